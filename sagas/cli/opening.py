"""What a command works with: the store that its options lead to, the keyring, and what `module:attribute` names."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from sagas.cli.words import Usage
from sagas.keyring import Keyring
from sagas.worker import Worker
from sagas.wrapping import LocalKeyWrapper
from sagas_store import MongoStore
from sagas_store.connect import connected

__all__ = ["called", "named", "store_of"]

_MASTER_KEYS: Final = "SAGAS_MASTER_KEYS"


@contextlib.asynccontextmanager
async def store_of(options: argparse.Namespace, **more: Any) -> AsyncIterator[MongoStore]:
    """The store that the options lead to, with the keyring that they name."""
    async with connected(options.uri, options.database, keyring=await _keyring(options), **more) as store:
        yield store


async def _keyring(options: argparse.Namespace) -> Keyring | None:
    if options.keyring is not None:
        made = await called(options.keyring)
        if not isinstance(made, Keyring):
            raise Usage(f"{options.keyring} is {type(made).__name__}, not a Keyring")
        return made
    # None is made by accident: a tenant's keys are its application's to make, or asked for with `keys create`.
    if options.master_keys is not None:
        return Keyring(LocalKeyWrapper.from_file(options.master_keys), create_on_first_use=False)
    if os.environ.get(_MASTER_KEYS):
        return Keyring(LocalKeyWrapper.from_env(_MASTER_KEYS), create_on_first_use=False)
    return None


async def called(target: str) -> Any:
    """What `module:attribute` names, called if it is a function: inside the running loop, where its clients belong."""
    found = named(target)
    if callable(found) and not isinstance(found, Worker):
        found = found()
        if inspect.isawaitable(found):
            found = await found
    return found


def named(target: str) -> Any:
    """What `module:attribute` names, looked for in the current folder first."""
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise Usage(f"{target!r} is not of the form module:attribute, for instance shop.worker:make_worker")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not: its traceback says more than we can
        raise Usage(f"no module {module_name!r} can be imported from here ({Path.cwd()})") from None
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise Usage(f"module {module_name!r} has no {attribute!r}")
        found = getattr(found, name)
    return found
