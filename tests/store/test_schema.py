"""The schema: applied from nothing, repaired when it drifted, and refusing what may not be stored."""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.errors import OperationFailure, WriteError

from sagas_store import MongoStore
from sagas_store.__main__ import rendered
from sagas_store.errors import SchemaMismatch, StoreUnavailable
from sagas_store.schema import SCHEMA
from sagas_store.states import HELD, SETTLED, State
from sagas_store.tenants import TenantDatabases
from tests.conftest import DRIVERS
from tests.store.making import client_of, entry, new_run
from tests.support.failpoints import fail_point

pytestmark = pytest.mark.parametrize("driver", DRIVERS)

ROOT = Path(__file__).parents[2]
FROM_NOTHING = [
    "create collection sagas.runs",
    "create index claim on sagas.runs",
    "create index turn on sagas.runs",
    "create index sealed_with on sagas.runs",
    "create index list_of_tenant on sagas.runs",
    "create index list on sagas.runs",
    "create index blocked on sagas.runs",
    "create index list_of_saga on sagas.runs",
    "create collection sagas.journal",
    "create collection sagas.keys",
    "create index active on sagas.keys",
    "create index of_tenant on sagas.keys",
]


# --- plan, apply, check -----------------------------------------------------------------------------------------------


async def test_an_empty_database_is_planned_then_applied_then_as_it_should_be(empty_database: Any) -> None:
    schema = MongoStore(empty_database).schema
    assert await schema.plan() == FROM_NOTHING
    assert await empty_database.list_collection_names() == [], "a plan changes nothing"
    with pytest.raises(SchemaMismatch) as mismatch:
        await schema.check()
    assert mismatch.value.differences == tuple(FROM_NOTHING)
    assert await schema.apply() == FROM_NOTHING
    assert await schema.plan() == []
    await schema.check()
    assert await schema.apply() == []


async def test_a_store_is_not_ready_before_its_schema_is_applied(empty_database: Any) -> None:
    store = MongoStore(empty_database)
    with pytest.raises(SchemaMismatch, match="schema apply"):
        await store.ready()
    await store.schema.apply()
    await store.ready()


async def test_where_nothing_is_the_name_is_in_question_first_and_then_how_to_apply(empty_database: Any) -> None:
    name = empty_database.name
    await empty_database["orders"].insert_one({})  # the application's own collections are no sagas
    store = MongoStore(empty_database)
    with pytest.raises(SchemaMismatch) as nothing:
        await store.ready()
    assert str(nothing.value).startswith(f"there are no sagas in database '{name}'; is the name right? If it is, apply")
    assert f"schema apply --database {name}" in str(nothing.value)
    assert "create" not in str(nothing.value), "what would be made is not the question"
    assert nothing.value.nothing
    assert len(nothing.value.differences) == len(FROM_NOTHING)
    await store.schema.apply()
    await empty_database["sagas.keys"].drop()
    with pytest.raises(SchemaMismatch, match=r"is not as needed: create collection sagas.keys; create index") as some:
        await MongoStore(empty_database).ready()
    assert not some.value.nothing


@pytest.mark.parametrize("whose", ["a store's", "a tenant's"])
async def test_an_index_may_take_longer_to_build_than_a_reply_is_waited_for(
    empty_database: Any, driver: str, mongo_uri: str, whose: str
) -> None:
    name = f"builder-{secrets.token_hex(4)}"
    short: dict[str, Any] = {"patience": timedelta(seconds=0.4), "reply": timedelta(seconds=0.2)}
    async with (
        client_of(driver, mongo_uri, appName=name) as client,
        AsyncMongoClient[dict[str, Any]](mongo_uri) as admin,
        fail_point(
            admin, ["createIndexes"], with_app_name=name, times=3, blockConnection=True, blockTimeMS=500
        ) as point,
    ):
        if whose == "a tenant's":
            tenants = TenantDatabases(client, prefix=empty_database.name[:-1], **short)
            await (await tenants.create(empty_database.name[-1])).schema.check()
        else:
            store = MongoStore(client[empty_database.name], **short)
            await store.schema.apply()
            await store.schema.check()
    assert point.hits == 3


