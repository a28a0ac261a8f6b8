"""A store from a connection string, for programs that have no client of their own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from pymongo import AsyncMongoClient
from pymongo.errors import ConfigurationError, InvalidURI

from sagas_store.errors import StoreRefused
from sagas_store.store import MongoStore

__all__ = ["connected"]


@asynccontextmanager
async def connected(uri: str | None = None, database: str | None = None) -> AsyncIterator[MongoStore]:
    """A store on `uri` (default: $SAGAS_MONGODB_URI) and `database` (default: $SAGAS_DATABASE, else `sagas`).

    Raises StoreRefused when there is no usable connection string; its text is never repeated, it may hold a password.
    """
    uri = uri or os.environ.get("SAGAS_MONGODB_URI")
    if not uri:
        raise StoreRefused("connect", "no connection string: pass --uri or set SAGAS_MONGODB_URI")
    try:
        client: AsyncMongoClient[Any] = AsyncMongoClient(uri, serverSelectionTimeoutMS=5_000)
    except (InvalidURI, ConfigurationError, ValueError) as error:
        raise StoreRefused("connect", f"the connection string cannot be used: {type(error).__name__}") from None
    async with client:
        name = database or os.environ.get("SAGAS_DATABASE") or "sagas"
        yield MongoStore(client[name], patience=timedelta(seconds=10))
