"""The operator's verbs: for many runs at once, and raced against each other and against workers.

Of those who act at once one is obeyed. The others are told why not, in words of this project's own: no error of the
driver's, and none of Python's, ever reaches a person.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from sagas import (
    Client,
    MongoStore,
    NonRetryable,
    Operator,
    OperatorRefused,
    RunFailed,
    RunRolledBack,
    Saga,
    SagaError,
    Start,
    State,
    Step,
    StopOutcome,
    StoreUnavailable,
)
from sagas.errors import StoreError
from sagas_store.states import HELD
from tests.stop.shop import ONCE, WHY, Order, Shop, fulfil, held, kinds, working
from tests.support.failpoints import fail_point
from tests.support.waiting import eventually

MENDED: Any = {"by": "olga@shop", "reason": "mended"}

AWAY = StoreUnavailable("move on", "NetworkTimeout")


@pytest.fixture
def operator(store: MongoStore) -> Operator:
    return Operator(store)


@pytest.fixture
def rng() -> random.Random:
    """Chance, printed so that a failure can be replayed with SAGAS_SEED."""
    seed = int(os.environ.get("SAGAS_SEED") or secrets.randbelow(2**32))
    print(f"SAGAS_SEED={seed}")
    return random.Random(seed)


short = Saga("short", Order)
"""Its pivot is its last step."""


@short.step
async def fetch(order: Order, step: Step[Shop]) -> Order:
    step.resources.done.append("fetch")
    return order


@fetch.compensation
async def put_back(order: Order, step: Step[Shop]) -> None:
    step.resources.done.append("put back")


@short.pivot(retry=ONCE)
async def pay(order: Order, step: Step[Shop]) -> Order:
    if order.does == "charge is unknown":
        raise TimeoutError
    if order.does == "charge is declined":
        raise NonRetryable("declined")
    return order


async def driven(
    client: Client, store: MongoStore, shop: Shop, does: Iterable[str], saga: Saga[Order] = fulfil
) -> list[str]:
    """The ids of runs that did this, all of them at rest."""
    async with working(store, shop, saga):
        runs = await client.start_many(
            saga, [Start(Order(does=what), key=f"{n}: {what}") for n, what in enumerate(does)]
        )
        await at_rest(store, [run.run_id for run in runs])
    return [run.run_id for run in runs]


async def at_rest(store: MongoStore, run_ids: list[str]) -> None:
    async def look() -> bool:
        return len(await store.runs.at_rest(run_ids)) == len(run_ids)

    await eventually(look, what="all runs are at rest", within_s=60)


async def parked(client: Client, store: MongoStore, shop: Shop, count: int = 1) -> list[str]:
    """The ids of runs that wait an hour for their next try."""
    async with working(store, shop):
        runs = await client.start_many(fulfil, [Start(Order(does="reserve is turned away")) for _ in range(count)])

        async def look() -> bool:
            found = (await store.runs.get_many([run.run_id for run in runs])).values()
            return all(run.state is State.PENDING and run.attempts == 1 for run in found)

        await eventually(look, what="they are parked")
    return [run.run_id for run in runs]


def breaking(monkeypatch: pytest.MonkeyPatch, holder: object, name: str, unlucky: str) -> None:
    """From now on this question of the store fails when it is about that run."""
    ask = getattr(holder, name)

    async def ask_or_fail(run: Any, *arguments: Any, **more: Any) -> Any:
        if getattr(run, "run_id", run) == unlucky:
            raise AWAY
        return await ask(run, *arguments, **more)

    monkeypatch.setattr(holder, name, ask_or_fail)


# -------------------------------------------------------------------- in bulk


async def test_all_held_runs_are_resumed_but_one_that_cannot_and_a_dry_run_resumes_none(
    client: Client, store: MongoStore, shop: Shop, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    does = ["ship fails", "release fails"] * 3 + ["charge is unknown", "ok", "charge is declined"]
    runs = await driven(client, store, shop, does)
    stuck, others = runs[:6], runs[6:]
    states = await asyncio.gather(*map(client.get, runs))
    dry = await operator.resume_many(**MENDED, dry_run=True)
    assert (dry.dry_run, sorted(dry.done), dry.refused) == (True, sorted(stuck), {})
    assert await asyncio.gather(*map(client.get, runs)) == states, "the dry run did something"

    shop.mended = True
    breaking(monkeypatch, store.interventions, "move_on", stuck[2])
    done = await operator.resume_many(**MENDED)
    assert sorted(done.done) == sorted({*stuck} - {stuck[2]})
    assert done.refused == {stuck[2]: str(AWAY)}
    for run_id, before in zip(runs, states, strict=True):
        resumed = run_id in done.done
        assert (await client.get(run_id)).state is (State.PENDING if resumed else before.state)
        assert (await kinds(client, run_id)).count("resumed") == resumed
    monkeypatch.undo()
    async with working(store, shop):
        await at_rest(store, runs)
    ends = [(await client.get(run_id)).state for run_id in stuck]
    assert ends == [
        State.COMPLETED,
        State.COMPENSATED,
        State.FORWARD_INCOMPLETE,
        *[State.COMPENSATED, State.COMPLETED, State.COMPENSATED],
    ]
    assert [(await client.get(run_id)).state for run_id in others] == [before.state for before in states[6:]]


async def test_a_bulk_resume_is_narrowed_by_state_key_saga_age_and_number(
    client: Client, store: MongoStore, shop: Shop, operator: Operator
) -> None:
    runs = await driven(client, store, shop, ["ship fails", "release fails", "ship fails"])
    born = (await client.get(runs[0])).created_at

    async def would(**narrowed: Any) -> list[str]:
        return sorted((await operator.resume_many(**MENDED, dry_run=True, **narrowed)).done)

    assert await would(states=[State.COMPENSATION_FAILED]) == [runs[1]]
    assert await would(states="compensation_failed") == [runs[1]]
    assert await would(key_prefix="2: ") == [runs[2]]
    assert await would(saga="another") == []
    assert await would(started_before=born) == []
    assert await would(started_before=born + timedelta(days=1)) == sorted(runs)
    assert len(await would(limit=2)) == 2


async def test_of_pending_runs_only_those_that_wait_for_a_retry_are_hurried_and_a_dry_run_says_just_those(
    client: Client, store: MongoStore, shop: Shop, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = await parked(client, store, shop, 5)
    await client.start(fulfil, Order())
    await client.start(fulfil, Order(), delay=timedelta(hours=1))
    await operator.retry_now(waiting[0], **MENDED)  # and is due from now on
    dry = await operator.retry_now_many(**MENDED, dry_run=True)
    assert (sorted(dry.done), dry.refused) == (sorted(waiting[1:]), {})
    assert [await kinds(client, run_id) for run_id in waiting[1:]] == [["step_retry_scheduled"]] * 4

    breaking(monkeypatch, store.interventions, "move_on", waiting[3])
    done = await operator.retry_now_many(**MENDED)
    assert sorted(done.done) == sorted({*waiting[1:]} - {waiting[3]})
    assert done.refused == {waiting[3]: str(AWAY)}
    for run_id in waiting:
        assert (await kinds(client, run_id)).count("retried_now") == (run_id != waiting[3])
    again = await operator.retry_now_many(**MENDED, dry_run=True)
    assert again.done == [waiting[3]]


async def test_undone_runs_are_started_anew_each_once_and_a_dry_run_starts_none(
    client: Client, store: MongoStore, shop: Shop, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = await driven(client, store, shop, ["charge is declined"] * 4 + ["ok", "ship fails"])
    undone = runs[:4]
    dry = await operator.restart_many(**MENDED, dry_run=True)
    assert (sorted(dry.done), dry.refused) == (sorted(undone), {})
    assert len((await client.runs()).runs) == len(runs)

    first_id = undone[1]
    breaking(monkeypatch, store.runs, "get", first_id)
    done = await operator.restart_many(**MENDED)
    assert sorted(done.done) == sorted({*undone} - {first_id})
    assert done.refused == {first_id: str(AWAY)}
    monkeypatch.undo()
    await operator.restart_many(**MENDED)
    fresh = (await client.runs(state=State.PENDING)).runs
    assert sorted(str(info.restarted_from) for info in fresh) == sorted(undone)


async def test_a_bulk_stop_tells_of_each_run_that_failed_and_stops_the_others(
    client: Client, store: MongoStore, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [run.run_id for run in await client.start_many(fulfil, [Start(Order()) for _ in range(120)])]
    unlucky = random.Random(1).choice(runs)
    breaking(monkeypatch, store.interventions, "ask_stop", unlucky)
    done = await client.stop_many(**WHY)
    assert done.failed == {unlucky: str(AWAY)}
    assert done.count == 120
    assert {run_id for ids in done.answers.values() for run_id in ids} == {*runs} - {unlucky}
    assert [info.run_id for info in (await client.runs(state=State.PENDING)).runs] == [unlucky]
    monkeypatch.undo()
    again = await client.stop_many(**WHY)
    assert (again.answers, again.failed) == ({StopOutcome.CANCELLED: [unlucky]}, {})


async def test_a_resume_of_what_has_ended_says_what_can_be_done_instead(
    client: Client, store: MongoStore, shop: Shop, operator: Operator
) -> None:
    completed, undone = await driven(client, store, shop, ["ok", "charge is declined"])
    with pytest.raises(OperatorRefused, match="nothing of it is left to do"):
        await operator.resume(completed, **MENDED)
    with pytest.raises(OperatorRefused, match="sagas restart"):
        await operator.resume(undone, **MENDED)


# -------------------------------------------------------------------- who is quicker


async def at_once(*asked: Any) -> tuple[list[object], list[OperatorRefused]]:
    """What each came to: those that were obeyed, and those that were refused; nothing else may come of any."""
    done = await asyncio.gather(*asked, return_exceptions=True)
    refused = [one for one in done if isinstance(one, OperatorRefused)]
    obeyed = [one for one in done if not isinstance(one, BaseException)]
    strange = [one for one in done if isinstance(one, BaseException) and not isinstance(one, OperatorRefused)]
    assert not strange, [repr(one) for one in strange]
    assert all(one.why for one in refused)
    return obeyed, refused


async def test_of_operators_who_cut_one_wait_short_one_does_and_the_others_hear_that_it_is_due(
    client: Client, store: MongoStore, shop: Shop, operator: Operator
) -> None:
    (run_id,) = await parked(client, store, shop)
    obeyed, refused = await at_once(*(operator.retry_now(run_id, **MENDED) for _ in range(8)))
    assert (len(obeyed), len(refused)) == (1, 7)
    with pytest.raises(OperatorRefused, match="due already"):
        await operator.retry_now(run_id, **MENDED)
    assert await kinds(client, run_id) == ["step_retry_scheduled", "retried_now"]


@pytest.mark.parametrize("saga", [fulfil, short], ids=["goes-on-after-the-pivot", "ends-with-the-pivot"])
async def test_of_verdicts_that_contradict_each_other_one_stands(
    client: Client, store: MongoStore, shop: Shop, operator: Operator, rng: random.Random, saga: Saga[Order]
) -> None:
    runs = await driven(client, store, shop, ["charge is unknown"] * 12, saga)
    yes: dict[str, Any] = {"happened": True, "context": Order(number=7)}

    async def say(run_id: str, said: dict[str, Any]) -> bool:
        for _ in range(rng.randrange(60)):
            await asyncio.sleep(0)
        await operator.verdict(saga, run_id, **said, **MENDED)
        return bool(said["happened"])

    stands = {}
    for run_id in runs:
        obeyed, refused = await at_once(*(say(run_id, said) for said in [yes, {"happened": False}] * 4))
        assert (len(obeyed), len(refused)) == (1, 7)
        (stands[run_id],) = obeyed
    async with working(store, shop, saga):
        await at_rest(store, runs)
    for run_id, happened in stands.items():
        assert (await kinds(client, run_id)).count("verdict") == 1
        assert (await client.get(run_id)).state is (State.COMPLETED if happened else State.COMPENSATED)
        if happened:
            assert (await client.run(saga, run_id=run_id).result(5)).number == 7
    print(Counter(stands.values()))


async def test_a_verdict_given_while_another_one_takes_effect_is_refused_in_words(
    client: Client, store: MongoStore, shop: Shop, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower one has read the run; before it writes, the quicker one has said so and a worker has finished."""
    (run_id,) = await driven(client, store, shop, ["charge is unknown"], short)
    read = store.runs.get

    async def read_and_be_overtaken(asked: str, **more: Any) -> Any:
        run = await read(asked, **more)
        monkeypatch.setattr(store.runs, "get", read)
        await operator.verdict(short, run_id, happened=True, context=Order(), **MENDED)
        async with working(store, shop, short):
            await at_rest(store, [run_id])
        return run

    monkeypatch.setattr(store.runs, "get", read_and_be_overtaken)
    with pytest.raises(OperatorRefused, match="quicker") as refused:
        await operator.verdict(short, run_id, happened=False, **MENDED)
    assert refused.value.state is State.COMPLETED