async def test_an_index_is_waited_for_no_longer_than_was_asked(
    empty_database: Any, driver: str, mongo_uri: str
) -> None:
    name = f"builder-{secrets.token_hex(4)}"
    async with (
        client_of(driver, mongo_uri, appName=name) as client,
        AsyncMongoClient[dict[str, Any]](mongo_uri) as admin,
        fail_point(admin, ["createIndexes"], with_app_name=name, blockConnection=True, blockTimeMS=500),
    ):
        with pytest.raises(StoreUnavailable, match="apply schema: create index claim"):
            await MongoStore(client[empty_database.name]).schema.apply(patience=timedelta(seconds=0.2))


async def test_a_prefix_gives_a_schema_of_its_own(empty_database: Any) -> None:
    await MongoStore(empty_database).schema.apply()
    other = MongoStore(empty_database, prefix="tenant-a.")
    assert await other.schema.plan() == [line.replace("sagas.", "tenant-a.") for line in FROM_NOTHING]
    await other.schema.apply()
    await MongoStore(empty_database).schema.check()
    await other.schema.check()


async def test_ten_appliers_at_once_on_an_empty_database_do_not_get_into_each_others_way(
    empty_database: Any, driver: str, mongo_uri: str
) -> None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(driver, mongo_uri)) for _ in range(10)]
        stores = [MongoStore(client[empty_database.name]) for client in clients]
        done = await asyncio.gather(*(store.schema.apply() for store in stores))
        assert sum(map(len, done)) >= len(FROM_NOTHING)
        await asyncio.gather(*(store.schema.check() for store in stores))


# --- drift ------------------------------------------------------------------------------------------------------------

Drift = Callable[[Any], Awaitable[Any]]
CLAIM_KEYS = [("saga", 1), ("version", 1), ("due_at", 1)]
CLAIM_PARTIAL = {"due_at": {"$exists": True}}


def rebuilt_claim(keys: Any = CLAIM_KEYS, partial: Any = CLAIM_PARTIAL, **more: Any) -> Drift:
    async def drift(database: Any) -> None:
        await database["sagas.runs"].drop_index("claim")
        if partial is not None:
            more["partialFilterExpression"] = partial
        await database["sagas.runs"].create_index(keys, name="claim", **more)

    return drift


def modified(collection: str, **changes: Any) -> Drift:
    return lambda database: database.command({"collMod": collection, **changes})


REBUILD_CLAIM = ["drop index claim of sagas.runs", "create index claim on sagas.runs"]
DRIFTS: dict[str, tuple[Drift, list[str]]] = {
    "a dropped index": (
        lambda database: database["sagas.runs"].drop_index("list"),
        ["create index list on sagas.runs"],
    ),
    "a dropped collection": (
        lambda database: database.drop_collection("sagas.journal"),
        ["create collection sagas.journal"],
    ),
    "another partial filter": (rebuilt_claim(partial={"state": "pending"}), REBUILD_CLAIM),
    "no partial filter": (rebuilt_claim(partial=None), REBUILD_CLAIM),
    "other keys": (rebuilt_claim(keys=[("saga", 1), ("due_at", 1), ("version", 1)]), REBUILD_CLAIM),
    "another direction": (rebuilt_claim(keys=[("saga", 1), ("version", 1), ("due_at", -1)]), REBUILD_CLAIM),
    "a unique index": (rebuilt_claim(unique=True), REBUILD_CLAIM),
    "a hidden index": (rebuilt_claim(hidden=True), REBUILD_CLAIM),
    "a collated index": (rebuilt_claim(collation={"locale": "de"}), REBUILD_CLAIM),
    "another validator": (
        modified("sagas.journal", validator={"$jsonSchema": {"bsonType": "object"}}),
        ["set the validator of sagas.journal"],
    ),
    "no validator": (modified("sagas.runs", validator={}), ["set the validator of sagas.runs"]),
    "a validator that only warns": (
        modified("sagas.runs", validationAction="warn"),
        ["set the validator of sagas.runs"],
    ),
    "a validator for new documents only": (
        modified("sagas.runs", validationLevel="moderate"),
        ["set the validator of sagas.runs"],
    ),
}


@pytest.mark.parametrize("drift", DRIFTS)
async def test_drift_is_named_and_repaired_without_losing_a_document(empty_database: Any, drift: str) -> None:
    store = MongoStore(empty_database)
    await store.schema.apply()
    await store.sync_clock()
    run = new_run(store)
    await store.runs.insert(run)
    change, expected = DRIFTS[drift]
    await change(empty_database)
    with pytest.raises(SchemaMismatch) as mismatch:
        await store.schema.check()
    assert list(mismatch.value.differences) == expected
    assert await store.schema.apply() == expected
    await store.schema.check()
    assert await store.runs.get(run.run_id) is not None


