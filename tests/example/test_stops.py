"""Stop in the example: which orders and when, and the audit, which accepts no answer that did not come true."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from docs.examples.order_fulfilment.audit import Question, audit
from docs.examples.order_fulfilment.inventory import Inventory
from docs.examples.order_fulfilment.network import Network, Outages, Request
from docs.examples.order_fulfilment.orders import order_key
from docs.examples.order_fulfilment.outbox import Outbox
from docs.examples.order_fulfilment.payment import Payment
from docs.examples.order_fulfilment.saga import fulfil_order
from docs.examples.order_fulfilment.shipping import Shipping
from docs.examples.order_fulfilment.shop import Shop
from docs.examples.order_fulfilment.stops import Stops, Wish, wishes
from docs.examples.order_fulfilment.worker import shop_database
from sagas import Client, Kind, MongoStore, Run, Start, State, StopAnswer, StopOutcome, Worker, WorkerOptions
from tests.example.facts import TOO_DEAR, Facts, order

NOT_STOPPED, UNTOUCHED, IN_TIME, TOO_LATE, ENDED = 1, 2, 3, 4, 5
BLOCKED = 50
"""Its stop is refused, for its card is being charged; and the charge is, too."""
FAILED_FIRST = TOO_DEAR
"""Its stop comes when the rollback has begun."""


class HeldUp(Network):
    """Requests with a certain verb for a certain order wait on the way until the test lets them go."""

    def __init__(self, database: Any, held_up: dict[int, str]) -> None:
        super().__init__(database, caller="a worker", outages=Outages())
        self.arrived = {number: asyncio.Event() for number in held_up}
        self.go_on = {number: asyncio.Event() for number in held_up}
        self._held_up = held_up

    async def carry(self, verb: str, order: int, key: str, effect: Callable[[], Awaitable[Any]]) -> Any:
        async def late() -> Any:
            if self._held_up.get(order) == verb:
                self.arrived[order].set()
                await self.go_on[order].wait()
            return await effect()

        return await super().carry(verb, order, key, late)


async def told(uri: str, name: str) -> Facts:
    """Seven orders, six of them stopped, each at another point of its way."""
    orders = [order(number) for number in (NOT_STOPPED, UNTOUCHED, IN_TIME, TOO_LATE, ENDED, FAILED_FIRST, BLOCKED)]
    async with AsyncMongoClient[Any](uri) as client:
        store = MongoStore(client[name])
        ledgers = client[shop_database(name)]
        network = HeldUp(
            ledgers, {IN_TIME: "authorise", TOO_LATE: "charge", BLOCKED: "charge", FAILED_FIRST: "release"}
        )
        shop = Shop(
            network,
            Inventory(ledgers, network),
            Payment(ledgers, network),
            Shipping(ledgers, network),
            Outbox(ledgers, network),
        )
        await store.schema.apply()
        await shop.open({1: 40, 2: 20})
        worker = Worker(store, [fulfil_order], resources=shop, options=WorkerOptions(handle_signals=False))
        answers: dict[int, StopAnswer] = {}

        async def stop(run: Run[Any], number: int) -> None:
            answers[number] = await run.stop(by="ann@shop", reason=f"not {number}")

        async with asyncio.timeout(60), Client(store) as sagas, asyncio.TaskGroup() as group:
            runs = await sagas.start_many(fulfil_order, [Start(one, order_key(one)) for one in orders])
            by_number = {one.number: run for one, run in zip(orders, runs, strict=True)}
            await stop(by_number[UNTOUCHED], UNTOUCHED)
            group.create_task(worker.run())
            for number, arrived in network.arrived.items():
                await arrived.wait()
                await stop(by_number[number], number)
                network.go_on[number].set()
            await asyncio.gather(*(run.result(timeout=60) for run in runs), return_exceptions=True)
            await stop(by_number[ENDED], ENDED)
            worker.stop()
            facts = await Facts.gathered(orders, sagas, shop, answers)
        for database in (name, shop_database(name)):
            await client.drop_database(database)
    return facts


@pytest.fixture(scope="module")
def facts(mongo_uri: str) -> Facts:
    return asyncio.run(told(mongo_uri, f"test_{secrets.token_hex(6)}"))


def test_each_stop_is_answered_by_where_its_order_was_and_ends_so(facts: Facts) -> None:
    ended = {number: (answer.outcome, facts.run(number).state) for number, answer in facts.answers.items()}

    assert ended == {
        UNTOUCHED: (StopOutcome.CANCELLED, State.CANCELLED),
        IN_TIME: (StopOutcome.WILL_BE_UNDONE, State.CANCELLED),
        FAILED_FIRST: (StopOutcome.WILL_BE_UNDONE, State.COMPENSATED),
        TOO_LATE: (StopOutcome.REFUSED, State.COMPLETED),
        BLOCKED: (StopOutcome.REFUSED, State.COMPENSATED),
        ENDED: (StopOutcome.ALREADY_SETTLED, State.COMPLETED),
    }


def test_the_audit_accepts_answers_that_came_true_and_counts_them(facts: Facts) -> None:
    result = facts.audit()

    assert (result.findings, result.unfinished) == ([], [])
    assert result.stops == Counter(
        {
            StopOutcome.CANCELLED: 1,
            StopOutcome.WILL_BE_UNDONE: 2,
            StopOutcome.REFUSED: 2,
            StopOutcome.ALREADY_SETTLED: 1,
        }
    )
    assert (result.completed, result.compensated, result.cancelled, result.untrue_answers) == (3, 2, 2, 0)


# ---------------------------------------------------------------------------------------- planted faults

Plant = Callable[[Facts], Facts]


def _answered(number: int, outcome: StopOutcome) -> Plant:
    """The answer was another one, and so is the run's record of it, so that only the deeds speak against it."""
    return lambda facts: facts.having_answer(number, outcome=outcome).having_run(number, stop=outcome)