async def test_a_run_restarted_by_many_at_once_is_one_new_run(
    client: Client, store: MongoStore, shop: Shop, operator: Operator
) -> None:
    (run_id,) = await driven(client, store, shop, ["charge is declined"])
    obeyed, _ = await at_once(*(operator.restart_as_new(run_id, **MENDED) for _ in range(8)))
    assert len(obeyed) == 8
    assert len(set(obeyed)) == 1
    assert [info.run_id for info in (await client.runs(state=State.PENDING)).runs] == [obeyed[0]]


async def test_a_run_started_anew_has_as_long_as_the_old_one_had(
    client: Client, store: MongoStore, shop: Shop, operator: Operator, database: Any
) -> None:
    never = datetime(9999, 12, 31, 23, 59, tzinfo=UTC)
    async with working(store, shop):
        old = [
            await client.start(fulfil, Order(does="charge is declined"), deadline=deadline)
            for deadline in (timedelta(hours=2), never, None)
        ]
        await at_rest(store, [run.run_id for run in old])
    # All of it was an hour ago.
    ago = [
        {"$set": {"created_at": {"$dateSubtract": {"startDate": "$created_at", "unit": "hour", "amount": 1}}}},
        {"$set": {"deadline": {"$dateSubtract": {"startDate": "$deadline", "unit": "hour", "amount": 1}}}},
    ]
    await database["sagas.runs"].update_one({"_id": old[0].run_id}, ago)
    await database["sagas.runs"].update_one({"_id": old[1].run_id}, ago[:1])
    new = [await client.get(await operator.restart_as_new(run.run_id, **MENDED)) for run in old]
    assert new[0].deadline is not None
    assert new[0].deadline - new[0].created_at == timedelta(hours=2)
    assert [new[1].deadline, new[2].deadline] == [never, None]