async def test_ten_appliers_at_once_on_a_drifted_database_do_not_get_into_each_others_way(
    empty_database: Any, driver: str, mongo_uri: str
) -> None:
    await MongoStore(empty_database).schema.apply()
    await rebuilt_claim(partial=None)(empty_database)
    await modified("sagas.runs", validator={})(empty_database)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(driver, mongo_uri)) for _ in range(10)]
        stores = [MongoStore(client[empty_database.name]) for client in clients]
        await asyncio.gather(*(store.schema.apply() for store in stores))
        await asyncio.gather(*(store.schema.check() for store in stores))


async def test_what_others_have_added_is_left_alone(empty_database: Any) -> None:
    store = MongoStore(empty_database)
    await store.schema.apply()
    await empty_database["sagas.runs"].create_index("key", name="by_key_for_our_reports")
    await empty_database["orders"].insert_one({"_id": 1})
    await store.schema.check()
    assert await store.schema.apply() == []
    assert "by_key_for_our_reports" in await empty_database["sagas.runs"].index_information()


# --- what the database refuses ----------------------------------------------------------------------------------------

NOW = datetime(2026, 1, 2, tzinfo=UTC)

RUN: dict[str, Any] = {
    "_id": "run-1",
    "saga": "order",
    "version": 1,
    "fingerprint": "reserve:c",
    "key": "order-1",
    "input": b"\x01{}",
    "state": "pending",
    "phase": "forward",
    "attempts": 0,
    "created_at": NOW,
    "due_at": NOW,
}
CLAIM = {"token": "t", "worker": "w", "taken_from": "pending", "at": NOW}
HELD_FOR = {"reason": "unfit", "since": NOW}
ENTRY: dict[str, Any] = {
    "_id": {"run": "run-1", "seq": 1},
    "kind": "step_succeeded",
    "at": NOW,
    "attempt": 1,
    "worker": "w",
    "token": "t",
    "step": "reserve",
    "try": 1,
    "next": "step:charge",
    "payload": b"\x01{}",
}
GONE = object()


