"""The command line: run a worker, look at runs, check and apply the schema.

stdout is data, stderr is talk. Exit codes: 0 done, 1 refused or not as it should be, 2 wrong usage, 3 the database
cannot be reached. `--json` prints one JSON document per line of the table it replaces.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, is_dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import structlog

from sagas.client import Client, JournalLine, RunInfo
from sagas.definition import Fate, Saga
from sagas.errors import InvalidInput, SagaError, StoreUnavailable
from sagas.operator import Operator
from sagas.stopping import StopOutcome
from sagas.tenant_worker import TenantWorker
from sagas.worker import Worker
from sagas_store.connect import connected
from sagas_store.errors import NoConnection
from sagas_store.states import HELD, OPEN, SETTLED, State

__all__ = ["build_parser", "main"]

DONE: Final = 0
REFUSED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3

_VERBS: Final = {
    "resume": "let a held run go on",
    "retry-now": "cut a parked run's wait short",
    "restart": "start an undone run anew, as a new run",
}
_BUILDING: Final = timedelta(minutes=30)
"""How long the server may take for an index of a large collection, once it is known to be there."""
_GROUPS: Final = {"held": HELD, "open": OPEN, "settled": SETTLED}


class _Usage(Exception):
    """The words of the command are wrong; the message says how."""


def build_parser() -> argparse.ArgumentParser:
    """Every command and option there is; the docs are checked against it."""
    parser = argparse.ArgumentParser(prog="sagas", description="Durable sagas on MongoDB.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    worker = commands.add_parser("worker", help="run a worker until SIGTERM or SIGINT")
    worker.add_argument(
        "target",
        metavar="MODULE:ATTRIBUTE",
        help="a Worker or TenantWorker; or a function, async or not, that returns one; or an async context manager",
    )
    worker.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="default: info"
    )
    worker.add_argument("--log-json", action="store_true", help="one JSON object per log line")
    worker.set_defaults(act=_worker)

    database = argparse.ArgumentParser(add_help=False)
    database.add_argument("--uri", help="MongoDB connection string; default: $SAGAS_MONGODB_URI")
    database.add_argument("--database", help="database name; default: $SAGAS_DATABASE, else 'sagas'")
    database.add_argument("--json", action="store_true", help="print JSON, one object a line")

    runs = commands.add_parser("runs", parents=[database], help="list runs, newest first")
    runs.add_argument("--state", action="append", choices=[*State, *_GROUPS], help="may be repeated")
    runs.add_argument("--saga", help="only runs of this saga")
    runs.add_argument("--limit", type=int, default=50, help="at most this many; default: 50")
    runs.add_argument("--after", help="continue after the page that printed this cursor")
    runs.set_defaults(act=_runs)

    show = commands.add_parser("show", parents=[database], help="one run and its journal, without payloads")
    show.add_argument("run_id", metavar="RUN")
    show.set_defaults(act=_show)

    _add_interventions(commands, database)

    schema = commands.add_parser("schema", parents=[database], help="check, plan or apply the database schema")
    schema.add_argument("verb", choices=("check", "plan", "apply"))
    schema.set_defaults(act=_schema)
    return parser


def _add_interventions(commands: Any, database: argparse.ArgumentParser) -> None:
    """The verbs by which a person moves a run on; each names who and why."""
    person = argparse.ArgumentParser(add_help=False)
    person.add_argument("--by", required=True, help="who asks; recorded")
    person.add_argument("--reason", required=True, help="why; recorded")
    bulk = argparse.ArgumentParser(add_help=False)
    bulk.add_argument("--saga", help="only runs of this saga")
    bulk.add_argument("--key-prefix", help="only runs whose key begins so")
    bulk.add_argument("--started-before", type=datetime.fromisoformat, help="only runs started before (ISO 8601)")
    bulk.add_argument("--limit", type=int, default=100_000, help="at most this many; default: 100000")
    bulk.add_argument("--dry-run", action="store_true", help="say what would be done, do nothing")

    stop = commands.add_parser("stop", parents=[database, person], help="press Stop; the answer is final")
    stop.add_argument("run_id", metavar="RUN")
    stop.set_defaults(act=_stop)

    preview = commands.add_parser("preview-stop", parents=[database], help="what a stop would do now; only reads")
    preview.add_argument("run_id", metavar="RUN")
    preview.set_defaults(act=_preview_stop)

    stop_many = commands.add_parser(
        "stop-many", parents=[database, person, bulk], help="press Stop on all runs that fit"
    )
    stop_many.set_defaults(act=_stop_many)

    for verb, what in _VERBS.items():
        one = commands.add_parser(verb, parents=[database, person], help=what)
        one.add_argument("run_id", metavar="RUN")
        one.set_defaults(act=_intervene)
        many = commands.add_parser(f"{verb}-many", parents=[database, person, bulk], help=f"{what}: all runs that fit")
        many.set_defaults(act=_intervene_many)

    verdict = commands.add_parser("verdict", parents=[database, person], help="say whether an in-doubt pivot happened")
    verdict.add_argument("run_id", metavar="RUN")
    verdict.add_argument("--saga", required=True, metavar="MODULE:ATTRIBUTE", help="the saga's definition")
    outcome = verdict.add_mutually_exclusive_group(required=True)
    outcome.add_argument(
        "--happened", metavar="FILE", type=Path, help="it did; FILE is the context it produced, as JSON"
    )
    outcome.add_argument("--did-not-happen", action="store_true", help="it did not; everything is undone")
    verdict.set_defaults(act=_verdict)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    options = build_parser().parse_args(arguments)
    act: Callable[[argparse.Namespace], Coroutine[Any, Any, int]] = options.act
    try:
        return asyncio.run(act(options))
    except (_Usage, InvalidInput, NoConnection) as error:
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


# ---------------------------------------------------------------------------------------------- worker


async def _worker(options: argparse.Namespace) -> int:
    _configure_logs(options.log_level, as_json=options.log_json)
    made = await _load(options.target)
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(made) if isinstance(made, AbstractAsyncContextManager) else made
        if not isinstance(worker, Worker | TenantWorker):
            raise _Usage(f"{options.target} is {type(worker).__name__}, not a Worker")
        spare_collector()
        await worker.run()
        if worker.left_behind:
            # A step that swallows its cancellation, or a thread, would keep the process for ever. Its run's lease
            # lapses, and whatever it still does is in doubt already.
            print(f"sagas worker: leaving {worker.left_behind} steps that do not end", file=sys.stderr, flush=True)
            os._exit(DONE)
    return DONE


def spare_collector() -> None:
    """Let Python's cycle collector look less often, and never again at what was imported; for a worker's own process.

    A worker makes many objects that live for a step and hardly any cycles, while hundreds of runs in flight are much
    to look through: it is a tenth of the engine's time otherwise.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


