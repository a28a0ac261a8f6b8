"""Every answer survives: Stop is pressed on many runs at once, and among the answers everything dies.

At the very moment at which an answer arrives, every worker process and the primary of a replica set of three get
SIGKILL. What had been answered until then stands on both survivors, to the letter; what was asked and not answered yet
is answered after the election; and new workers bring every run to the end that its answer named.

On one machine the other two nodes have every write within a millisecond, so that an answer given too early would
survive as well. Hence the second test: they stop replicating, the primary alone records further stops, and when it is
dead they go on with what they have. It has taken these to its grave, and nobody may have been told of them. Some of
these stops are of runs that are not due yet: no worker can have ended them first, however fast it is.

`SAGAS_SEED` replays the choice of runs, of their order and of the moment; it is printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from pymongo import AsyncMongoClient, ReadPreference, WriteConcern
from pymongo.read_concern import ReadConcern

from sagas import Client, Run, Start, State, StopAnswer, StopOutcome, StoreUnavailable
from sagas_store import MongoStore
from sagas_store.embedded import EmbeddedMongo, Node
from tests.process.app import Job, fulfil
from tests.process.fleet import WorkerProcess, Workers, calls_made, check_all, until_at_rest, were_late
from tests.support.waiting import eventually

pytestmark = [pytest.mark.failover, pytest.mark.process, pytest.mark.slow]

RUNS: Final = 240
STOPPED: Final = 200
WORKERS: Final = 3
LATER: Final = 8
"""How many runs are not due within the test: the primary alone records at least their stops."""
AT_ONCE: Final = 48
"""How many press Stop at the same time."""
FORWARD: Final = {
    "ok": State.COMPLETED,
    "slow": State.COMPLETED,
    "slow-charge": State.COMPLETED,
    "lost-charge": State.COMPLETED,
    "refuse-charge": State.COMPENSATED,
    "refuse-ship": State.FORWARD_INCOMPLETE,
}
"""How a run ends whom no stop turns back, by its plan."""


@pytest.fixture
def three_nodes() -> Iterator[EmbeddedMongo]:
    with EmbeddedMongo.start(nodes=3, parameters={"enableTestCommands": "1"}) as mongo:
        yield mongo


@pytest.fixture
def rng() -> random.Random:
    seed = int(os.environ.get("SAGAS_SEED") or secrets.randbelow(2**32))
    print(f"SAGAS_SEED={seed}")
    return random.Random(seed)


class Catastrophe:
    """Presses Stop, and in the midst of it kills every worker and the primary."""

    def __init__(self, fleet: list[WorkerProcess], primary: Node, *, at_answer: int) -> None:
        self.answers: dict[str, StopAnswer] = {}
        self.before: dict[str, StopAnswer] = {}
        """The answers that had been given when everything died."""
        self.midst = asyncio.Event()
        """So many answers are given."""
        self.at_that_moment: Callable[[], None] = self.strike
        """What happens then. The loop does nothing else between the answer and it."""
        self.pressing: list[asyncio.Task[None]] = []
        self._fleet = fleet
        self._primary = primary
        self._at_answer = at_answer

    def press(self, runs: Iterable[Run[Job]]) -> None:
        """Press Stop on each of them, on so many at the same time."""
        room = asyncio.Semaphore(AT_ONCE)
        self.pressing += [asyncio.create_task(self._press(run, room)) for run in runs]

    async def answered(self) -> None:
        """Return once everybody who pressed has an answer."""
        await asyncio.wait_for(asyncio.gather(*self.pressing), 120)

    async def leave(self) -> None:
        """Nobody presses any longer, whether answered or not: the client is about to be closed."""
        for press in self.pressing:
            press.cancel()
        await asyncio.gather(*self.pressing, return_exceptions=True)

    async def _press(self, run: Run[Job], room: asyncio.Semaphore) -> None:
        """Press Stop until there is an answer: the database may be away for longer than a client's patience."""
        async with room:
            while run.run_id not in self.answers:
                try:
                    answer = await run.stop(by=f"customer of {run.run_id}", reason=_reason(run.run_id))
                except StoreUnavailable:
                    continue
                self.answers[run.run_id] = answer
                if len(self.answers) == self._at_answer:
                    self.at_that_moment()
                    self.midst.set()

    def strike(self) -> None:
        for worker in self._fleet:
            worker.send(signal.SIGKILL)
        os.kill(self._primary.pid, signal.SIGKILL)
        self.before = dict(self.answers)

    async def over(self) -> None:
        """Return once they are all known to be dead."""
        for worker in self._fleet:
            assert await worker.until_ended() == -signal.SIGKILL
        await asyncio.to_thread(self._primary.kill)


def _reason(run_id: str) -> str:
    return f"no longer needed: {run_id}"


