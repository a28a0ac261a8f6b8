"""The server under test, and databases in it that are there for one measurement."""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import pymongo
from pymongo import AsyncMongoClient, MongoClient

from sagas import MongoStore
from sagas_store.embedded import EmbeddedMongo
from scripts._bench.timing import fsync_ms

__all__ = ["Database", "Server"]

_CACHE_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Database:
    """An empty database with the schema, and a store on it."""

    name: str
    store: MongoStore
    raw: Any


@dataclass(frozen=True, slots=True)
class Server:
    """A replica set of one node, alone on the machine but for whoever measures."""

    uri: str
    pid: int
    setup: dict[str, Any]

    @classmethod
    @contextmanager
    def started(cls) -> Iterator[Server]:
        """An embedded server, ended afterwards."""
        with EmbeddedMongo.start(cache_bytes=_CACHE_BYTES) as mongo:
            with MongoClient[dict[str, Any]](mongo.uri) as client:
                status = client.admin.command("serverStatus")
            setup = {
                "cores": os.cpu_count(),
                "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
                "python": platform.python_version(),
                "pymongo": pymongo.version,
                "mongod": status["version"],
                "nodes": 1,
                "mongod_cache_gib": _CACHE_BYTES / 2**30,
                "fsync_ms": round(fsync_ms(), 3),
                "shared": "server, workers and clients run on the same cores",
            }
            yield cls(mongo.uri, int(status["pid"]), setup)

    @asynccontextmanager
    async def database(self) -> AsyncIterator[Database]:
        """A fresh one, dropped afterwards."""
        async with AsyncMongoClient[Any](self.uri) as client:
            name = f"bench_{secrets.token_hex(4)}"
            store = MongoStore(client[name])
            await store.schema.apply()
            await store.ready()
            try:
                yield Database(name, store, client[name])
            finally:
                await client.drop_database(name)
