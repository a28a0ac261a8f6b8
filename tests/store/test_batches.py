"""Writes that go together, and each of them failing in turn: its neighbours are as if it had not been there."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

import sagas_store.inserts
from sagas_store import MongoStore
from sagas_store.commit import Batching
from sagas_store.errors import FenceLost, RecordTooLarge, RunExists, StopFirst, StoreRefused, StoreUnavailable
from sagas_store.faults import Patience, is_transient
from sagas_store.inserts import InsertTogether
from sagas_store.journal import Journal
from sagas_store.records import RunRecord
from sagas_store.runs import Runs
from sagas_store.states import State
from tests.conftest import DRIVERS
from tests.store.making import Commands, ForgetfulNetwork, claim, client_of, entry, new_run, stored, transaction
from tests.support.changing import replace

pytestmark = pytest.mark.parametrize("driver", DRIVERS)

COUNT = 5
LARGE = b"x" * (16 * 2**20)
ROOMY = Batching(bytes_max=2**30)
"""So that what is too large for the server is not sent by itself."""
Writes = list[Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Watched:
    """A store, and what it has sent."""

    store: MongoStore
    commands: Commands
    database: Any

    def batches(self, command: str, documents: str) -> list[int]:
        """The sizes of the batches sent."""
        return [len(sent[documents]) for sent in self.commands.of(command)]


@pytest.fixture
async def watched(store: MongoStore, database: Any, driver: str, mongo_uri: str) -> AsyncIterator[Watched]:
    commands = Commands()
    async with client_of(driver, mongo_uri, event_listeners=[commands]) as client:
        watched = MongoStore(client[database.name])
        watched._ready = True
        await watched.ready()
        yield Watched(watched, commands, database)


class Unsettled(Patience):
    """A try as a batch takes so long, and settles nothing."""

    def __init__(self, took_s: float) -> None:
        super().__init__(timedelta(seconds=90), timedelta(seconds=10))
        self.took_s = took_s
        self.now = 0.0
        self.left: list[float] = []
        """How long each has when it goes on by itself."""

    async def call(
        self,
        operation: str,
        attempt: Callable[[], Awaitable[Any]],
        *,
        passes: Callable[[BaseException], bool] = is_transient,
        within_s: float = math.inf,
    ) -> Any:
        assert isinstance(attempt, InsertTogether)
        if not attempt._alone:
            self.now += self.took_s
            return attempt._fates
        self.left.append(within_s)
        return await super().call(operation, attempt, passes=passes, within_s=within_s)


@pytest.mark.parametrize(("took_s", "left_s"), [(10, 80), (85, 10), (90, 10)])
async def test_what_a_batch_has_not_settled_goes_on_with_what_is_left_of_the_patience(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch, took_s: float, left_s: float
) -> None:
    patience = Unsettled(took_s)
    monkeypatch.setattr(sagas_store.inserts, "monotonic", lambda: patience.now)
    journal = Journal(store.journal._collection, patience)
    assert await together([journal.append(entry(f"run-{number}", 1)) for number in range(3)]) == [None] * 3
    assert patience.left == [left_s] * 3


async def together(writes: Writes, *, cancel: int | None = None) -> list[BaseException | None]:
    """Begun in one turn of the event loop, so that they leave as one batch; one of them may be cancelled then."""
    tasks = [asyncio.create_task(write) for write in writes]
    await asyncio.sleep(0)
    if cancel is not None:
        tasks[cancel].cancel()
    return list(await asyncio.gather(*tasks, return_exceptions=True))


def check(fates: list[BaseException | None], place: int, wanted: type[BaseException]) -> None:
    assert [type(fate) for fate in fates] == [wanted if one == place else type(None) for one in range(COUNT)]


# --- entries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [False, True], ids=["", "the batch's reply is lost"])
@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"run_id": "run-taken"}, FenceLost),
        ({"payload": LARGE}, RecordTooLarge),
        ({"attempt": -1}, StoreRefused),  # the validator's word
    ],
    ids=["fenced", "oversize", "refused"],
)
async def test_an_entry_that_fails_fails_alone(
    watched: Watched, change: dict[str, Any], wanted: type[BaseException], lost: bool
) -> None:
    await watched.store.journal.append(entry("run-taken", 1, token="theirs"))
    for place in range(COUNT):
        ids = [f"run-{place}-{number}" for number in range(COUNT)]
        entries = [entry(run_id, 1) for run_id in ids]
        entries[place] = replace(entries[place], **change)
        network = ForgetfulNetwork(*(["append"] if lost else []))
        journal = Journal(watched.store.journal._collection, network, ROOMY)
        check(await together([journal.append(one) for one in entries]), place, wanted)
        assert not network.to_lose
        journals = await watched.store.journal.load_many(ids)
        assert [len(found) for found in journals.values()] == [int(number != place) for number in range(COUNT)]
        (theirs,) = await watched.store.journal.load("run-taken")
        assert theirs.token == "theirs"
    assert max(watched.batches("insert", "documents")) >= COUNT - 1, "they went together"


async def test_an_entry_whose_writer_is_cancelled_takes_no_other_along_and_is_written_all_the_same(
    watched: Watched,
) -> None:
    for place in range(COUNT):
        ids = [f"run-{place}-{number}" for number in range(COUNT)]
        fates = await together([watched.store.journal.append(entry(run_id, 1)) for run_id in ids], cancel=place)
        check(fates, place, asyncio.CancelledError)
        # It had been handed over: whoever reads the journal next finds it, as after any lost reply.
        assert all((await watched.store.journal.load_many(ids)).values())
    assert watched.batches("insert", "documents") == [COUNT] * COUNT


# --- starts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [False, True], ids=["", "the batch's reply is lost"])
@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"run_id": "run-taken"}, RunExists),
        ({"input": LARGE}, RecordTooLarge),
        ({"version": 0}, StoreRefused),
    ],
    ids=["there already", "oversize", "refused"],
)
async def test_a_start_that_fails_fails_alone(
    watched: Watched, change: dict[str, Any], wanted: type[BaseException], lost: bool
) -> None:
    await watched.store.runs.insert(new_run(watched.store, run_id="run-taken", input=b"theirs"))
    for place in range(COUNT):
        new = [new_run(watched.store) for _ in range(COUNT)]
        asked = [replace(one, **change) if number == place else one for number, one in enumerate(new)]
        network = ForgetfulNetwork(*(["start"] if lost else []))
        runs = Runs(watched.store.runs._collection, network, ROOMY)
        check(await together([runs.insert(one) for one in asked]), place, wanted)
        assert not network.to_lose
        found = await watched.store.runs.get_many([one.run_id for one in new])
        assert set(found) == {one.run_id for number, one in enumerate(new) if number != place}
        assert (await stored(watched.database, "run-taken"))["input"] == b"theirs"
    assert max(watched.batches("insert", "documents")) >= COUNT - 1, "they went together"


async def test_many_starts_go_in_as_many_writes_as_their_count_and_size_ask_for(watched: Watched) -> None:
    size = 1000
    small = [new_run(watched.store) for _ in range(COUNT)]
    large = [new_run(watched.store, input=b"x" * size) for _ in range(3 * COUNT)]
    runs = Runs(watched.store.runs._collection, ForgetfulNetwork(), Batching(count_max=4, bytes_max=2 * size))
    assert await runs.insert_many([*small, *large]) == set()
    sent = [[len(one["input"]) for one in command["documents"]] for command in watched.commands.of("insert")]
    assert sum(map(len, sent)) == 4 * COUNT
    assert all(len(batch) <= 4 and sum(batch) <= 2 * size for batch in sent)
    assert len(sent) < 3 * COUNT, "they went together as far as they may"
    assert await runs.insert_many([small[0], new_run(watched.store)]) == {small[0].run_id}


# --- a key that an open transaction holds -----------------------------------------------------------------------------

Write = Callable[[int], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Insert:
    """One kind of write that goes in batches, over collections with so much patience."""

    collection: str
    write: Callable[[Any, Patience, Batching], Write]
    """Makes the writes of one batch, by number."""
    taken: type[BaseException]


def entries_of(store: MongoStore, patience: Patience, batching: Batching) -> Write:
    journal = Journal(store.journal._collection, patience, batching)
    return lambda number: journal.append(entry(f"run-{number}", 1))


def starts_of(store: MongoStore, patience: Patience, batching: Batching) -> Write:
    runs = Runs(store.runs._collection, patience, batching)
    return lambda number: runs.insert(new_run(store, run_id=f"run-{number}"))


INSERTS = {
    "entries": Insert("sagas.journal", entries_of, FenceLost),
    "starts": Insert("sagas.runs", starts_of, RunExists),
}


@asynccontextmanager
async def holding(store: MongoStore, database: Any, driver: str, kind: str, number: int, *, commit: bool) -> Any:
    """A transaction, a lost worker's or another client's, that has inserted this key and is open."""
    async with transaction(database, driver, commit=commit) as session:
        theirs = entry(f"run-{number}", 1, token="theirs")
        if kind == "entries":
            await store.journal.append_in(session, theirs)
        else:
            await store.runs.insert_in(session, new_run(store, run_id=f"run-{number}", input=b"theirs"))
        yield


@pytest.mark.parametrize("kind", INSERTS)
@pytest.mark.parametrize("place", [0, 2, COUNT - 1])
@pytest.mark.parametrize("commit", [False, True], ids=["aborted", "committed"])
async def test_a_key_that_an_open_transaction_holds_keeps_no_neighbour_from_its_answer(
    store: MongoStore, database: Any, driver: str, kind: str, place: int, commit: bool
) -> None:
    write = INSERTS[kind].write(store, Patience(timedelta(seconds=30), timedelta(seconds=0.3)), ROOMY)
    async with holding(store, database, driver, kind, place, commit=commit):
        tasks = [asyncio.create_task(write(number)) for number in range(COUNT)]
        others = [task for number, task in enumerate(tasks) if number != place]
        assert await asyncio.wait_for(asyncio.gather(*others), 10) == [None] * (COUNT - 1)
        assert not tasks[place].done(), "its fate is the transaction's to say"
    fate = (await asyncio.gather(tasks[place], return_exceptions=True))[0]
    assert type(fate) is (INSERTS[kind].taken if commit else type(None))
    assert await database[INSERTS[kind].collection].count_documents({}) == COUNT


@pytest.mark.parametrize("kind", INSERTS)
async def test_when_patience_ends_only_what_is_held_up_is_unavailable(
    store: MongoStore, database: Any, driver: str, kind: str
) -> None:
    write = INSERTS[kind].write(store, Patience(timedelta(seconds=1), timedelta(seconds=0.3)), ROOMY)
    async with holding(store, database, driver, kind, 2, commit=False):
        check(await together([write(number) for number in range(COUNT)]), 2, StoreUnavailable)


@pytest.mark.parametrize("kind", INSERTS)
async def test_what_is_held_up_takes_no_batchs_place(store: MongoStore, database: Any, driver: str, kind: str) -> None:
    patience = Patience(timedelta(seconds=30), timedelta(seconds=0.3))
    write = INSERTS[kind].write(store, patience, Batching(in_flight_max=1, count_max=1))
    async with holding(store, database, driver, kind, 0, commit=False):
        first = asyncio.create_task(write(0))
        await asyncio.sleep(0)
        await asyncio.wait_for(write(1), 10)
        assert not first.done()
    await first


# --- a holder's moves -------------------------------------------------------------------------------------------------


async def fenced(watched: Watched, run: RunRecord) -> None:
    """Its lease lapsed, and another worker has it."""
    await watched.database["sagas.runs"].update_one(
        {"_id": run.run_id}, {"$set": {"claim.token": "theirs", "attempts": 2}}
    )


async def stopped(watched: Watched, run: RunRecord) -> None:
    assert await watched.store.interventions.ask_stop(run.run_id, by="shop", reason=b"changed their mind")


async def parked(watched: Watched, run: RunRecord) -> None:
    """Its own park has been made, under the same token, before the answer was lost: it is not ours to settle."""
    await watched.database["sagas.runs"].update_one({"_id": run.run_id}, {"$set": {"state": "pending"}})


MOVES: dict[str, Callable[[Any, RunRecord], Coroutine[Any, Any, None]]] = {
    "settle": lambda runs, run: runs.settle(run, State.COMPLETED),
    "pass the gate": lambda runs, run: runs.pass_gate(run),
    "hold": lambda runs, run: runs.hold(run, State.BROKEN, "unfit"),
}


MOVED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "settle": lambda run: run["state"] == State.COMPLETED and "due_at" not in run,
    "pass the gate": lambda run: "gate_passed_at" in run,
    "hold": lambda run: run["state"] == State.BROKEN,
}
HAPPENS = [(fenced, FenceLost), (stopped, StopFirst), (parked, FenceLost)]


@pytest.mark.parametrize("lost", [False, True], ids=["", "the batch's reply is lost"])
@pytest.mark.parametrize("tokens", [1, 2], ids=["one claim", "two claims"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize(
    ("happens", "wanted"),
    [(fenced, FenceLost), (stopped, StopFirst), (parked, FenceLost)],
    ids=lambda one: one.__name__,
)
async def test_a_move_that_fails_fails_alone(
    watched: Watched,
    happens: Callable[[Watched, RunRecord], Awaitable[None]],
    wanted: type[BaseException],
    move: str,
    tokens: int,
    lost: bool,
) -> None:
    deadline = watched.store.clock.now() + timedelta(hours=1)  # a run that has one is moved by another update
    for place in range(COUNT):
        some = [new_run(watched.store, deadline=deadline if number % 2 else None) for number in range(COUNT)]
        await watched.store.runs.insert_many(some)
        held = await claim(watched.store, token=f"one-{place}", limit=COUNT if tokens == 1 else 2)
        held += await claim(watched.store, token=f"two-{place}", limit=COUNT - len(held))
        assert len(held) == COUNT
        await happens(watched, held[place])
        before = await stored(watched.database, held[place].run_id)
        network = ForgetfulNetwork(*(["move runs"] if lost else []))
        runs = network.runs(watched.store)
        check(await together([MOVES[move](runs, run) for run in held]), place, wanted)
        assert not network.to_lose
        now = [await stored(watched.database, run.run_id) for run in held]
        assert now.pop(place) == before, "the one that failed was not touched"
        assert all(MOVED[move](run) for run in now)
        await watched.database["sagas.runs"].delete_many({})


async def test_a_move_whose_run_is_cancelled_takes_no_other_along(watched: Watched) -> None:
    for place in range(COUNT):
        await watched.store.runs.insert_many([new_run(watched.store) for _ in range(COUNT)])
        held = await claim(watched.store, token=f"token-{place}", limit=COUNT)
        fates = await together([watched.store.runs.settle(run, State.COMPLETED) for run in held], cancel=place)
        check(fates, place, asyncio.CancelledError)
        states = [(await stored(watched.database, run.run_id))["state"] for run in held]
        assert states == [State.COMPLETED] * COUNT
