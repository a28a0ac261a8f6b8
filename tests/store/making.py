"""What the store's tests are made of: clients of either driver, runs, claims, entries, lost replies, lapsed leases."""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient
from pymongo.errors import AutoReconnect
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from sagas_store import MongoStore
from sagas_store.claims import Claims
from sagas_store.clock import EPOCH
from sagas_store.entries import Entry, Kind
from sagas_store.faults import Patience, is_transient
from sagas_store.journal import Journal
from sagas_store.records import NewRun, RunRecord
from sagas_store.runs import Runs
from tests.support.changing import replace

__all__ = [
    "DEFINITIONS",
    "LEASE",
    "SAGA",
    "Commands",
    "ForgetfulNetwork",
    "claim",
    "client_of",
    "entry",
    "lapse",
    "new_run",
    "started_and_claimed",
    "stored",
    "transaction",
]

T = TypeVar("T")

SAGA: Final = "order"
DEFINITIONS: Final = [(SAGA, 1)]
LEASE: Final = timedelta(minutes=5)

_number = itertools.count(1)


@asynccontextmanager
async def client_of(driver: str, uri: str, **options: Any) -> AsyncIterator[Any]:
    """A client of that driver, closed at the end."""
    client: Any = AsyncMongoClient(uri, **options) if driver == "pymongo" else AsyncIOMotorClient(uri, **options)
    try:
        yield client
    finally:
        closing = client.close()
        if closing is not None:
            await closing


@asynccontextmanager
async def transaction(database: Any, driver: str, *, commit: bool) -> AsyncIterator[Any]:
    """A transaction as an application writes it with its driver; yields the session."""
    starting = database.client.start_session()
    async with await starting if driver == "motor" else starting as session:
        begun = session.start_transaction()
        if driver == "pymongo":
            await begun
        yield session
        await (session.commit_transaction() if commit else session.abort_transaction())


def new_run(store: MongoStore, *, due_in: timedelta = timedelta(0), **changes: Any) -> NewRun:
    """A run that is due `due_in` from now by the server's clock; a negative one makes it due for so long."""
    now = store.clock.now()
    run = NewRun(
        run_id=f"run-{next(_number)}",
        saga=SAGA,
        version=1,
        fingerprint="reserve:c charge:p",
        input=b"\x01{}",
        created_at=_milliseconds(now),
        due_at=_milliseconds(now + due_in),
    )
    return replace(run, **changes)


async def claim(
    store: MongoStore, *, token: str = "token-1", limit: int = 1, lease: timedelta = LEASE
) -> list[RunRecord]:
    """Claim due runs of `SAGA`."""
    return await store.claims.take(DEFINITIONS, token=token, worker="worker-1", lease=lease, limit=limit)


async def started_and_claimed(store: MongoStore, *, token: str = "token-1", **changes: Any) -> RunRecord:
    """One run that a worker holds."""
    run = new_run(store, **changes)
    await store.runs.insert(run)
    (claimed,) = await claim(store, token=token)
    assert claimed.run_id == run.run_id
    return claimed


async def lapse(database: Any) -> int:
    """Let every lease be over, as if its length had passed; returns how many there were."""
    done = await database["sagas.runs"].update_many(
        {"state": "running"}, [{"$set": {"due_at": {"$subtract": ["$$NOW", 1]}}}]
    )
    return int(done.modified_count)


async def stored(database: Any, run_id: str) -> dict[str, Any]:
    """The run's document as it is."""
    found: dict[str, Any] | None = await database["sagas.runs"].find_one({"_id": run_id})
    assert found is not None, run_id
    return found


def entry(run_id: str, seq: int, **changes: Any) -> Entry:
    """An entry of a journal."""
    made = Entry(
        run_id=run_id,
        seq=seq,
        kind=Kind.STEP_SUCCEEDED,
        at=EPOCH + timedelta(seconds=seq),
        attempt=1,
        worker="worker-1",
        token="token-1",
        step="reserve",
        try_number=1,
        payload=b"\x01{}",
    )
    return replace(made, **changes)


class Commands(CommandListener):
    """What clients with this listener have sent, in order, and the cursors that the server has opened for them."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.cursors: list[int] = []
        self.inputs: list[int] = []
        """How many inputs each answer had with it."""

    def of(self, name: str) -> list[dict[str, Any]]:
        """The commands of this name so far."""
        return [command for sent, command in list(self.sent) if sent == name]

    def started(self, event: CommandStartedEvent) -> None:
        self.sent.append((event.command_name, dict(event.command)))

    def succeeded(self, event: CommandSucceededEvent) -> None:
        if event.command_name in ("find", "aggregate"):
            self.cursors.append(event.reply["cursor"]["id"])
            self.inputs.append(sum("input" in found for found in event.reply["cursor"].get("firstBatch", ())))

    def failed(self, event: CommandFailedEvent) -> None:
        pass


class ForgetfulNetwork(Patience):
    """The first reply to each of the named operations is lost on its way, after the server has done its work."""

    def __init__(self, *operations: str) -> None:
        super().__init__(timedelta(seconds=10), timedelta(seconds=10))
        self.to_lose = set(operations)

    async def call(
        self,
        operation: str,
        attempt: Callable[[], Awaitable[T]],
        *,
        passes: Callable[[BaseException], bool] = is_transient,
        within_s: float = math.inf,
    ) -> T:
        async def lossy() -> T:
            answer = await attempt()
            if operation in self.to_lose:
                self.to_lose.discard(operation)
                raise AutoReconnect("the reply is lost")
            return answer

        return await super().call(operation, lossy, passes=passes, within_s=within_s)

    def runs(self, store: MongoStore) -> Runs:
        """The store's runs, reached over this network."""
        return Runs(store.runs._collection, self)

    def claims(self, store: MongoStore) -> Claims:
        """The store's claims, made over this network."""
        return Claims(store.claims._collection, self)

    def journal(self, store: MongoStore) -> Journal:
        """The store's journal, reached over this network."""
        return Journal(store.journal._collection, self)


def _milliseconds(at: datetime) -> datetime:
    return at.replace(microsecond=at.microsecond // 1000 * 1000)