async def test_runs_restarted_before_count_as_done_and_are_not_started_again(
    client: Client, store: MongoStore, shop: Shop, operator: Operator
) -> None:
    runs = await driven(client, store, shop, ["charge is declined"] * 2)
    for _ in range(2):
        for dry_run in (True, False):
            assert sorted((await operator.restart_many(dry_run=dry_run, **MENDED)).done) == sorted(runs)
    assert len((await client.runs()).runs) == 4


async def test_a_stop_and_a_resume_at_once_are_both_honoured_or_the_resume_is_refused(
    client: Client, store: MongoStore, shop: Shop, operator: Operator
) -> None:
    runs = await driven(client, store, shop, ["release fails"] * 20)
    shop.mended = True
    for run_id in runs:
        answer, resumed = await asyncio.gather(
            client.stop(run_id, **WHY), operator.resume(run_id, **MENDED), return_exceptions=True
        )
        assert not isinstance(answer, BaseException), repr(answer)
        assert answer.outcome is StopOutcome.WILL_BE_UNDONE
        if isinstance(resumed, BaseException):
            assert isinstance(resumed, OperatorRefused), repr(resumed)
            await operator.resume(run_id, **MENDED)  # looked at again
    async with working(store, shop):
        await at_rest(store, runs)
    for run_id in runs:
        assert (await client.get(run_id)).state is State.COMPENSATED
        assert (await kinds(client, run_id)).count("resumed") == 1


