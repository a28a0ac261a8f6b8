"""The tests of keys share one database and empty it between them: making collections is what costs a test its time."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient

from tests.sealing.deployment import Deployment


@pytest.fixture(scope="session")
def shared_database_name(mongo_uri: str) -> Iterator[str]:
    name = f"sealing_{secrets.token_hex(6)}"
    yield name
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        client.drop_database(name)


@pytest.fixture
async def database(mongo_uri: str, driver: str, shared_database_name: str) -> AsyncIterator[Any]:
    """A database whose collections, if they are there, hold nothing."""
    client: Any = AsyncMongoClient(mongo_uri) if driver == "pymongo" else AsyncIOMotorClient(mongo_uri)
    try:
        database = client[shared_database_name]
        yield database
        for name in await database.list_collection_names():
            await database[name].delete_many({})
    finally:
        closing = client.close()
        if closing is not None:
            await closing


@pytest.fixture
async def shop(database: Any) -> AsyncIterator[Deployment]:
    deployment = Deployment(database)
    await deployment.store.schema.apply()
    await deployment.store.ready()
    yield deployment
    await deployment.client.close()
