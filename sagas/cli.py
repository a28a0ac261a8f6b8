"""The command line: run a worker, look at runs, check and apply the schema.

stdout is data, stderr is talk. Exit codes: 0 done, 1 refused or not as it should be, 2 wrong usage, 3 the database
cannot be reached. `--json` prints one JSON document per line of the table it replaces.

Longer than other modules: one program, all of whose words stand side by side; each command is a few lines.
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
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, is_dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import structlog

from sagas.client import Client, JournalLine, RunInfo
from sagas.definition import Fate, Saga
from sagas.errors import InvalidInput, SagaError, StoreUnavailable
from sagas.keykeeping import NO_TENANT, NeedingRun, Rewrap
from sagas.keyring import Keyring
from sagas.operator import BulkResult, Operator
from sagas.stopping import StopOutcome
from sagas.tenant_worker import TenantWorker
from sagas.worker import Worker
from sagas.wrapping import LocalKeyWrapper
from sagas_store import MongoStore
from sagas_store.connect import connected
from sagas_store.errors import NoConnection
from sagas_store.keys import KeyRecord
from sagas_store.records import HeldGroup
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
_REWRAPPING: Final = timedelta(seconds=90)
"""It goes on through a failover; nobody waits for the first line."""
_MASTER_KEYS: Final = "SAGAS_MASTER_KEYS"
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
    keys = database.add_mutually_exclusive_group()
    keys.add_argument("--keyring", metavar="MODULE:ATTRIBUTE", help="a Keyring, or a function that returns one")
    keys.add_argument(
        "--master-keys",
        metavar="FILE",
        type=Path,
        help="a file of local master keys; default: the keys in $SAGAS_MASTER_KEYS, else nothing is opened or sealed",
    )

    runs = commands.add_parser("runs", parents=[database], help="list runs, newest first")
    runs.add_argument("--state", action="append", choices=[*State, *_GROUPS], help="may be repeated")
    runs.add_argument("--saga", help="only runs of this saga")
    runs.add_argument("--tenant", help="only runs of this tenant")
    runs.add_argument("--limit", type=int, default=50, help="at most this many; default: 50")
    runs.add_argument("--after", help="continue after the page that printed this cursor")
    runs.set_defaults(act=_runs)

    show = commands.add_parser("show", parents=[database], help="one run and its journal, without payloads")
    show.add_argument("run_id", metavar="RUN")
    show.set_defaults(act=_show)

    _add_interventions(commands, database)
    _add_keys(commands, database)

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
    bulk.add_argument("--tenant", help="only runs of this tenant")
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

    held = commands.add_parser("held", parents=[database], help="count held runs by state, tenant, key and failure")
    held.add_argument("--state", action="append", choices=sorted(HELD), help="may be repeated; default: all of them")
    held.add_argument("--tenant", help="only runs of this tenant")
    held.set_defaults(act=_held)

    requeue = commands.add_parser(
        "requeue", parents=[database, person], help="let runs go on whose key is back, if they open"
    )
    which = requeue.add_mutually_exclusive_group()
    which.add_argument("--tenant", help="all of this tenant's that do not open")
    which.add_argument("--run", action="append", metavar="RUN", help="this run; may be repeated")
    requeue.add_argument("--dry-run", action="store_true", help="say which would open, do nothing")
    requeue.set_defaults(act=_requeue)

    verdict = commands.add_parser("verdict", parents=[database, person], help="say whether an in-doubt pivot happened")
    verdict.add_argument("run_id", metavar="RUN")
    verdict.add_argument("--saga", required=True, metavar="MODULE:ATTRIBUTE", help="the saga's definition")
    outcome = verdict.add_mutually_exclusive_group(required=True)
    outcome.add_argument(
        "--happened", metavar="FILE", type=Path, help="it did; FILE is the context it produced, as JSON"
    )
    outcome.add_argument("--did-not-happen", action="store_true", help="it did not; everything is undone")
    verdict.set_defaults(act=_verdict)


def _add_keys(commands: Any, database: argparse.ArgumentParser) -> None:
    """The verbs on tenants' keys."""
    whose = argparse.ArgumentParser(add_help=False)
    one = whose.add_mutually_exclusive_group(required=True)
    one.add_argument("--tenant", help="whose keys")
    one.add_argument("--no-tenant", action="store_true", help="those of the runs without a tenant")
    keys = commands.add_parser("keys", help="tenants' keys: make, rotate, seal anew, destroy")
    verbs = keys.add_subparsers(dest="verb", required=True, metavar="VERB")

    listed = verbs.add_parser("list", parents=[database], help="keys, their states and master keys; all tenants' too")
    among = listed.add_mutually_exclusive_group()
    among.add_argument("--tenant", help="only this tenant's")
    among.add_argument("--no-tenant", action="store_true", help="only those of the runs without a tenant")
    listed.set_defaults(act=_keys_list)

    for verb, what in {
        "create": "make a tenant's first keys, or new ones after a destruction",
        "rotate": "seal with a new key from now on",
    }.items():
        verbs.add_parser(verb, parents=[database, whose], help=what).set_defaults(act=_keys_made)

    rewrap = verbs.add_parser("rewrap", parents=[database, whose], help="seal anew what older keys have sealed")
    rewrap.set_defaults(act=_keys_rewrap)

    master = verbs.add_parser("rewrap-master", parents=[database], help="wrap all keys with the newest master key")
    master.set_defaults(act=_keys_rewrap_master)

    usage = verbs.add_parser("usage", parents=[database, whose], help="which runs need a key, and whether it may go")
    usage.add_argument("key_id", metavar="KEY")
    usage.add_argument("--runs", action="store_true", help="list the runs, too")
    usage.set_defaults(act=_keys_usage)

    discard = verbs.add_parser("discard", parents=[database, whose], help="destroy a retired key that no run needs")
    discard.add_argument("key_id", metavar="KEY")
    discard.add_argument("--confirm", required=True, metavar="KEY", help="the key's id once more")
    discard.set_defaults(act=_keys_discard)

    destroy = verbs.add_parser("destroy", parents=[database, whose], help="make all of a tenant's payloads unreadable")
    destroy.add_argument("--confirm", required=True, metavar="TENANT", help="the tenant once more, or 'no tenant'")
    destroy.set_defaults(act=_keys_destroy)


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
    except BrokenPipeError:  # whoever read the output has seen enough; nor is anything left to be flushed at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


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


