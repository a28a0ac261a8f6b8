"""The commands by which a person moves runs on. Each names who and why."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from sagas.cli.opening import named, run_meant, store_of
from sagas.cli.printing import DONE, REFUSED, several, to_json, types
from sagas.cli.words import Commands, Parser, Usage, bulk_words, chosen, file, person_words, run_words
from sagas.client import Client
from sagas.definition import Fate, Saga
from sagas.errors import Unreadable
from sagas.operator import BulkResult, Operator
from sagas.payload import read_context
from sagas.stopping import StopOutcome
from sagas_store.states import State

__all__ = ["add"]

_VERBS: Final = {
    "resume": "let a held run go on",
    "retry-now": "cut a parked run's wait short",
    "restart": "start an undone run anew, as a new run",
}

C = TypeVar("C", bound=BaseModel)

_ABSENT: Final = object()


def add(commands: Commands, database: Parser) -> None:
    """The verbs on runs."""
    person, bulk = person_words(), bulk_words()

    stop = commands.add_parser("stop", parents=[database, person], help="press Stop; the answer is final")
    stop.add_argument("run_id", metavar="RUN")
    stop.set_defaults(act=_stop)

    preview = commands.add_parser(
        "preview-stop", parents=[database, run_words()], help="what a stop would do now; only reads"
    )
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

    requeue = commands.add_parser(
        "requeue", parents=[database, person], help="let runs go on whose key is back, if they open"
    )
    which = requeue.add_mutually_exclusive_group(required=True)
    which.add_argument("--tenant", help="all of this tenant's that do not open")
    which.add_argument("--run", action="append", metavar="RUN", help="this run; may be repeated")
    which.add_argument(
        "--all", action="store_true", help="all that do not open; refused where one of them has a tenant"
    )
    requeue.add_argument("--dry-run", action="store_true", help="say which would open, do nothing")
    requeue.set_defaults(act=_requeue)

    verdict = commands.add_parser("verdict", parents=[database, person], help="say whether an in-doubt pivot happened")
    verdict.add_argument("run_id", metavar="RUN")
    verdict.add_argument("--saga", required=True, metavar="MODULE:ATTRIBUTE", help="the saga's definition")
    outcome = verdict.add_mutually_exclusive_group(required=True)
    outcome.add_argument(
        "--happened", metavar="FILE", type=file, help="it did; FILE is the context it produced, as JSON"
    )
    outcome.add_argument("--did-not-happen", action="store_true", help="it did not; everything is undone")
    verdict.add_argument("--yes", action="store_true", help="do not ask; where there is no terminal it has to be said")
    verdict.add_argument("--dry-run", action="store_true", help="check everything, say what would change, do nothing")
    verdict.set_defaults(act=_verdict)


async def _stop(options: argparse.Namespace) -> int:
    async with store_of(options) as store, Client(store) as client:
        answer = await client.stop(options.run_id, by=options.by, reason=options.reason)
    if options.json:
        print(to_json(answer))
    else:
        print(f"{answer.outcome}: {answer.why}\n{answer.next}")
        if not answer.first and answer.by is not None:
            print(f"asked before, by {answer.by} at {answer.asked_at:%Y-%m-%d %H:%M:%S} UTC", file=sys.stderr)
    if answer.first and answer.by is not None and answer.reason is None:
        print("it counts without its reason, which cannot be sealed without the keys: --master-keys", file=sys.stderr)
    return DONE if answer.outcome in (StopOutcome.CANCELLED, StopOutcome.WILL_BE_UNDONE) else REFUSED


async def _preview_stop(options: argparse.Namespace) -> int:
    async with store_of(options) as store, Client(store) as client:
        preview = await client.preview_stop(await run_meant(options, store, client))
    if options.json:
        print(to_json(preview))
        return DONE
    print(f"{preview.outcome}: {preview.why}")
    if preview.in_hand is not None:
        print(f"in hand: {preview.in_hand}, which would get its grace")
    for undo in preview.undo:
        print(f"undo {undo.step}" + (" (it may not have happened)" if undo.fate is Fate.IN_DOUBT else ""))
    return DONE


async def _stop_many(options: argparse.Namespace) -> int:
    async with store_of(options) as store, Client(store) as client:
        result = await client.stop_many(by=options.by, reason=options.reason, **chosen(options))
    if options.json:
        print(to_json(result))
    else:
        print(several(result.count, "run") + (", nothing done (dry run)" if result.dry_run else ""))
        for outcome, ids in sorted(result.answers.items()):
            print(f"{outcome:<15} {len(ids)}")
        for run_id, why in result.failed.items():
            print(f"failed {run_id}: {why}")
    return REFUSED if result.failed else DONE


async def _intervene(options: argparse.Namespace) -> int:
    async with store_of(options) as store:
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
    async with store_of(options) as store:
        operator = Operator(store)
        verbs = {
            "resume-many": operator.resume_many,
            "retry-now-many": operator.retry_now_many,
            "restart-many": operator.restart_many,
        }
        result = await verbs[options.command](by=options.by, reason=options.reason, **chosen(options))
    return _print_bulk(result, as_json=options.json)


def _print_bulk(result: BulkResult, *, as_json: bool) -> int:
    if as_json:
        print(to_json(result))
    else:
        print(several(len(result.done), "run") + (", nothing done (dry run)" if result.dry_run else ""))
        for run_id, why in result.refused.items():
            print(f"refused {run_id}: {why}")
    return REFUSED if result.refused else DONE


async def _requeue(options: argparse.Namespace) -> int:
    async with store_of(options) as store:
        result = await Operator(store).requeue_quarantined(
            tenant=options.tenant, runs=options.run, by=options.by, reason=options.reason, dry_run=options.dry_run
        )
    return _print_bulk(result, as_json=options.json)


async def _verdict(options: argparse.Namespace) -> int:
    saga = named(options.saga)
    if not isinstance(saga, Saga):
        raise Usage(f"{options.saga} is {type(saga).__name__}, not a Saga")
    context = _given_context(saga, options.happened) if options.happened is not None else None
    async with store_of(options) as store, Client(store) as client:

        async def say(*, dry_run: bool) -> None:
            await Operator(store).verdict(
                saga,
                options.run_id,
                happened=context is not None,
                context=context,
                by=options.by,
                reason=options.reason,
                dry_run=dry_run,
            )

        await say(dry_run=True)
        await _print_consequence(client, options.run_id, context)
        if not options.dry_run:
            if not options.yes and not _confirmed():
                print("nothing was done", file=sys.stderr)
                return REFUSED
            await say(dry_run=False)
    if options.dry_run:
        print("nothing done (dry run)", file=sys.stderr)
    elif options.json:
        print(json.dumps({"run": options.run_id, "state": "pending"}))
    else:
        print(f"run {options.run_id} goes on")
    return DONE


def _given_context(saga: Saga[C], path: Path) -> C:
    """The context in a file that a person has written. Raises Usage, which says what is wrong and quotes none of it."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise Usage(f"--happened: {path} cannot be read: {error.strerror}") from None
    try:
        json.loads(text)
        return read_context(saga.context, text, f"--happened: {path}")
    except json.JSONDecodeError as error:
        why = f"{error.msg}, line {error.lineno}, column {error.colno}"
    except (UnicodeDecodeError, RecursionError) as error:
        why = type(error).__name__
    except Unreadable as error:
        raise Usage(str(error)) from None
    raise Usage(f"--happened: {path} is not JSON: {why}")


async def _print_consequence(client: Client, run_id: str, context: BaseModel | None) -> None:
    """What the verdict comes to, for whoever has to confirm it: by the names of fields, without their values."""
    if context is None:
        print("the pivot did not happen: everything before it is undone. It cannot be taken back.", file=sys.stderr)
        return
    before, given = _fields(await client.context(run_id)), _fields(json.loads(context.model_dump_json(warnings=False)))
    names = {**before, **given}
    changed = [name for name in names if before.get(name, _ABSENT) != given.get(name, _ABSENT)]
    doubt = " No field is as it was: is it this run's?" if len(changed) == len(names) > 1 else ""
    print(
        "the pivot happened: the run goes forward with this context. What differs from the one before the pivot: "
        f"{', '.join(changed) or 'nothing'}.{doubt} It cannot be taken back.",
        file=sys.stderr,
    )


def _fields(context: Any) -> dict[str, Any]:
    return context if isinstance(context, dict) else {"the whole": context}


def _confirmed() -> bool:
    if not sys.stdin.isatty():
        print("there is no terminal to confirm it on: say --yes", file=sys.stderr)
        return False
    return types("yes")
