"""The one seam that knows which driver is in use: PyMongo's asyncio client, or Motor.

Both give the same collections, cursors and results; they differ in how sessions begin and in how a change stream is
opened. Everything else in the store is written once, against PyMongo's asyncio types.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC
from typing import TYPE_CHECKING, Any, Final, cast

import pymongo
from bson.codec_options import CodecOptions
from pymongo import AsyncMongoClient, ReadPreference, WriteConcern
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import ConfigurationError
from pymongo.read_concern import ReadConcern

from sagas_store.errors import InvalidInput
from sagas_store.inputs import kind_of

if TYPE_CHECKING:
    from motor.motor_asyncio import AsyncIOMotorDatabase

__all__ = ["Collection", "Document", "Driver", "check_client", "check_session"]

Document = dict[str, Any]
Collection = AsyncCollection[Document]

_PLAIN: CodecOptions[Document] = CodecOptions(tz_aware=True, tzinfo=UTC)
_DURABLE = WriteConcern("majority", j=True)
_PROVEN = ReadConcern("majority")

_KEPT_FREE: Final = 4
"""Connections of the application's pool that the store leaves alone: an open change stream keeps one for as long as it
waits (a worker's, a client's), and the application has questions of its own."""
_ABORT_S: Final = 5.0
_POOL_UNLIMITED: Final = 100
"""What counts as the pool's size where it has no limit or a larger one; the driver's own default. The writes of many
runs share a few operations, so more would only crowd the server."""


class Driver:
    """An application's database handle, whichever driver made it, with the concerns that the store insists on."""

    def __init__(self, database: AsyncDatabase[Any] | AsyncIOMotorDatabase[Any]) -> None:
        self.is_motor = _is_motor(database, "AsyncIOMotorDatabase")
        if not self.is_motor and not isinstance(database, AsyncDatabase):
            raise InvalidInput(
                "database",
                f"must be one of pymongo.AsyncMongoClient or of motor, not {type(database).__name__} from "
                f"{type(database).__module__}; a blocking MongoClient would stop the event loop at every write",
            )
        self._seeds = _addresses(database.client)
        # What is written is on a majority's disks before it counts, and what is read as the truth can no longer be
        # rolled back, whatever the application set on its client.
        # Motor waits in threads, few of them for the whole process. A stream that waited there for its next event would
        # keep one of them from everybody else, so there the waiting is done here.
        self._await_ms, self.rest_s = (1, 0.1) if self.is_motor else (1000, 0.0)
        self.database = cast(
            "AsyncDatabase[Document]",
            database.with_options(
                codec_options=_PLAIN,
                read_preference=ReadPreference.PRIMARY,
                write_concern=_DURABLE,
                read_concern=_PROVEN,
            ),
        )

    @property
    def operations_max(self) -> int:
        """How many operations may be under way at once so that none waits in the driver for a connection."""
        pool = self.database.client.options.pool_options.max_pool_size
        return max(1, int(min(pool or _POOL_UNLIMITED, _POOL_UNLIMITED)) - _KEPT_FREE)

    def turns(self) -> asyncio.Semaphore:
        """Turns for so many operations."""
        return asyncio.Semaphore(self.operations_max)

    def unanswered(self) -> str:
        """Why no server answers, as far as the driver knows, and what to look at. Of the URI hosts alone are told."""
        client = self.database.client
        known = client.topology_description
        servers = known.server_descriptions().values()
        seeds = ", ".join(self._seeds) or "the addresses given"
        wanted = known.replica_set_name
        if wanted is not None and (not servers or any(isinstance(one.error, ConfigurationError) for one in servers)):
            return f"no member of replica set {wanted!r} is at {seeds}; is replicaSet in the connection string right?"
        hosts = ", ".join(_addresses(client)) or seeds
        if any(one.is_server_type_known for one in servers):
            return f"{hosts}: none of those that answer is the primary; is an election under way, or a majority down?"
        return f"nobody answers at {hosts}; is it up, and is the connection string right (hosts, ports, tls)?"

    def collection(self, name: str) -> Collection:
        return self.database[name]

    async def command(self, name: str, value: Any = 1, **more: Any) -> Document:
        """Run a command on the application's database."""
        return await self.database.command(name, value, codec_options=_PLAIN, **more)

    async def admin(self, name: str, value: Any = 1, **more: Any) -> Document:
        """Run a command on the admin database."""
        return await self.database.client.admin.command(name, value, codec_options=_PLAIN, **more)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncClientSession]:
        """A session with a transaction that the caller commits or aborts; one left open is aborted at the end."""
        client = self.database.client
        starting: Any = client.start_session()
        session: AsyncClientSession = await starting if self.is_motor else starting
        try:
            yield session
        finally:
            # An abort is a courtesy, so nobody waits long for its answer; the server ends what is left open by itself.
            with pymongo.timeout(_ABORT_S):
                await session.end_session()

    async def begin(self, session: AsyncClientSession) -> None:
        """Start a transaction that reads a majority snapshot and commits to a majority."""
        starting = session.start_transaction(
            read_concern=ReadConcern("snapshot"), write_concern=_DURABLE, read_preference=ReadPreference.PRIMARY
        )
        if not self.is_motor:
            await starting

    @asynccontextmanager
    async def watch(self, collection: Collection, pipeline: Sequence[Mapping[str, Any]]) -> AsyncIterator[Any]:
        """An open change stream; iterate it with `try_next`, which returns None after a while without an event.

        Then rest for `self.rest_s`.
        """
        opening: Any = collection.watch(pipeline, max_await_time_ms=self._await_ms)
        stream = opening if self.is_motor else await opening
        async with stream:
            yield stream


def check_client(client: object) -> None:
    """Raise InvalidInput unless it is an asyncio client of a driver that a store can use."""
    if not isinstance(client, AsyncMongoClient) and not _is_motor(client, "AsyncIOMotorClient"):
        raise InvalidInput("client", f"must be a pymongo.AsyncMongoClient, or Motor's, not {kind_of(client)}")


def check_session(session: object) -> None:
    """Raise InvalidInput unless it is a driver's session with a transaction under way."""
    if not isinstance(session, AsyncClientSession) and not _is_motor(session, "AsyncIOMotorClientSession"):
        raise InvalidInput("session", f"must be a session of the store's client, not {kind_of(session)}")
    if not cast("AsyncClientSession", session).in_transaction:
        raise InvalidInput("session", "must have a transaction under way: begin it first, and commit it afterwards")


def _is_motor(given: object, name: str) -> bool:
    """Whether it is of this class of Motor's, by name: Motor need not be installed."""
    return any(kind.__name__ == name and kind.__module__.startswith("motor.") for kind in type(given).__mro__)


def _addresses(client: Any) -> list[str]:
    """The servers that a client knows of; before its first answer those of its connection string."""
    servers = client.topology_description.server_descriptions()
    return [f"{host}:{port}" if port is not None else host for host, port in servers]
