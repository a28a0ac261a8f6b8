"""The worker, driven for real in this process against a real server: what it claims, keeps, gives back and gives up."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import structlog

import sagas.worker
from sagas import Client, Fate, NonRetryable, Retryable, RetryPolicy, RunHeld, Saga, Start, Step, Worker
from sagas.clock import monotonic
from sagas.executor import Attempt
from sagas.identity import compensation_key, step_key
from sagas_store import MongoStore
from sagas_store.entries import Entry, Kind
from sagas_store.errors import StoreError, StoreRefused, StoreUnavailable
from sagas_store.records import Renewal, RunRecord
from sagas_store.states import State
from tests.support.changing import replace
from tests.support.crashing import EFFECTS, Gate, Order, Part, Plan, Server, Shape, World, working
from tests.support.waiting import eventually

LONG = timedelta(hours=1)
SHORT_LEASE = timedelta(seconds=0.9)
"""Renewed every 0.15 s."""


def waits(name: str, gate: Gate, *, then: Callable[[], None] | None = None) -> Saga[Order]:
    """A saga of two steps without compensation: one waits at the gate, the other says that it was reached."""
    saga = Saga(name, Order)

    @saga.step(no_compensation=True, timeout=None)
    async def first(order: Order, step: Step[None]) -> Order:
        await gate.wait()
        return order

    @saga.step(no_compensation=True)
    async def second(order: Order, step: Step[None]) -> Order:
        if then is not None:
            then()
        return order

    return saga


async def run_of(store: MongoStore, run_id: str) -> RunRecord:
    run = await store.runs.get(run_id)
    assert run is not None
    return run


async def kinds_of(store: MongoStore, run_id: str) -> list[Kind]:
    return [entry.kind for entry in await store.journal.load(run_id)]


async def until_state(store: MongoStore, run_id: str, *states: State) -> RunRecord:
    async def look() -> RunRecord | None:
        run = await run_of(store, run_id)
        return run if run.state in states else None

    run = await eventually(look, what=f"run {run_id} becomes {' or '.join(states)}")
    assert run is not None
    return run


async def lapse(database: Any, *run_ids: str) -> None:
    """The leases are over, by the server's clock."""
    await database["sagas.runs"].update_many(
        {"_id": {"$in": run_ids}, "due_at": {"$exists": True}}, {"$set": {"due_at": datetime(2000, 1, 1, tzinfo=UTC)}}
    )


def assert_handed_back(run: RunRecord, now: datetime) -> None:
    assert run.state is State.PENDING
    assert run.due_at is not None
    assert run.due_at <= now + timedelta(milliseconds=5)  # the server's clock, as this side knows it


