"""The keys collection: at most one active key per tenant and purpose, whoever races; on both drivers."""

from __future__ import annotations

import asyncio
import json
import secrets
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo.errors import AutoReconnect, WriteError

from sagas_store import MongoStore
from sagas_store.errors import KeyIdTaken, StoreRefused
from sagas_store.keys import KeyRecord, Keys, KeyState, NewKey, Purpose, active_filter, of_tenant_filter, page_filter
from tests.conftest import DRIVERS
from tests.sealing.deployment import WHY

pytestmark = pytest.mark.parametrize("driver", DRIVERS)

DATA, LOOKUP = Purpose.DATA, Purpose.LOOKUP
TENANTS = ["vinet", None]


def new_key(tenant: str | None = "vinet", purpose: Purpose = DATA, **more: Any) -> NewKey:
    content = {"key_id": secrets.token_hex(8), "master": "2026", "wrapped": secrets.token_bytes(61), **more}
    return NewKey(tenant=tenant, purpose=purpose, **content)


async def kept(store: MongoStore, key: NewKey) -> KeyRecord:
    record = await store.keys.insert_first(key)
    assert record is not None
    return record


class LostReply:
    """A collection whose next update is made, while its reply is lost."""

    def __init__(self, collection: Any) -> None:
        self._collection = collection
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collection, name)

    async def update_one(self, *args: Any, **more: Any) -> Any:
        done = await self._collection.update_one(*args, **more)
        if not self.lost:
            self.lost += 1
            raise AutoReconnect("the reply was lost")
        return done


# --- the first key ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tenant", TENANTS)
async def test_a_key_is_read_back_as_it_was_given_with_the_servers_time(store: MongoStore, tenant: str | None) -> None:
    key = new_key(tenant)
    record = await kept(store, key)
    assert record == await store.keys.get(key.key_id) == await store.keys.newest_active(tenant, DATA)
    assert (record.key_id, record.tenant, record.purpose) == (key.key_id, tenant, DATA)
    assert (record.state, record.master, record.wrapped) == (KeyState.ACTIVE, "2026", key.wrapped)
    assert (record.retired_at, record.destroyed_at) == (None, None)
    assert abs(record.created_at - store.clock.now()) < timedelta(seconds=10)
    assert record.created_at.tzinfo is UTC


@pytest.mark.parametrize("tenant", TENANTS)
async def test_of_many_first_keys_made_at_once_one_is_active_and_all_are_told_of_it(
    store: MongoStore, tenant: str | None
) -> None:
    made = await asyncio.gather(*(store.keys.insert_first(new_key(tenant)) for _ in range(20)))
    assert len({record.key_id for record in made if record is not None}) == 1
    assert None not in made
    assert len(await store.keys.list_of_tenant(tenant)) == 1


async def test_tenants_and_purposes_do_not_stand_in_each_others_way(store: MongoStore) -> None:
    keys = [new_key(tenant, purpose) for tenant in ("vinet", "hanar", None) for purpose in Purpose]
    for key in keys:
        assert (await kept(store, key)).key_id == key.key_id
    for key in keys:
        active = await store.keys.newest_active(key.tenant, key.purpose)
        assert active is not None
        assert active.key_id == key.key_id
    assert {one.key_id for one in await store.keys.list_of_tenant(None)} == {
        key.key_id for key in keys if key.tenant is None
    }


async def test_a_repeat_after_a_lost_reply_keeps_one_key(store: MongoStore) -> None:
    collection = LostReply(store.keys._collection)
    keys = Keys(store._driver, collection, store._patience)  # type: ignore[arg-type]
    key = new_key()
    record = await keys.insert_first(key)
    assert collection.lost == 1
    assert record is not None
    assert record.key_id == key.key_id
    assert len(await store.keys.list_of_tenant("vinet")) == 1


async def test_a_repeat_does_not_bring_back_a_key_that_was_retired_meanwhile(store: MongoStore) -> None:
    key = new_key()
    before = await kept(store, key)
    await store.keys.rotate(key.key_id, new_key(), **WHY)
    retired = await store.keys.get(key.key_id)
    await store.keys._insert(key, None)
    assert retired is not None
    assert retired == await store.keys.get(key.key_id)
    assert (retired.state, retired.created_at) == (KeyState.RETIRED, before.created_at)


