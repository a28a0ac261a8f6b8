"""A real replica set of three loses its primary by SIGKILL, gets it back, and steps down twice, while 200 runs go on.

What was acknowledged stands; every run comes to the rest it would have come to anyway; nothing is done again once its
success was acknowledged; and every effect has happened once for its idempotency key.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import pytest
from pymongo import AsyncMongoClient
from pymongo.errors import PyMongoError

from sagas import Client, Start, State, Step, Worker, WorkerOptions
from sagas_store import MongoStore
from sagas_store.embedded import EmbeddedMongo, Node
from sagas_store.entries import Entry, Kind
from sagas_store.states import HELD, SETTLED
from tests.faults.shop import SAGAS, Order, Shop, by_name
from tests.support.oracle import check
from tests.support.waiting import eventually

pytestmark = [pytest.mark.failover, pytest.mark.slow]

RUNS: Final = {"forward": 130, "declined": 40, "transactional": 20, "stuck": 10}
ENDS: Final = {
    "forward": State.COMPLETED,
    "declined": State.COMPENSATED,
    "transactional": State.COMPLETED,
    "stuck": State.FORWARD_INCOMPLETE,
}
STANDING: Final = {
    "forward": ["charge", "reserve", "ship"],
    "declined": [],
    "transactional": ["reserve"],
    "stuck": ["charge", "reserve"],
}
"""The effects that the participants know in the end; that of the transaction is in the database."""
TROUBLE_S: Final = 90.0
"""The longest that anything here may take; an election takes two or three seconds."""


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[EmbeddedMongo]:
    with EmbeddedMongo.start(nodes=3) as mongo:
        yield mongo


@dataclass
class Acknowledged:
    """What the workers were told is durable."""

    entries: list[Entry] = field(default_factory=list)
    succeeded: set[str] = field(default_factory=set)
    """Idempotency keys of steps and compensations whose success was acknowledged."""
    done_again: list[str] = field(default_factory=list)

    def record(self, store: MongoStore) -> None:
        """Note every entry from the moment on at which the store says that it stands."""
        append, commit_together = store.journal.append, store.commit_together

        async def recorded_append(entry: Entry) -> None:
            await append(entry)
            self.note(entry)

        async def recorded_commit(body: Callable[[Any], Awaitable[Entry | None]]) -> Entry | None:
            if (entry := await commit_together(body)) is not None:
                self.note(entry)
            return entry

        store.journal.append = recorded_append  # type: ignore[method-assign]
        store.commit_together = recorded_commit  # type: ignore[method-assign]

    def note(self, entry: Entry) -> None:
        self.entries.append(entry)
        if entry.kind is Kind.STEP_SUCCEEDED:
            self.succeeded.add(f"{entry.run_id}/{entry.step}")
        elif entry.kind is Kind.COMPENSATION_SUCCEEDED:
            self.succeeded.add(f"{entry.run_id}/{entry.step}/compensation")

    def called(self, step: Step[Any]) -> None:
        """A step begins: its success must not have been acknowledged before."""
        if step.idempotency_key in self.succeeded:
            self.done_again.append(step.idempotency_key)


@asynccontextmanager
async def working(uri: str, name: str, shop: Shop, acknowledged: Acknowledged, number: int) -> AsyncIterator[None]:
    """A worker with a client of its own; it drains at the end."""
    async with AsyncMongoClient[Any](uri) as client:
        store = MongoStore(client[name])
        acknowledged.record(store)
        shop.effects_of_database = client[name]["effects"]
        # Few at a time, so that there is work under way whenever something happens.
        options = WorkerOptions(
            concurrency=8, lease=timedelta(seconds=10), poll=timedelta(milliseconds=200), handle_signals=False
        )
        worker = Worker(store, SAGAS, resources=shop, name=f"worker-{number}", options=options)
        running = asyncio.create_task(worker.run())
        try:
            yield
        finally:
            worker.stop()
            done, _ = await asyncio.wait([running], timeout=30)
            assert done, "a worker that is told to stop stops"
            await running


class Trouble:
    """What happens to the replica set, as the runs get on."""

    def __init__(self, mongo: EmbeddedMongo, database: Any) -> None:
        self.mongo = mongo
        self.runs = database["sagas.runs"]

    async def at_rest(self) -> int:
        try:
            return int(await self.runs.count_documents({"state": {"$in": sorted(SETTLED | HELD)}}))
        except PyMongoError:
            return -1  # nobody to ask at the moment

    async def once_at_rest(self, count: int) -> None:
        async def so_many() -> bool:
            return await self.at_rest() >= count

        await eventually(so_many, what=f"{count} runs at rest", within_s=TROUBLE_S)

    async def primary(self) -> Node:
        return await asyncio.to_thread(self.mongo.wait_for_primary)

    async def all_in_service(self) -> None:
        async def states() -> bool:
            found = Counter([await asyncio.to_thread(node.state) for node in self.mongo.nodes])
            return found == {"PRIMARY": 1, "SECONDARY": 2}

        await eventually(states, what="all three are in service", within_s=TROUBLE_S)

    async def step_down(self) -> None:
        primary = await self.primary()
        with suppress(PyMongoError):  # it may hang up while it steps down
            await asyncio.to_thread(primary.ask, {"replSetStepDown": 10, "secondaryCatchUpPeriodSecs": 5})
        successor = await self.primary()
        print(f"{primary.name} stepped down, {successor.name} was elected, {await self.at_rest()} at rest")
        assert successor is not primary

    async def brews(self) -> None:
        await self.once_at_rest(20)
        killed = await self.primary()
        killed.kill()
        successor = await self.primary()
        print(f"{killed.name} was killed, {successor.name} was elected, {await self.at_rest()} at rest")
        await self.once_at_rest(60)
        await asyncio.to_thread(killed.restart)
        await self.all_in_service()
        print(f"{killed.name} is back, {await self.at_rest()} at rest")
        await self.once_at_rest(90)
        await self.step_down()
        await self.once_at_rest(130)
        await self.step_down()


async def test_two_hundred_runs_survive_a_killed_primary_and_two_elections(three_nodes: EmbeddedMongo) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    name = f"failover_{secrets.token_hex(4)}"
    # Each worker has a shop front of its own, whose transactional steps write over that worker's client; the
    # participants behind are the same.
    acknowledged = Acknowledged()
    shops = [Shop(takes_s=lambda: rng.uniform(0, 0.2), before_each=acknowledged.called) for _ in range(2)]
    for front in shops[1:]:
        front.calls, front.effects, front.refused = shops[0].calls, shops[0].effects, shops[0].refused
    async with AsyncMongoClient[Any](three_nodes.uri) as connection:
        database = connection[name]
        store = MongoStore(database)
        await store.schema.apply()
        await database.create_collection("effects")
        async with Client(store) as client:
            runs = await started(client)
        trouble = Trouble(three_nodes, database)
        async with (
            asyncio.timeout(TROUBLE_S * 2),
            working(three_nodes.uri, name, shops[0], acknowledged, 1),
            working(three_nodes.uri, name, shops[1], acknowledged, 2),
        ):
            await trouble.brews()
            await trouble.once_at_rest(len(runs))
        await judged(store, database, runs, shops[0], acknowledged)


async def started(client: Client) -> dict[str, str]:
    """Run id -> saga. They become due in an order in which all sagas are mixed."""
    made: dict[str, str] = {}
    rounds = max(RUNS.values())
    for turn in range(rounds):
        for saga, count in RUNS.items():
            if (turn + 1) * count // rounds > turn * count // rounds:
                (run,) = await client.start_many(by_name(saga), [Start(Order(number=str(turn)))])
                made[run.run_id] = saga
    assert Counter(made.values()) == RUNS
    return made


async def judged(
    store: MongoStore, database: Any, runs: dict[str, str], shop: Shop, acknowledged: Acknowledged
) -> None:
    found = await store.runs.get_many(list(runs))
    journals = await store.journal.load_many(list(runs))
    assert {run_id: run.state for run_id, run in found.items()} == {run_id: ENDS[saga] for run_id, saga in runs.items()}
    missing = [entry for entry in acknowledged.entries if entry not in journals[entry.run_id]]
    assert not missing, "what was acknowledged stands"
    assert len(acknowledged.entries) >= 2 * len(runs)
    assert not acknowledged.done_again, "what was acknowledged is never done again"
    for run_id, saga in runs.items():
        standing = sorted(key.removeprefix(f"{run_id}/") for key in shop.effects if key.startswith(f"{run_id}/"))
        assert standing == STANDING[saga], (run_id, saga)
        if saga != "transactional":
            check(by_name(saga), found[run_id], journals[run_id], shop.calls[run_id])
    committed = Counter([effect["key"] async for effect in database["effects"].find()])
    assert committed == Counter(f"{run_id}/charge" for run_id, saga in runs.items() if saga == "transactional")
    attempts = Counter(run.attempts for run in found.values())
    print(f"attempts per run: {dict(sorted(attempts.items()))}; {len(acknowledged.entries)} entries acknowledged")