class Renewals:
    """The heartbeats of a worker, as they are sent; one may be made to fail."""

    def __init__(self, store: MongoStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[dict[str, str]] = []
        self.news = asyncio.Event()
        self.broken = False
        self._renew = store.runs.renew
        monkeypatch.setattr(store.runs, "renew", self.renew)

    async def renew(self, held: dict[str, str], *, lease: timedelta) -> Renewal:
        self.sent.append(dict(held))
        try:
            if self.broken:
                raise StoreUnavailable("renew", "the test says so")
            return await self._renew(held, lease=lease)
        finally:
            self.news.set()

    async def next(self) -> dict[str, str]:
        """The next one, from now on."""
        self.news.clear()
        await asyncio.wait_for(self.news.wait(), 20)
        return self.sent[-1]


# ------------------------------------------------------------------------------------ what it cannot read


@pytest.mark.parametrize(
    "change",
    [
        {"phase": "halfway"},
        {"stop": {"decision": "postponed", "by": "shop", "asked_at": datetime(2026, 1, 2, tzinfo=UTC)}},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_a_run_of_a_newer_version_is_held_and_the_others_claimed_with_it_are_driven(
    store: MongoStore, database: Any, change: dict[str, Any]
) -> None:
    gate = Gate()
    gate.opened.set()
    saga = waits("read", gate)
    await database.command("collMod", "sagas.runs", validator={})  # as a newer version needs it
    async with Client(store) as client:
        runs = await client.start_many(saga, [Start(Order()) for _ in range(11)])
        odd = runs[5].run_id
        await database["sagas.runs"].update_one({"_id": odd}, {"$set": change})
        with structlog.testing.capture_logs() as logs:
            async with working(store, saga, lease=LONG):
                for run in runs:
                    if run.run_id != odd:
                        await run.result(timeout=20)

                async def held() -> Any:
                    return await database["sagas.runs"].find_one({"_id": odd, "state": "broken"})

                found = await eventually(held, what="the odd one is held")
        assert found["attempts"] == 1
        (field,) = change
        assert f"cannot read its {field}: " in found["held"]["reason"]
        assert {one["state"] for one in logs if one.get("run") == odd} == {"broken"}
        with pytest.raises(StoreError, match=f"{odd}.*{field}"):
            await client.get(odd)
        (listed,) = (await client.runs(state=State.BROKEN)).runs
        assert (listed.run_id, listed.held_reason) == (odd, found["held"]["reason"])


# ------------------------------------------------------------------------------------ leases


async def test_one_heartbeat_renews_the_leases_of_all_runs_in_one_trip(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = [Gate() for _ in range(5)]
    sagas = [waits(f"waits-{n}", gate) for n, gate in enumerate(gates)]
    renewals = Renewals(store, monkeypatch)
    async with Client(store) as client, working(store, *sagas, lease=2 * SHORT_LEASE):
        runs = [await client.start(saga, Order()) for saga in sagas]
        for gate in gates:
            await gate.entered.wait()
        await renewals.next()  # so that none is under way while the leases are read
        before = {run.run_id: (await run_of(store, run.run_id)).due_at for run in runs}
        held = await renewals.next()
        count = len(renewals.sent)
        after = {run.run_id: (await run_of(store, run.run_id)).due_at for run in runs}
        assert set(held) == set(before)
        assert len(set(after.values())) == 1, "one update gives all of them one end"
        assert all(after[run_id] > before[run_id] for run_id in before)  # type: ignore[operator]
        assert count <= len(renewals.sent) <= count + 1


async def test_a_lost_lease_breaks_off_the_step_and_nothing_more_is_written(store: MongoStore, database: Any) -> None:
    gate = Gate()
    saga = waits("waits", gate)
    async with Client(store) as client, working(store, saga, lease=SHORT_LEASE) as (worker, _):
        run = await client.start(saga, Order())
        await gate.entered.wait()
        # Another worker finds the lease over.
        other = MongoStore(database)
        await lapse(database, run.run_id)
        (claimed,) = await other.claims.take([("waits", 1)], token="b" * 32, worker="other", lease=LONG, limit=1)
        await asyncio.wait_for(gate.broken_off.wait(), 20)
        await eventually(lambda: _is_idle(worker), what="the worker lets go of the run")
    assert await run_of(store, run.run_id) == replace(claimed, input_read=None)
    assert await store.journal.load(run.run_id) == []


async def _is_idle(worker: Any) -> bool:
    return not worker._attempts


async def test_a_failed_renewal_is_not_a_lost_lease(store: MongoStore, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    saga = waits("waits", gate)
    renewals = Renewals(store, monkeypatch)
    async with Client(store) as client, working(store, saga, lease=timedelta(seconds=3)):
        run = await client.start(saga, Order())
        await gate.entered.wait()
        renewals.broken = True
        await renewals.next()
        assert not gate.broken_off.is_set()
        renewals.broken = False
        await renewals.next()
        gate.opened.set()
        await run.result(20)
    assert await kinds_of(store, run.run_id) == [Kind.STEP_SUCCEEDED] * 2


async def test_renewals_that_fail_are_soon_tried_again_with_what_is_held_then(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after as long as after one that got through: the database may be away for two thirds of a lease."""
    monkeypatch.setattr(sagas.worker, "_AGAIN_S", 0.01)
    gates = [Gate(), Gate()]
    both = [waits(f"waits-{n}", gate) for n, gate in enumerate(gates)]
    renewals = Renewals(store, monkeypatch)
    renewals.broken = True
    async with Client(store) as client, working(store, *both, lease=timedelta(seconds=12)):  # renewed every two seconds
        runs = [await client.start(both[0], Order())]
        await gates[0].entered.wait()
        assert set(await renewals.next()) == {runs[0].run_id}
        failed_at = monotonic()
        for _ in range(20):
            await renewals.next()
        assert monotonic() - failed_at < 10
        runs.append(await client.start(both[1], Order()))
        await gates[1].entered.wait()
        assert set(await renewals.next()) == {run.run_id for run in runs}
        for gate in gates:
            gate.opened.set()


async def test_a_log_that_cannot_be_written_takes_no_lease_and_no_run_with_it(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []

    def disk_full(logger: object, method: str, line: MutableMapping[str, Any]) -> str:
        lost.append(line["event"])
        raise OSError(errno.ENOSPC, "no space left on device")

    gate = Gate()
    saga = waits("waits", gate)
    renewals = Renewals(store, monkeypatch)
    take = store.claims.take
    structlog.configure(processors=[disk_full])
    try:
        async with Client(store) as client, working(store, saga, lease=timedelta(seconds=3)):
            run = await client.start(saga, Order())
            await asyncio.wait_for(gate.entered.wait(), 20)
            renewals.broken = True
            monkeypatch.setattr(store.claims, "take", _unavailable)
            await eventually(lambda: _said(lost, "renewal failed", "claim failed"), what="both have failed")
            renewals.broken = False
            monkeypatch.setattr(store.claims, "take", take)
            assert set(await renewals.next()) == {run.run_id}
            gate.opened.set()
            await run.result(20)
            await (await client.start(saga, Order())).result(20)
    finally:
        structlog.reset_defaults()


async def _unavailable(*_: Any, **__: Any) -> list[RunRecord]:
    raise StoreUnavailable("claim", "the test says so")


async def _said(lines: list[str], *wanted: str) -> bool:
    return all(any(line.startswith(one) for line in lines) for one in wanted)


@pytest.mark.parametrize("helper", ["_renew", "_write_off", "_listen"])
async def test_a_helper_that_a_fault_has_ended_begins_again(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch, helper: str
) -> None:
    """A worker that goes on claiming and renews nothing, or watches nothing, is worse than none."""
    monkeypatch.setattr(sagas.worker, "_AGAIN_S", 0.01)
    calls = 0

    async def fails(*_: Any) -> None:
        step_of_the_helper()

    def step_of_the_helper(*_: Any) -> None:
        nonlocal calls
        calls += 1
        raise KeyError("a fault of the engine")

    monkeypatch.setattr(Worker, helper, step_of_the_helper if helper == "_write_off" else fails)
    gate = Gate()
    gate.opened.set()
    saga = waits("waits", gate)
    async with Client(store) as client, working(store, saga, lease=SHORT_LEASE):

        async def called_again() -> bool:
            return calls > 2

        await eventually(called_again, what=f"{helper} is called again")
        await (await client.start(saga, Order())).result(20)
        monkeypatch.undo()  # the drain has the same part


async def test_a_worker_whose_own_clock_says_that_the_lease_is_over_starts_no_further_step(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, reached = Gate(), asyncio.Event()
    saga = waits("waits", gate, then=reached.set)
    ahead = 0.0
    Renewals(store, monkeypatch).broken = True
    async with (
        Client(store) as client,
        working(store, saga, lease=LONG, monotonic=lambda: monotonic() + ahead) as (worker, _),
    ):
        run = await client.start(saga, Order())
        await gate.entered.wait()
        ahead = LONG.total_seconds()
        gate.opened.set()
        await eventually(lambda: _is_idle(worker), what="the worker gives up")
        await run.result(20)
    # It ended its lease itself, so that nobody has to wait for the end of it.
    written = [(entry.attempt, entry.kind) for entry in await store.journal.load(run.run_id)]
    assert written == [(1, Kind.STEP_SUCCEEDED), (2, Kind.TAKEN_OVER), (2, Kind.STEP_SUCCEEDED)]


async def test_a_worker_that_cannot_renew_breaks_off_the_step_once_the_lease_is_over(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker may be running that step by then: whoever is cut off must not go on beside it."""
    gate = Gate()
    saga = waits("waits", gate)
    Renewals(store, monkeypatch).broken = True
    async with Client(store) as client, working(store, saga, lease=SHORT_LEASE):
        run = await client.start(saga, Order())
        await gate.entered.wait()
        await asyncio.wait_for(gate.broken_off.wait(), 5)
    assert all(entry.attempt > 1 for entry in await store.journal.load(run.run_id))


async def test_a_worker_that_claims_its_own_lapsed_run_keeps_the_new_lease_and_gives_up_the_old_one(
    store: MongoStore, database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was paused, or cut off, for longer than its lease, and is the first to see that the run is due."""
    gates = [Gate(), Gate()]
    calls = 0
    saga = Saga("waits", Order)

    @saga.step(no_compensation=True, timeout=None)
    async def first(order: Order, step: Step[None]) -> Order:
        nonlocal calls
        calls += 1
        await gates[calls - 1].wait()
        return order

    renewals = Renewals(store, monkeypatch)
    renewals.broken = True  # until the new claim is made, no heartbeat tells of the lost lease
    async with Client(store) as client, working(store, saga, lease=timedelta(seconds=3)) as (worker, task):
        run = await client.start(saga, Order())
        await gates[0].entered.wait()
        await lapse(database, run.run_id)
        await asyncio.wait_for(gates[1].entered.wait(), 20)
        await asyncio.wait_for(gates[0].broken_off.wait(), 5)  # the same step must not run twice side by side here
        await eventually(lambda: _one_task(worker), what="the old attempt ends")
        renewals.broken = False
        held = await renewals.next()
        claim = (await run_of(store, run.run_id)).claim
        assert claim is not None
        assert held == {run.run_id: claim.token}, "the lease that it holds is not renewed"
        worker.stop()  # and the attempt is told to drain
        gates[1].opened.set()
        await asyncio.wait_for(task, 20)
    assert (await run_of(store, run.run_id)).state is State.COMPLETED
    assert await kinds_of(store, run.run_id) == [Kind.TAKEN_OVER, Kind.STEP_SUCCEEDED]


async def _one_task(worker: Any) -> bool:
    return len(worker._tasks) == 1


async def test_an_ousted_worker_that_reads_the_journal_late_does_not_push_out_the_rightful_one(
    database: Any, store: MongoStore
) -> None:
    """Frozen between its claim and its reading: what it reads is already the other's, and no number stops it."""
    server = Server(database, store)
    await server.ready()
    parts = (Part(name="reserve", does=("again", "ok"), wait=timedelta(minutes=30)), Part(name="pack"))
    world = World(server, Shape("parked", parts, State.COMPLETED))
    await world.start()
    parking = world.process()
    await parking.work_once()
    await world.lapse()
    frozen = world.process(Plan(3, after=True, fate="suspend"))  # it has read back what it claimed
    async with frozen.working_until_suspended() as ousted:
        await world.lapse()
        rightful = world.process(Plan(6, after=True, fate="suspend"))  # in its first step
        async with rightful.working_until_suspended() as driving:
            assert rightful.trail[-1] == "effect of step reserve"
            frozen.resumed.set()
            await asyncio.wait({ousted})
            assert ousted.exception() is not None, "it went on"
            rightful.resumed.set()
            assert await driving is State.COMPLETED
    await world.check(suspended=True)
    server.close()


# ------------------------------------------------------------------------------------ claiming


async def test_no_more_runs_are_claimed_than_there_is_room_for(store: MongoStore) -> None:
    gates: list[Gate] = []
    saga = Saga("waits", Order)
    entered: asyncio.Queue[Gate] = asyncio.Queue()

    @saga.step(no_compensation=True)
    async def first(order: Order, step: Step[None]) -> Order:
        gates.append(Gate())
        entered.put_nowait(gates[-1])
        await gates[-1].wait()
        return order

    async with Client(store) as client:
        runs = await client.start_many(saga, [Start(Order()) for _ in range(10)])
        async with working(store, saga, concurrency=3):
            inside = [await entered.get() for _ in range(3)]
            assert await _states(store, [run.run_id for run in runs]) == {State.RUNNING: 3, State.PENDING: 7}
            untouched = [run for run in [await run_of(store, run.run_id) for run in runs] if run.attempts == 0]
            assert len(untouched) == 7
            inside[0].opened.set()
            await entered.get()
            assert await _states(store, [run.run_id for run in runs]) == {
                State.COMPLETED: 1,
                State.RUNNING: 3,
                State.PENDING: 6,
            }


async def _states(store: MongoStore, run_ids: list[str]) -> dict[State, int]:
    found = await store.runs.get_many(run_ids)
    counts: dict[State, int] = {}
    for run in found.values():
        counts[run.state] = counts.get(run.state, 0) + 1
    return counts


async def test_a_parked_retry_frees_the_worker_for_others(store: MongoStore) -> None:
    later = Saga("later", Order)
    now = Saga("now", Order)

    @later.step(no_compensation=True)
    async def ask(order: Order, step: Step[None]) -> Order:
        raise Retryable("closed today", retry_after=LONG)

    @now.step(no_compensation=True)
    async def do(order: Order, step: Step[None]) -> Order:
        return order

    async with Client(store) as client, working(store, later, now, concurrency=1):
        parked = await client.start(later, Order())
        await until_state(store, parked.run_id, State.PENDING)
        run = await client.start(now, Order())
        await run.result(20)
        record = await eventually(lambda: _parked(store, parked.run_id), what="the run is parked")
    assert record is not None
    assert record.due_at is not None
    assert timedelta(minutes=59) < record.due_at - store.clock.now() <= LONG


async def _parked(store: MongoStore, run_id: str) -> RunRecord | None:
    run = await run_of(store, run_id)
    return run if run.state is State.PENDING and run.attempts == 1 else None


async def test_at_capacity_runs_get_their_turn_in_the_order_in_which_they_were_due(store: MongoStore) -> None:
    order_of_start: list[str] = []
    sagas = [Saga("busy", Order), Saga("quiet", Order)]
    for saga in sagas:

        async def do(order: Order, step: Step[None]) -> Order:
            order_of_start.append(step.run_id)
            return order

        saga.step(no_compensation=True)(do)

    start = store.clock.now() - timedelta(minutes=10)
    async with Client(store) as client:
        due = [(start + timedelta(seconds=n), sagas[0]) for n in range(0, 60, 2)]
        due += [(start + timedelta(seconds=n), sagas[1]) for n in (5, 31)]
        runs = [await client.start(saga, Order(), due_at=at) for at, saga in due]
        expected = [run.run_id for _, run in sorted(zip([at for at, _ in due], runs, strict=True), key=lambda p: p[0])]
        async with working(store, *sagas, concurrency=1):
            for run in runs:
                await run.result(20)
    assert order_of_start == expected


async def test_a_run_starts_at_once_on_an_idle_worker_that_polls_rarely(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, listening = Gate(), asyncio.Event()
    saga = waits("waits", gate)
    on_due = store.hints.on_due

    async def on_due_with_sign(sagas: Any, notice: Callable[[], None], **more: Any) -> None:
        await on_due(sagas, notice, listening, **more)

    monkeypatch.setattr(store.hints, "on_due", on_due_with_sign)
    async with Client(store) as client, working(store, saga, poll=timedelta(seconds=600)):
        await asyncio.wait_for(listening.wait(), 20)
        await client.start(saga, Order())
        await asyncio.wait_for(gate.entered.wait(), 5)
        gate.opened.set()


async def test_a_run_started_while_the_change_stream_was_being_opened_is_not_left_to_the_next_poll(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has looked and found nothing, and does not hear yet: what comes in between must be looked for."""
    gate, looked, go_on = Gate(), asyncio.Event(), asyncio.Event()
    saga = waits("waits", gate)
    on_due, next_due_at = store.hints.on_due, store.claims.next_due_at

    async def late_on_due(sagas: Any, notice: Callable[[], None], **more: Any) -> None:
        await go_on.wait()
        await on_due(sagas, notice, **more)

    async def next_due_at_with_sign(definitions: Any) -> datetime | None:
        found = await next_due_at(definitions)
        looked.set()
        return found

    monkeypatch.setattr(store.hints, "on_due", late_on_due)
    monkeypatch.setattr(store.claims, "next_due_at", next_due_at_with_sign)
    async with Client(store) as client, working(store, saga, poll=timedelta(seconds=600)):
        await asyncio.wait_for(looked.wait(), 20)
        await client.start(saga, Order())
        go_on.set()
        await asyncio.wait_for(gate.entered.wait(), 5)
        gate.opened.set()


@pytest.fixture
def silent(store: MongoStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """No change stream says anything, and the next poll is ten minutes away."""

    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(store.hints, "on_due", never)


SELDOM = timedelta(seconds=600)


@pytest.mark.parametrize("concurrency", [1, 3, 16])
@pytest.mark.usefixtures("silent")
async def test_a_backlog_larger_than_a_worker_has_places_for_is_worked_off_without_a_poll(
    store: MongoStore, concurrency: int
) -> None:
    gate = Gate()
    gate.opened.set()
    saga = waits("waits", gate)
    async with Client(store) as client:
        runs = await client.start_many(saga, [Start(Order()) for _ in range(20)])
        async with working(store, saga, poll=SELDOM, concurrency=concurrency):
            await asyncio.wait_for(asyncio.gather(*(run.result() for run in runs)), 20)


@pytest.mark.usefixtures("silent")
async def test_a_run_that_was_parked_goes_on_when_it_is_due_without_a_poll(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    saga, looked = Saga("again", Order), asyncio.Event()
    next_due_at = store.claims.next_due_at

    @saga.step(no_compensation=True)
    async def declined_once(order: Order, step: Step[None]) -> Order:
        if step.try_number == 1:
            await looked.wait()  # the worker has seen that nothing is due before this lease ends, and waits
            raise Retryable("later", retry_after=timedelta(milliseconds=50))
        return order

    async def next_due_at_with_sign(definitions: Any) -> datetime | None:
        found = await next_due_at(definitions)
        asyncio.get_running_loop().call_soon(looked.set)
        return found

    monkeypatch.setattr(store.claims, "next_due_at", next_due_at_with_sign)
    async with Client(store) as client:
        run = await client.start(saga, Order())
        async with working(store, saga, poll=SELDOM, park_after=timedelta(0)):
            await run.result(20)


async def test_what_a_failed_claim_did_not_take_is_looked_for_when_an_attempt_ends(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, failed = Gate(), asyncio.Event()
    holding, quick = waits("holding", gate), waits("quick", Gate())
    take, fails = store.claims.take, False

    async def fails_when_told(*arguments: Any, **more: Any) -> list[RunRecord]:
        nonlocal fails
        if fails:
            fails = False
            failed.set()
            raise StoreUnavailable("claim", "the test says so")
        return await take(*arguments, **more)

    monkeypatch.setattr(store.claims, "take", fails_when_told)
    async with Client(store) as client, working(store, holding, quick, poll=SELDOM):
        await client.start(holding, Order())
        await asyncio.wait_for(gate.entered.wait(), 20)
        fails = True
        run = await client.start(quick, Order())
        await asyncio.wait_for(failed.wait(), 20)
        gate.opened.set()
        await until_state(store, run.run_id, State.RUNNING, State.COMPLETED)


async def test_a_delayed_run_starts_when_it_is_due_and_not_at_the_next_poll(store: MongoStore) -> None:
    gate = Gate()
    saga = waits("waits", gate)
    async with Client(store) as client:
        run = await client.start(saga, Order(), delay=timedelta(seconds=0.3))
        due_at = (await run.info()).due_at
        async with working(store, saga, poll=timedelta(seconds=600)):
            await asyncio.wait_for(gate.entered.wait(), 10)
            claim = (await run_of(store, run.run_id)).claim
            assert claim is not None
            assert due_at is not None
            assert claim.at >= due_at
            gate.opened.set()


async def test_a_worker_may_be_named_by_any_text(store: MongoStore) -> None:
    gate = Gate()
    gate.opened.set()
    saga = waits("waits", gate)
    async with Client(store) as client, working(store, saga, name="$state"):
        run = await client.start(saga, Order())
        await run.result(5)
        assert (await run.info()).worker == "$state"


async def test_a_damaged_run_that_is_due_first_keeps_a_worker_with_one_place_from_none_and_is_told_of_once(
    store: MongoStore, database: Any
) -> None:
    gate = Gate()
    gate.opened.set()
    saga = waits("waits", gate)
    async with Client(store) as client:
        damaged, *others = await client.start_many(saga, [Start(Order()) for _ in range(3)])
        await lapse(database, damaged.run_id)
        change = {"q": {"_id": damaged.run_id}, "u": {"$set": {"phase": "halfway"}}}
        await database.command("update", "sagas.runs", updates=[change], bypassDocumentValidation=True)
        with structlog.testing.capture_logs() as lines:
            async with working(store, saga, concurrency=1, poll=timedelta(milliseconds=20)):
                for run in others:
                    await run.result(20)
    (told,) = [line for line in lines if line["log_level"] == "warning"]
    assert told["event"] == "run cannot be claimed, leaving it out for a minute"
    assert damaged.run_id in told["error"]


async def test_while_journals_cannot_be_read_first_attempts_go_on_and_the_others_are_none(
    store: MongoStore, database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role without the right to read the journal is no crash of a worker: no run is ever held as broken for it."""
    gate = Gate()
    gate.opened.set()
    saga = waits("waits", gate)
    load_many, rounds = store.journal.load_many, 0

    async def refused(run_ids: list[str]) -> dict[str, list[Entry]]:
        nonlocal rounds
        rounds += 1
        raise StoreRefused("read journals", "the test says so")

    async with Client(store) as client:
        again = await client.start(saga, Order())
        await store.claims.take([("waits", 1)], token="a" * 32, worker="dead", lease=LONG, limit=1)
        await lapse(database, again.run_id)
        first = await client.start(saga, Order())
        monkeypatch.setattr(store.journal, "load_many", refused)
        async with working(store, saga, poll=timedelta(milliseconds=10)):
            await first.result(20)

            async def often() -> bool:
                return rounds > 12

            await eventually(often, what="the journal was asked for more than ten times")
            assert (await run_of(store, again.run_id)).attempts <= 3
            monkeypatch.setattr(store.journal, "load_many", load_many)
            await again.result(20)
    (over, *_) = await store.journal.load(again.run_id)
    assert (over.kind, over.taken_from) == (Kind.TAKEN_OVER, State.PENDING)
    assert (await run_of(store, first.run_id)).attempts == 1


async def test_claimed_runs_whose_journals_cannot_be_read_are_let_go_all_at_once(
    store: MongoStore, database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, each with the whole of the store's patience, they would keep a drain waiting for hours."""
    asked, all_asked = 0, asyncio.Event()
    give_back = store.runs.give_back

    async def away(run_ids: list[str]) -> dict[str, list[Entry]]:
        raise StoreUnavailable("read journals", "the test says so")

    async def give_back_with_all_others(run: RunRecord) -> None:
        nonlocal asked
        asked += 1
        if asked == 5:
            all_asked.set()
        await all_asked.wait()
        await give_back(run)

    saga = waits("waits", Gate())
    async with Client(store) as client:
        runs = await client.start_many(saga, [Start(Order()) for _ in range(5)])
        await store.claims.take([("waits", 1)], token="a" * 32, worker="dead", lease=LONG, limit=5)
        await lapse(database, *(run.run_id for run in runs))
        monkeypatch.setattr(store.journal, "load_many", away)
        monkeypatch.setattr(store.runs, "give_back", give_back_with_all_others)
        async with working(store, saga, poll=LONG) as (worker, task):
            await asyncio.wait_for(all_asked.wait(), 20)
            worker.stop()
            await asyncio.wait_for(task, 20)
        for record in (await store.runs.get_many([run.run_id for run in runs])).values():
            assert_handed_back(record, store.clock.now())


# ------------------------------------------------------------------------------------ draining


async def until_draining(worker: Worker) -> None:
    async def told() -> bool:
        return all(attempt._draining for attempt in worker._attempts.values())

    await eventually(told, what="the attempts are told to drain")


async def test_a_drain_lets_the_step_in_hand_finish_and_hands_the_run_back(store: MongoStore) -> None:
    gate, reached = Gate(), asyncio.Event()
    saga = waits("waits", gate, then=reached.set)
    async with Client(store) as client, working(store, saga) as (worker, task):
        run = await client.start(saga, Order())
        await gate.entered.wait()
        worker.stop()
        await until_draining(worker)
        gate.opened.set()
        await asyncio.wait_for(task, 20)
        record = await run_of(store, run.run_id)
        assert_handed_back(record, store.clock.now())
        assert await kinds_of(store, run.run_id) == [Kind.STEP_SUCCEEDED]
        assert not reached.is_set()


async def test_a_drain_begins_at_once_though_the_worker_waits_for_an_answer_to_its_claim(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database may be away, and the claim be repeated for half a minute: that is not the drain's time."""
    gate, reached = Gate(), asyncio.Event()
    saga = waits("waits", gate, then=reached.set)
    take, asking, answered = store.claims.take, asyncio.Event(), asyncio.Event()

    async def slow_claim(*arguments: Any, **more: Any) -> list[RunRecord]:
        if gate.entered.is_set():
            asking.set()
            await answered.wait()
        return await take(*arguments, **more)

    monkeypatch.setattr(store.claims, "take", slow_claim)
    async with Client(store) as client, working(store, saga) as (worker, task):
        run = await client.start(saga, Order())
        await gate.entered.wait()
        await asyncio.wait_for(asking.wait(), 20)
        worker.stop()
        gate.opened.set()
        await eventually(lambda: _is_idle(worker), what="the run is let go")
        assert not reached.is_set(), "the next step began"
        assert_handed_back(await run_of(store, run.run_id), store.clock.now())
        answered.set()
        await asyncio.wait_for(task, 20)


async def test_after_the_grace_the_step_is_broken_off_and_in_doubt(store: MongoStore) -> None:
    gate = Gate()
    saga = waits("waits", gate)
    async with (
        Client(store) as client,
        working(store, saga, drain_grace=timedelta(seconds=0.05)) as (worker, task),
    ):
        run = await client.start(saga, Order())
        await gate.entered.wait()
        worker.stop()
        await asyncio.wait_for(task, 20)
        assert gate.broken_off.is_set()
        assert_handed_back(await run_of(store, run.run_id), store.clock.now())
        (entry,) = await store.journal.load(run.run_id)
        assert (entry.kind, entry.step, entry.try_number) == (Kind.INTERRUPTED, "first", 1)


async def test_a_second_stop_cuts_the_grace(store: MongoStore) -> None:
    gate = Gate()
    saga = waits("waits", gate)
    async with Client(store) as client, working(store, saga, drain_grace=LONG) as (worker, task):
        run = await client.start(saga, Order())
        await gate.entered.wait()
        worker.stop()
        await until_draining(worker)
        assert not gate.broken_off.is_set()
        worker.stop()
        await asyncio.wait_for(task, 20)
        assert_handed_back(await run_of(store, run.run_id), store.clock.now())


def undone(gate: Gate) -> Saga[Order]:
    """A saga that rolls back, and whose newest compensation waits at the gate."""
    saga = Saga("undone", Order)

    @saga.step
    async def reserve(order: Order, step: Step[None]) -> Order:
        return order

    @reserve.compensation
    async def release(order: Order, step: Step[None]) -> None: ...

    @saga.step
    async def pack(order: Order, step: Step[None]) -> Order:
        return order

    @pack.compensation(timeout=None)
    async def unpack(order: Order, step: Step[None]) -> None:
        await gate.wait()

    @saga.pivot
    async def charge(order: Order, step: Step[None]) -> Order:
        raise NonRetryable("no")

    return saga


async def test_a_compensation_in_hand_is_never_broken_off_by_a_drain(store: MongoStore) -> None:
    gate = Gate()
    saga = undone(gate)
    async with Client(store) as client, working(store, saga, drain_grace=timedelta(0)) as (worker, task):
        run = await client.start(saga, Order())
        await gate.entered.wait()
        worker.stop()
        worker.stop()
        with pytest.raises(TimeoutError):  # it waits for the compensation: there is no event for not ending
            await asyncio.wait_for(asyncio.shield(task), 0.2)
        assert not gate.broken_off.is_set()
        gate.opened.set()
        await asyncio.wait_for(task, 20)
        assert_handed_back(await run_of(store, run.run_id), store.clock.now())
        assert (await kinds_of(store, run.run_id))[-1] is Kind.COMPENSATION_SUCCEEDED


async def test_who_cancels_a_draining_worker_tears_no_compensation_and_leaves_no_run_behind(store: MongoStore) -> None:
    """As `asyncio.wait_for(task, grace)` does after `stop()`."""
    gate, other = Gate(), Gate()
    sagas = undone(gate), waits("waits", other)
    async with Client(store) as client, working(store, *sagas, drain_grace=LONG) as (worker, task):
        runs = [await client.start(saga, Order()) for saga in sagas]
        await gate.entered.wait()
        await other.entered.wait()
        worker.stop()
        await until_draining(worker)
        task.cancel()
        await asyncio.wait_for(other.broken_off.wait(), 5)
        assert not gate.broken_off.is_set()
        gate.opened.set()
        await asyncio.wait({task}, timeout=20)
        assert task.done()
        for run in runs:
            assert_handed_back(await run_of(store, run.run_id), store.clock.now())


async def test_who_cancels_the_worker_gets_every_run_handed_back(store: MongoStore) -> None:
    gates = [Gate(), Gate()]
    sagas = [waits(f"waits-{n}", gate) for n, gate in enumerate(gates)]
    retried = Saga("retried", Order)
    tried = asyncio.Event()

    @retried.step(no_compensation=True, retry=RetryPolicy(initial_wait=LONG, max_wait=LONG, jitter=False))
    async def ask(order: Order, step: Step[None]) -> Order:
        tried.set()
        raise Retryable("later")

    async with (
        Client(store) as client,
        working(store, *sagas, retried, park_after=2 * LONG) as (_, task),
    ):
        runs = [await client.start(saga, Order()) for saga in sagas]
        waiting = await client.start(retried, Order())
        for gate in gates:
            await gate.entered.wait()
        await tried.wait()
        await eventually(lambda: store.journal.load(waiting.run_id), what="the retry is journaled")
        task.cancel()
        await asyncio.wait({task}, timeout=20)
        assert task.cancelled()
        for run in runs:
            assert_handed_back(await run_of(store, run.run_id), store.clock.now())
            assert await kinds_of(store, run.run_id) == [Kind.INTERRUPTED]
        record = await run_of(store, waiting.run_id)
        assert record.state is State.PENDING
        assert record.due_at is not None
        assert record.due_at > store.clock.now() + LONG / 2  # its wait goes on


@pytest.mark.parametrize("where", ["reading back the claim", "reading the journals"])
async def test_who_cancels_the_worker_while_it_claims_gets_those_runs_back_too(
    store: MongoStore, database: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    gate = Gate()
    saga = waits("waits", gate)
    claiming, go_on = asyncio.Event(), asyncio.Event()

    def stopped(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def stop(*arguments: Any, **more: Any) -> Any:
            found = await call(*arguments, **more)
            if found:
                claiming.set()
                await go_on.wait()
            return found

        return stop

    async with Client(store) as client:
        run = await client.start(saga, Order())
        # A second attempt, so that there is a journal to read.
        await store.claims.take([("waits", 1)], token="a" * 32, worker="dead", lease=LONG, limit=1)
        await lapse(database, run.run_id)
        if where == "reading the journals":
            monkeypatch.setattr(store.journal, "load_many", stopped(store.journal.load_many))
        else:
            monkeypatch.setattr(store.claims, "take", stopped(store.claims.take))
        async with working(store, saga) as (_, task):
            await asyncio.wait_for(claiming.wait(), 20)
            task.cancel()
            await asyncio.sleep(0)
            go_on.set()
            await asyncio.wait({task}, timeout=20)
            assert task.cancelled()
        assert_handed_back(await run_of(store, run.run_id), store.clock.now())


async def test_a_drain_breaks_off_a_transactional_step_that_it_met_before_its_beginning(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, beginning, go_on = Gate(), asyncio.Event(), asyncio.Event()
    saga = Saga("waits", Order)

    @saga.step(no_compensation=True, transactional=True, timeout=None)
    async def first(order: Order, step: Step[None]) -> Order:
        await gate.wait()
        return order

    begin = store._driver.begin

    async def slow_begin(session: Any) -> None:
        beginning.set()
        await go_on.wait()
        await begin(session)

    monkeypatch.setattr(store._driver, "begin", slow_begin)
    interrupt, told = Attempt.interrupt, asyncio.Event()

    def interrupt_and_tell(attempt: Attempt) -> None:
        interrupt(attempt)
        told.set()

    monkeypatch.setattr(Attempt, "interrupt", interrupt_and_tell)
    async with Client(store) as client, working(store, saga, drain_grace=timedelta(0)) as (worker, task):
        run = await client.start(saga, Order())
        await beginning.wait()
        worker.stop()
        await asyncio.wait_for(told.wait(), 20)
        go_on.set()
        ended, _ = await asyncio.wait({task}, timeout=5)
        gate.opened.set()
        assert ended, "the step went on after the grace"
        assert_handed_back(await run_of(store, run.run_id), store.clock.now())


# ------------------------------------------------------------------------------------ what steps are given


async def test_plain_functions_run_in_a_thread_and_do_not_hold_up_the_loop(store: MongoStore) -> None:
    in_thread, go_on = threading.Event(), threading.Event()
    names: list[str] = []
    blocking, quick = Saga("blocking", Order), Saga("quick", Order)

    @blocking.step(no_compensation=True)
    def block(order: Order, step: Step[None]) -> Order:
        names.append(threading.current_thread().name)
        in_thread.set()
        assert go_on.wait(20)
        return Order(trail=("blocked",))

    @quick.step(no_compensation=True)
    async def do(order: Order, step: Step[None]) -> Order:
        return order

    async with Client(store) as client, working(store, blocking, quick):
        slow = await client.start(blocking, Order())
        await asyncio.to_thread(in_thread.wait, 20)
        await (await client.start(quick, Order())).result(20)
        go_on.set()
        assert (await slow.result(20)).trail == ("blocked",)
    assert names[0].startswith("sagas-step")


async def test_waiting_for_a_thread_is_not_part_of_a_steps_time(store: MongoStore) -> None:
    blocking = Saga("blocking", Order)
    gates = [threading.Event() for _ in range(4)]
    entered: list[threading.Event] = []

    @blocking.step(no_compensation=True, timeout=0.5, retry=RetryPolicy(max_attempts=1))
    def block(order: Order, step: Step[None]) -> Order:
        gate = gates[len(entered)]
        entered.append(gate)
        assert gate.wait(20)
        return order

    async with Client(store) as client, working(store, blocking, threads=1):
        runs = [await client.start(blocking, Order()) for _ in gates]
        for number, gate in enumerate(gates):

            async def inside(number: int = number) -> bool:
                return len(entered) > number

            await eventually(inside, what=f"step {number} has the thread")
            await asyncio.sleep(0.3)  # what it works; the last one has waited for longer than its timeout by now
            gate.set()
        await asyncio.gather(*(run.result(20) for run in runs))


async def test_a_step_is_told_its_run_try_attempt_and_key(store: MongoStore, database: Any) -> None:
    told: list[tuple[str, int, int, str, Fate, object]] = []
    resources = object()
    gate = Gate()
    saga = Saga("told", Order)

    def tell(step: Step[Any]) -> None:
        assert (step.saga, step.run_id) == ("told", run.run_id)
        told.append((step.name, step.attempt, step.try_number, step.idempotency_key, step.fate, step.resources))

    @saga.step(retry=RetryPolicy(initial_wait=timedelta(0)))
    async def reserve(order: Order, step: Step[Any]) -> Order:
        tell(step)
        if step.try_number == 1:
            raise Retryable("later")
        return order

    @reserve.compensation
    async def release(order: Order, step: Step[Any]) -> None:
        tell(step)

    @saga.step
    async def pack(order: Order, step: Step[Any]) -> Order:
        tell(step)
        if step.attempt == 1:
            await gate.wait()
        raise NonRetryable("no")

    @pack.compensation
    async def unpack(order: Order, step: Step[Any]) -> None:
        tell(step)

    async with Client(store) as client:
        run = await client.start(saga, Order())
        async with working(store, saga, resources=resources) as (worker, task):
            await gate.entered.wait()
            worker.stop()
            worker.stop()
            await task
        async with working(store, saga, resources=resources):
            await until_state(store, run.run_id, State.COMPENSATED)
    reserve_key, pack_key = step_key(run.run_id, "reserve"), step_key(run.run_id, "pack")
    assert told == [
        ("reserve", 1, 1, reserve_key, Fate.KNOWN, resources),
        ("reserve", 1, 2, reserve_key, Fate.KNOWN, resources),
        ("pack", 1, 1, pack_key, Fate.KNOWN, resources),
        ("pack", 2, 2, pack_key, Fate.KNOWN, resources),
        ("pack", 2, 1, compensation_key(run.run_id, "pack"), Fate.IN_DOUBT, resources),
        ("reserve", 2, 1, compensation_key(run.run_id, "reserve"), Fate.KNOWN, resources),
    ]
    assert reserve_key != compensation_key(run.run_id, "reserve")


async def test_a_steps_log_lines_name_the_run_the_step_and_the_try(store: MongoStore) -> None:
    saga = Saga("logs", Order)

    @saga.step(no_compensation=True)
    async def speak(order: Order, step: Step[None]) -> Order:
        with structlog.testing.capture_logs() as lines:
            step.log.info("hello")
        said.extend(lines)
        return order

    said: list[Any] = []
    async with Client(store) as client, working(store, saga):
        run = await client.start(saga, Order())
        await run.result(20)
    (line,) = said
    assert line["event"] == "hello"
    assert (line["run"], line["saga"], line["step"]) == (run.run_id, "logs", "speak")
    assert (line["attempt"], line["try_"]) == (1, 1)


async def test_each_failed_try_is_logged_and_never_with_what_its_exception_says(store: MongoStore) -> None:
    saga = Saga("declines", Order)
    once_more = RetryPolicy(max_attempts=2, initial_wait=timedelta(0), jitter=False)

    @saga.pivot(retry=once_more)
    async def charge(order: Order, step: Step[None]) -> Order:
        if step.try_number == 1:
            raise Retryable("4111-1111", in_doubt=True)
        return order

    @saga.step(retry=once_more)
    async def ship(order: Order, step: Step[None]) -> Order:
        if step.try_number == 1:
            raise TimeoutError("4111-1111")
        return None  # type: ignore[return-value]

    with structlog.testing.capture_logs() as lines:
        async with Client(store) as client, working(store, saga):
            run = await client.start(saga, Order())
            with pytest.raises(RunHeld):
                await run.result(20)
    said = [line for line in lines if line.get("run") == run.run_id]
    tried = [line for line in said if line["event"] == "try failed"]
    assert [(one["step"], one["kind"], one["try_"], one["error"], one["in_doubt"]) for one in tried] == [
        ("charge", "step_retry_scheduled", 1, "sagas.errors.Retryable", True),
        ("ship", "step_retry_scheduled", 1, "TimeoutError", True),
        ("ship", "step_failed", 2, "sagas.payload.NotJournalable", True),
    ]
    assert [one["next_try_at"] is not None for one in tried] == [True, True, False]
    assert {(one["saga"], one["log_level"]) for one in tried} == {("declines", "info")}
    (held,) = [line for line in said if line["log_level"] == "warning"]
    assert held["event"] == "run held, an operator must act"
    assert (held["state"], held["reason"]) == (
        "forward_incomplete", "ship failed for good after the pivot (2 tries)",
    )  # fmt: skip
    assert "4111-1111" not in repr(lines)


async def test_a_run_that_is_broken_is_a_warning_in_the_log(store: MongoStore) -> None:
    before, after = Saga("grows", Order), Saga("grows", Order)

    async def same(order: Order, step: Step[None]) -> Order:
        return order

    before.step(name="one", no_compensation=True)(same)
    after.step(name="another", no_compensation=True)(same)
    with structlog.testing.capture_logs() as lines:
        async with Client(store) as client, working(store, after):
            with pytest.raises(RunHeld):
                await (await client.start(before, Order())).result(20)
    (held,) = [line for line in lines if line["event"] == "run held, an operator must act"]
    assert (held["log_level"], held["state"]) == ("warning", "broken")
    assert "a changed saga needs a new version" in held["reason"]


async def test_what_a_failing_step_did_to_its_context_is_not_seen_by_the_next_try(store: MongoStore) -> None:
    saga = Saga("mutates", Order)
    seen: list[tuple[str, ...]] = []

    @saga.step(retry=RetryPolicy(initial_wait=timedelta(0)))
    async def reserve(order: Order, step: Step[None]) -> Order:
        seen.append(order.trail)
        order.trail = ("spoilt",)
        if step.try_number < 3:
            raise Retryable("later")
        order.trail = ("reserved",)
        return order

    @reserve.compensation
    async def release(order: Order, step: Step[None]) -> None:
        seen.append(order.trail)
        order.trail = ("spoilt",)

    @saga.step(no_compensation=True)
    async def refuse(order: Order, step: Step[None]) -> Order:
        seen.append(order.trail)
        order.trail = ("spoilt",)
        raise NonRetryable("no")

    async with Client(store) as client, working(store, saga):
        run = await client.start(saga, Order())
        await until_state(store, run.run_id, State.COMPENSATED)
    assert seen == [(), (), (), ("reserved",), ("reserved",)]


# ------------------------------------------------------------------------------------ transactional steps


@pytest.mark.parametrize("after", [False, True], ids=["before the commit", "after the commit"])
async def test_a_transactional_steps_write_and_its_entry_stand_or_fall_together(
    database: Any, store: MongoStore, after: bool
) -> None:
    server = Server(database, store)
    await server.ready()
    shape = Shape("transactional", (Part(name="reserve", transactional=True),), State.COMPLETED)
    probe = World(server, shape)
    await probe.start()
    undisturbed = probe.process()
    await undisturbed.work()
    world = World(server, shape)
    await world.start()
    dying = world.process(Plan(undisturbed.trail.index("commit") + 1, after))
    await dying.work()
    assert dying.dead
    stands = 1 if after else 0
    assert await database[EFFECTS].count_documents({"run": world.name}) == stands
    entries: list[Entry] = await world.journal()
    assert [entry.kind for entry in entries] == [Kind.STEP_SUCCEEDED] * stands
    await world.finish()
    await world.check()
    assert await database[EFFECTS].count_documents({"run": world.name}) == 1
    assert len(world.ledger) == 2 - stands
    server.close()