def _state(number: int, state: State) -> Plant:
    return lambda facts: facts.having_run(number, state=state)


def _record(number: int, **change: Any) -> Plant:
    return lambda facts: facts.having_run(number, **change)


def _journal_without(number: int, kind: Kind) -> Plant:
    def plant(facts: Facts) -> Facts:
        left = [line for line in facts.journal(number) if line.kind is not kind]
        assert len(left) == len(facts.journal(number)) - 1
        return facts.having_journal(number, left)

    return plant


def _journal_of(number: int, kind: Kind, **change: Any) -> Plant:
    """One kind of line says something else."""
    return lambda facts: facts.having_journal(
        number, [replace(line, **change) if line.kind is kind else line for line in facts.journal(number)]
    )


def _journal_of_another(number: int, other: int) -> Plant:
    return lambda facts: facts.having_journal(number, facts.journal(other))


def _never_asked(number: int) -> Plant:
    return lambda facts: replace(facts, answers={key: one for key, one in facts.answers.items() if key != number})


def _requested(number: int) -> Plant:
    return lambda facts: facts.having(requests=[*facts.ledgers.requests, Request("x", "reserve", number, 1, ())])


def _charged(number: int) -> Plant:
    charge = {"_id": "x", "kind": "charged", "order": number, "amount_cents": order(number).total_cents}
    return lambda facts: facts.having(payments=[*facts.ledgers.payments, charge])


