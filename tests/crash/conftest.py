"""What the matrices share."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sagas_store import MongoStore
from tests.support.crashing import Server


@pytest.fixture
async def server(database: Any, store: MongoStore) -> AsyncIterator[Server]:
    server = Server(database, store)
    await server.ready()
    yield server
    server.close()


@pytest.fixture(scope="module")
def seed() -> int:
    """Printed, so that a failure can be replayed with SAGAS_SEED."""
    return int(os.environ.get("SAGAS_SEED") or secrets.randbelow(2**32))
