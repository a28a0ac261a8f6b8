"""What docs/performance.md says a run costs is what it costs: the commands are counted at the driver."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pymongo import AsyncMongoClient

from sagas import Client, NonRetryable, Retryable, RetryPolicy, Saga, Start, Step
from sagas_store import MongoStore
from sagas_store.states import State
from tests.store.making import Commands, lapse
from tests.support.crashing import working
from tests.support.waiting import eventually

PAGE = (Path(__file__).parents[2] / "docs/performance.md").read_text()
LEASE = timedelta(minutes=5)


class Order(BaseModel):
    fails: str = ""


def five_steps() -> Saga[Order]:
    saga = Saga("five-steps", Order)

    async def act(order: Order, step: Step[Any]) -> Order:
        if order.fails == f"{step.name} later" and step.try_number == 1:
            raise Retryable("later", retry_after=timedelta(hours=1))
        if order.fails == step.name:
            raise NonRetryable("no")
        return order

    async def undo(order: Order, step: Step[Any]) -> None: ...

    for name in ("reserve", "authorise"):
        saga.step(name=name, retry=RetryPolicy(max_attempts=5))(act).compensation(undo)
    saga.pivot(name="charge")(act)
    for name in ("book", "notify"):
        saga.step(name=name)(act)
    return saga


SAGA = five_steps()
DEFINITIONS = [(SAGA.name, SAGA.version)]


@dataclass(slots=True)
class Counted:
    """What was sent by the worker's client, or the starter's."""

    commands: Commands
    store: MongoStore

    def writes(self) -> Counter[str]:
        """Write commands, by what they are for."""
        done: Counter[str] = Counter()
        for name, command in self.commands.sent:
            if name == "insert":
                done["starts" if command["insert"] == "sagas.runs" else "entries"] += 1
            elif name == "update":
                done[kind_of(command["updates"][0])] += 1
        return done

    def reads(self) -> Counter[str]:
        """Finds, by collection."""
        return Counter(command["find"] for name, command in self.commands.sent if name == "find")


def kind_of(update: dict[str, Any]) -> str:
    change = update["u"]
    parts = change if isinstance(change, list) else [change]  # a pipeline, or an update without one
    changes: dict[str, Any] = {
        name: value for part in parts for kind in ("$set", "$currentDate") for name, value in part.get(kind, {}).items()
    }
    if "claim" in changes:
        return "claims"
    if "gate_passed_at" in changes:
        return "gates"
    if "phase" in changes:
        return "shown rolling back"
    if "state" in changes:
        return "parks" if changes["state"] == State.PENDING else "settlings"
    return "renewals"


@asynccontextmanager
async def counted(database: Any, uri: str) -> AsyncIterator[Counted]:
    commands = Commands()
    async with AsyncMongoClient[Any](uri, event_listeners=[commands]) as client:
        store = MongoStore(client[database.name])
        await store.ready()
        commands.sent.clear()
        yield Counted(commands, store)


async def until(store: MongoStore, state: State, count: int = 1) -> None:
    async def look() -> bool:
        return await store.database["sagas.runs"].count_documents({"state": state}) == count

    await eventually(look, what=f"{count} runs are {state}")


async def driven(store: MongoStore, database: Any, uri: str, state: State, **context: str) -> Counted:
    """One run alone, from its start until a worker has left it in `state`."""
    async with counted(database, uri) as sent, Client(sent.store) as client:
        await client.start(SAGA, Order(**context))
        async with working(sent.store, SAGA, poll=timedelta(seconds=600)):
            await until(store, state)
        return sent


async def test_a_run_that_goes_well(store: MongoStore, database: Any, mongo_uri: str) -> None:
    sent = await driven(store, database, mongo_uri, State.COMPLETED)
    assert sent.writes() == {"starts": 1, "claims": 1, "entries": 5, "gates": 1, "settlings": 1}
    assert sent.reads()["sagas.journal"] == 0, "a first attempt reads no journal"
    assert row("five steps that go well") == (9, 2)


async def test_a_claim_is_three_round_trips_whatever_its_size_and_an_idle_poll_two(
    store: MongoStore, database: Any, mongo_uri: str
) -> None:
    async with Client(store) as client:
        await client.start_many(SAGA, [Start(Order()) for _ in range(60)])
    async with counted(database, mongo_uri) as sent:
        # More is due than fits, so it is asked whose turn it is.
        runs = await sent.store.claims.take(DEFINITIONS, token="t", worker="w", lease=LEASE, limit=20)
        assert [name for name, _ in sent.commands.sent] == ["find", "find", "update", "find"]
        assert row("a claim of less than is due") == (1, 3)
    async with counted(database, mongo_uri) as sent:
        runs = await sent.store.claims.take(DEFINITIONS, token="u", worker="w", lease=LEASE, limit=64)
        assert len(runs) == 40
        assert [name for name, _ in sent.commands.sent] == ["find", "update", "find"]
        assert row("a claim, of any number of runs") == (1, 2)
        sent.commands.sent.clear()
        assert not await sent.store.claims.take(DEFINITIONS, token="v", worker="w", lease=LEASE, limit=24)
        await sent.store.claims.next_due_at(DEFINITIONS)
        assert [name for name, _ in sent.commands.sent] == ["find", "find"]
        assert row("an idle poll") == (0, 2)
        sent.commands.sent.clear()
        await sent.store.runs.renew({run.run_id: "u" for run in runs}, lease=LEASE)
        assert sorted(name for name, _ in sent.commands.sent) == ["find", "update"]
        assert row("a heartbeat, of all of a worker's runs") == (1, 1)


async def test_a_rollback(store: MongoStore, database: Any, mongo_uri: str) -> None:
    sent = await driven(store, database, mongo_uri, State.COMPENSATED, fails="charge")
    # Two steps, the pivot's failure, the rollback's beginning, two compensations.
    assert sent.writes() == {
        "starts": 1, "claims": 1, "entries": 6, "gates": 1, "shown rolling back": 1, "settlings": 1,
    }  # fmt: skip
    assert row("two steps, the pivot fails, both are undone") == (11, 2)


async def test_a_retry_that_frees_the_worker(store: MongoStore, database: Any, mongo_uri: str) -> None:
    async with counted(database, mongo_uri) as sent, Client(sent.store) as client:
        await client.start(SAGA, Order(fails="reserve later"))
        async with working(sent.store, SAGA, poll=timedelta(seconds=600)):

            async def parked() -> bool:
                return sent.writes()["parks"] == 1

            await eventually(parked, what="the run is parked")
        assert sent.writes() == {"starts": 1, "claims": 1, "entries": 1, "parks": 1}
        assert row("a failed try whose retry frees the worker") == (2, 0)


async def test_a_takeover_reads_all_journals_of_its_batch_in_one_query(
    store: MongoStore, database: Any, mongo_uri: str
) -> None:
    async with Client(store) as client:
        await client.start_many(SAGA, [Start(Order()) for _ in range(10)])
    await store.claims.take(DEFINITIONS, token="lost", worker="w", lease=LEASE, limit=10)
    await lapse(database)
    async with counted(database, mongo_uri) as sent:
        async with working(sent.store, SAGA, poll=timedelta(seconds=600)):
            await until(store, State.COMPLETED, 10)
        assert sent.reads()["sagas.journal"] == 1
        assert sent.writes()["claims"] == 1
        entries = [len(command["documents"]) for command in sent.commands.of("insert")]
        assert sum(entries) == 10 * (1 + 5), "each takeover announces itself, then its run's steps follow"
    assert row("a takeover, beside its claim") == (1, 1)


async def test_runs_that_go_together_share_their_writes(store: MongoStore, database: Any, mongo_uri: str) -> None:
    async with counted(database, mongo_uri) as sent, Client(sent.store) as client:
        started = [asyncio.create_task(client.start(SAGA, Order())) for _ in range(60)]
        await asyncio.gather(*started)
        async with working(sent.store, SAGA, concurrency=64, poll=timedelta(seconds=600)):
            await until(store, State.COMPLETED, 60)
        assert sum(sent.writes().values()) < 60, "nine writes each, and fewer commands than runs"


async def test_updates_of_many_cost_no_retryable_write(store: MongoStore, database: Any, mongo_uri: str) -> None:
    # The driver keeps those for writes of one document, so there is nothing to switch off for group commit's sake.
    async with counted(database, mongo_uri) as sent:
        async with Client(store) as client:
            await client.start_many(SAGA, [Start(Order()) for _ in range(3)])
        runs = await sent.store.claims.take(DEFINITIONS, token="t", worker="w", lease=LEASE, limit=3)
        await asyncio.gather(*(sent.store.runs.settle(run, State.COMPLETED) for run in runs))
        settling = sent.commands.of("update")[-1]
        assert settling["updates"][0]["multi"] is True
        assert all("txnNumber" not in command for command in sent.commands.of("update"))


# --- the page ---------------------------------------------------------------------------------------------------------


def row(what: str) -> tuple[int, int]:
    """The writes and reads that the page's table gives for it."""
    match = re.search(rf"^\| {re.escape(what)} \| (\d+) \| (\d+) \|", PAGE, re.MULTILINE)
    assert match is not None, f"docs/performance.md has no row {what!r}"
    return int(match[1]), int(match[2])


@pytest.mark.parametrize("word", ["writes", "reads"])
def test_the_table_names_its_columns(word: str) -> None:
    assert f"| {word} |" in PAGE