def changed(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The document with fields set, or taken away where the value is GONE; `a.b` reaches inside."""
    made = copy.deepcopy(document)
    for path, value in changes.items():
        *outer, last = path.split(".")
        place = made
        for name in outer:
            place = place[name]
        if value is GONE:
            del place[last]
        else:
            place[last] = value
    return made


async def test_runs_of_every_state_with_what_belongs_to_it_are_stored(store: MongoStore, database: Any) -> None:
    documents = [
        RUN,
        changed(RUN, {"key": GONE}),
        changed(RUN, {"state": "running", "claim": CLAIM, "attempts": 1, "gate_passed_at": NOW, "phase": "past_gate"}),
        *(changed(RUN, {"state": str(state), "due_at": GONE, "settled_at": NOW, "claim": CLAIM}) for state in SETTLED),
        *(changed(RUN, {"state": str(state), "due_at": GONE, "held": HELD_FOR, "claim": CLAIM}) for state in HELD),
    ]
    await database["sagas.runs"].insert_many([{**one, "_id": str(number)} for number, one in enumerate(documents)])
    assert len(documents) == len(State) + 1


WRONG_RUNS: dict[str, dict[str, Any]] = {
    **{
        f"without {name}": {name: GONE}
        for name in ("saga", "version", "fingerprint", "state", "phase", "attempts", "created_at", "input")
    },
    "a field that nobody knows": {"sate": "pending"},
    "an id that is no text": {"_id": 7},
    "no name": {"saga": ""},
    "a name that is too long": {"saga": "x" * 65},
    "a version that is text": {"version": "1"},
    "a version that is a fraction": {"version": 1.5},
    "version nought": {"version": 0},
    "attempts below nought": {"attempts": -1},
    "an input in the clear": {"input": "{}"},
    "a time that is text": {"due_at": "2026-01-02"},
    "a time that is null": {"due_at": None},
    "a state that does not exist": {"state": "paused"},
    "a phase that does not exist": {"phase": "sideways"},
    "pending and never due": {"due_at": GONE},
    "running and never due": {"state": "running", "claim": CLAIM, "due_at": GONE},
    "pending and settled": {"settled_at": NOW},
    "settled at no time": {"state": "completed", "due_at": GONE},
    "settled and due": {"state": "completed", "settled_at": NOW},
    "held for no reason": {"state": "broken", "due_at": GONE},
    "held and due": {"state": "in_doubt", "held": HELD_FOR},
    "held and settled": {"state": "in_doubt", "due_at": GONE, "held": HELD_FOR, "settled_at": NOW},
    "held without a time": {"state": "broken", "due_at": GONE, "held": {"reason": "unfit"}},
    "held with something more": {"state": "broken", "due_at": GONE, "held": {**HELD_FOR, "by": "me"}},
    "a claim without its token": {"claim": changed(CLAIM, {"token": GONE})},
    "a claim without its time": {"claim": changed(CLAIM, {"at": GONE})},
    "a claim with something more": {"claim": {**CLAIM, "host": "h"}},
    "a claim taken from a settled run": {"claim": {**CLAIM, "taken_from": "completed"}},
}


@pytest.mark.parametrize("wrong", WRONG_RUNS)
async def test_a_malformed_run_is_refused(store: MongoStore, database: Any, wrong: str) -> None:
    with pytest.raises(WriteError) as refused:
        await database["sagas.runs"].insert_one(changed(RUN, WRONG_RUNS[wrong]))
    assert refused.value.code == 121


async def test_a_run_cannot_be_made_malformed_later_either(store: MongoStore, database: Any) -> None:
    await database["sagas.runs"].insert_one(copy.deepcopy(RUN))
    for update in ({"$set": {"state": "completed"}}, {"$unset": {"due_at": 1}}, {"$set": {"claim": {"token": "t"}}}):
        with pytest.raises(WriteError):
            await database["sagas.runs"].update_one({"_id": "run-1"}, update)
    assert await database["sagas.runs"].count_documents({"_id": "run-1", "state": "pending"}) == 1


WRONG_ENTRIES: dict[str, dict[str, Any]] = {
    **{f"without {name}": {name: GONE} for name in ("kind", "at", "attempt", "worker", "token")},
    "a field that nobody knows": {"steps": "reserve"},
    "an id that is a text": {"_id": "run-1:1"},
    "an id without its number": {"_id": {"run": "run-1"}},
    "an id with something more": {"_id": {"run": "run-1", "seq": 1, "shard": 2}},
    "a number that is nought": {"_id.seq": 0},
    "a number that is a fraction": {"_id.seq": 1.5},
    "a run that is no text": {"_id.run": 7},
    "a kind that does not exist": {"kind": "step_skipped"},
    "attempt nought": {"attempt": 0},
    "try nought": {"try": 0},
    "a payload in the clear": {"payload": "{}"},
    "a time that is text": {"at": "now"},
    "a doubt that is a text": {"in_doubt": "yes"},
    "a cause that does not exist": {"cause": "boredom"},
    "taken from a held run": {"taken_from": "broken"},
    "a step's name that is too long": {"step": "x" * 65},
}


@pytest.mark.parametrize("wrong", WRONG_ENTRIES)
async def test_a_malformed_entry_is_refused(store: MongoStore, database: Any, wrong: str) -> None:
    with pytest.raises(WriteError) as refused:
        await database["sagas.journal"].insert_one(changed(ENTRY, WRONG_ENTRIES[wrong]))
    assert refused.value.code == 121


async def test_a_well_formed_entry_is_stored(store: MongoStore, database: Any) -> None:
    await database["sagas.journal"].insert_one(copy.deepcopy(ENTRY))
    (found,) = await store.journal.load("run-1")
    assert found == entry("run-1", 1, at=NOW, worker="w", token="t", next="step:charge")


# --- the committed form -----------------------------------------------------------------------------------------------


async def test_the_committed_files_are_what_the_code_says(driver: str) -> None:
    committed = {str(path.relative_to(ROOT / "schema")): path.read_text() for path in (ROOT / "schema").rglob("*.json")}
    assert committed == rendered()


async def test_every_index_serves_somebody_and_every_query_is_served_once(driver: str) -> None:
    for spec in SCHEMA:
        served = [name for index in spec.indexes for name in index.serves]
        assert all(index.serves for index in spec.indexes)
        everything = [*served, *spec.primary_key_serves]
        assert len(everything) == len(set(everything)), spec.name


async def test_the_server_understands_the_committed_validators(empty_database: Any) -> None:
    with pytest.raises(OperationFailure):  # or the tests above would prove nothing of the server's checking
        await empty_database.create_collection("nonsense", validator={"$jsonSchema": {"bsonType": "nonsense"}})