async def test_an_id_that_is_taken_is_refused_and_nothing_is_overwritten(store: MongoStore) -> None:
    key = new_key()
    record = await kept(store, key)
    with pytest.raises(KeyIdTaken):
        await store.keys.insert_first(new_key("hanar", key_id=key.key_id))
    with pytest.raises(KeyIdTaken):
        await store.keys.rotate(key.key_id, new_key(key_id=key.key_id), **WHY)
    assert await store.keys.get(key.key_id) == record
    assert await store.keys.list_of_tenant("hanar") == []


async def test_words_that_look_like_commands_are_kept_as_words(store: MongoStore) -> None:
    key = new_key("$state", master="$$NOW")
    record = await kept(store, key)
    assert (record.tenant, record.master) == ("$state", "$$NOW")


async def test_what_is_not_there_is_not_found(store: MongoStore) -> None:
    assert await store.keys.get("00" * 8) is None
    assert await store.keys.newest_active("vinet", DATA) is None
    assert await store.keys.list_of_tenant("vinet") == []


# --- rotating ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tenant", TENANTS)
async def test_a_rotation_retires_the_old_key_and_makes_the_new_one_active(
    store: MongoStore, tenant: str | None
) -> None:
    old, new = new_key(tenant), new_key(tenant)
    await kept(store, old)
    active = await store.keys.rotate(old.key_id, new, **WHY)
    assert active is not None
    assert active.key_id == new.key_id
    assert active == await store.keys.newest_active(tenant, DATA)
    retired, _ = await store.keys.list_of_tenant(tenant)
    assert (retired.key_id, retired.state, retired.wrapped) == (old.key_id, KeyState.RETIRED, old.wrapped)
    assert retired.retired_at is not None
    assert retired.retired_at >= retired.created_at
    assert (retired.retired_by, retired.retired_reason) == (WHY["by"], WHY["reason"])


async def test_of_rotations_at_once_each_leaves_one_active_key(store: MongoStore) -> None:
    first = await kept(store, new_key())
    made = await asyncio.gather(*(store.keys.rotate(first.key_id, new_key(), **WHY) for _ in range(8)))
    assert len({record.key_id for record in made if record is not None}) == 1
    states = [record.state for record in await store.keys.list_of_tenant("vinet")]
    assert sorted(states) == [KeyState.ACTIVE, KeyState.RETIRED]


async def test_a_rotation_of_a_destroyed_tenant_makes_no_key(store: MongoStore) -> None:
    first = await kept(store, new_key())
    await store.keys.destroy("vinet", **WHY)
    assert await store.keys.rotate(first.key_id, new_key(), **WHY) is None
    assert [one.state for one in await store.keys.list_of_tenant("vinet")] == [KeyState.DESTROYED]


# --- rewrapping -------------------------------------------------------------------------------------------------------


async def test_rewrapping_replaces_the_wrapped_bytes_and_nothing_else(store: MongoStore) -> None:
    record = await kept(store, new_key())
    assert await store.keys.rewrap(record, master="2027", wrapped=b"new")
    now = await store.keys.get(record.key_id)
    assert now is not None
    assert (now.master, now.wrapped) == ("2027", b"new")
    assert (now.state, now.created_at) == (record.state, record.created_at)
    assert await store.keys.rewrap(record, master="2027", wrapped=b"new")  # the reply was lost


async def test_a_key_that_was_destroyed_meanwhile_does_not_come_back(store: MongoStore) -> None:
    record = await kept(store, new_key())
    await store.keys.destroy("vinet", **WHY)
    assert not await store.keys.rewrap(record, master="2027", wrapped=b"new")
    now = await store.keys.get(record.key_id)
    assert now is not None
    assert (now.wrapped, now.state) == (None, KeyState.DESTROYED)
    assert not await store.keys.rewrap(now, master="2027", wrapped=b"new")


# --- destroying -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tenant", TENANTS)
async def test_destroying_overwrites_every_key_of_the_tenant_and_of_no_other(
    store: MongoStore, database: Any, tenant: str | None
) -> None:
    data, lookup, other = new_key(tenant), new_key(tenant, LOOKUP), new_key("hanar")
    for key in (data, lookup, other):
        await kept(store, key)
    await store.keys.rotate(data.key_id, new_key(tenant), **WHY)
    left = await store.keys.destroy(tenant, **WHY)
    assert [(one.state, one.wrapped) for one in left] == [(KeyState.DESTROYED, None)] * 3
    assert all(one.destroyed_at is not None for one in left)
    assert left == await store.keys.list_of_tenant(tenant)
    assert await store.keys.newest_active(tenant, DATA) is None
    stored = [document async for document in database["sagas.keys"].find({"tenant": tenant})]
    assert len(stored) == 3
    assert data.wrapped not in [value for document in stored for value in document.values()]
    spared = await store.keys.get(other.key_id)
    assert spared is not None
    assert spared.wrapped == other.wrapped


