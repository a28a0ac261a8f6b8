"""`sagas schema`: check, plan or apply the database schema."""

from __future__ import annotations

import argparse
import json
import sys

from sagas.cli.printing import DONE, REFUSED
from sagas.cli.words import Commands, Parser
from sagas_store.connect import connected

__all__ = ["add"]


def add(commands: Commands, database: Parser) -> None:
    """The command on the schema."""
    schema = commands.add_parser("schema", parents=[database], help="check, plan or apply the database schema")
    schema.add_argument("verb", choices=("check", "plan", "apply"))
    schema.set_defaults(act=_schema)


async def _schema(options: argparse.Namespace) -> int:
    async with connected(options.uri, options.database) as store:
        done = await (store.schema.apply() if options.verb == "apply" else store.schema.plan())
    for line in done:
        print(json.dumps({"step": line}) if options.json else line)
    if options.verb == "check" and done:
        print("the schema differs; apply it: sagas schema apply", file=sys.stderr)
        return REFUSED
    if not done:
        print("the schema is as it should be", file=sys.stderr)
    return DONE
