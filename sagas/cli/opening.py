"""What a command works with: the store that its options lead to, the keyring, and what `module:attribute` names."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

from sagas.choosing import check_run_id
from sagas.cli.printing import one_line
from sagas.cli.words import Usage
from sagas.client import Client
from sagas.errors import SagaError
from sagas.keyring import Keyring
from sagas.payload import type_name
from sagas.worker import Worker
from sagas.wrapping import LocalKeyWrapper
from sagas_store import MongoStore
from sagas_store.connect import connected

__all__ = ["TargetFailed", "called", "code_of", "named", "run_meant", "store_of"]

_MASTER_KEYS: Final = "SAGAS_MASTER_KEYS"
_BEGINNING_MIN: Final = 8
"""Of a run's id: shorter ones are no help for a person, and mean another run too soon."""
_WHOLE: Final = 32
_CANDIDATES: Final = 5


@contextlib.asynccontextmanager
async def store_of(options: argparse.Namespace, **more: Any) -> AsyncIterator[MongoStore]:
    """The store that the options lead to, with the keyring that they name."""
    async with connected(options.uri, options.database, keyring=await _keyring(options), **more) as store:
        yield store


async def run_meant(options: argparse.Namespace, store: MongoStore, client: Client) -> str:
    """The id of the run that `run_words` name. Raises Usage, RunNotFound."""
    given: str | None = options.run_id
    if (given is None) == (options.saga is None and options.key is None and options.tenant is None):
        raise Usage("which run? Its id, or else --saga and --key, with --tenant where it has one")
    if given is None:
        if options.saga is None or options.key is None:
            raise Usage("--saga and --key are given together")
        return await client.find_id(options.saga, key=options.key, tenant=options.tenant)
    if not _BEGINNING_MIN <= len(check_run_id(given)) < _WHOLE:
        return given
    await store.ready()
    found = await store.runs.beginning_with(given, limit=_CANDIDATES + 1)
    if len(found) <= 1 or given in found:
        return given if given in found or not found else found[0]
    more = " and others" if len(found) > _CANDIDATES else ""
    raise Usage(f"RUN: {given} is the beginning of several: {', '.join(found[:_CANDIDATES])}{more}")


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


class TargetFailed(Exception):
    """The code that a command was told to use has raised something of its own, which is the cause of this."""


@contextlib.contextmanager
def code_of(target: str) -> Iterator[None]:
    """Whatever that code raises is said in one line: what it is, and where. Raises TargetFailed.

    A traceback would say more, but it buries what a person has mistyped or not set; `sagas worker` shows it on request.
    """
    try:
        yield
    except (Usage, SagaError):  # say it themselves
        raise
    except Exception as error:
        frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith("<")]
        where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        raise TargetFailed(f"{target} raised {type_name(error)}: {one_line(str(error))}{where}") from error


async def called(target: str) -> Any:
    """What `module:attribute` names, called if it is a function: inside the running loop, where its clients belong."""
    found = named(target)
    if callable(found) and not isinstance(found, Worker):
        if missing := _required(found):
            raise Usage(
                f"{target} cannot be called without {', '.join(missing)}; name a function that takes no arguments"
            )
        with code_of(target):
            found = found()
            if inspect.isawaitable(found):
                found = await found
    return found


def _required(function: Callable[..., Any]) -> list[str]:
    """The arguments that it has to be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of some that are written in C nothing is known
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in optional]


def named(target: str) -> Any:
    """What `module:attribute` names, looked for in the current folder first."""
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise Usage(f"{target!r} is not of the form module:attribute, for instance shop.worker:make_worker")
    sys.path.insert(0, str(Path.cwd()))
    with code_of(target):
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module is there, and something that it imports is not
            raise Usage(f"no module {module_name!r} can be imported from here ({Path.cwd()})") from None
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise Usage(f"module {module_name!r} has no {attribute!r}")
        found = getattr(found, name)
    return found
