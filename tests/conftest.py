"""Fixtures that every test may use: a real MongoDB, a database of its own per test, a store on either driver."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import settings
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient

from sagas_store import MongoStore
from sagas_store.embedded import EmbeddedMongo
from tests.support.ticks import stretch_as_asked

DRIVERS = ("pymongo", "motor")

# Hypothesis prints how to reproduce a failure, also in CI, where it would otherwise stop drawing at random.
settings.register_profile("sagas", print_blob=True, derandomize=False, deadline=None)
settings.load_profile("sagas")

stretch_as_asked()

# A shell that is no terminal starts what it puts in the background deaf to SIGINT, and a child inherits that: then no
# process of these tests could be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def mongo_uri() -> Iterator[str]:
    """A replica set with test commands on: SAGAS_MONGODB_URI, else an embedded one for the session."""
    if uri := os.environ.get("SAGAS_MONGODB_URI"):
        yield uri
        return
    with EmbeddedMongo.start(parameters={"enableTestCommands": "1"}) as mongo:
        yield mongo.uri


@pytest.fixture
def driver() -> str:
    """Which driver `database` uses. For both: `pytestmark = pytest.mark.parametrize("driver", DRIVERS)`."""
    return "pymongo"


@pytest.fixture
async def database(mongo_uri: str, driver: str) -> AsyncIterator[Any]:
    """An empty database, dropped afterwards."""
    client: Any = AsyncMongoClient(mongo_uri) if driver == "pymongo" else AsyncIOMotorClient(mongo_uri)
    name = f"test_{secrets.token_hex(6)}"
    try:
        yield client[name]
        await client.drop_database(name)
    finally:
        closing = client.close()
        if closing is not None:
            await closing


@pytest.fixture
async def store(database: Any) -> MongoStore:
    """A store with its schema applied and its clock read."""
    store = MongoStore(database)
    await store.schema.apply()
    await store.ready()
    return store
