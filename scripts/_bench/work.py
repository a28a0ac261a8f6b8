"""What a child process does: `python -m scripts._bench.work WORK URI DATABASE OPTIONS`.

It says `ready`, begins at a line on its standard input, ends when that is closed, and then prints what it has counted.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from bson import ObjectId
from pymongo import AsyncMongoClient

from sagas import Keyring, Limits, LocalKeyWrapper, MongoStore, Worker, WorkerOptions
from sagas.cli.working import spare_collector
from sagas.clock import new_token
from sagas_store.commit import ONE_BY_ONE
from sagas_store.drivers import Driver
from sagas_store.entries import Entry
from scripts._bench.sagas import CONTEXT_BYTES, fulfil, wait
from scripts._bench.timing import percentile

STORES: dict[str, Callable[[Any], MongoStore]] = {
    "plain": MongoStore,
    "one by one": lambda database: MongoStore(database, batching=ONE_BY_ONE),
    # Nobody's secret: what is measured is sealing, not keeping.
    "sealed": lambda database: MongoStore(database, keyring=Keyring(LocalKeyWrapper({"bench": bytes(32)}))),
}
"""What `store` among the options may say: how the store is made that a worker works on."""


class Work:
    """Told when to begin and when to end."""

    async def begin(self) -> None:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

    async def until_end(self) -> None:
        await asyncio.to_thread(sys.stdin.read)


async def work(told: Work, database: Any, options: dict[str, Any]) -> dict[str, Any]:
    """A worker; with `time_commits`, says how long a step's entry took to be durable."""
    store = STORES[options.get("store", "plain")](database)
    await store.ready()
    commits: list[float] = []
    if options.get("time_commits"):
        append = store.journal.append

        async def timed(entry: Entry) -> None:
            begun = time.perf_counter()
            await append(entry)
            commits.append(time.perf_counter() - begun)

        store.journal.append = timed  # type: ignore[method-assign]
    worker = Worker(
        store,
        [fulfil, wait],
        options=WorkerOptions(
            concurrency=options["in_flight"],
            lease=timedelta(seconds=options.get("lease_s", 300)),
            limits=Limits(context_bytes_max=8 * 2**20),
            drain_grace=timedelta(0),
            handle_signals=False,
        ),
    )
    spare_collector()  # as `sagas worker` does
    await told.begin()
    working = asyncio.create_task(worker.run())
    await told.until_end()
    worker.stop()
    await working
    if not commits:
        return {}
    return {
        "p50_ms": percentile(commits, 0.5) * 1e3,
        "p99_ms": percentile(commits, 0.99) * 1e3,
    }


async def claim(told: Work, database: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Claims until nothing is due, and drives nothing."""
    store = MongoStore(database)
    await store.ready()
    await told.begin()
    claimed = claims = 0
    while runs := await store.claims.take(
        [(fulfil.name, 1)], token=new_token(), worker="bench", lease=timedelta(hours=1), limit=options["batch"]
    ):
        claimed += len(runs)
        claims += 1
    print("done", flush=True)
    await told.until_end()
    return {"claimed": claimed, "claims": claims}


# -------------------------------------------------------------------------------------------------------- the floor


async def floor(told: Work, database: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The bare writes that a run needs, by loops that do nothing else; the runs are there already.

    `waves` loops, each with `batch` runs at a time, all in the same step, so that every write is of a whole batch: find
    due ones and stamp them, five unordered inserts of entries, the gate, the settling.
    """
    driver = Driver(database)
    runs, journal = driver.collection("sagas.runs"), driver.collection("sagas.journal")
    payload = b"x" * CONTEXT_BYTES
    waves, batch = options["waves"], options["batch"]
    await told.begin()

    one_claims = asyncio.Lock()  # as one worker does: nobody collides
    due = {"saga": fulfil.name, "version": 1, "due_at": {"$exists": True, "$lt": datetime.now(UTC)}}

    async def wave() -> None:
        while True:
            token = new_token()
            async with one_claims:
                found = await runs.find(due, {"_id": 1}, sort=[("due_at", 1)], limit=batch).to_list(None)
                if not found:
                    return
                ids = [one["_id"] for one in found]
                await _stamp(runs, ids, token)
            await _drive(runs, journal, ids, token, payload)

    await asyncio.gather(*(wave() for _ in range(waves)))
    print("done", flush=True)
    await told.until_end()
    return {}


async def _stamp(runs: Any, ids: list[str], token: str) -> None:
    claim = {"token": token, "worker": "floor", "taken_from": "pending", "at": datetime.now(UTC)}
    lease_end = datetime.now(UTC) + timedelta(minutes=5)
    changes = {"state": "running", "attempts": 1, "claim": claim, "due_at": lease_end}
    await runs.update_many({"_id": {"$in": ids}, "state": "pending"}, {"$set": changes})


async def _drive(runs: Any, journal: Any, ids: list[str], token: str, payload: bytes) -> None:
    held = {"_id": {"$in": ids}, "claim.token": token}
    for seq in range(1, 6):
        entry = {"kind": "step_succeeded", "at": datetime.now(UTC), "attempt": 1, "worker": "floor", "token": token}
        entry |= {"step": "reserve", "try": 1, "next": "step:authorise", "payload": payload}
        entries = [{"_id": {"run": one, "seq": seq}, **entry} for one in ids]
        await (journal.insert_many(entries, ordered=False) if len(entries) > 1 else journal.insert_one(entries[0]))
        if seq == 2:
            await runs.update_many(held, {"$set": {"gate_passed_at": datetime.now(UTC), "phase": "past_gate"}})
    settled = {"state": "completed", "settled_at": datetime.now(UTC)}
    await runs.update_many(held, {"$set": settled, "$unset": {"due_at": 1}})


async def bare(told: Work, database: Any, options: dict[str, Any]) -> dict[str, Any]:
    """One run's writes one after another, each awaited: what a single run on an idle server cannot go below."""
    driver = Driver(database)
    runs, journal = driver.collection("sagas.runs"), driver.collection("sagas.journal")
    payload = b"x" * CONTEXT_BYTES
    await told.begin()
    taken = []
    while await asyncio.to_thread(sys.stdin.readline):
        begun = time.perf_counter()
        run_id = str(ObjectId())
        now = datetime.now(UTC)
        named = {"saga": "bench-bare", "version": 1, "fingerprint": "-", "phase": "forward", "attempts": 0}
        times = {"created_at": now, "due_at": now}
        await runs.insert_one({"_id": run_id, **named, **times, "state": "pending", "input": payload})
        await _stamp(runs, [run_id], run_id)
        await _drive(runs, journal, [run_id], run_id, payload)
        taken.append(time.perf_counter() - begun)
        print(taken[-1], flush=True)
    return {}


WORKS: dict[str, Callable[[Work, Any, dict[str, Any]], Awaitable[dict[str, Any]]]] = {
    "work": work,
    "claim": claim,
    "floor": floor,
    "bare": bare,
}


async def main(kind: str, uri: str, name: str, options: dict[str, Any]) -> None:
    async with AsyncMongoClient[Any](uri) as client:
        counted = await WORKS[kind](Work(), client[name], options)
    print(json.dumps(counted), flush=True)


if __name__ == "__main__":
    _, kind, uri, name, options = sys.argv
    asyncio.run(main(kind, uri, name, json.loads(options)))
