"""A server of this suite's own, so that no fail point can ever hit anybody else's test."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from sagas_store import MongoStore
from sagas_store.embedded import EmbeddedMongo


@pytest.fixture(scope="package")
def faulty_mongo() -> Iterator[EmbeddedMongo]:
    with EmbeddedMongo.start(parameters={"enableTestCommands": "1"}) as mongo:
        yield mongo


@pytest.fixture(scope="package")
def database_name(faulty_mongo: EmbeddedMongo) -> str:
    """A database with the schema in it."""
    name = f"faults_{secrets.token_hex(4)}"

    async def apply() -> None:
        async with AsyncMongoClient[Any](faulty_mongo.uri) as client:
            await MongoStore(client[name]).schema.apply()
            await client[name].create_collection("effects")

    asyncio.run(apply())
    return name


@pytest.fixture
async def healthy(faulty_mongo: EmbeddedMongo, database_name: str) -> AsyncIterator[Any]:
    """The suite's one database through a client that no fail point hits; emptied after each test."""
    async with AsyncMongoClient[Any](faulty_mongo.uri) as client:
        database = client[database_name]
        yield database
        for name in ("sagas.runs", "sagas.journal", "effects"):
            await database[name].delete_many({})