async def _load(target: str) -> Any:
    """What `module:attribute` names, called if it is a function: inside the running loop, where its clients belong."""
    found = _import(target)
    if callable(found) and not isinstance(found, Worker):
        found = found()
        if inspect.isawaitable(found):
            found = await found
    return found


def _import(target: str) -> Any:
    """What `module:attribute` names, looked for in the current folder first."""
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise _Usage(f"{target!r} is not of the form module:attribute, for instance shop.worker:make_worker")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not: its traceback says more than we can
        raise _Usage(f"no module {module_name!r} can be imported from here ({Path.cwd()})") from None
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise _Usage(f"module {module_name!r} has no {attribute!r}")
        found = getattr(found, name)
    return found


def _configure_logs(level: str, *, as_json: bool) -> None:
    last: Any = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


# ---------------------------------------------------------------------------------------------- reading


async def _runs(options: argparse.Namespace) -> int:
    async with connected(options.uri, options.database) as store, Client(store) as client:
        page = await client.runs(
            state=_states(options.state), saga=options.saga, after=options.after, limit=options.limit
        )
    if options.json:
        for run in page.runs:
            print(_json(run))
    else:
        print(_table(_RUN_COLUMNS, [_run_row(run) for run in page.runs]))
    if page.next is not None:
        print(f"more: --after {page.next}", file=sys.stderr)
    return DONE