DOES = ("ship fails", "release fails", "charge is unknown", "charge is declined", "ok")


class Hustle:
    """Several people at many runs at random moments, and what each was told."""

    def __init__(self, client: Client, operator: Operator, rng: random.Random) -> None:
        self.rng = rng
        self.accepted: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.verbs: dict[str, Callable[[str], Awaitable[object]]] = {
            "resumed": lambda run_id: operator.resume(run_id, **MENDED),
            "retried_now": lambda run_id: operator.retry_now(run_id, **MENDED),
            "verdict": lambda run_id: operator.verdict(fulfil, run_id, **rng.choice(VERDICTS), **MENDED),
            "restarted": lambda run_id: operator.restart_as_new(run_id, **MENDED),
            "stop": lambda run_id: client.stop(run_id, **WHY),
        }

    async def press(self, run_id: str, verb: str) -> None:
        for _ in range(self.rng.randrange(200)):
            await asyncio.sleep(0)
        try:
            await self.verbs[verb](run_id)
        except OperatorRefused as refused:
            self.refusals[refused.why] += 1
        else:
            self.accepted[run_id, verb] += 1

    async def all(self, run_ids: list[str]) -> None:
        todo = [(run_id, verb) for run_id in run_ids for verb in self.verbs if verb != "stop" for _ in range(3)]
        todo += [(run_id, "stop") for run_id in run_ids if self.rng.random() < 0.3]
        self.rng.shuffle(todo)
        await asyncio.gather(*(self.press(run_id, verb) for run_id, verb in todo))

    def report(self) -> set[str]:
        counted = Counter(dict.fromkeys(self.verbs, 0))
        for (_, verb), times in self.accepted.items():
            counted[verb] += times
        print(counted, self.refusals, sep="\n")
        return {verb for verb, times in counted.items() if times}


