"""Fixtures of the process tests; no worker process outlives its test."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sagas import Client
from sagas_store import MongoStore
from tests.process.fleet import Workers


@pytest.fixture
def workers(mongo_uri: str, database: Any, store: MongoStore, tmp_path: Path) -> Iterator[Workers]:
    """Worker processes on this test's database."""
    workers = Workers(mongo_uri, database.name, tmp_path)
    yield workers
    workers.end()


@pytest.fixture
async def client(store: MongoStore) -> AsyncIterator[Client]:
    async with Client(store) as client:
        yield client


@pytest.fixture
def rng() -> random.Random:
    """Chance, printed so that a failure can be replayed with SAGAS_SEED."""
    seed = int(os.environ.get("SAGAS_SEED") or secrets.randbelow(2**32))
    print(f"SAGAS_SEED={seed}")
    return random.Random(seed)