def _states(names: list[str] | None) -> list[State] | None:
    if names is None:
        return None
    return sorted({state for name in names for state in _GROUPS.get(name) or {State(name)}})


async def _show(options: argparse.Namespace) -> int:
    async with connected(options.uri, options.database) as store, Client(store) as client:
        run = await client.get(options.run_id)
        journal = await client.journal(options.run_id)
    if options.json:
        print(json.dumps({"run": asdict(run), "journal": [_entry(line) for line in journal]}, default=_plain))
        return DONE
    for name, value in asdict(run).items():
        if value is not None:
            print(f"{name:<15} {_plain(value) if isinstance(value, datetime) else value}")
    print()
    print(_table(_ENTRY_COLUMNS, [_entry_row(line) for line in journal]))
    return DONE


async def _schema(options: argparse.Namespace) -> int:
    async with connected(options.uri, options.database) as store:
        done = await store.schema.plan()
    if done and options.verb == "apply":
        async with connected(options.uri, options.database, patience=_BUILDING) as store:
            done = await store.schema.apply()
    for line in done:
        print(json.dumps({"step": line}) if options.json else line)
    if options.verb == "check" and done:
        print("the schema differs; apply it: sagas schema apply", file=sys.stderr)
        return REFUSED
    if not done:
        print("the schema is as it should be", file=sys.stderr)
    return DONE


# ---------------------------------------------------------------------------------------------- moving runs on


async def _stop(options: argparse.Namespace) -> int:
    async with connected(options.uri, options.database) as store, Client(store) as client:
        answer = await client.stop(options.run_id, by=options.by, reason=options.reason)
    if options.json:
        print(_json(answer))
    else:
        print(f"{answer.outcome}: {answer.why}\n{answer.next}")
        if not answer.first and answer.by is not None:
            print(f"asked before, by {answer.by} at {answer.asked_at:%Y-%m-%d %H:%M:%S} UTC", file=sys.stderr)
    return DONE if answer.outcome in (StopOutcome.CANCELLED, StopOutcome.WILL_BE_UNDONE) else REFUSED


async def _preview_stop(options: argparse.Namespace) -> int:
    async with connected(options.uri, options.database) as store, Client(store) as client:
        preview = await client.preview_stop(options.run_id)
    if options.json:
        print(_json(preview))
        return DONE
    print(f"{preview.outcome}: {preview.why}")
    if preview.in_hand is not None:
        print(f"in hand: {preview.in_hand}, which would get its grace")
    for undo in preview.undo:
        print(f"undo {undo.step}" + (" (it may not have happened)" if undo.fate is Fate.IN_DOUBT else ""))
    return DONE


async def _stop_many(options: argparse.Namespace) -> int:
    async with connected(options.uri, options.database) as store, Client(store) as client:
        result = await client.stop_many(by=options.by, reason=options.reason, **_bulk(options))
    if options.json:
        print(_json(result))
    else:
        print(f"{result.count} runs" + (", nothing done (dry run)" if result.dry_run else ""))
        for outcome, ids in sorted(result.answers.items()):
            print(f"{outcome:<15} {len(ids)}")
        for run_id, why in result.failed.items():
            print(f"failed {run_id}: {why}")
    return REFUSED if result.failed else DONE