# ---------------------------------------------------------------------------------------------- the database


@contextlib.asynccontextmanager
async def _store(options: argparse.Namespace, **more: Any) -> AsyncIterator[MongoStore]:
    """The store that the options lead to, with the keyring that they name."""
    async with connected(options.uri, options.database, keyring=await _keyring(options), **more) as store:
        yield store


async def _keyring(options: argparse.Namespace) -> Keyring | None:
    if options.keyring is not None:
        made = await _load(options.keyring)
        if not isinstance(made, Keyring):
            raise _Usage(f"{options.keyring} is {type(made).__name__}, not a Keyring")
        return made
    # None is made by accident: a tenant's keys are its application's to make, or asked for with `keys create`.
    if options.master_keys is not None:
        return Keyring(LocalKeyWrapper.from_file(options.master_keys), create_on_first_use=False)
    if os.environ.get(_MASTER_KEYS):
        return Keyring(LocalKeyWrapper.from_env(_MASTER_KEYS), create_on_first_use=False)
    return None


# ---------------------------------------------------------------------------------------------- reading


async def _runs(options: argparse.Namespace) -> int:
    async with _store(options) as store, Client(store) as client:
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
    async with _store(options) as store, Client(store) as client:
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
        done = await (store.schema.apply() if options.verb == "apply" else store.schema.plan())
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
    async with _store(options) as store, Client(store) as client:
        answer = await client.stop(options.run_id, by=options.by, reason=options.reason)
    if options.json:
        print(_json(answer))
    else:
        print(f"{answer.outcome}: {answer.why}\n{answer.next}")
        if not answer.first and answer.by is not None:
            print(f"asked before, by {answer.by} at {answer.asked_at:%Y-%m-%d %H:%M:%S} UTC", file=sys.stderr)
    if answer.first and answer.by is not None and answer.reason is None:
        print("it counts without its reason, which cannot be sealed without the keys: --master-keys", file=sys.stderr)
    return DONE if answer.outcome in (StopOutcome.CANCELLED, StopOutcome.WILL_BE_UNDONE) else REFUSED


