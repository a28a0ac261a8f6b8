"""What the snippets of the docs share: a store on the server that the environment names, with its schema applied."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sagas import Keyring, MongoStore
from sagas_store.connect import connected


@asynccontextmanager
async def new_store(keyring: Keyring | None = None) -> AsyncIterator[MongoStore]:
    """A store that is ready to use."""
    async with connected(keyring=keyring) as store:
        await store.schema.apply()
        yield store