@dataclass
class Scene:
    """240 runs of which some are being worked on, by three worker processes, on a replica set of three."""

    mongo: EmbeddedMongo
    name: str
    database: Any
    store: MongoStore
    client: Client
    workers: Workers
    plan_of: dict[str, str]
    chosen: list[Run[Job]]
    primary: Node
    catastrophe: Catastrophe

    @property
    def secondaries(self) -> list[Node]:
        return [node for node in self.mongo.nodes if node is not self.primary]

    async def ends_well(self) -> None:
        """After the strike: what was answered stands, the others are answered, and every run ends as it was said."""
        await self.catastrophe.over()
        successor = await asyncio.to_thread(self.mongo.wait_for_primary)
        given = len(self.catastrophe.before)
        print(f"{self.primary.name} died with {given} answers given, {successor.name} was elected")
        assert successor is not self.primary
        await stand(self.mongo, self.name, self.catastrophe.before)
        await self.catastrophe.answered()
        assert self.catastrophe.before.items() <= self.catastrophe.answers.items()
        await stand(self.mongo, self.name, self.catastrophe.answers)

        for _ in range(WORKERS):
            self.workers.start(concurrency=16)
        await until_at_rest(self.store, self.plan_of, within_s=120)
        await stand(self.mongo, self.name, self.catastrophe.answers)
        await asked_again(self.client, self.catastrophe.answers)
        await come_true(self.store, self.database, self.plan_of, self.catastrophe, self.workers)


@pytest.fixture
async def scene(three_nodes: EmbeddedMongo, tmp_path: Path, rng: random.Random) -> AsyncIterator[Scene]:
    name = f"answers_{secrets.token_hex(4)}"
    workers = Workers(three_nodes.uri, name, tmp_path)
    connection: AsyncMongoClient[Any] = AsyncMongoClient(three_nodes.uri, tz_aware=True)
    try:
        async with connection as mongo:
            store = MongoStore(mongo[name])
            await store.schema.apply()
            async with Client(store) as client:
                plans = rng.choices(list(FORWARD), weights=[4, 4, 4, 2, 2, 1], k=RUNS)
                runs = await client.start_many(fulfil(), [Start(Job(plan=plan)) for plan in plans])
                plan_of = dict(zip([run.run_id for run in runs], plans, strict=True))
                fleet = [workers.start(concurrency=16) for _ in range(WORKERS)]
                primary = await asyncio.to_thread(three_nodes.wait_for_primary)
                catastrophe = Catastrophe(fleet, primary, at_answer=rng.randint(40, 100))
                chosen = rng.sample(runs, STOPPED)
                await under_way(mongo[name], rng.randint(100, 250))  # and at once, before they have all ended
                try:
                    yield Scene(
                        three_nodes, name, mongo[name], store, client, workers, plan_of, chosen, primary, catastrophe
                    )
                finally:
                    await catastrophe.leave()
    finally:
        workers.end()


async def test_every_answer_survives_the_death_of_all_workers_and_of_the_primary(scene: Scene) -> None:
    scene.catastrophe.press(scene.chosen)
    await asyncio.wait_for(scene.catastrophe.midst.wait(), 60)
    await scene.ends_well()


async def test_nobody_is_told_of_a_stop_that_only_the_dying_primary_knows(scene: Scene) -> None:
    not_due = Start(Job(), delay=timedelta(hours=1))
    later = await scene.client.start_many(fulfil(), [not_due] * LATER)
    expected = {run.run_id for run in later}
    scene.plan_of.update(dict.fromkeys(expected, "ok"))
    scene.catastrophe.at_that_moment = lambda: replicate(scene.secondaries, go_on=False)
    scene.catastrophe.press(scene.chosen)
    await asyncio.wait_for(scene.catastrophe.midst.wait(), 60)
    scene.catastrophe.press(later)

    async def alone() -> dict[str, datetime] | None:
        known = await known_to(scene, scene.primary)
        for node in scene.secondaries:
            known = {run_id: known[run_id] for run_id in known.keys() - await known_to(scene, node)}
        return known if known.keys() >= expected else None

    grave = await eventually(alone, what="the primary alone knows of the stops of all that is not due")
    assert grave is not None
    scene.catastrophe.strike()
    replicate(scene.secondaries, go_on=True)
    await scene.ends_well()
    lost = {run_id for run_id, asked_at in grave.items() if scene.catastrophe.answers[run_id].asked_at != asked_at}
    print(f"{len(lost)} stops died with the primary, and were asked again")
    assert lost >= expected
    assert not lost & scene.catastrophe.before.keys()


def replicate(nodes: Iterable[Node], *, go_on: bool) -> None:
    for node in nodes:
        node.ask({"configureFailPoint": "stopReplProducer", "mode": "off" if go_on else "alwaysOn"})


