"""`sagas keys`: the verbs on tenants' keys."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final

from sagas.cli.opening import store_of
from sagas.cli.printing import DONE, REFUSED, several, table, time, to_json, types
from sagas.cli.words import Commands, Parser, person_words
from sagas.keykeeping import NO_TENANT, NeedingRun, Rewrap
from sagas.operator import Operator
from sagas_store.keys import KeyRecord

__all__ = ["add"]

_REWRAPPING: Final = timedelta(seconds=90)
"""It goes on through a failover; nobody waits for the first line."""
_KEY_COLUMNS: Final = ("tenant", "key", "purpose", "state", "created", "retired", "destroyed", "master", "by and why")


def add(commands: Commands, database: Parser) -> None:
    """The verbs on tenants' keys."""
    whose = Parser(add_help=False)
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

    person = person_words()
    create = verbs.add_parser(
        "create", parents=[database, whose], help="make a tenant's first keys, or new ones after a destruction"
    )
    create.set_defaults(act=_keys_create)
    rotate = verbs.add_parser("rotate", parents=[database, whose, person], help="seal with a new key from now on")
    rotate.set_defaults(act=_keys_rotate)

    rewrap = verbs.add_parser("rewrap", parents=[database, whose], help="seal anew what older keys have sealed")
    rewrap.set_defaults(act=_keys_rewrap)

    master = verbs.add_parser("rewrap-master", parents=[database], help="wrap all keys with the newest master key")
    master.set_defaults(act=_keys_rewrap_master)

    usage = verbs.add_parser("usage", parents=[database, whose], help="which runs need a key, and whether it may go")
    usage.add_argument("key_id", metavar="KEY")
    usage.add_argument("--runs", action="store_true", help="list the runs, too")
    usage.set_defaults(act=_keys_usage)

    discard = verbs.add_parser(
        "discard", parents=[database, whose, person], help="destroy a retired key that no run needs"
    )
    discard.add_argument("key_id", metavar="KEY")
    discard.add_argument("--confirm", required=True, metavar="KEY", help="the key's id once more")
    discard.set_defaults(act=_keys_discard)

    destroy = verbs.add_parser(
        "destroy", parents=[database, whose, person], help="make all of a tenant's payloads unreadable"
    )
    destroy.add_argument("--confirm", required=True, metavar="TENANT", help="the tenant once more, or 'no tenant'")
    destroy.set_defaults(act=_keys_destroy)


async def _keys_list(options: argparse.Namespace) -> int:
    async with store_of(options) as store:
        keeper = Operator(store).keys
        if options.tenant is None and not options.no_tenant:
            found = [key async for key in keeper.every()]
            found.sort(key=lambda key: (key.tenant or "", key.created_at))
        else:
            found = await keeper.of_tenant(options.tenant)
    if options.json:
        for key in found:
            print(to_json(_key(key)))
    else:
        print(table(_KEY_COLUMNS, [_key_row(key) for key in found]))
    return DONE


async def _keys_create(options: argparse.Namespace) -> int:
    async with store_of(options) as store:
        return _made(options, await Operator(store).keys.create(options.tenant))


async def _keys_rotate(options: argparse.Namespace) -> int:
    async with store_of(options) as store:
        made = await Operator(store).keys.rotate(options.tenant, by=options.by, reason=options.reason)
    return _made(options, made)


def _made(options: argparse.Namespace, made: str) -> int:
    print(json.dumps({"tenant": options.tenant, "key_id": made}) if options.json else f"key {made} seals from now on")
    return DONE


async def _keys_rewrap(options: argparse.Namespace) -> int:
    def progress(now: Rewrap) -> None:
        seen = f"{now.seen} of {several(now.total, 'run')}"
        print(f"{seen}, {several(now.payloads, 'payload')}, {len(now.left)} left over", file=sys.stderr)

    async with store_of(options, patience=_REWRAPPING) as store:
        done = await Operator(store).keys.rewrap(options.tenant, progress=progress)
    if options.json:
        print(to_json({**asdict(done), "complete": done.complete}))
    else:
        sealed_anew = several(done.payloads, "payload")
        print(f"on key {done.key_id} alone: {several(done.done, 'run')}; sealed anew: {sealed_anew}")
        for key_id, why in done.lost.items():
            print(f"key {key_id} cannot be had: {why}")
        for run_id, why in done.left.items():
            print(f"left over {run_id}: {why}")
    return DONE if done.complete else REFUSED


async def _keys_rewrap_master(options: argparse.Namespace) -> int:
    async with store_of(options) as store:
        done = await Operator(store).keys.rewrap_master()
    if options.json:
        print(to_json(done))
    else:
        print(f"{len(done.done)} keys are wrapped by the newest master key")
        for key_id, why in done.failed.items():
            print(f"left as it is {key_id}: {why}")
    return REFUSED if done.failed else DONE


async def _keys_usage(options: argparse.Namespace) -> int:
    async with store_of(options) as store:
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
        print(to_json({**said, "runs": [asdict(run) for run in runs]} if options.runs else said))
        return DONE
    print(f"key {usage.key.key_id} is {usage.key.state}, needed by")
    print(table(("group", "runs"), [("open", usage.open), ("held", usage.held), ("settled", usage.settled)]))
    print(("it may be discarded: " if usage.discardable else "it may not be discarded: ") + usage.why)
    if options.runs:
        print(table(("run", "state"), [(run.run_id, run.state) for run in runs]))
    return DONE


async def _keys_discard(options: argparse.Namespace) -> int:
    async with store_of(options) as store:
        await Operator(store).keys.discard(
            options.tenant, options.key_id, confirm=options.confirm, by=options.by, reason=options.reason
        )
    print(json.dumps({"key_id": options.key_id, "state": "destroyed"}) if options.json else "destroyed")
    return DONE


async def _keys_destroy(options: argparse.Namespace) -> int:
    whose = options.tenant if options.tenant is not None else NO_TENANT
    if options.confirm == whose and sys.stdin.isatty():
        print(f"Everything that was ever sealed for {whose} becomes unreadable, for good.", file=sys.stderr)
        if not types(whose):
            print("nothing was destroyed", file=sys.stderr)
            return REFUSED
    async with store_of(options) as store:
        gone = await Operator(store).keys.destroy(
            options.tenant, confirm=options.confirm, by=options.by, reason=options.reason
        )
    if options.json:
        print(json.dumps({"tenant": options.tenant, "destroyed": gone}))
    else:
        print(f"{len(gone)} keys are destroyed")
    return DONE


def _key_row(key: KeyRecord) -> tuple[Any, ...]:
    times = (time(key.created_at), time(key.retired_at), time(key.destroyed_at))
    by, reason = key.destroyed_by or key.retired_by, key.destroyed_reason or key.retired_reason
    return (key.tenant or "", key.key_id, key.purpose, key.state, *times, key.master, f"{by}: {reason}" if by else "")


def _key(key: KeyRecord) -> dict[str, Any]:
    """A key without the key, wrapped as it is."""
    shown = asdict(key)
    del shown["wrapped"]
    return shown
