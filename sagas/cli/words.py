"""The words of the command line that several commands share."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path
from typing import Any

__all__ = ["Commands", "Parser", "Usage", "bulk_words", "chosen", "database_words", "file", "person_words", "run_words"]

Commands = Any
"""What argparse calls subparsers, and does not name."""


class Usage(Exception):
    """The words of the command are wrong; the message says how."""


class Parser(argparse.ArgumentParser):
    """A parser that guesses nothing; it and those of its commands, which argparse makes of the same class.

    No option may be abbreviated: `--key` would be taken for `--keyring`, and a script's short form would mean another
    option as soon as there is one. No value may be empty: that is a variable of the shell that is not set, and
    `--database ""` must not lead to the database that is used where none is named.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **more})
        self.register("type", None, _given)

    def add_subparsers(self, **more: Any) -> Any:
        """Its commands, each of which looks at its own words."""
        commands = super().add_subparsers(**more)
        commands.type = str
        return commands


def _given(text: str) -> str:
    """The text, for arguments of no other type."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty; is a variable not set?")
    return text


def file(text: str) -> Path:
    """A file's path."""
    return Path(_given(text))


def instant(text: str) -> datetime:
    """A time with its zone."""
    try:
        at = datetime.fromisoformat(_given(text))
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time with a time zone, for instance 2026-01-31T00:00:00+00:00"
        )
    return at


def database_words() -> Parser:
    """Where the database is, and what opens its payloads."""
    words = Parser(add_help=False)
    words.add_argument("--uri", help="MongoDB connection string; default: $SAGAS_MONGODB_URI")
    words.add_argument("--database", help="database name; default: $SAGAS_DATABASE, else 'sagas'")
    words.add_argument("--json", action="store_true", help="print JSON, one object a line")
    keys = words.add_mutually_exclusive_group()
    keys.add_argument("--keyring", metavar="MODULE:ATTRIBUTE", help="a Keyring, or a function that returns one")
    keys.add_argument(
        "--master-keys",
        metavar="FILE",
        type=file,
        help="a file of local master keys; default: the keys in $SAGAS_MASTER_KEYS, else nothing is opened or sealed",
    )
    return words


def run_words() -> Parser:
    """Which run a command that only reads is about; `opening.run_meant` finds it. Whoever acts gives the whole id."""
    words = Parser(add_help=False)
    words.add_argument(
        "run_id", metavar="RUN", nargs="?", help="the run's id, or its beginning: eight characters or more"
    )
    words.add_argument("--saga", help="in place of RUN, with --key: the saga's name")
    words.add_argument("--key", help="the idempotency key that the run was started with")
    words.add_argument("--tenant", help="with --key: the run's tenant; default: a run without a tenant")
    return words


def person_words() -> Parser:
    """Who acts, and why."""
    words = Parser(add_help=False)
    words.add_argument("--by", required=True, help="who asks; recorded")
    words.add_argument("--reason", required=True, help="why; recorded")
    return words


def bulk_words() -> Parser:
    """Which runs a verb for many means; `chosen` reads them."""
    words = Parser(add_help=False)
    words.add_argument("--saga", help="only runs of this saga")
    words.add_argument("--tenant", help="only runs of this tenant")
    words.add_argument("--key-prefix", help="only runs whose key begins so")
    words.add_argument("--started-before", type=instant, metavar="TIME", help="only runs started before (ISO 8601)")
    words.add_argument("--all", action="store_true", help="all runs to which the verb applies, whatever they are")
    words.add_argument("--limit", type=int, default=100_000, help="at most this many; default: 100000")
    words.add_argument("--dry-run", action="store_true", help="say what would be done, do nothing")
    return words


def chosen(options: argparse.Namespace) -> dict[str, Any]:
    """What `bulk_words` chose. Raises Usage for every run there is, unless that was said."""
    filters = {name: getattr(options, name) for name in ("saga", "tenant", "key_prefix", "started_before")}
    narrowed = any(value is not None for value in filters.values())
    if narrowed == options.all:
        raise Usage(
            "--all or what narrows it: not both"
            if narrowed
            else "which runs? --saga, --tenant, --key-prefix or --started-before, or all of them: --all"
        )
    return {**filters, "limit": options.limit, "dry_run": options.dry_run}
