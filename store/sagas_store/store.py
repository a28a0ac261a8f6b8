"""MongoStore: one application's runs and journal in one database."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import InvalidName

from sagas_store.blocked import BlockedRuns
from sagas_store.claims import Claims
from sagas_store.clock import Monotonic, ServerClock, monotonic
from sagas_store.commit import Batching
from sagas_store.drivers import Document, Driver
from sagas_store.entries import Entry
from sagas_store.errors import FenceLost, InvalidInput, StoreUnavailable
from sagas_store.faults import Patience, is_worth_committing_again
from sagas_store.inputs import check_kind, check_methods, given_or
from sagas_store.interventions import Interventions
from sagas_store.journal import JOURNAL_SPEC_NAME, Journal
from sagas_store.keys import KEYS_SPEC_NAME, Keys
from sagas_store.resealing import Resealing
from sagas_store.runs import RUNS_SPEC_NAME, Runs
from sagas_store.schema import Schema
from sagas_store.server import refuse_unsafe
from sagas_store.watch import Hints

if TYPE_CHECKING:
    from motor.motor_asyncio import AsyncIOMotorDatabase

__all__ = ["PATIENCE", "REPLY", "BindsKeys", "MongoStore"]

PATIENCE: Final = timedelta(seconds=90)
REPLY: Final = timedelta(seconds=10)
_NO_KEYS_S: Final = 60.0
"""For how long it is taken for granted that there are still no keys in a database."""


class BindsKeys(Protocol):
    """A keyring, as far as a store knows one: it is told where the wrapped keys are kept, and carried along."""

    def bind(self, keys: Keys) -> None:
        """Use these from now on."""


class MongoStore:
    """Runs, their journals and wrapped keys in `sagas.runs`, `sagas.journal` and `sagas.keys` of a database.

    Takes a database of `pymongo.AsyncMongoClient`, or of Motor. Opens nothing by itself; the application owns the
    client and closes it. Safe to share between a client and a worker of one event loop.
    """

    def __init__(
        self,
        database: AsyncDatabase[Any] | AsyncIOMotorDatabase[Any],
        *,
        keyring: BindsKeys | None = None,
        prefix: str = "sagas.",
        patience: timedelta | float = PATIENCE,
        reply: timedelta | float = REPLY,
        batching: Batching | None = None,
        turns: asyncio.Semaphore | None = None,
        monotonic: Monotonic = monotonic,
    ) -> None:
        """Take the database as it is; nothing is asked of the server yet.

        With a `keyring` (sagas.Keyring) everything that clients, operators and workers store through it is sealed; the
        store itself opens nothing and carries it along, so that none of them can forget it. `prefix` begins the
        collections' names. `patience` bounds how long an operation that does not get through is repeated, `reply` how
        long one answer of the server is waited for; each is a timedelta, or seconds. A write that went to the server
        with others may take one `reply` longer than `patience`. The default patience outlasts the minute for which the
        server keeps a dead worker's open transaction, which blocks the next entry of that run.
        `batching` bounds how many writes go to the server together. `turns` bounds how many operations are under way at
        once, where several stores share a client's connections; the default is what the client's pool has room for.
        Raises InvalidInput.
        """
        batching = given_or("batching", batching, Batching)
        check_kind("prefix", prefix, str, "'sagas.'")
        if keyring is not None:
            check_methods("keyring", keyring, ("bind",), "a sagas.Keyring")
        self._driver = Driver(database)
        turns = given_or("turns", turns, asyncio.Semaphore, self._driver.turns)
        self._patience = Patience(patience, reply, at_once=turns, unanswered=self._driver.unanswered)
        try:
            runs = self._driver.collection(prefix + RUNS_SPEC_NAME)
        except InvalidName as error:
            raise InvalidInput("prefix", f"no collection can be named so: {error}") from None
        self.runs = Runs(runs, self._patience, batching)
        self.claims = Claims(runs, self._patience, monotonic)
        self.journal = Journal(self._driver.collection(prefix + JOURNAL_SPEC_NAME), self._patience, batching)
        self.keys = Keys(self._driver, self._driver.collection(prefix + KEYS_SPEC_NAME), self._patience)
        self.schema = Schema(self._driver, prefix, self._patience)
        """Makes the collections and indexes: `await store.schema.apply()`."""
        self.interventions = Interventions(runs, self.runs, self.journal, self._patience, self.commit_together)
        self.blocked_runs = BlockedRuns(runs, self._patience)
        self.resealing = Resealing(self._driver, runs, self.journal, self._patience)
        self.hints = Hints(self._driver, runs)
        self.clock = ServerClock(monotonic)
        self.keyring = keyring
        if keyring is not None:
            keyring.bind(self.keys)
        self.database = database
        """The application's own handle, as it was given."""
        self.holds_keys = False
        """Whether there are keys in the database, as far as is known: then payloads in it are sealed. Only a store
        without a keyring asks, and only until there are some."""
        self._look_for_keys_at = math.inf
        self._monotonic = monotonic
        self._ready = False

    async def ready(self) -> None:
        """Check once that the server is safe and the schema applied; read its clock, and whether there are keys.

        What was read within the last minute is not read again. Raises UnsafeServer, SchemaMismatch or StoreUnavailable,
        each naming what to change.
        """
        if not self._ready:
            await refuse_unsafe(self._driver, self._patience)
            await self.schema.check()
            await self.look_for_keys()
            self._ready = True
        elif self._monotonic() >= self._look_for_keys_at:
            await self.look_for_keys()
        await self.sync_clock()

    async def look_for_keys(self) -> None:
        """Bring `holds_keys` up to date: the first key may have come since it was read."""
        if self.keyring is None and not self.holds_keys:
            self._look_for_keys_at = self._monotonic() + _NO_KEYS_S  # one looks, and not all who come at that moment
            self.holds_keys = bool(await self.keys.page(after=None, limit=1))

    async def sync_clock(self) -> None:
        """Read the server's clock unless a reading of the last minute is at hand."""
        if self.clock.fresh:
            return

        async def hello() -> Document:
            return await self._driver.command("hello")

        self.clock.observe((await self._patience.call("read the clock", hello))["localTime"])

    async def commit_together(self, body: Callable[[AsyncClientSession], Awaitable[Entry | None]]) -> Entry | None:
        """Run `body` in a transaction, append the entry that it returns in the same one, and commit.

        When `body` returns None the transaction is aborted, and nothing it wrote has happened. What `body` raises
        aborts the transaction and passes through, except a passing fault of the transaction itself: then `body` runs
        again in a fresh one, because nothing of the first has happened. An unknown commit is settled by reading the
        journal: the sequence number lets at most one transaction with that entry commit, ever. Raises FenceLost,
        StoreUnavailable.
        """

        async def once() -> Entry | None:
            async with self._driver.session() as session:
                await self._driver.begin(session)
                entry = await body(session)
                if entry is None:
                    return None
                try:
                    await self.journal.append_in(session, entry)
                    await self._patience.call("commit", session.commit_transaction, passes=is_worth_committing_again)
                except (FenceLost, StoreUnavailable):
                    # The number is taken, or the reply to the commit is lost. Either way the journal knows whether an
                    # earlier commit of ours got through; what it holds is what happened.
                    if (committed := await self.journal.find_own(entry)) is None:
                        raise
                    return committed
                return entry

        return await self._patience.transact(once)
