"""The commands that read: list runs, show one, count what is held. None but `context` prints a payload."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

from sagas.choosing import GROUPS
from sagas.cli.opening import run_meant, store_of
from sagas.cli.printing import DONE, harmless, one_line, plain, table, time, to_json
from sagas.cli.words import Commands, Parser, run_words
from sagas.client import Client
from sagas.operator import Operator
from sagas.shown import JournalLine, RunInfo
from sagas_store.records import HeldGroup
from sagas_store.states import HELD, State

__all__ = ["add"]

_NAMES: Final = [state.value for state in State]
_RUN_COLUMNS: Final = ("run", "saga", "tenant", "key", "state", "phase", "attempts", "created", "reason")
_ENTRY_COLUMNS: Final = ("seq", "at", "kind", "step", "try", "attempt", "next", "note")
_HELD_COLUMNS: Final = ("state", "tenant", "key", "failure", "count", "since")


def add(commands: Commands, database: Parser) -> None:
    """The commands that look at runs."""
    runs = commands.add_parser("runs", parents=[database], help="list runs, newest first")
    runs.add_argument("--state", action="append", choices=[*_NAMES, *GROUPS], help="may be repeated")
    runs.add_argument("--saga", help="only runs of this saga")
    runs.add_argument("--tenant", help="only runs of this tenant")
    runs.add_argument("--limit", type=int, default=50, help="at most this many; default: 50")
    runs.add_argument("--after", help="continue after the page that printed this cursor")
    runs.set_defaults(act=_runs)

    which = run_words()
    show = commands.add_parser("show", parents=[database, which], help="one run and its journal, without its contexts")
    show.add_argument("--traceback", action="store_true", help="with the traceback of each failed try")
    show.set_defaults(act=_show)

    context = commands.add_parser(
        "context", parents=[database, which], help="a run's newest context, as JSON: prints its payload"
    )
    context.set_defaults(act=_context)

    held = commands.add_parser("held", parents=[database], help="count held runs, and those that do not open")
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
            state=options.state,
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


async def _show(options: argparse.Namespace) -> int:
    async with store_of(options) as store, Client(store) as client:
        run_id = await run_meant(options, store, client)
        run = await client.get(run_id)
        journal = await client.journal(run_id)
    if options.json:
        lines = [_entry(line, with_traceback=options.traceback) for line in journal]
        print(json.dumps({"run": asdict(run), "journal": lines}, default=plain))
        return DONE
    for name, value in asdict(run).items():
        if value is not None:
            print(f"{name:<15} {plain(value) if isinstance(value, datetime) else one_line(str(value))}")
    print()
    print(table(_ENTRY_COLUMNS, [_entry_row(line) for line in journal]))
    for line in journal:
        if options.traceback and line.error is not None:
            print(f"\nentry {line.seq}, {line.step}:\n{harmless(line.error.traceback.rstrip())}")
    return DONE


async def _context(options: argparse.Namespace) -> int:
    async with store_of(options) as store, Client(store) as client:
        context = await client.context(await run_meant(options, store, client))
    # One line with --json as always; else for whoever reads it, or corrects it for a verdict.
    print(json.dumps(context) if options.json else json.dumps(context, indent=2, ensure_ascii=False))
    return DONE


async def _held(options: argparse.Namespace) -> int:
    async with store_of(options) as store:
        operator = Operator(store)
        states = HELD if options.state is None else options.state
        groups = await operator.list_held(status=states, tenant=options.tenant)
        # They are not held yet, and wait for the same: somebody has to bring a key back.
        waiting = await operator.list_blocked(tenant=options.tenant) if options.state is None else []
    if options.json:
        for group in [*groups, *waiting]:
            print(to_json(group))
        return DONE
    print(table(_HELD_COLUMNS, [_held_row(group) for group in groups]))
    if waiting:
        print("\nnot held, on hold until their payloads open:")
        print(table(_HELD_COLUMNS, [_held_row(group) for group in waiting]))
    return DONE


def _held_row(group: HeldGroup) -> tuple[Any, ...]:
    return (group.state, group.tenant or "", group.key_id or "", group.failure or "", group.count, time(group.since))


def _run_row(run: RunInfo) -> tuple[Any, ...]:
    blocked = f"on hold, {run.blocked_by}: {run.blocked_why}" if run.blocked_by is not None else ""
    return (
        run.run_id, f"{run.saga}@{run.version}", run.tenant or "", run.key or "", run.state, run.phase or "",
        run.attempts, time(run.created_at), one_line(run.held_reason or blocked),
    )  # fmt: skip


def _entry_row(line: JournalLine) -> tuple[Any, ...]:
    notes = [
        one_line(f"{line.error.type}: {line.error.message}") if line.error else "",
        "(in doubt)" if line.in_doubt else "",
        f"by {line.by}" + (f": {one_line(line.reason)}" if line.reason is not None else "")
        if line.by is not None
        else "",
        f"({line.unopened})" if line.unopened is not None else "",
    ]
    at = f"{line.at:%Y-%m-%d %H:%M:%S.%f}"[:-3] + "Z"
    return (
        line.seq, at, line.kind, line.step or "", line.try_number or "", line.attempt, line.next or "",
        " ".join(note for note in notes if note),
    )  # fmt: skip


def _entry(line: JournalLine, *, with_traceback: bool) -> dict[str, Any]:
    shown = asdict(line)
    if shown["error"] is not None and not with_traceback:
        del shown["error"]["traceback"]
    return shown
