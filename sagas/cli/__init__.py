"""The command line: run a worker, look at runs, move them on, look after keys, check and apply the schema.

stdout is data, stderr is talk. Exit codes: 0 done, 1 refused or not as it should be, 2 wrong usage, 3 the database
cannot be reached. `--json` prints one JSON document per line of the table it replaces.

One module per subject, with its commands' words and what they do side by side: `working`, `looking`, `moving`, `keys`,
`schema`. They share `words` (options), `opening` (the store, the keyring, `module:attribute`) and `printing`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from sagas.cli import keys, looking, moving, schema, working
from sagas.cli.opening import TargetFailed
from sagas.cli.printing import DONE, REFUSED, UNREACHABLE, USAGE
from sagas.cli.words import Parser, Usage, database_words
from sagas.errors import InvalidInput, SagaError, StoreUnavailable
from sagas_store.errors import NoConnection

__all__ = ["build_parser", "main"]

_WORDS: Final = {
    "run_id": "RUN",
    "key_id": "KEY",
    "runs": "--run",
    "tenant, runs": "--tenant, --run",
    "keyring": "--keyring, --master-keys",
}
"""Where a command has another word for an argument than the library, beside `--` and the argument's name."""


def build_parser() -> Parser:
    """Every command and option there is; the docs are checked against it."""
    parser = Parser(prog="sagas", description="Durable sagas on MongoDB.")
    parser.add_argument("--version", action="version", version=f"mongo-sagas {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    database = database_words()
    working.add(commands)
    looking.add(commands, database)
    moving.add(commands, database)
    keys.add(commands, database)
    schema.add(commands, database)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    options = build_parser().parse_args(arguments)
    act: Callable[[argparse.Namespace], Coroutine[Any, Any, int]] = options.act
    try:
        return asyncio.run(act(options))
    except (Usage, TargetFailed, SagaError) as error:
        if isinstance(error, TargetFailed) and getattr(options, "log_level", "") == "debug":
            traceback.print_exception(error.__cause__)
        words = " ".join(filter(None, (options.command, getattr(options, "verb", None))))
        print(f"sagas {words}: {_in_its_words(error, options)}", file=sys.stderr)
        return _code(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough; nor is anything left to be flushed at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def _version() -> str:
    try:
        return importlib.metadata.version("mongo-sagas")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _code(error: Exception) -> int:
    match error:
        case Usage() | InvalidInput() | NoConnection():
            return USAGE
        case StoreUnavailable():
            return UNREACHABLE
        case _:
            return REFUSED


def _in_its_words(error: Exception, options: argparse.Namespace) -> str:
    """What is wrong, by the option's name where the library says the argument's."""
    said = str(error)
    if not isinstance(error, InvalidInput) or "database" not in options:  # of a worker the arguments are in its code
        return said
    word = f"--{error.field.replace('_', '-')}" if error.field in options else error.field
    return _WORDS.get(error.field, word) + said.removeprefix(error.field)
