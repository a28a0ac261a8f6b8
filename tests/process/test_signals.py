"""Worker processes that are told to go with SIGTERM, and one that is stopped with SIGSTOP and goes on later."""

from __future__ import annotations

import signal
from datetime import datetime, timedelta
from typing import Any

import pytest

from sagas import Client, Run
from sagas_store import MongoStore
from sagas_store.entries import Kind
from sagas_store.records import RunRecord
from sagas_store.states import State
from tests.process.app import Job, deaf, fulfil
from tests.process.fleet import Workers, check_all, inside, open_gate, until_at_rest
from tests.support.waiting import eventually

pytestmark = pytest.mark.process


async def handed_back(store: MongoStore, run_id: str) -> RunRecord:
    """The run, which must be due for anybody at once."""
    run = await store.runs.get(run_id)
    assert run is not None
    assert run.state is State.PENDING
    assert run.due_at is not None
    assert run.due_at <= store.clock.now() + timedelta(milliseconds=5)
    return run


async def kinds(store: MongoStore, run_id: str) -> list[Kind]:
    return [entry.kind for entry in await store.journal.load(run_id)]


async def test_sigterm_finishes_what_is_in_hand_breaks_off_what_outlasts_the_grace_and_tears_no_compensation(
    client: Client, store: MongoStore, database: Any, workers: Workers
) -> None:
    worker = await workers.start_and_wait(lease_s=300, grace_s=2)
    finishes = await client.start(fulfil(), Job(plan="wait"))
    outlasts = await client.start(fulfil(), Job(plan="wait"))
    undoes = await client.start(fulfil(), Job(plan="wait-undo"))
    for run in (finishes, outlasts, undoes):
        await inside(database, run.run_id)
    worker.send(signal.SIGTERM)
    await worker.until_logged("worker draining")
    await open_gate(database, finishes.run_id)

    async def broken_off() -> bool:
        return Kind.INTERRUPTED in await kinds(store, outlasts.run_id)

    await eventually(broken_off, what="the grace is over")
    assert worker.process.poll() is None, "it waits for the compensation"
    await open_gate(database, undoes.run_id)
    assert await worker.until_ended() == 0, worker.log()

    for run in (finishes, outlasts, undoes):
        await handed_back(store, run.run_id)
    assert await kinds(store, finishes.run_id) == [Kind.STEP_SUCCEEDED]
    assert await kinds(store, outlasts.run_id) == [Kind.INTERRUPTED]
    assert (await kinds(store, undoes.run_id))[-2:] == [Kind.ROLLBACK_BEGUN, Kind.COMPENSATION_SUCCEEDED]
    assert await database["sagas.runs"].count_documents({"state": State.RUNNING}) == 0

    await open_gate(database, outlasts.run_id)
    workers.start()
    expected = {
        finishes.run_id: State.COMPLETED,
        outlasts.run_id: State.COMPLETED,
        undoes.run_id: State.COMPENSATED,
    }
    await until_at_rest(store, expected)
    await check_all(store, database, expected, suspended=False)


async def test_a_second_sigterm_cuts_the_grace(
    client: Client, store: MongoStore, database: Any, workers: Workers
) -> None:
    worker = await workers.start_and_wait(lease_s=300, grace_s=3600)
    run = await client.start(fulfil(), Job(plan="wait"))
    await inside(database, run.run_id)
    worker.send(signal.SIGTERM)
    await worker.until_logged("worker draining")
    assert await kinds(store, run.run_id) == []
    worker.send(signal.SIGTERM)
    assert await worker.until_ended() == 0, worker.log()
    await handed_back(store, run.run_id)
    assert await kinds(store, run.run_id) == [Kind.INTERRUPTED]


async def test_an_idle_worker_ends_at_once_on_sigterm(workers: Workers) -> None:
    worker = await workers.start_and_wait(poll_s=600)
    worker.send(signal.SIGTERM)
    assert await worker.until_ended(5) == 0, worker.log()


async def test_a_thread_that_never_ends_does_not_keep_a_drained_worker_from_ending(
    client: Client, store: MongoStore, database: Any, workers: Workers
) -> None:
    worker = await workers.start_and_wait()
    run = await client.start(deaf(), Job())
    await until_at_rest(store, [run.run_id])
    worker.send(signal.SIGTERM)
    await worker.until_logged("worker drained")
    assert await worker.until_ended(5) == 0, worker.log()


