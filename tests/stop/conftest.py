"""Fixtures of the tests of stops and operators."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sagas import Client, MongoStore
from tests.stop.shop import Shop


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
async def client(store: MongoStore) -> AsyncIterator[Client]:
    async with Client(store) as client:
        yield client