async def _preview_stop(options: argparse.Namespace) -> int:
    async with _store(options) as store, Client(store) as client:
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
    async with _store(options) as store, Client(store) as client:
        result = await client.stop_many(by=options.by, reason=options.reason, **_bulk(options))
    if options.json:
        print(_json(result))
    else:
        print(_several(result.count, "run") + (", nothing done (dry run)" if result.dry_run else ""))
        for outcome, ids in sorted(result.answers.items()):
            print(f"{outcome:<15} {len(ids)}")
        for run_id, why in result.failed.items():
            print(f"failed {run_id}: {why}")
    return REFUSED if result.failed else DONE


async def _intervene(options: argparse.Namespace) -> int:
    async with _store(options) as store:
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
    async with _store(options) as store:
        operator = Operator(store)
        verbs = {
            "resume-many": operator.resume_many,
            "retry-now-many": operator.retry_now_many,
            "restart-many": operator.restart_many,
        }
        result = await verbs[options.command](by=options.by, reason=options.reason, **_bulk(options))
    return _print_bulk(result, as_json=options.json)


def _print_bulk(result: BulkResult, *, as_json: bool) -> int:
    if as_json:
        print(_json(result))
    else:
        print(_several(len(result.done), "run") + (", nothing done (dry run)" if result.dry_run else ""))
        for run_id, why in result.refused.items():
            print(f"refused {run_id}: {why}")
    return REFUSED if result.refused else DONE


async def _held(options: argparse.Namespace) -> int:
    async with _store(options) as store:
        states = HELD if options.state is None else [State(name) for name in options.state]
        groups = await Operator(store).list_held(status=states, tenant=options.tenant)
    if options.json:
        for group in groups:
            print(_json(group))
    else:
        print(_table(_HELD_COLUMNS, [_held_row(group) for group in groups]))
    return DONE


async def _requeue(options: argparse.Namespace) -> int:
    async with _store(options) as store:
        result = await Operator(store).requeue_quarantined(
            tenant=options.tenant, runs=options.run, by=options.by, reason=options.reason, dry_run=options.dry_run
        )
    return _print_bulk(result, as_json=options.json)


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
    async with _store(options) as store:
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
        "tenant": options.tenant,
        "saga": options.saga,
        "key_prefix": options.key_prefix,
        "started_before": before,
        "limit": options.limit,
        "dry_run": options.dry_run,
    }


# ---------------------------------------------------------------------------------------------- keys


async def _keys_list(options: argparse.Namespace) -> int:
    async with _store(options) as store:
        keeper = Operator(store).keys
        if options.tenant is None and not options.no_tenant:
            found = [key async for key in keeper.every()]
            found.sort(key=lambda key: (key.tenant or "", key.created_at))
        else:
            found = await keeper.of_tenant(options.tenant)
    if options.json:
        for key in found:
            print(_json(_key(key)))
    else:
        print(_table(_KEY_COLUMNS, [_key_row(key) for key in found]))
    return DONE


async def _keys_made(options: argparse.Namespace) -> int:
    async with _store(options) as store:
        keeper = Operator(store).keys
        made = await (keeper.create if options.verb == "create" else keeper.rotate)(options.tenant)
    print(json.dumps({"tenant": options.tenant, "key_id": made}) if options.json else f"key {made} seals from now on")
    return DONE


async def _keys_rewrap(options: argparse.Namespace) -> int:
    def progress(now: Rewrap) -> None:
        seen = f"{now.seen} of {_several(now.total, 'run')}"
        print(f"{seen}, {_several(now.payloads, 'payload')}, {len(now.left)} left over", file=sys.stderr)

    async with _store(options, patience=_REWRAPPING) as store:
        done = await Operator(store).keys.rewrap(options.tenant, progress=progress)
    if options.json:
        print(_json({**asdict(done), "complete": done.complete}))
    else:
        sealed_anew = _several(done.payloads, "payload")
        print(f"on key {done.key_id} alone: {_several(done.done, 'run')}; sealed anew: {sealed_anew}")
        for key_id, why in done.lost.items():
            print(f"key {key_id} cannot be had: {why}")
        for run_id, why in done.left.items():
            print(f"left over {run_id}: {why}")
    return DONE if done.complete else REFUSED