async def _intervene(options: argparse.Namespace) -> int:
    async with connected(options.uri, options.database) as store:
        operator = Operator(store)
        said: dict[str, str] = {"by": options.by, "reason": options.reason}
        match options.command:
            case "resume":
                await operator.resume(options.run_id, **said)
                done = {"run": options.run_id, "state": str(State.PENDING)}
            case "retry-now":
                await operator.retry_now(options.run_id, **said)
                done = {"run": options.run_id, "state": str(State.PENDING)}
            case _:
                new = await operator.restart_as_new(options.run_id, **said)
                done = {"run": new, "restarted_from": options.run_id}
    print(json.dumps(done) if options.json else "  ".join(f"{name} {value}" for name, value in done.items()))
    return DONE


async def _intervene_many(options: argparse.Namespace) -> int:
    async with connected(options.uri, options.database) as store:
        operator = Operator(store)
        verbs = {
            "resume-many": operator.resume_many,
            "retry-now-many": operator.retry_now_many,
            "restart-many": operator.restart_many,
        }
        result = await verbs[options.command](by=options.by, reason=options.reason, **_bulk(options))
    if options.json:
        print(_json(result))
    else:
        print(f"{len(result.done)} runs" + (", nothing done (dry run)" if result.dry_run else ""))
        for run_id, why in result.refused.items():
            print(f"refused {run_id}: {why}")
    return REFUSED if result.refused else DONE


async def _verdict(options: argparse.Namespace) -> int:
    saga = _import(options.saga)
    if not isinstance(saga, Saga):
        raise _Usage(f"{options.saga} is {type(saga).__name__}, not a Saga")
    context = None
    if options.happened is not None:
        try:
            context = saga.context.model_validate_json(options.happened.read_bytes())
        except (OSError, ValueError) as error:
            raise _Usage(f"{options.happened} is not a {saga.context.__name__}: {type(error).__name__}") from None
    async with connected(options.uri, options.database) as store:
        await Operator(store).verdict(
            saga, options.run_id, happened=context is not None, context=context, by=options.by, reason=options.reason
        )
    print(json.dumps({"run": options.run_id, "state": "pending"}) if options.json else f"run {options.run_id} goes on")
    return DONE


def _bulk(options: argparse.Namespace) -> dict[str, Any]:
    before = options.started_before
    if before is not None and before.tzinfo is None:
        raise _Usage("--started-before needs a time zone, for instance 2026-01-31T00:00:00+00:00")
    return {
        "saga": options.saga,
        "key_prefix": options.key_prefix,
        "started_before": before,
        "limit": options.limit,
        "dry_run": options.dry_run,
    }


# ---------------------------------------------------------------------------------------------- printing

_RUN_COLUMNS: Final = ("run", "saga", "key", "state", "phase", "attempts", "created", "reason")
_ENTRY_COLUMNS: Final = ("seq", "at", "kind", "step", "try", "attempt", "next", "error")


def _run_row(run: RunInfo) -> tuple[Any, ...]:
    return (
        run.run_id, f"{run.saga}@{run.version}", run.key or "", run.state, run.phase, run.attempts,
        f"{run.created_at:%Y-%m-%d %H:%M:%S}", run.held_reason or "",
    )  # fmt: skip


def _entry_row(line: JournalLine) -> tuple[Any, ...]:
    error = (line.error.type if line.error else "") + (" (in doubt)" if line.in_doubt else "")
    return (
        line.seq, f"{line.at:%H:%M:%S.%f}"[:-3], line.kind, line.step or "", line.try_number or "", line.attempt,
        line.next or "", error,
    )  # fmt: skip


def _entry(line: JournalLine) -> dict[str, Any]:
    """An entry without what a step's exception said: that may quote a payload."""
    return {**asdict(line), "error": line.error.type if line.error else None}


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, *rows]
    widths = [max(len(str(line[at])) for line in lines) for at in range(len(columns))]
    return "\n".join(
        "  ".join(f"{value!s:<{width}}" for value, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _json(value: Any) -> str:
    return json.dumps(asdict(value) if is_dataclass(value) and not isinstance(value, type) else value, default=_plain)


def _plain(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