async def known_to(scene: Scene, node: Node) -> dict[str, datetime]:
    """Which stops this very node has on record, and when they were asked."""
    async with AsyncMongoClient[Any](node.host, directConnection=True, tz_aware=True) as client:
        runs = client[scene.name].get_collection("sagas.runs", read_concern=ReadConcern("local"))
        stopped = await runs.find({"stop": {"$exists": True}}, {"stop.asked_at": 1}).to_list()
        return {run["_id"]: run["stop"]["asked_at"] for run in stopped}


async def under_way(database: Any, calls: int) -> None:
    async def so_many() -> bool:
        return await calls_made(database) >= calls

    await eventually(so_many, what=f"{calls} calls are made", within_s=60)


async def stand(mongo: EmbeddedMongo, name: str, answers: dict[str, StopAnswer]) -> None:
    """The record of each stop is on a majority, as it was answered: read from each survivor."""
    for preference in (ReadPreference.PRIMARY, ReadPreference.SECONDARY):
        found = await records(mongo.uri, name, answers, preference)
        wrong = []
        for run_id, answer in answers.items():
            run = found[run_id]
            stop = run.get("stop")
            if answer.outcome is StopOutcome.ALREADY_SETTLED:
                if stop is not None or run["state"] != answer.state:
                    wrong.append(f"{run_id}: answered {answer}, found {run}")
                continue
            said = (stop["decision"], stop["by"], stop["asked_at"]) if stop is not None else None
            if said != (answer.outcome, answer.by, answer.asked_at) or not _says(run, _reason(run_id)):
                wrong.append(f"{run_id}: answered {answer}, found {stop}")
            assert answer.by == f"customer of {run_id}"
            assert answer.reason == _reason(run_id)
        assert not wrong, f"{len(wrong)} of {len(answers)} answers do not stand on the {preference.name}: {wrong[:3]}"


def _says(run: dict[str, Any], reason: str) -> bool:
    stored: bytes = run["stop"]["reason"]
    return stored.endswith(json.dumps(reason).encode())


async def records(uri: str, name: str, run_ids: Iterable[str], preference: Any) -> dict[str, dict[str, Any]]:
    """A majority read that cannot be stale: in a session after a write of its own that a majority has."""
    async with AsyncMongoClient[Any](uri, tz_aware=True) as client, client.start_session() as session:
        marks = client[name].get_collection("marks", write_concern=WriteConcern("majority"))
        await marks.insert_one({}, session=session)
        runs = client[name].get_collection(
            "sagas.runs", read_concern=ReadConcern("majority"), read_preference=preference
        )
        found = runs.find({"_id": {"$in": list(run_ids)}}, {"stop": 1, "state": 1}, session=session)
        return {run["_id"]: run async for run in found}


async def asked_again(client: Client, answers: dict[str, StopAnswer]) -> None:
    """Whoever asks once more is told the same."""
    for run_id, answer in answers.items():
        again = await client.stop(run_id, by="somebody else", reason="for another reason")
        assert not again.first
        assert (again.outcome, again.by, again.reason, again.asked_at) == (
            answer.outcome, answer.by, answer.reason, answer.asked_at,
        )  # fmt: skip


async def come_true(
    store: MongoStore, database: Any, plan_of: dict[str, str], catastrophe: Catastrophe, workers: Workers
) -> None:
    """Each run ended as its answer said; and by the oracle's word its journal and its participants agree."""
    found = await store.runs.get_many(list(plan_of))
    told: Counter[str] = Counter()
    expected: dict[str, State] = {}
    for run_id, plan in plan_of.items():
        answer = catastrophe.answers.get(run_id)
        state = found[run_id].state
        match answer.outcome if answer is not None else None:
            case StopOutcome.CANCELLED:
                ends = {State.CANCELLED}
            case StopOutcome.WILL_BE_UNDONE:  # compensated where the pivot had failed before the stop
                ends = {State.CANCELLED, State.COMPENSATED} if plan == "refuse-charge" else {State.CANCELLED}
            case _:
                ends = {FORWARD[plan]}
        expected[run_id] = state if state in ends else min(ends)
        when = "before" if run_id in catastrophe.before else "after"
        told[f"{answer.outcome}, answered {when}: {state}" if answer is not None else f"not asked: {state}"] += 1
    print(*(f"{count:5}  {what}" for what, count in sorted(told.items())), sep="\n")
    await check_all(store, database, expected, suspended=were_late(workers))
    acted_on = {StopOutcome.WILL_BE_UNDONE, StopOutcome.REFUSED}
    assert {answer.outcome for answer in catastrophe.before.values()} & acted_on, "nothing was being worked on"
