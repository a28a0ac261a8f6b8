"""The application that the process tests run: `python -m sagas worker tests.process.app:make_worker`.

A shop whose participants live in the same database: `calls` is the ledger, a document per call; `effects` has one
document per effect, with the idempotency key as its `_id`, so that a repeated key has the effect once. A compensation
closes its step's key, so that what arrives after it has no effect. What a run does beyond the ordinary is said by the
`plan` in its context; it waits at a gate until there is a document with its run's id in `gates`.

Environment: SAGAS_MONGODB_URI, SAGAS_DATABASE, APP_OPTIONS (JSON: lease_s, grace_s, poll_s, concurrency, version,
key_age_s); with SAGAS_MASTER_KEYS what it stores is sealed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from bson import ObjectId
from pydantic import BaseModel
from pymongo import AsyncMongoClient
from pymongo.errors import DuplicateKeyError

from sagas import (
    Keyring,
    LocalKeyWrapper,
    MongoStore,
    NonRetryable,
    Retryable,
    RetryPolicy,
    Saga,
    Step,
    Worker,
    WorkerOptions,
)
from sagas.decide import Activity
from sagas.identity import step_key
from sagas_store.journal import journal_filter
from tests.support.oracle import Call
from tests.support.ticks import stretch_as_asked

__all__ = ["Job", "fulfil", "ledgers", "make_worker", "transact"]

stretch_as_asked()

RETRY = RetryPolicy(max_attempts=3, initial_wait=timedelta(milliseconds=20), jitter=False)


class Job(BaseModel):
    """What a run is about."""

    plan: str = "ok"
    trail: tuple[str, ...] = ()

    def through(self, step: str) -> Job:
        return self.model_copy(update={"trail": (*self.trail, step)})


@dataclass(frozen=True, slots=True)
class Shop:
    """The participants."""

    database: Any

    async def begin(self, step: Step[Shop], activity: Activity) -> ObjectId:
        """Write the call into the ledger, with the newest entry of the journal as it then is."""
        newest = await self.database["sagas.journal"].find_one(
            journal_filter([step.run_id]), {"_id": 1}, sort=[("_id", -1)]
        )
        call = ObjectId()
        await self.database.calls.insert_one(
            {
                "_id": call,
                "run": step.run_id,
                "activity": activity,
                "step": step.name,
                "key": step.idempotency_key,
                "attempt": step.attempt,
                "try": step.try_number,
                "seen_seq": newest["_id"]["seq"] if newest else 0,
                "at": time.monotonic_ns(),  # one machine, one clock
            }
        )
        return call

    async def act(self, step: Step[Shop], call: ObjectId) -> None:
        """The effect, once per key."""
        effect = {"_id": step.idempotency_key, "run": step.run_id, "call": call}
        if step.session is not None:
            # No key to honour: committing with the outcome is what makes it happen once.
            await self.database.effects.insert_one({**effect, "_id": call}, session=step.session)
            return
        with contextlib.suppress(DuplicateKeyError):  # a repeat, or too late
            await self.database.effects.insert_one(effect)

    async def undo(self, step: Step[Shop], call: ObjectId) -> None:
        await self.database.effects.update_one(
            {"_id": step_key(step.run_id, step.name)}, {"$set": {"closed": True, "run": step.run_id}}, upsert=True
        )
        await self.act(step, call)

    async def happened(self, step: Step[Shop]) -> bool:
        return (
            await self.database.effects.find_one({"_id": step.idempotency_key, "call": {"$exists": True}}) is not None
        )

    async def pass_gate(self, step: Step[Shop]) -> None:
        """Wait for the test: only the database is common to it and to this process, so look and look again."""
        await self.database.inside.update_one(
            {"_id": f"{step.run_id}/{step.attempt}"}, {"$set": {"step": step.name}}, upsert=True
        )
        while await self.database.gates.find_one({"_id": step.run_id}) is None:
            await asyncio.sleep(0.01)


async def ledgers(database: Any, run_ids: Sequence[str]) -> dict[str, list[Call]]:
    """What the participants saw of each run."""
    applied = {effect["call"] async for effect in database.effects.find({"call": {"$exists": True}}, {"call": 1})}
    found: dict[str, list[Call]] = {run_id: [] for run_id in run_ids}
    order = 0
    async for call in database.calls.find({"run": {"$in": list(run_ids)}}).sort("at", 1):
        order += 1
        found[call["run"]].append(
            Call(
                order=order,
                activity=Activity(call["activity"]),
                step=call["step"],
                key=call["key"],
                attempt=call["attempt"],
                try_number=call["try"],
                applied=call["_id"] in applied,
                seen_seq=call["seen_seq"],
            )
        )
    return found


async def misbehave_before(job: Job, step: Step[Shop]) -> None:
    """What the plan says of this step, before its effect."""
    match job.plan, step.name:
        case ("wait", "reserve"):
            await step.resources.pass_gate(step)
        case ("exit", "reserve"):
            os._exit(9)
        case ("stop-pack", "pack"):
            await step.stop_asked.wait()
        case ("slow", "reserve") | ("slow-charge", "charge"):
            await asyncio.sleep(0.2)
        case ("refuse-pack", "pack"):
            raise NonRetryable("no box")
        case ("again-pack", "pack") if step.try_number == 1:
            raise Retryable("no box yet")
        case ("refuse-charge" | "wait-undo" | "fail-undo", "charge"):
            raise NonRetryable("declined")
        case ("refuse-ship", "ship"):
            raise NonRetryable("no such address")


async def carry_out(job: Job, step: Step[Shop]) -> Job:
    """One forward step, as the plan says."""
    call = await step.resources.begin(step, Activity.STEP)
    await misbehave_before(job, step)
    await step.resources.act(step, call)
    if step.name == "charge" and (job.plan == "silent-charge" or (job.plan == "lost-charge" and step.try_number == 1)):
        raise TimeoutError
    return job.through(step.name)


def fulfil(version: int = 1) -> Saga[Job]:
    """Reserve, pack, charge (the pivot, with a probe), ship."""
    saga = Saga("fulfil", Job, version=version)
    reserve = saga.step(name="reserve", retry=RETRY, timeout=None)(carry_out)
    pack = saga.step(name="pack", retry=RETRY)(carry_out)
    charge = saga.pivot(name="charge", retry=RETRY)(carry_out)
    saga.step(name="ship", retry=RETRY)(carry_out)

    @reserve.compensation(retry=RETRY)
    async def release(job: Job, step: Step[Shop]) -> None:
        await step.resources.undo(step, await step.resources.begin(step, Activity.COMPENSATION))

    @pack.compensation(retry=RETRY, timeout=None)
    async def unpack(job: Job, step: Step[Shop]) -> None:
        call = await step.resources.begin(step, Activity.COMPENSATION)
        if job.plan in ("wait-undo", "stop-pack"):
            await step.resources.pass_gate(step)
        await step.resources.undo(step, call)
        if job.plan == "fail-undo":
            raise NonRetryable("the box is stuck")

    @charge.probe
    async def find_charge(job: Job, step: Step[Shop]) -> Job | None:
        await step.resources.begin(step, Activity.PROBE)
        if job.plan == "silent-charge":
            raise TimeoutError
        return job.through("charge") if await step.resources.happened(step) else None

    return saga


def transact() -> Saga[Job]:
    """Book with a session (transactional), confirm with a session (the pivot)."""
    saga = Saga("transact", Job)

    @saga.step(transactional=True, retry=RETRY)
    async def book(job: Job, step: Step[Shop]) -> Job:
        await step.resources.act(step, await step.resources.begin(step, Activity.STEP))
        if job.plan == "exit-at-commit" and step.attempt == 1:
            step.session.commit_transaction = lambda: os._exit(9)
        return job.through("book")

    @book.compensation(retry=RETRY)
    async def unbook(job: Job, step: Step[Shop]) -> None:
        await step.resources.undo(step, await step.resources.begin(step, Activity.COMPENSATION))

    @saga.pivot(transactional=True, retry=RETRY)
    async def confirm(job: Job, step: Step[Shop]) -> Job:
        await step.resources.act(step, await step.resources.begin(step, Activity.STEP))
        if job.plan == "refuse-confirm":
            raise NonRetryable("no")
        return job.through("confirm")

    return saga


def deaf() -> Saga[Job]:
    """A plain function that never returns, whatever its timeout."""
    saga = Saga("deaf", Job)

    @saga.step(no_compensation=True, timeout=0.1, retry=RetryPolicy(max_attempts=1))
    def block(job: Job, step: Step[Shop]) -> Job:
        time.sleep(3600)
        return job

    return saga


async def make_worker() -> Worker:
    """The worker, as its environment says."""
    options: Mapping[str, Any] = json.loads(os.environ.get("APP_OPTIONS", "{}"))
    client: AsyncMongoClient[Any] = AsyncMongoClient(
        os.environ["SAGAS_MONGODB_URI"], serverSelectionTimeoutMS=2_000, tz_aware=True
    )
    database = client[os.environ["SAGAS_DATABASE"]]
    keyring = None
    if "SAGAS_MASTER_KEYS" in os.environ:
        keyring = Keyring(LocalKeyWrapper.from_env(), max_age=timedelta(seconds=options["key_age_s"]))
    return Worker(
        MongoStore(database, keyring=keyring),
        [fulfil(options.get("version", 1)), transact(), deaf()],
        resources=Shop(database),
        options=WorkerOptions(
            concurrency=options.get("concurrency", 8),
            lease=timedelta(seconds=options.get("lease_s", 1.5)),
            poll=timedelta(seconds=options.get("poll_s", 0.2)),
            drain_grace=timedelta(seconds=options.get("grace_s", 20)),
        ),
    )
