"""Pressing Stop: the answers, what the worker makes of them, deadlines, and the operator's verbs."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from sagas import (
    Client,
    Fate,
    InvalidInput,
    Kind,
    MongoStore,
    Operator,
    OperatorRefused,
    Run,
    RunInfo,
    RunNotFound,
    RunRolledBack,
    Saga,
    Start,
    State,
    Step,
    StopOutcome,
    Undo,
)
from sagas_store.states import Decision
from tests.stop.shop import WHY, Order, Shop, fulfil, held, kinds, working
from tests.support.waiting import eventually

# -------------------------------------------------------------------- the answers


async def test_a_run_that_nothing_has_run_of_is_cancelled_in_the_write_that_records_the_stop(client: Client) -> None:
    run = await client.start(fulfil, Order())
    assert (await run.preview_stop()).outcome is StopOutcome.CANCELLED
    answer = await run.stop(**WHY)
    assert (answer.outcome, answer.first, answer.state) == (StopOutcome.CANCELLED, True, State.CANCELLED)
    assert (answer.by, answer.reason) == (WHY["by"], WHY["reason"])
    assert await kinds(client, run.run_id) == []
    with pytest.raises(RunRolledBack, match="a stop was honoured"):
        await run.result(5)


async def test_a_second_stop_is_told_the_first_ones_fate(client: Client) -> None:
    run = await client.start(fulfil, Order())
    first = await run.stop(**WHY)
    second = await run.stop(by="bob@shop", reason="me too")
    assert (second.outcome, second.by, second.asked_at) == (first.outcome, first.by, first.asked_at)
    assert not second.first


async def test_a_stop_without_a_name_or_a_reason_and_one_of_an_unknown_run_are_refused(client: Client) -> None:
    run = await client.start(fulfil, Order())
    with pytest.raises(InvalidInput, match="by"):
        await run.stop(by=" ", reason="why")
    with pytest.raises(InvalidInput, match="reason"):
        await run.stop(by="ann", reason="")
    with pytest.raises(RunNotFound):
        await client.stop("unknown", **WHY)


async def test_before_the_gate_everything_is_undone_the_step_in_hand_included(
    client: Client, store: MongoStore, shop: Shop
) -> None:
    async with working(store, shop):
        run = await client.start(fulfil, Order(does="reserve waits"))
        await shop.inside.wait()
        preview = await run.preview_stop()
        assert (preview.outcome, preview.in_hand) == (StopOutcome.WILL_BE_UNDONE, "reserve")
        assert preview.undo == (Undo("reserve", Fate.IN_DOUBT),)
        answer = await run.stop(**WHY)
        assert answer.outcome is StopOutcome.WILL_BE_UNDONE
        with pytest.raises(RunRolledBack):
            await run.result(10)
    assert (await run.info()).state is State.CANCELLED
    assert shop.done == ["release in_doubt"]
    assert await kinds(client, run.run_id) == ["interrupted", "rollback_begun", "compensation_succeeded"]
    begun = (await run.journal())[1]
    assert (begun.by, begun.reason) == (WHY["by"], WHY["reason"])


async def test_a_step_that_listens_finishes_in_its_grace_and_is_compensated_as_known(
    client: Client, store: MongoStore, shop: Shop
) -> None:
    async with working(store, shop):
        run = await client.start(fulfil, Order(does="reserve listens"))
        await shop.inside.wait()
        await run.stop(**WHY)
        with pytest.raises(RunRolledBack):
            await run.result(10)
    assert shop.done == ["reserve", "release known"]


async def test_a_stop_is_learned_by_heartbeat_where_there_is_no_change_stream(
    client: Client, store: MongoStore, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_due = store.hints.on_due

    async def silent(sagas: Any, notice: Any, **_: Any) -> None:
        await on_due(sagas, notice)

    monkeypatch.setattr(store.hints, "on_due", silent)
    async with working(store, shop, lease=timedelta(seconds=1)):
        run = await client.start(fulfil, Order(does="reserve waits"))
        await shop.inside.wait()
        await run.stop(**WHY)
        with pytest.raises(RunRolledBack):
            await run.result(10)
    assert shop.done == ["release in_doubt"]


async def test_a_stop_ends_a_wait_for_a_retry_at_once(client: Client, store: MongoStore, shop: Shop) -> None:
    async with working(store, shop, park_after=timedelta(seconds=60)):
        run = await client.start(fulfil, Order(does="reserve waits in place"))
        await eventually(lambda: store.journal.load(run.run_id), what="the retry is journaled")
        await run.stop(**WHY)
        with pytest.raises(RunRolledBack):
            await run.result(10)
    assert await kinds(client, run.run_id) == ["step_retry_scheduled", "rollback_begun"]


async def test_a_stop_of_a_parked_run_acts_at_once(client: Client, store: MongoStore, shop: Shop) -> None:
    async with working(store, shop):
        run = await client.start(fulfil, Order(does="reserve is turned away"))

        async def parked() -> bool:
            info = await run.info()
            return info.state is State.PENDING and info.attempts == 1

        await eventually(parked, what="it is parked")
        assert (await run.stop(**WHY)).outcome is StopOutcome.WILL_BE_UNDONE
        with pytest.raises(RunRolledBack):
            await run.result(10)
    assert (await run.info()).state is State.CANCELLED


async def test_after_the_gate_a_stop_is_refused_and_the_run_completes_forward(
    client: Client, store: MongoStore, shop: Shop
) -> None:
    async with working(store, shop):
        run = await client.start(fulfil, Order(does="charge waits"))
        await shop.inside.wait()
        assert (await run.preview_stop()).outcome is StopOutcome.REFUSED
        answer = await run.stop(**WHY)
        assert answer.outcome is StopOutcome.REFUSED
        assert "gate" in answer.why
        shop.go_on.set()
        await run.result(10)
    assert shop.done == ["reserve", "pack", "charge", "ship"]
    refusal = next(line for line in await run.journal() if line.kind is Kind.STOP_REFUSED)
    assert (refusal.by, refusal.reason) == (WHY["by"], WHY["reason"])
    again = await run.stop(**WHY)
    assert (again.outcome, again.state) == (StopOutcome.REFUSED, State.COMPLETED)


async def test_a_refused_stop_says_so_when_the_pivot_then_fails(client: Client, store: MongoStore, shop: Shop) -> None:
    async with working(store, shop):
        run = await client.start(fulfil, Order(does="charge waits and fails"))
        await shop.inside.wait()
        assert (await run.stop(**WHY)).outcome is StopOutcome.REFUSED
        shop.go_on.set()
        with pytest.raises(RunRolledBack):
            await run.result(10)
    answer = await run.stop(**WHY)
    assert (answer.outcome, answer.state) == (StopOutcome.REFUSED, State.COMPENSATED)
    assert "pivot itself failed" in answer.next
    assert shop.done == ["reserve", "pack", "unpack known", "release known"]


async def test_a_stop_while_it_rolls_back_says_that_it_is_undone_already(
    client: Client, store: MongoStore, shop: Shop
) -> None:
    async with working(store, shop):
        run = await client.start(fulfil, Order(does="release waits"))
        await shop.inside.wait()
        answer = await run.stop(**WHY)
        assert answer.outcome is StopOutcome.WILL_BE_UNDONE
        assert "rolling back already" in answer.why
        shop.go_on.set()
        with pytest.raises(RunRolledBack):
            await run.result(10)
    assert (await run.info()).state is State.COMPENSATED


async def test_a_settled_run_has_nothing_to_stop(client: Client, store: MongoStore, shop: Shop) -> None:
    async with working(store, shop):
        run = await client.start(fulfil, Order())
        await run.result(10)
    answer = await run.stop(**WHY)
    assert answer.outcome is StopOutcome.ALREADY_SETTLED
    assert "completed" in answer.why
    assert (await run.info()).stop is None


async def test_many_are_stopped_by_what_they_have_in_common_and_a_dry_run_stops_none(client: Client) -> None:
    await client.start_many(fulfil, [Start(Order(number=n), key=f"a-{n}") for n in range(7)])
    other = await client.start(fulfil, Order(), key="b-1")
    dry = await client.stop_many(**WHY, key_prefix="a-", dry_run=True)
    assert (dry.count, list(dry.answers)) == (7, [StopOutcome.CANCELLED])
    assert len((await client.runs(state=State.PENDING)).runs) == 8
    done = await client.stop_many(**WHY, saga="fulfil", key_prefix="a-")
    assert done.count == 7
    assert (await other.info()).state is State.PENDING


# -------------------------------------------------------------------- deadlines


async def test_a_deadline_that_comes_in_a_step_undoes_the_run(client: Client, store: MongoStore, shop: Shop) -> None:
    async with working(store, shop):
        for seconds in (1, 2, 4, 8, 16):
            run = await client.start(fulfil, Order(does="reserve waits"), deadline=timedelta(seconds=seconds))
            with pytest.raises(RunRolledBack, match="deadline"):
                await run.result(30)
            assert (await run.info()).state is State.TIMED_OUT
            if shop.inside.is_set():  # else it came before the step, on a machine that stood still
                break
    assert shop.done == ["release in_doubt"]


async def test_a_deadline_after_the_gate_marks_the_run_overdue_and_it_goes_on(
    client: Client, store: MongoStore, shop: Shop, database: Any
) -> None:
    async with working(store, shop):
        run = await client.start(fulfil, Order(does="charge waits"), deadline=timedelta(hours=1))
        await shop.inside.wait()
        long_ago = (await run.info()).created_at - timedelta(hours=1)
        await database["sagas.runs"].update_one({"_id": run.run_id}, {"$set": {"deadline": long_ago}})
        shop.go_on.set()
        await run.result(10)
    info = await run.info()
    assert (info.state, info.overdue) == (State.COMPLETED, True)


async def test_a_deadline_before_the_run_may_begin_is_refused(client: Client) -> None:
    with pytest.raises(InvalidInput, match="deadline"):
        await client.start(fulfil, Order(), delay=timedelta(hours=2), deadline=timedelta(hours=1))


# -------------------------------------------------------------------- the operator


async def test_resume_after_the_pivot_runs_only_what_remains(client: Client, store: MongoStore, shop: Shop) -> None:
    run_id = await held(client, store, shop, "ship fails")
    assert (await client.stop(run_id, **WHY)).outcome is StopOutcome.REFUSED
    shop.mended = True
    await Operator(store).resume(run_id, **WHY)
    async with working(store, shop):
        await client.run(fulfil, run_id=run_id).result(10)
    assert shop.done == ["reserve", "pack", "charge", "ship"]
    assert {"resumed", "stop_refused"} <= set(await kinds(client, run_id))


async def test_resume_of_a_rollback_runs_only_what_is_not_undone(client: Client, store: MongoStore, shop: Shop) -> None:
    run_id = await held(client, store, shop, "release fails")
    assert shop.done == ["reserve", "pack", "unpack known"]
    shop.mended = True
    await Operator(store).resume(run_id, **WHY)
    async with working(store, shop):
        with pytest.raises(RunRolledBack):
            await client.run(fulfil, run_id=run_id).result(10)
    assert shop.done == ["reserve", "pack", "unpack known", "release known"]
    assert (await client.get(run_id)).state is State.COMPENSATED


@pytest.mark.parametrize("happened", [True, False])
async def test_a_verdict_settles_what_nobody_could_find_out(
    client: Client, store: MongoStore, shop: Shop, happened: bool
) -> None:
    run_id = await held(client, store, shop, "charge is unknown")
    operator = Operator(store)
    with pytest.raises(OperatorRefused, match="verdict"):
        await operator.resume(run_id, **WHY)
    context = Order(number=7) if happened else None
    await operator.verdict(fulfil, run_id, happened=happened, context=context, **WHY)
    async with working(store, shop):
        run = client.run(fulfil, run_id=run_id)
        if happened:
            assert (await run.result(10)).number == 7
            assert shop.done == ["reserve", "pack", "ship"]
        else:
            with pytest.raises(RunRolledBack):
                await run.result(10)
            assert shop.done == ["reserve", "pack", "unpack known", "release known"]


async def test_a_parked_run_can_be_hurried(client: Client, store: MongoStore, shop: Shop) -> None:
    async with working(store, shop):
        run = await client.start(fulfil, Order(does="reserve is turned away"))

        async def parked() -> bool:
            info = await run.info()  # one look: of two, the first may see it not begun, and the second under way
            return info.state is State.PENDING and info.attempts == 1

        await eventually(parked, what="it is parked")
        await Operator(store).retry_now(run.run_id, **WHY)

        async def tried_again() -> bool:
            return (await kinds(client, run.run_id)).count("step_retry_scheduled") == 2

        await eventually(tried_again, what="it is tried again")


async def test_an_undone_run_is_started_anew_once_and_a_completed_one_never(
    client: Client, store: MongoStore, shop: Shop
) -> None:
    operator = Operator(store)
    async with working(store, shop):
        undone = await client.start(fulfil, Order(does="charge is declined"))
        with pytest.raises(RunRolledBack):
            await undone.result(10)
        completed = await client.start(fulfil, Order())
        await completed.result(10)
    new = await operator.restart_as_new(undone.run_id, **WHY)
    assert await operator.restart_as_new(undone.run_id, **WHY) == new
    assert (await client.get(new)).restarted_from == undone.run_id
    with pytest.raises(OperatorRefused, match="everything again"):
        await operator.restart_as_new(completed.run_id, **WHY)


async def test_of_operators_who_act_at_once_one_is_obeyed_and_the_others_are_told(
    client: Client, store: MongoStore, shop: Shop
) -> None:
    run_id = await held(client, store, shop, "ship fails")
    operator = Operator(store)
    outcomes = await asyncio.gather(
        *(operator.resume(run_id, by=f"operator-{n}", reason="mended") for n in range(8)), return_exceptions=True
    )
    refused = [one for one in outcomes if isinstance(one, OperatorRefused)]
    assert (outcomes.count(None), len(refused)) == (1, 7)
    assert (await kinds(client, run_id)).count("resumed") == 1


# -------------------------------------------------------------------- races


def agrees(outcome: StopOutcome, info: RunInfo, did: list[str]) -> None:
    """What was answered, where the run ended, and what its steps did."""
    match outcome:
        case StopOutcome.CANCELLED:
            assert (info.state, did, info.stop) == (State.CANCELLED, [], Decision.CANCELLED)
        case StopOutcome.WILL_BE_UNDONE:
            assert info.state is State.CANCELLED
            assert "charge" not in did
            assert did.count("release") == did.count("reserve")
        case StopOutcome.REFUSED | StopOutcome.ALREADY_SETTLED:
            assert (info.state, did) == (State.COMPLETED, ["reserve", "charge", "ship"])


async def test_stops_at_random_moments_are_answered_truthfully(client: Client, store: MongoStore, shop: Shop) -> None:
    """Whatever the interleaving: the answer, the run's state, its journal and what was done agree."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    raced = Saga("raced", Order)
    done: dict[int, list[str]] = {n: [] for n in range(400)}
    begun = {(n, what): asyncio.Event() for n in done for what in ("reserve", "charge", "ship")}

    def does(what: str) -> Any:
        async def do(order: Order, step: Step[Shop]) -> Order:
            if what != "release":
                begun[order.number, what].set()
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            done[order.number].append(what)
            return order

        return do

    raced.step(name="reserve")(does("reserve")).compensation(does("release"))
    raced.pivot(name="charge")(does("charge"))
    raced.step(name="ship")(does("ship"))
    async with working(store, shop, raced, concurrency=32):
        runs = await client.start_many(raced, [Start(Order(number=n)) for n in done])

        async def press(number: int, run: Run[Order]) -> StopOutcome:
            # Chance is in the work done, not in the turns of the loop: a slow machine sees the same interleavings.
            if (after := rng.choice(["", "reserve", "charge", "ship"])) != "":
                await begun[number, after].wait()
            for _ in range(rng.randrange(40)):
                await asyncio.sleep(0)
            return (await run.stop(**WHY)).outcome

        outcomes = await asyncio.gather(*(press(number, run) for number, run in enumerate(runs)))
        await asyncio.gather(*(asyncio.wait([asyncio.ensure_future(run.result(60))]) for run in runs))
    seen: Counter[StopOutcome] = Counter()
    for number, (run, outcome) in enumerate(zip(runs, outcomes, strict=True)):
        info, did = await run.info(), done[number]
        seen[outcome] += 1
        agrees(outcome, info, did)
        assert ("stop_refused" in await kinds(client, run.run_id)) == (outcome is StopOutcome.REFUSED)
    print(seen)
    assert seen.keys() >= {StopOutcome.CANCELLED, StopOutcome.WILL_BE_UNDONE, StopOutcome.REFUSED}
