"""Every named query of the schema, explained by the real server beside a hundred thousand runs it must not look at.

What is explained is what the store really sends: each case asks the store its question, and the commands that went out
are explained afterwards. A name in the schema without a case here fails, and so does a case without a name.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo.database import Database

from sagas_store import MongoStore
from sagas_store.blocked import _chosen
from sagas_store.claims import Claims
from sagas_store.errors import FenceLost
from sagas_store.journal import Resealed
from sagas_store.keys import KEYS_SPEC_NAME
from sagas_store.records import RunFilter, RunPosition
from sagas_store.resealing import ResealedField
from sagas_store.schema import SCHEMA
from sagas_store.states import HELD, OPEN, SETTLED, State
from tests.store.making import LEASE, Commands, entry

pytestmark = pytest.mark.slow

MANY: Final = 100_000
DUE: Final = 200
"""How many runs of each saga are due; the queries below ask for fewer."""
SAGAS: Final = ("order", "refund")
DEFINITIONS: Final = [(saga, 1) for saga in SAGAS]
BLOCKED: Final = 100
"""How many of the pending runs do not open."""
JOURNALS: Final = 2_000
ENTRIES: Final = 5
NOW: Final = datetime(2026, 1, 2)

ALL: Final = frozenset(State)
LONG_AGO: Final = NOW.astimezone() - timedelta(days=50)
TURNS: Final = 2 * (20 + 2 * 500)
"""Two index keys for each tenant that has runs, none of which need be due, in both of the sagas."""
SINCE: Final = NOW.astimezone() - timedelta(seconds=99)
WAITING: Final = RunFilter(states=frozenset({State.PENDING}), blocked=True)
DAMAGED: Final = 9
"""How many of those that are due longest are left out."""
IDS: Final = [f"due-{number}" for number in range(64)]


def documents() -> Iterator[dict[str, Any]]:
    """A hundred thousand delayed, as many settled, some due, some of another saga; made over three months."""
    common = {"version": 1, "fingerprint": "a:c", "phase": "forward", "attempts": 0, "input": b"\x01" + b"x" * 100}
    states = sorted(SETTLED)
    for number in range(MANY):
        created_at = NOW - timedelta(seconds=number * 77)
        made = {"saga": SAGAS[number % 2], "created_at": created_at, **common}
        if number % 2:
            made |= {"tenant": f"tenant-{number % 1000:03}", "keys": [f"{number % 7:016x}"]}
        in_the_future = datetime(2099, 1, 1) + timedelta(seconds=number)
        yield {"_id": f"delayed-{number}", "state": "pending", "due_at": in_the_future, **made}
        settled_at = created_at + timedelta(seconds=1)
        yield {"_id": f"settled-{number}", "state": str(states[number % 5]), "settled_at": settled_at, **made}
    for number in range(2 * DUE):
        made = {"saga": SAGAS[number % 2], "created_at": NOW - timedelta(days=number), **common}
        if number % 4 < 2:
            made |= {"tenant": f"tenant-{'aaa' if number < DUE else number}", "keys": [f"{9:016x}"]}
        yield {"_id": f"due-{number}", "state": "pending", "due_at": NOW - timedelta(seconds=number), **made}
    why = {"count": 1, "since": NOW, "failure": "KeyLost", "why": "gone", "key_id": f"{9:016x}"}
    for number in range(BLOCKED):
        made = {"saga": SAGAS[0], "created_at": NOW - timedelta(days=number), "blocked": why, **common}
        made |= {"tenant": "tenant-001"} if number % 2 else {}
        yield {"_id": f"blocked-{number}", "state": "pending", "due_at": datetime(2099, 1, 1), **made}
    yield {"_id": "rare-1", "state": "pending", "due_at": NOW, **common, "saga": "rare", "created_at": NOW}


def entries() -> Iterator[dict[str, Any]]:
    common = {"kind": "step_succeeded", "at": NOW, "attempt": 1, "worker": "w", "token": "t", "payload": b"\x01{}"}
    for number in range(JOURNALS):
        for seq in range(1, ENTRIES + 1):
            yield {"_id": {"run": f"due-{number}", "seq": seq}, **common}


@pytest.fixture(scope="module")
def filled(mongo_uri: str) -> Iterator[str]:
    """The name of a database with all of the above."""
    name = f"plans_{secrets.token_hex(6)}"

    async def apply() -> None:
        async with AsyncMongoClient[Any](mongo_uri) as client:
            await MongoStore(client[name]).schema.apply()

    asyncio.run(apply())
    with MongoClient[dict[str, Any]](mongo_uri, w=1, journal=False) as client:
        fill(client[name], "sagas.runs", documents())
        fill(client[name], "sagas.journal", entries())
        yield name
        client.drop_database(name)


def fill(database: Database[dict[str, Any]], collection: str, source: Iterator[dict[str, Any]]) -> None:
    while batch := [document for document, _ in zip(source, range(20_000), strict=False)]:
        # What the validator says is tested elsewhere; it would cost half of the time here.
        database[collection].insert_many(batch, ordered=False)


@dataclass(frozen=True)
class Case:
    """A question to the store, and how much of the database the server may look at to answer it."""

    query: str
    ask: Callable[[MongoStore], Awaitable[Any]]
    examined_max: int
    """Index keys, and documents, that any one of its commands may examine."""
    what: str = ""


async def late(asking: Awaitable[Any]) -> None:
    with pytest.raises(FenceLost):
        await asking


async def settle(store: MongoStore) -> None:
    (run,) = await store.claims.take([("order", 1)], token="plan", worker="w", lease=LEASE, limit=1)
    await store.runs.settle(run, State.COMPLETED)
    await store.runs.settle(run, State.COMPLETED)  # the second finds its own work, by another command
    await store.runs._collection.update_one(
        {"_id": run.run_id}, {"$set": {"state": "pending", "due_at": NOW}, "$unset": {"settled_at": 1}}
    )


async def append(store: MongoStore) -> None:
    await late(store.journal.append(entry("due-7", 3, token="late")))  # the number is taken: whose is it?


async def replace_input(store: MongoStore) -> None:
    field = ResealedField("input", b"old", b"new")
    await store.resealing.replace("delayed-77", f"{9:016x}", [field], [])


async def keep_keys(store: MongoStore) -> None:
    run = await store.runs.get("due-7")
    assert run is not None
    await store.resealing.keep_keys(run, [f"{8:016x}"], last_seq=99)


def page(
    states: frozenset[State], saga: str | None = None, *, after: bool = False, **narrower: Any
) -> Callable[[MongoStore], Awaitable[Any]]:
    position = RunPosition(NOW.astimezone() - timedelta(days=40), "delayed-4000") if after else None
    chosen = RunFilter(states=states, saga=saga, **narrower)
    return lambda store: store.runs.page(chosen, after=position, limit=51)


def oldest(tenant: str | None, *, after: bool = False) -> Callable[[MongoStore], Awaitable[Any]]:
    position = RunPosition(NOW.astimezone() - timedelta(days=80), "blocked-80") if after else None

    async def ask(store: MongoStore) -> None:
        for chosen in _chosen(tenant=tenant):
            await store.blocked_runs._page(chosen, position, 50)

    return ask


def without_damaged(store: MongoStore) -> Claims:
    """Claims that have found some to be damaged, and leave them out."""
    store.claims._refused = {f"due-{2 * DUE - number}": math.inf for number in range(1, 1 + DAMAGED)}
    return store.claims


CASES: Final = [
    Case("find_due", lambda store: store.claims._due(DEFINITIONS, 50), 55),
    Case("find_due", lambda store: store.claims._due(DEFINITIONS[:1], 50), 55, "of one saga"),
    Case("find_due", lambda store: store.claims._due([("rare", 1), ("none", 1)], 50), 5, "of which little is due"),
    Case("find_due", lambda store: store.claims._due([("order", 1)], 10_000), DUE + 5, "when few are due"),
    Case(
        "find_due",
        lambda store: store.claims._due(DEFINITIONS, 50, NOW.astimezone() - timedelta(seconds=99)),
        55,
        "since",
    ),
    Case("find_in_turn", lambda store: store.claims._in_turn(DEFINITIONS, 20, []), TURNS),
    Case("find_in_turn", lambda store: store.claims._in_turn(DEFINITIONS, 20, ["tenant-aaa"]), TURNS, "but one"),
    Case("next_due", lambda store: store.claims.next_due_at(DEFINITIONS), 5),
    Case("find_due", lambda store: without_damaged(store)._due(DEFINITIONS, 50), 55 + DAMAGED, "but the damaged"),
    Case(
        "find_in_turn", lambda store: without_damaged(store)._in_turn(DEFINITIONS, 20, []), TURNS + DAMAGED, "undamaged"
    ),
    Case("next_due", lambda store: without_damaged(store).next_due_at(DEFINITIONS), 5 + DAMAGED, "but the damaged"),
    Case("claim", lambda store: store.claims._stamp(IDS, "never", "w", LEASE, lambda _: None), 2 * len(IDS) + 5),
    Case("renew", lambda store: store.runs.renew(dict.fromkeys(IDS, "none"), lease=LEASE), 2 * len(IDS) + 5),
    Case("settle", settle, 55),
    Case("get", lambda store: store.runs.get("delayed-77"), 2),
    Case("get", lambda store: store.runs.get_many(IDS), 2 * len(IDS) + 5, "many"),
    Case("beginning_with", lambda store: store.runs.beginning_with("delayed-9999", limit=6), 8),
    Case("replace", replace_input, 2),
    Case("keep_keys", keep_keys, 3),
    Case("at_rest", lambda store: store.runs.at_rest([f"settled-{n}" for n in range(500)]), 1_005),
    Case("page_of_states", page(ALL), 51 + 2 * len(ALL)),
    Case("page_of_states", page(ALL, after=True), 52 + 2 * len(ALL), "the next page"),
    Case("page_of_states", page(HELD), 2 * len(HELD), "of which there are none"),
    Case("page_of_states", page(OPEN), 51 + 2 * len(OPEN), "of two states"),
    Case("page_of_states", page(ALL, created_before=LONG_AGO), 51 + 2 * len(ALL), "started before"),
    Case("page_of_states", page(ALL, created_before=LONG_AGO, after=True), 52 + 2 * len(ALL), "before, the next page"),
    Case("page_of_states", page(OPEN, stopped=False), 51 + 2 * len(OPEN), "without a stop"),
    Case("page_of_states_and_saga", page(ALL, "order"), 2 * (51 + 2 * len(ALL))),
    Case("page_of_states_and_saga", page(ALL, "order", after=True), 2 * (52 + 2 * len(ALL)), "the next page"),
    Case("page_of_states_and_saga", page(ALL, "rare"), 51 + 2 * len(ALL), "of which there is one run"),
    Case("page_of_tenant", page(ALL, tenant="tenant-001"), 51 + 2 * len(ALL)),
    Case("page_of_tenant", page(HELD, tenant="tenant-001"), 2 * len(HELD), "of which there are none"),
    Case("oldest_blocked", oldest(None), 52),
    Case("oldest_blocked", oldest(None, after=True), 53, "the next page"),
    Case("oldest_blocked_of_tenant", oldest("tenant-001"), BLOCKED + 1),
    Case("any_blocked", lambda store: store.blocked_runs.any_tenanted(), BLOCKED + 1),
    Case("blocked_groups", lambda store: store.runs.groups(WAITING), BLOCKED + 1),
    Case(
        "blocked_groups", lambda store: store.runs.groups(replace(WAITING, tenant="tenant-001")), BLOCKED + 1, "of one"
    ),
    Case("needing_key", lambda store: store.runs.needing_key(f"{3:016x}", limit=50), 52),
    Case("count_needing_key", lambda store: store.runs.count_needing_key(f"{9:016x}"), DUE + 5),
    Case("append", append, 2),
    Case("load", lambda store: store.journal.load("due-7"), ENTRIES + 2),
    Case("load_many", lambda store: store.journal.load_many(IDS), len(IDS) * (ENTRIES + 2)),
    Case("reseal", lambda store: store.journal.reseal("due-7", [Resealed(2, "payload", b"\x01{}", b"\x01{}")]), 2),
    Case("last_context", lambda store: store.journal.last_context("due-7"), ENTRIES + 2),
]


def test_every_named_query_has_a_case_and_every_case_a_name() -> None:
    named = {
        name
        for spec in SCHEMA
        if spec.name != KEYS_SPEC_NAME  # tested with the rest of that collection
        for name in [*spec.primary_key_serves, *(served for index in spec.indexes for served in index.serves)]
    }
    assert {case.query for case in CASES} == named


@pytest.fixture
async def watched(mongo_uri: str, filled: str) -> AsyncIterator[tuple[MongoStore, Commands]]:
    commands = Commands()
    async with AsyncMongoClient[Any](mongo_uri, event_listeners=[commands]) as client:
        yield MongoStore(client[filled]), commands


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.query} {case.what}".strip())
async def test_a_named_query_looks_at_little_more_than_it_returns(
    watched: tuple[MongoStore, Commands], mongo_uri: str, filled: str, case: Case
) -> None:
    store, commands = watched
    await case.ask(store)
    asked = [explainable(name, command) for name, command in commands.sent if name in ("find", "update", "aggregate")]
    assert asked, "the case has asked the server nothing that can be explained"
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        for command in asked:
            plan = client[filled].command({"explain": command, "verbosity": "executionStats"})
            if "stages" in plan:  # of an aggregation: what reads the collection comes first
                plan = plan["stages"][0]["$cursor"]
            stages = set(stages_of(plan["queryPlanner"]["winningPlan"]))
            assert not stages & {"COLLSCAN", "SORT"}, (stages, command)
            assert stages & {"IXSCAN", "IDHACK", "UPDATE", "EXPRESS_IXSCAN"}, (stages, command)
            done = plan["executionStats"]
            examined = max(done["totalKeysExamined"], done["totalDocsExamined"])
            assert examined <= case.examined_max, (examined, stages, command)


def explainable(name: str, command: dict[str, Any]) -> dict[str, Any]:
    """The command without what belongs to the session it was sent in; an update's clauses one by one are enough."""
    kept = {
        "find": ("find", "filter", "sort", "limit", "projection", "singleBatch", "hint"),
        "update": ("update", "updates"),
        "aggregate": ("aggregate", "pipeline", "cursor"),
    }[name]
    return {key: command[key] for key in kept if key in command}


def stages_of(plan: Any) -> Iterator[str]:
    """Every stage's name, wherever the server's plan nests it."""
    if isinstance(plan, dict):
        if "stage" in plan:
            yield plan["stage"]
        for key, value in plan.items():
            if key != "slotBasedPlan":
                yield from stages_of(value)
    elif isinstance(plan, list):
        for one in plan:
            yield from stages_of(one)
