"""The commands that read: list runs, show one, count what is held. None of them prints a payload."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

from sagas.cli.opening import store_of
from sagas.cli.printing import DONE, plain, table, time, to_json
from sagas.cli.words import Commands, Parser
from sagas.client import Client, JournalLine, RunInfo
from sagas.operator import Operator
from sagas_store.runs import HeldGroup
from sagas_store.states import HELD, OPEN, SETTLED, State

__all__ = ["add"]

_NAMES: Final = [state.value for state in State]
_GROUPS: Final = {"held": HELD, "open": OPEN, "settled": SETTLED}
_RUN_COLUMNS: Final = ("run", "saga", "tenant", "key", "state", "phase", "attempts", "created", "reason")
_ENTRY_COLUMNS: Final = ("seq", "at", "kind", "step", "try", "attempt", "next", "note")
_HELD_COLUMNS: Final = ("state", "tenant", "key", "failure", "count", "since")


def add(commands: Commands, database: Parser) -> None:
    """The commands that look at runs."""
    runs = commands.add_parser("runs", parents=[database], help="list runs, newest first")
    runs.add_argument("--state", action="append", choices=[*_NAMES, *_GROUPS], help="may be repeated")
    runs.add_argument("--saga", help="only runs of this saga")
    runs.add_argument("--tenant", help="only runs of this tenant")
    runs.add_argument("--limit", type=int, default=50, help="at most this many; default: 50")
    runs.add_argument("--after", help="continue after the page that printed this cursor")
    runs.set_defaults(act=_runs)

    show = commands.add_parser("show", parents=[database], help="one run and its journal, without payloads")
    show.add_argument("run_id", metavar="RUN")
    show.set_defaults(act=_show)

    held = commands.add_parser("held", parents=[database], help="count held runs by state, tenant, key and failure")
    held.add_argument(
        "--state",
        action="append",
        choices=[name for name in _NAMES if name in HELD],
        help="may be repeated; default: all of them",
    )
    held.add_argument("--tenant", help="only runs of this tenant")
    held.set_defaults(act=_held)


async def _runs(options: argparse.Namespace) -> int:
    async with store_of(options) as store, Client(store) as client:
        page = await client.runs(
            state=_states(options.state),
            tenant=options.tenant,
            saga=options.saga,
            after=options.after,
            limit=options.limit,
            open_keys=store.keyring is not None,
        )
    if options.json:
        for run in page.runs:
            print(to_json(run))
    else:
        print(table(_RUN_COLUMNS, [_run_row(run) for run in page.runs]))
    if page.next is not None:
        print(f"more: --after {page.next}", file=sys.stderr)
    return DONE


def _states(names: list[str] | None) -> list[State] | None:
    if names is None:
        return None
    return sorted({state for name in names for state in _GROUPS.get(name) or {State(name)}})


async def _show(options: argparse.Namespace) -> int:
    async with store_of(options) as store, Client(store) as client:
        run = await client.get(options.run_id)
        journal = await client.journal(options.run_id)
    if options.json:
        print(json.dumps({"run": asdict(run), "journal": [_entry(line) for line in journal]}, default=plain))
        return DONE
    for name, value in asdict(run).items():
        if value is not None:
            print(f"{name:<15} {plain(value) if isinstance(value, datetime) else value}")
    print()
    print(table(_ENTRY_COLUMNS, [_entry_row(line) for line in journal]))
    return DONE


async def _held(options: argparse.Namespace) -> int:
    async with store_of(options) as store:
        states = HELD if options.state is None else [State(name) for name in options.state]
        groups = await Operator(store).list_held(status=states, tenant=options.tenant)
    if options.json:
        for group in groups:
            print(to_json(group))
    else:
        print(table(_HELD_COLUMNS, [_held_row(group) for group in groups]))
    return DONE


def _held_row(group: HeldGroup) -> tuple[Any, ...]:
    return (group.state, group.tenant or "", group.key_id or "", group.failure or "", group.count, time(group.since))


def _run_row(run: RunInfo) -> tuple[Any, ...]:
    blocked = f"on hold, {run.blocked_by}: {run.blocked_why}" if run.blocked_by is not None else ""
    return (
        run.run_id, f"{run.saga}@{run.version}", run.tenant or "", run.key or "", run.state, run.phase, run.attempts,
        f"{run.created_at:%Y-%m-%d %H:%M:%S}", run.held_reason or blocked,
    )  # fmt: skip


def _entry_row(line: JournalLine) -> tuple[Any, ...]:
    notes = [
        line.error.type if line.error else "",
        "(in doubt)" if line.in_doubt else "",
        f"by {line.by}" + (f": {line.reason}" if line.reason is not None else "") if line.by is not None else "",
        f"({line.unopened})" if line.unopened is not None else "",
    ]
    return (
        line.seq, f"{line.at:%H:%M:%S.%f}"[:-3], line.kind, line.step or "", line.try_number or "", line.attempt,
        line.next or "", " ".join(note for note in notes if note),
    )  # fmt: skip


def _entry(line: JournalLine) -> dict[str, Any]:
    """An entry without what a step's exception said: that may quote a payload."""
    return {**asdict(line), "error": line.error.type if line.error else None}