VERDICTS: list[dict[str, Any]] = [{"happened": True, "context": Order(does="ok")}, {"happened": False}]


@pytest.mark.slow
async def test_verbs_raced_against_each_other_and_against_live_workers_have_one_effect_each(
    client: Client, store: MongoStore, shop: Shop, operator: Operator, rng: random.Random
) -> None:
    """Every verb, and stop, on every run, by several people at random moments, while two workers take what is due."""
    runs = await driven(client, store, shop, [rng.choice(DOES) for _ in range(60)])
    runs += await parked(client, store, shop, 20)
    before = {run_id: (await client.get(run_id)).state for run_id in runs}
    shop.mended = True
    hustle = Hustle(client, operator, rng)
    async with working(store, shop, concurrency=16), working(store, shop, concurrency=16):
        await hustle.all(runs)
        await asyncio.gather(*(client.stop(run_id, **WHY) for run_id in runs))  # what was parked again would wait on
        await at_rest(store, runs)
    for run_id in runs:
        told, state = Counter(await kinds(client, run_id)), (await client.get(run_id)).state
        for verb in ("resumed", "retried_now", "verdict"):
            assert told[verb] == hustle.accepted[run_id, verb], f"{verb} of {run_id} ({before[run_id]}): {told}"
        assert told["verdict"] <= 1
        if before[run_id] in (State.COMPLETED, State.COMPENSATED):
            assert state is before[run_id]
        if "rollback_begun" in told:
            assert state not in (State.COMPLETED, State.FORWARD_INCOMPLETE, State.IN_DOUBT)
    assert hustle.report() == hustle.verbs.keys()
    assert any("quicker" in why for why in hustle.refusals), "nobody was overtaken between looking and writing"


