"""The words of the command line that several commands share."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path
from typing import Any

__all__ = ["Commands", "Usage", "bulk_words", "database_words", "person_words"]


Commands = Any
"""What argparse calls subparsers, and does not name."""


class Usage(Exception):
    """The words of the command are wrong; the message says how."""


def database_words() -> argparse.ArgumentParser:
    """Where the database is, and what opens its payloads."""
    words = argparse.ArgumentParser(add_help=False)
    words.add_argument("--uri", help="MongoDB connection string; default: $SAGAS_MONGODB_URI")
    words.add_argument("--database", help="database name; default: $SAGAS_DATABASE, else 'sagas'")
    words.add_argument("--json", action="store_true", help="print JSON, one object a line")
    keys = words.add_mutually_exclusive_group()
    keys.add_argument("--keyring", metavar="MODULE:ATTRIBUTE", help="a Keyring, or a function that returns one")
    keys.add_argument(
        "--master-keys",
        metavar="FILE",
        type=Path,
        help="a file of local master keys; default: the keys in $SAGAS_MASTER_KEYS, else nothing is opened or sealed",
    )
    return words


def person_words() -> argparse.ArgumentParser:
    """Who acts, and why."""
    words = argparse.ArgumentParser(add_help=False)
    words.add_argument("--by", required=True, help="who asks; recorded")
    words.add_argument("--reason", required=True, help="why; recorded")
    return words


def bulk_words() -> argparse.ArgumentParser:
    """Which runs a verb for many means."""
    words = argparse.ArgumentParser(add_help=False)
    words.add_argument("--saga", help="only runs of this saga")
    words.add_argument("--tenant", help="only runs of this tenant")
    words.add_argument("--key-prefix", help="only runs whose key begins so")
    words.add_argument("--started-before", type=datetime.fromisoformat, help="only runs started before (ISO 8601)")
    words.add_argument("--limit", type=int, default=100_000, help="at most this many; default: 100000")
    words.add_argument("--dry-run", action="store_true", help="say what would be done, do nothing")
    return words