async def test_destroying_twice_keeps_the_first_time(store: MongoStore) -> None:
    await kept(store, new_key())
    first = await store.keys.destroy("vinet", **WHY)
    assert [(one.destroyed_by, one.destroyed_reason) for one in first] == [(WHY["by"], WHY["reason"])]
    assert await store.keys.destroy("vinet", by="bob@shop", reason="for another reason") == first
    assert await store.keys.destroy("nobody", **WHY) == []


async def test_whatever_races_a_destruction_nothing_of_the_tenant_is_left_active(store: MongoStore) -> None:
    for _ in range(5):
        tenant = secrets.token_hex(4)
        first = await kept(store, new_key(tenant))
        await asyncio.gather(
            store.keys.destroy(tenant, **WHY),
            *(store.keys.rotate(first.key_id, new_key(tenant), **WHY) for _ in range(3)),
        )
        assert {one.state for one in await store.keys.list_of_tenant(tenant)} == {KeyState.DESTROYED}


# --- paging -----------------------------------------------------------------------------------------------------------


async def test_pages_name_every_key_once(store: MongoStore) -> None:
    made = {(await kept(store, new_key(f"tenant {n}"))).key_id for n in range(7)}
    seen: list[str] = []
    while page := await store.keys.page(after=seen[-1] if seen else None, limit=3):
        seen += [one.key_id for one in page]
    assert seen == sorted(made)


# --- the schema -------------------------------------------------------------------------------------------------------

NOW = datetime(2026, 11, 29, tzinfo=UTC)
FINE: dict[str, Any] = {
    "_id": "0123456789abcdef",
    "tenant": "vinet",
    "purpose": "data",
    "state": "active",
    "created_at": NOW,
    "master": "2026",
    "wrapped": b"x",
}
WRONG: dict[str, dict[str, Any]] = {
    "an id of another form": {"_id": "0123"},
    "an empty tenant": {"tenant": ""},
    "an unknown purpose": {"purpose": "other"},
    "an unknown state": {"state": "lost"},
    "an active key without its wrapped bytes": {"wrapped": None},
    "an active key that was destroyed": {"destroyed_at": NOW},
    "a destroyed key with its wrapped bytes": {"state": "destroyed", "destroyed_at": NOW},
    "a destroyed key without its time": {"state": "destroyed", "wrapped": None},
    "wrapped bytes as text": {"wrapped": "x"},
    "a field of no meaning": {"secret": b"x"},
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_what_makes_no_sense_cannot_be_stored_by_anybody(store: MongoStore, database: Any, wrong: str) -> None:
    await database["sagas.keys"].insert_one(FINE)
    await database["sagas.keys"].delete_one({})
    document = {name: value for name, value in {**FINE, **WRONG[wrong]}.items() if value is not None}
    with pytest.raises(WriteError, match="Document failed validation"):
        await database["sagas.keys"].insert_one(document)


async def test_a_key_the_validator_refuses_is_refused_by_name(store: MongoStore) -> None:
    with pytest.raises(StoreRefused):
        await store.keys.insert_first(new_key(key_id="short"))


QUERIES = {
    "newest_active": (active_filter("vinet", DATA), [], "active"),
    "newest_active, no tenant": (active_filter(None, DATA), [], "active"),
    "list_of_tenant": (of_tenant_filter("vinet"), [("created_at", 1), ("_id", 1)], "of_tenant"),
    "destroy": ({**of_tenant_filter(None), "state": {"$ne": KeyState.DESTROYED}}, [], "of_tenant"),
    "page": (page_filter("0123456789abcdef"), [("_id", 1)], "_id_"),
}


@pytest.mark.parametrize("query", QUERIES)
async def test_every_question_is_answered_by_its_index(store: MongoStore, query: str) -> None:
    for n in range(30):
        await kept(store, new_key(f"tenant {n}"))
    filter_, sort, index = QUERIES[query]
    cursor = store.keys._collection.find(filter_)
    plan = json.dumps((await (cursor.sort(sort) if sort else cursor).explain())["queryPlanner"], default=str)
    assert "COLLSCAN" not in plan
    assert '"stage": "SORT"' not in plan
    assert f'"indexName": "{index}"' in json.dumps(json.loads(plan)["winningPlan"])


async def test_applying_the_schema_again_changes_nothing(store: MongoStore) -> None:
    assert await store.schema.plan() == []