async def test_a_stop_that_finds_its_run_let_go_on_in_that_very_moment_stops_it(
    client: Client, store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for a run that has failed, and pending once it looks why: it asks again instead of saying it has ended."""
    plain = Saga("plain", Order)

    @plain.step(no_compensation=True, retry=ONCE)
    async def count(order: Order, step: Step[Any]) -> Order:
        raise NonRetryable("not today")

    async with working(store, Shop(), plain):
        run = await client.start(plain, Order())
        with pytest.raises(RunFailed):
            await run.result(20)
    ask = store.interventions.ask_stop

    async def ask_too_early(run_id: str, **words: Any) -> bool:
        recorded = await ask(run_id, **words)
        monkeypatch.setattr(store.interventions, "ask_stop", ask)
        await Operator(store).resume(run_id, by="bob@shop", reason="it is mended")
        return recorded

    monkeypatch.setattr(store.interventions, "ask_stop", ask_too_early)
    answer = await run.stop(**WHY)
    assert (answer.outcome, answer.first, answer.state) == (StopOutcome.WILL_BE_UNDONE, True, State.PENDING)


async def test_a_stop_of_what_cannot_be_undone_says_so_and_it_is_not_restarted(
    client: Client, store: MongoStore, shop: Shop, operator: Operator
) -> None:
    plain = Saga("plain", Order)

    @plain.step(no_compensation=True, retry=ONCE)
    async def count(order: Order, step: Step[Shop]) -> Order:
        step.resources.done.append("count")
        return order

    @plain.step(no_compensation=True, retry=ONCE)
    async def book(order: Order, step: Step[Shop]) -> Order:
        step.resources.inside.set()
        await step.stop_asked.wait()
        assert step.stop_asked
        return order

    @plain.step(no_compensation=True, retry=ONCE)
    async def never(order: Order, step: Step[Shop]) -> Order:
        raise AssertionError("a stop was asked")

    untouched = await client.start(plain, Order(), delay=timedelta(hours=1))
    assert (await untouched.stop(**WHY)).outcome is StopOutcome.CANCELLED
    async with working(store, shop, plain):
        run = await client.start(plain, Order())
        await asyncio.wait_for(shop.inside.wait(), 20)
        assert "what it has done stays" in (await run.preview_stop()).why
        answer = await run.stop(**WHY)
        assert (answer.outcome, answer.why) == (StopOutcome.WILL_BE_UNDONE, "it came before the run's end")
        assert "what it has done stays" in answer.next
        assert "undone" not in answer.next
        with pytest.raises(RunRolledBack):
            await run.result(20)
    assert shop.done == ["count"]
    with pytest.raises(OperatorRefused, match="what it has done stays: a new run would do everything again"):
        await operator.restart_as_new(run.run_id, **MENDED)
    with pytest.raises(OperatorRefused, match="it has ended; nothing of it is left to do"):
        await operator.resume(run.run_id, **MENDED)
    await operator.restart_as_new(untouched.run_id, **MENDED)


@pytest.mark.parametrize("state", ["broken", "quarantined", "on hold"])
async def test_a_stop_of_a_held_run_that_cannot_be_undone_promises_no_undoing(
    client: Client, store: MongoStore, database: Any, state: str
) -> None:
    plain = Saga("plain", Order)

    @plain.step(no_compensation=True, retry=ONCE)
    async def count(order: Order, step: Step[Shop]) -> Order:
        return order

    run = await client.start(plain, Order(), delay=timedelta(hours=1))
    blocked = {"blocked": {"count": 9, "since": "$$NOW", "failure": "KeyLost", "why": "gone"}, "attempts": 1}
    held = {"state": state, "held": {"reason": "as the store writes it", "since": "$$NOW"}}
    changes = [{"$set": blocked}] if state == "on hold" else [{"$set": {**blocked, **held}}, {"$unset": ["due_at"]}]
    await database["sagas.runs"].update_one({"_id": run.run_id}, changes)
    answer = await run.stop(**WHY)
    assert answer.outcome is StopOutcome.WILL_BE_UNDONE
    assert "it ends (no step of it has a compensation, so what it has done stays) as soon as" in answer.next
    assert "undone" not in answer.next


# -------------------------------------------------------------------- what a person is shown


@pytest.fixture
async def unlucky_store(mongo_uri: str, database: Any, store: MongoStore) -> AsyncIterator[MongoStore]:
    """A store on a connection that fail points can tell from all others."""
    async with AsyncMongoClient[Any](mongo_uri, appname="unlucky") as connection:
        yield MongoStore(connection[database.name], patience=timedelta(seconds=1))


@pytest.mark.parametrize("command", ["update", "find", "insert"])
@pytest.mark.parametrize(
    "trouble",
    [{"errorCode": 13}, {"closeConnection": True}, {"errorCode": 112}],
    ids=["no-right", "no-answer", "conflict"],
)
async def test_whatever_the_server_says_to_a_resume_the_operator_is_told_in_an_error_of_ours(
    client: Client,
    store: MongoStore,
    shop: Shop,
    unlucky_store: MongoStore,
    database: Any,
    command: str,
    trouble: dict[str, Any],
) -> None:
    run_id = await held(client, store, shop, "ship fails")
    await unlucky_store.ready()
    async with fail_point(database.client, [command], with_app_name="unlucky", **trouble):
        with pytest.raises(SagaError) as told:
            await Operator(unlucky_store).resume(run_id, **MENDED)
    assert isinstance(told.value, StoreError)
    if (await client.get(run_id)).state in HELD:
        await Operator(store).resume(run_id, **MENDED)
    assert (await kinds(client, run_id)).count("resumed") == 1