async def test_a_worker_stopped_for_longer_than_its_lease_writes_nothing_more_to_that_run(
    client: Client, store: MongoStore, database: Any, workers: Workers
) -> None:
    stopped = await workers.start_and_wait(lease_s=1.5)
    run = await client.start(fulfil(), Job(plan="wait"))
    await inside(database, run.run_id)
    stopped.send(signal.SIGSTOP)
    other = workers.start(lease_s=1.5)
    await inside(database, run.run_id, attempt=2)
    await open_gate(database, run.run_id)
    await until_at_rest(store, [run.run_id])
    before = await store.runs.get(run.run_id), await store.journal.load(run.run_id)
    stopped.send(signal.SIGCONT)
    await stopped.until_logged("the lease is lost")
    assert (await store.runs.get(run.run_id), await store.journal.load(run.run_id)) == before
    await check_all(store, database, {run.run_id: State.COMPLETED}, suspended=True)

    # It is as good as ever: alone, it takes the next run.
    await other.kill()
    next_run = await client.start(fulfil(), Job())
    await until_at_rest(store, [next_run.run_id])
    claim = (await store.runs.get(next_run.run_id)).claim  # type: ignore[union-attr]
    assert claim is not None
    assert f":{stopped.pid}:" in claim.worker


async def test_a_worker_stopped_for_longer_than_its_lease_goes_on_with_its_own_run_when_nobody_else_took_it(
    client: Client, store: MongoStore, database: Any, workers: Workers
) -> None:
    """Its heartbeat renews the lapsed lease, or it claims the run anew: which comes first is open, either is kept."""
    worker = await workers.start_and_wait(lease_s=1.5)
    run = await client.start(fulfil(), Job(plan="wait"))
    await inside(database, run.run_id)
    worker.send(signal.SIGSTOP)

    async def lease_left() -> timedelta:
        record = await store.runs.get(run.run_id)
        assert record is not None
        assert record.due_at is not None
        return record.due_at - store.clock.now()

    async def lapsed() -> bool:
        return await lease_left() < timedelta(milliseconds=-50)

    await eventually(lapsed, what="the lease lapses")
    resumed_at = store.clock.now()
    worker.send(signal.SIGCONT)

    ends: dict[int, list[datetime]] = {}

    async def kept() -> bool:
        info = await client.get(run.run_id)
        assert info.due_at is not None
        # Giving the old lease up and renewing it may cross; then there is one more attempt, and no more than that.
        assert info.attempts <= 3, "it lets go of every lease again"
        ends.setdefault(info.attempts, []).append(info.due_at)
        return info.due_at > max(ends[info.attempts][0], resumed_at) + timedelta(seconds=2.5)

    await eventually(kept, what="a lease is kept")
    await open_gate(database, run.run_id)
    await until_at_rest(store, [run.run_id], within_s=20)
    await check_all(store, database, {run.run_id: State.COMPLETED}, suspended=True)
    worker.send(signal.SIGTERM)
    assert await worker.until_ended(10) == 0, worker.log()
    assert "KeyError" not in worker.log()


async def test_a_run_starts_at_once_on_an_idle_worker_process_that_polls_every_half_minute(
    client: Client, store: MongoStore, database: Any, workers: Workers
) -> None:
    await workers.start_and_wait(poll_s=30)
    started: list[Run[Job]] = []

    async def first_call() -> bool:
        # The worker opens its change stream beside its first look; which of a few starts it hears of first is open.
        if await database.calls.find_one({}) is not None:
            return True
        if len(started) < 20:
            started.append(await client.start(fulfil(), Job()))
        return False

    await eventually(first_call, what="a step runs", within_s=5)
    await until_at_rest(store, [run.run_id for run in started], within_s=10)


async def test_two_versions_of_a_saga_are_served_side_by_side_by_their_own_workers(
    client: Client, store: MongoStore, database: Any, workers: Workers
) -> None:
    old, new = await workers.start_and_wait(version=1), await workers.start_and_wait(version=2)
    runs: dict[int, list[str]] = {1: [], 2: []}
    for version in (1, 2, 1, 2):
        runs[version].append((await client.start(fulfil(version), Job())).run_id)
    await until_at_rest(store, [*runs[1], *runs[2]], within_s=20)
    for version, worker in ((1, old), (2, new)):
        for run in (await store.runs.get_many(runs[version])).values():
            assert run.state is State.COMPLETED
            assert run.claim is not None
            assert f":{worker.pid}:" in run.claim.worker