def _pivot_went_through(facts: Facts) -> Facts:
    done = next(line for line in facts.journal(TOO_LATE) if line.step == "charge_card")
    return facts.having_journal(IN_TIME, [*facts.journal(IN_TIME), done])


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        pytest.param(_answered(TOO_LATE, StopOutcome.CANCELLED), "it is not cancelled", id="cancelled, and completed"),
        pytest.param(_journal_of_another(UNTOUCHED, IN_TIME), "nothing had run yet", id="cancelled, with a journal"),
        pytest.param(_requested(UNTOUCHED), "1 requests", id="cancelled, and a participant was asked"),
        pytest.param(_charged(UNTOUCHED), "nothing had run yet", id="cancelled, and charged"),
        pytest.param(
            _answered(TOO_LATE, StopOutcome.WILL_BE_UNDONE), "everything would be undone", id="undone, and completed"
        ),
        pytest.param(_state(IN_TIME, State.FORWARD_INCOMPLETE), "everything would be undone", id="undone, and held"),
        pytest.param(_state(IN_TIME, State.TIMED_OUT), "everything would be undone", id="undone, by the clock"),
        pytest.param(_state(IN_TIME, State.COMPENSATED), "no step had failed", id="undone, for no failed step"),
        pytest.param(_state(FAILED_FIRST, State.CANCELLED), "for whose stop", id="undone for a failed step, cancelled"),
        pytest.param(_charged(IN_TIME), "there is still its charge", id="undone, and charged"),
        pytest.param(_charged(FAILED_FIRST), "there is still its charge", id="rolling back, and charged"),
        pytest.param(_pivot_went_through, "the pivot went through", id="undone, after its pivot"),
        pytest.param(_journal_of(IN_TIME, Kind.ROLLBACK_BEGUN, by="bob"), "for whose stop", id="undone, for bob"),
        pytest.param(_journal_of(IN_TIME, Kind.ROLLBACK_BEGUN, reason="no"), "for whose stop", id="undone, else why"),
        pytest.param(_state(TOO_LATE, State.CANCELLED), "the stop was refused", id="refused, and cancelled"),
        pytest.param(_state(TOO_LATE, State.TIMED_OUT), "the stop was refused", id="refused, and timed out"),
        pytest.param(_answered(IN_TIME, StopOutcome.REFUSED), "never passed", id="refused, before the gate"),
        pytest.param(_record(TOO_LATE, gate_passed_at=None), "never passed", id="refused, and no gate"),
        pytest.param(
            _journal_of(BLOCKED, Kind.ROLLBACK_BEGUN, step="reserve_stock"),
            "the pivot did not fail",
            id="refused, and undone for another step",
        ),
        pytest.param(
            _journal_of(BLOCKED, Kind.ROLLBACK_BEGUN, by="ann@shop"), "that it was honoured", id="refused and honoured"
        ),
        pytest.param(_journal_without(TOO_LATE, Kind.STOP_REFUSED), "does not say so", id="refused, not journaled"),
        pytest.param(_journal_of(TOO_LATE, Kind.STOP_REFUSED, by="bob"), "does not say so", id="refused to bob"),
        pytest.param(_record(TOO_LATE, stop=None), "the record of its stop", id="refused, no record"),
        pytest.param(_record(IN_TIME, stop_by="bob"), "the record of its stop", id="undone, recorded for bob"),
        pytest.param(_record(UNTOUCHED, stop_at=None), "the record of its stop", id="cancelled, recorded without when"),
        pytest.param(_state(ENDED, State.COMPENSATED), "it had ended as completed", id="settled, and moved on"),
        pytest.param(_state(ENDED, State.CANCELLED), "no stop was answered with that", id="settled, and cancelled"),
        pytest.param(
            lambda facts: facts.having_answer(ENDED, state=State.RUNNING), "it had ended as running", id="not settled"
        ),
        pytest.param(_record(ENDED, stop=StopOutcome.REFUSED), "nobody was told", id="settled, and a stop on record"),
        pytest.param(_never_asked(TOO_LATE), "nobody was told", id="nobody asked, and refused"),
        pytest.param(_never_asked(UNTOUCHED), "no stop was answered with that", id="nobody asked, and cancelled"),
        pytest.param(_state(NOT_STOPPED, State.CANCELLED), "no stop was answered", id="nobody asked, all the same"),
    ],
)
def test_the_audit_detects_an_answer_that_did_not_come_true(facts: Facts, plant: Plant, says: str) -> None:
    result = plant(facts).audit()

    assert any(says in finding.text for finding in result.findings if finding.question is Question.ANSWERED), (
        result.findings
    )
    assert result.untrue_answers >= 1


