"""Worker processes killed with SIGKILL, the database killed under them, and a run that kills whoever touches it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.errors import PyMongoError

from sagas import Client, Start, StoreUnavailable
from sagas_store import MongoStore
from sagas_store.embedded import EmbeddedMongo
from sagas_store.states import State
from tests.process.app import Job, fulfil, transact
from tests.process.fleet import (
    Workers,
    calls_made,
    check_all,
    lapse,
    until_at_rest,
    were_late,
)
from tests.support.waiting import eventually

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def mongo_uri() -> Iterator[str]:
    """A server of its own: a killed worker leaves its transaction open, and the server keeps it for a minute."""
    with EmbeddedMongo.start(parameters={"transactionLifetimeLimitSeconds": "3"}) as mongo:
        yield mongo.uri


PLANS = {
    "ok": State.COMPLETED,
    "again-pack": State.COMPLETED,
    "lost-charge": State.COMPLETED,
    "refuse-pack": State.COMPENSATED,
    "refuse-charge": State.COMPENSATED,
    "fail-undo": State.COMPENSATION_FAILED,
    "silent-charge": State.IN_DOUBT,
    "refuse-ship": State.FORWARD_INCOMPLETE,
}
TRANSACTIONS = {"ok": State.COMPLETED, "refuse-confirm": State.COMPENSATED}


async def test_500_sagas_come_to_their_right_end_while_workers_are_killed_at_random(
    client: Client, store: MongoStore, database: Any, workers: Workers, rng: random.Random
) -> None:
    fleet = [workers.start() for _ in range(3)]
    plans = rng.choices(list(PLANS), weights=[6, 2, 2, 2, 2, 1, 1, 1], k=420)
    started = await client.start_many(fulfil(), [Start(Job(plan=plan), key=str(n)) for n, plan in enumerate(plans)])
    booked = rng.choices(list(TRANSACTIONS), weights=[3, 1], k=80)
    started += await client.start_many(transact(), [Start(Job(plan=plan), key=str(n)) for n, plan in enumerate(booked)])
    expected = dict(
        zip([run.run_id for run in started], [PLANS[p] for p in plans] + [TRANSACTIONS[p] for p in booked], strict=True)
    )
    rested = asyncio.create_task(until_at_rest(store, expected, within_s=150))
    kills = 0
    while not rested.done():
        # Chance is in the work done, not in the time passed: a slow machine is killed as often as a quick one.
        goal = await calls_made(database) + rng.randint(60, 240)

        async def worked(goal: int = goal) -> bool:
            return rested.done() or await calls_made(database) >= goal

        await eventually(worked, what=f"{goal} calls are made", within_s=150)
        if not rested.done():
            victim = rng.randrange(len(fleet))
            await fleet[victim].kill()
            fleet[victim] = workers.start()
            kills += 1
    await rested
    print(kills, "workers killed")
    assert kills >= 5
    await check_all(store, database, expected, suspended=were_late(workers))


async def test_nothing_acknowledged_is_lost_when_the_database_is_killed_under_load(
    tmp_path: Path, rng: random.Random
) -> None:
    with EmbeddedMongo.start(folder=tmp_path / "database") as mongo:
        connection: AsyncMongoClient[Any] = AsyncMongoClient(mongo.uri, tz_aware=True, serverSelectionTimeoutMS=2_000)
        async with connection:
            database = connection["killed"]
            store = MongoStore(database)
            await store.schema.apply()
            workers = Workers(mongo.uri, "killed", tmp_path)
            try:
                for _ in range(2):
                    workers.start()
                acknowledged: dict[str, State] = {}
                done = asyncio.Event()

                starting = asyncio.create_task(start_until(done, database, store, acknowledged, rng))
                for _ in range(3):
                    goal = await calls_made(database) + rng.randint(80, 200)

                    async def worked(goal: int = goal) -> bool:
                        assert not starting.done(), starting.exception()
                        return await calls_made(database) >= goal

                    await eventually(worked, what=f"{goal} calls are made", within_s=60)
                    await asyncio.to_thread(mongo.nodes[0].kill)
                    await asyncio.to_thread(mongo.nodes[0].restart)
                    await asyncio.to_thread(mongo.wait_for_primary)
                done.set()
                await starting
                print(len(acknowledged), "runs acknowledged")
                await until_at_rest(store, acknowledged, within_s=90)
                assert await database["sagas.runs"].count_documents({}) == len(acknowledged)
                await check_all(store, database, acknowledged, suspended=were_late(workers))
            finally:
                workers.end()


async def start_until(
    done: asyncio.Event, database: Any, store: MongoStore, acknowledged: dict[str, State], rng: random.Random
) -> None:
    """Start runs, some ahead of the workers; what was not acknowledged is started again with the same key."""
    async with Client(store) as client:
        while not done.is_set():
            plan = rng.choice(list(PLANS))
            key = str(len(acknowledged))
            while True:
                try:
                    run = await client.start(fulfil(), Job(plan=plan), key=key)
                    break
                except StoreUnavailable:
                    continue  # its patience waits, this does not
            acknowledged[run.run_id] = PLANS[plan]

            async def room() -> bool:
                try:
                    open_ones = await database["sagas.runs"].count_documents({"due_at": {"$exists": True}})
                except PyMongoError:
                    return False
                return done.is_set() or open_ones < 60

            await eventually(room, what="the workers keep up", within_s=60)


async def test_a_run_that_kills_its_worker_every_time_is_held_and_loses_nothing_of_its_neighbours(
    client: Client, store: MongoStore, database: Any, workers: Workers
) -> None:
    killer = await client.start(fulfil(), Job(plan="exit"), key="killer")
    others = await client.start_many(fulfil(), [Start(Job(plan="slow"), key=str(n)) for n in range(5)])
    deaths = 0
    while (await killer.info()).state is not State.BROKEN:
        worker = workers.start(lease_s=300)

        async def ended(worker: Any = worker) -> bool:
            return worker.process.poll() is not None or (await killer.info()).state is State.BROKEN

        await eventually(ended, what="the worker dies of it, or it is held")
        if worker.process.poll() is not None:
            assert worker.process.returncode == 9, worker.log()
            deaths += 1
        await lapse(database)
        assert deaths <= 12, "it kills for ever"
    assert deaths == 10
    info = await killer.info()
    assert info.held_reason is not None
    assert "10 attempts in a row" in info.held_reason
    await lapse(database)
    workers.start()
    await until_at_rest(store, [run.run_id for run in others], within_s=30)
    # Whoever had the bad luck to be claimed with it every time may be held with it. Held is not lost: a person looks at
    # them, resumes them, and they go on; none is undone or doubled.
    states = {run.run_id: (await run.info()).state for run in others}
    assert set(states.values()) <= {State.COMPLETED, State.BROKEN}
    expected = states | {killer.run_id: State.BROKEN}
    await check_all(store, database, expected, suspended=were_late(workers))


async def test_a_worker_killed_between_writing_its_entry_and_committing_it_leaves_a_run_that_another_finishes(
    client: Client, store: MongoStore, database: Any, workers: Workers
) -> None:
    """Its transaction stays open on the server, with the very entry that the next worker has to write."""
    run = await client.start(transact(), Job(plan="exit-at-commit"))
    first = workers.start(lease_s=1.5)
    assert await first.until_ended() == 9
    workers.start(lease_s=1.5)
    await until_at_rest(store, [run.run_id], within_s=60)
    await check_all(store, database, {run.run_id: State.COMPLETED}, suspended=were_late(workers))
