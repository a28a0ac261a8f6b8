"""The store suite shares one database and empties it between tests: making collections is what costs a test its time.

`empty_database` is for the tests of the schema itself: there nothing has been made yet.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from pymongo import MongoClient

from sagas_store import MongoStore
from tests.store.making import client_of


@pytest.fixture(scope="session")
def shared_database_name(mongo_uri: str) -> Iterator[str]:
    name = f"store_{secrets.token_hex(6)}"
    yield name
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        client.drop_database(name)


@pytest.fixture
async def database(mongo_uri: str, driver: str, shared_database_name: str) -> AsyncIterator[Any]:
    """A database whose collections hold nothing.

    They stay: a transaction that meets a collection made a moment ago is rightly told to try again, and tests that
    count how often something is tried would count that.
    """
    async with client_of(driver, mongo_uri) as client:
        database = client[shared_database_name]
        yield database
        for name in await database.list_collection_names():
            await database[name].delete_many({})


@pytest.fixture
async def empty_database(mongo_uri: str, driver: str) -> AsyncIterator[Any]:
    """A database of the test's own, with nothing in it, dropped afterwards."""
    async with client_of(driver, mongo_uri) as client:
        name = f"test_{secrets.token_hex(6)}"
        yield client[name]
        await client.drop_database(name)


@pytest.fixture(scope="session")
def applied() -> set[str]:
    """The databases that are known to have the schema."""
    return set()


@pytest.fixture
async def store(database: Any, applied: set[str]) -> MongoStore:
    """A store with its schema applied and its clock read."""
    store = MongoStore(database)
    if database.name not in applied:
        await store.schema.apply()
        await store.ready()
        applied.add(database.name)
    store._ready = True  # what was checked for the first test is not checked for each: it takes a third of its time
    await store.ready()
    return store
