"""The commands by which a person moves runs on. Each names who and why."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Final

from sagas.cli.opening import named, store_of
from sagas.cli.printing import DONE, REFUSED, several, to_json
from sagas.cli.words import Commands, Parser, Usage, bulk_words, chosen, file, person_words
from sagas.client import Client
from sagas.definition import Fate, Saga
from sagas.operator import BulkResult, Operator
from sagas.stopping import StopOutcome
from sagas_store.states import State

__all__ = ["add"]

_VERBS: Final = {
    "resume": "let a held run go on",
    "retry-now": "cut a parked run's wait short",
    "restart": "start an undone run anew, as a new run",
}


def add(commands: Commands, database: Parser) -> None:
    """The verbs on runs."""
    person, bulk = person_words(), bulk_words()

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
        preview = await client.preview_stop(options.run_id)
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
    context = None
    if options.happened is not None:
        try:
            context = saga.context.model_validate_json(options.happened.read_bytes())
        except (OSError, ValueError) as error:
            raise Usage(f"{options.happened} is not a {saga.context.__name__}: {type(error).__name__}") from None
    async with store_of(options) as store:
        await Operator(store).verdict(
            saga, options.run_id, happened=context is not None, context=context, by=options.by, reason=options.reason
        )
    print(json.dumps({"run": options.run_id, "state": "pending"}) if options.json else f"run {options.run_id} goes on")
    return DONE