@pytest.mark.parametrize(
    ("number", "state"),
    [
        (IN_TIME, State.COMPENSATION_FAILED),
        (IN_TIME, State.BROKEN),
        (IN_TIME, State.RUNNING),
        (TOO_LATE, State.FORWARD_INCOMPLETE),
        (TOO_LATE, State.IN_DOUBT),
        (TOO_LATE, State.RUNNING),
    ],
)
def test_an_answer_may_still_come_true_while_its_run_is_not_at_its_end(facts: Facts, number: int, state: State) -> None:
    assert facts.having_run(number, state=state).audit().untrue_answers == 0


def test_a_stop_without_an_answer_is_unfinished(facts: Facts) -> None:
    left = {number: answer for number, answer in facts.answers.items() if number != TOO_LATE}

    result = audit(facts.orders, facts.runs, facts.journals, facts.ledgers, left, unanswered={TOO_LATE})
    assert result.unfinished == [f"order {TOO_LATE}: its stop is not answered"]
    assert result.findings == []


# ---------------------------------------------------------------------------------------- which orders, and when


def test_the_same_seed_stops_the_same_orders_at_the_same_moments() -> None:
    orders = [order(number) for number in range(100, 200)]

    assert wishes(orders, rate=0.3, seed=7) == wishes(orders, rate=0.3, seed=7)
    assert wishes(orders, rate=0.3, seed=7) != wishes(orders, rate=0.3, seed=8)


@pytest.mark.parametrize(("rate", "stopped"), [(0, 0), (0.05, 5), (0.3, 30), (1, 100)])
def test_so_many_orders_are_stopped_as_the_rate_says(rate: float, stopped: int) -> None:
    planned = wishes([order(number) for number in range(100, 200)], rate=rate, seed=1)

    assert len({wish.order.number for wish in planned}) == len(planned) == stopped


class Asked:
    """A way to the participants of which only what was asked there is known."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.looked = asyncio.Event()

    async def asked(self, what: Iterable[tuple[int, str]]) -> set[int]:
        self.looked.set()
        return self.numbers & {number for number, _ in what}


class Pressed:
    """A run that says by an event that its Stop was pressed."""

    def __init__(self, error: Exception | None = None) -> None:
        self.pressed = asyncio.Event()
        self._error = error

    async def stop(self, *, by: str, reason: str) -> Any:
        self.pressed.set()
        if self._error is not None:
            raise self._error
        return f"{by}: {reason}"


async def test_stop_is_pressed_at_its_moment_or_else_when_the_order_has_come_to_rest() -> None:
    planned = [Wish(order(1), "charge", 0, 0), Wish(order(2), None, 2, 0), Wish(order(3), "ship", 0, 0)]
    stops, network, at_rest = Stops(planned), Asked(), {4}
    runs = {wish.order.number: Pressed() for wish in planned}
    pressing = asyncio.create_task(stops.press(runs, network, at_rest))  # type: ignore[arg-type]
    await network.looked.wait()
    assert stops.unanswered == {1, 2, 3}

    async with asyncio.timeout(10):
        network.numbers.add(1)
        await runs[1].pressed.wait()
        assert not runs[2].pressed.is_set()
        at_rest.add(5)
        await runs[2].pressed.wait()
        assert not runs[3].pressed.is_set()
        at_rest.add(3)
        await pressing

    assert stops.answers[3] == "customer VINET: order 3 is not wanted any more"  # type: ignore[comparison-overlap]
    assert stops.unanswered == set()


async def test_a_stop_that_cannot_be_answered_ends_the_pressing() -> None:
    stops = Stops([Wish(order(1), None, 0, 0)])

    with pytest.raises(ConnectionError):
        await stops.press({1: Pressed(ConnectionError("away"))}, Asked(), set())  # type: ignore[dict-item, arg-type]
    assert stops.unanswered == {1}
