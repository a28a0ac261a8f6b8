"""The command line: run a worker, look at runs, move them on, look after keys, check and apply the schema.

stdout is data, stderr is talk. Exit codes: 0 done, 1 refused or not as it should be, 2 wrong usage, 3 the database
cannot be reached. `--json` prints one JSON document per line of the table it replaces.

One module per subject, with its commands' words and what they do side by side: `working`, `looking`, `moving`, `keys`,
`schema`. They share `words` (options), `opening` (the store, the keyring, `module:attribute`) and `printing`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from sagas.cli import keys, looking, moving, schema, working
from sagas.cli.printing import DONE, REFUSED, UNREACHABLE, USAGE
from sagas.cli.words import Usage, database_words
from sagas.errors import InvalidInput, SagaError, StoreUnavailable
from sagas_store.errors import NoConnection

__all__ = ["build_parser", "main"]


def build_parser() -> argparse.ArgumentParser:
    """Every command and option there is; the docs are checked against it."""
    parser = argparse.ArgumentParser(prog="sagas", description="Durable sagas on MongoDB.")
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
    except (Usage, InvalidInput, NoConnection) as error:
        print(f"sagas {options.command}: {error}", file=sys.stderr)
        return USAGE
    except StoreUnavailable as error:
        print(f"sagas {options.command}: {error}", file=sys.stderr)
        return UNREACHABLE
    except SagaError as error:
        print(f"sagas {options.command}: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough; nor is anything left to be flushed at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
