"""A store from a connection string, for programs that have no client of their own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Final

from pymongo import AsyncMongoClient
from pymongo.errors import InvalidName, PyMongoError

from sagas_store.errors import NoConnection
from sagas_store.store import BindsKeys, MongoStore

__all__ = ["connected"]

_PATIENCE: Final = timedelta(seconds=5)
"""A person waits for the answer."""
_SCHEMES: Final = ("mongodb://", "mongodb+srv://")


@asynccontextmanager
async def connected(
    uri: str | None = None,
    database: str | None = None,
    *,
    keyring: BindsKeys | None = None,
    patience: timedelta | float = _PATIENCE,
) -> AsyncIterator[MongoStore]:
    """A store on `uri` (default: $SAGAS_MONGODB_URI) and `database` (default: $SAGAS_DATABASE, else `sagas`).

    Raises NoConnection where either cannot be used, and where one is given and empty: that never means the default. A
    connection string is never repeated, it may hold a password.
    """
    if uri is None:
        uri = os.environ.get("SAGAS_MONGODB_URI")
    if not uri:
        raise NoConnection("no connection string: pass --uri or set SAGAS_MONGODB_URI")
    try:
        client: AsyncMongoClient[Any] = AsyncMongoClient(uri)
    except (PyMongoError, ValueError, OSError) as error:
        raise NoConnection(f"the connection string cannot be used: {_problem(uri, error)}") from None
    async with client:
        name = database if database is not None else (os.environ.get("SAGAS_DATABASE") or "sagas")
        try:
            found = client[name]
        except InvalidName as error:
            raise NoConnection(f"the database's name cannot be used: {error}") from None
        yield MongoStore(found, keyring=keyring, patience=patience, reply=patience)


def _problem(uri: str, error: Exception) -> str:
    """What is wrong with it, without a word of it, nor of the error, which may quote it."""
    if isinstance(error, OSError):
        return f"a file that it names cannot be read ({type(error).__name__})"
    if "://" in uri and not uri.startswith(_SCHEMES):
        return f"it must begin with {' or '.join(_SCHEMES)} ({type(error).__name__})"
    return (
        f"it must be like mongodb://user:password@host:27017/?replicaSet=rs0, what is special in user and password "
        f"percent-encoded ({type(error).__name__})"
    )
