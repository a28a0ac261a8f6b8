"""What the matrices share."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sagas import Keyring, LocalKeyWrapper
from sagas_store import MongoStore
from tests.support.crashing import Server


@pytest.fixture
async def server(request: pytest.FixtureRequest, database: Any, store: MongoStore) -> AsyncIterator[Server]:
    """Where a test asks for "sealed", each process has a keyring of its own, whose trips are points like all others."""
    server = Server(database, store)
    if getattr(request, "param", "unsealed") == "sealed":
        wrapper = LocalKeyWrapper({"test": bytes(32)})
        sealed = MongoStore(database, keyring=Keyring(wrapper))
        await sealed.ready()
        server = Server(database, sealed, wrapper=wrapper)
    await server.ready()
    yield server
    server.close()


@pytest.fixture(scope="module")
def seed() -> int:
    """Printed, so that a failure can be replayed with SAGAS_SEED."""
    return int(os.environ.get("SAGAS_SEED") or secrets.randbelow(2**32))