async def _keys_rewrap_master(options: argparse.Namespace) -> int:
    async with _store(options) as store:
        done = await Operator(store).keys.rewrap_master()
    if options.json:
        print(_json(done))
    else:
        print(f"{len(done.done)} keys are wrapped by the newest master key")
        for key_id, why in done.failed.items():
            print(f"left as it is {key_id}: {why}")
    return REFUSED if done.failed else DONE


async def _keys_usage(options: argparse.Namespace) -> int:
    async with _store(options) as store:
        keeper = Operator(store).keys
        usage = await keeper.usage(options.tenant, options.key_id)
        runs: list[NeedingRun] = []
        while options.runs and (
            page := await keeper.runs_needing(options.tenant, options.key_id, after=runs[-1].run_id if runs else "")
        ):
            runs += page
    if options.json:
        counted = {"open": usage.open, "held": usage.held, "settled": usage.settled, "states": usage.runs}
        said = {**_key(usage.key), **counted, "discardable": usage.discardable, "why": usage.why}
        print(_json({**said, "runs": [asdict(run) for run in runs]} if options.runs else said))
        return DONE
    print(f"key {usage.key.key_id} is {usage.key.state}, needed by")
    print(_table(("group", "runs"), [("open", usage.open), ("held", usage.held), ("settled", usage.settled)]))
    print(("it may be discarded: " if usage.discardable else "it may not be discarded: ") + usage.why)
    if options.runs:
        print(_table(("run", "state"), [(run.run_id, run.state) for run in runs]))
    return DONE


async def _keys_discard(options: argparse.Namespace) -> int:
    async with _store(options) as store:
        await Operator(store).keys.discard(options.tenant, options.key_id, confirm=options.confirm)
    print(json.dumps({"key_id": options.key_id, "state": "destroyed"}) if options.json else "destroyed")
    return DONE


async def _keys_destroy(options: argparse.Namespace) -> int:
    whose = options.tenant if options.tenant is not None else NO_TENANT
    if options.confirm == whose and sys.stdin.isatty():
        print(f"Everything that was ever sealed for {whose} becomes unreadable, for good.", file=sys.stderr)
        print(f"Type {whose} to go on: ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip() != whose:
            print("nothing was destroyed", file=sys.stderr)
            return REFUSED
    async with _store(options) as store:
        gone = await Operator(store).keys.destroy(options.tenant, confirm=options.confirm)
    if options.json:
        print(json.dumps({"tenant": options.tenant, "destroyed": gone}))
    else:
        print(f"{len(gone)} keys are destroyed")
    return DONE


# ---------------------------------------------------------------------------------------------- printing

_RUN_COLUMNS: Final = ("run", "saga", "tenant", "key", "state", "phase", "attempts", "created", "reason")
_ENTRY_COLUMNS: Final = ("seq", "at", "kind", "step", "try", "attempt", "next", "note")


_HELD_COLUMNS: Final = ("state", "tenant", "key", "failure", "count", "since")
_KEY_COLUMNS: Final = ("tenant", "key", "purpose", "state", "created", "retired", "destroyed", "master")


def _held_row(group: HeldGroup) -> tuple[Any, ...]:
    return (group.state, group.tenant or "", group.key_id or "", group.failure or "", group.count, _time(group.since))


def _key_row(key: KeyRecord) -> tuple[Any, ...]:
    times = (_time(key.created_at), _time(key.retired_at), _time(key.destroyed_at))
    return (key.tenant or "", key.key_id, key.purpose, key.state, *times, key.master)


def _key(key: KeyRecord) -> dict[str, Any]:
    """A key without the key, wrapped as it is."""
    shown = asdict(key)
    del shown["wrapped"]
    return shown


def _time(at: datetime | None) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S}" if at is not None else ""


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


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, *rows]
    widths = [max(len(str(line[at])) for line in lines) for at in range(len(columns))]
    return "\n".join(
        "  ".join(f"{value!s:<{width}}" for value, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _several(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _json(value: Any) -> str:
    return json.dumps(asdict(value) if is_dataclass(value) and not isinstance(value, type) else value, default=_plain)


def _plain(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
