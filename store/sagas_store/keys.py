"""The keys collection: one document per data key of a tenant, wrapped by a master key that is not here.

The store keeps wrapped bytes and states; it can open nothing. A tenant has at most one active key per purpose, which a
partial unique index sees to: of two processes that make a tenant's first key at once, both end up with the same one.
A destroyed key leaves its document behind without the wrapped bytes: what is gone and since when stays known, and
nothing is made anew by accident.

The collection is small and stays on one shard: a unique index cannot hold across shards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from pymongo import errors
from pymongo.asynchronous.client_session import AsyncClientSession

from sagas_store.drivers import Collection, Document, Driver
from sagas_store.errors import KeyIdTaken, StoreRefused
from sagas_store.faults import Patience, describe, is_worth_committing_again

__all__ = ["KEYS_SPEC_NAME", "KeyRecord", "KeyState", "Keys", "NewKey", "Purpose"]

KEYS_SPEC_NAME: Final = "keys"


class Purpose(StrEnum):
    """What a key is for. Stored as written here."""

    DATA = "data"
    """Payloads are sealed under keys derived from it."""
    LOOKUP = "lookup"
    """Idempotency keys are hashed with it. Never rotated: a hash that changes finds nothing again."""


class KeyState(StrEnum):
    """Where a key stands. Stored as written here."""

    ACTIVE = "active"
    """New payloads are sealed with it. At most one per tenant and purpose."""
    RETIRED = "retired"
    """Opens what it sealed; nothing new is sealed with it. A rotation brings it here."""
    DESTROYED = "destroyed"
    """Its wrapped bytes are gone, and with them whatever it sealed. For good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A key to be kept."""

    key_id: str
    tenant: str | None
    purpose: Purpose
    master: str
    """The name of the master key that wrapped it."""
    wrapped: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """A key as the database has it. Times are the server's, aware UTC."""

    key_id: str
    tenant: str | None
    purpose: Purpose
    state: KeyState
    created_at: datetime
    retired_at: datetime | None
    retired_by: str | None
    """Who rotated it away, and below why."""
    retired_reason: str | None
    destroyed_at: datetime | None
    destroyed_by: str | None
    destroyed_reason: str | None
    master: str
    wrapped: bytes | None = field(repr=False)
    """None once it is destroyed."""


class Keys:
    """Every question put to the keys collection."""

    def __init__(self, driver: Driver, collection: Collection, patience: Patience) -> None:
        self._driver = driver
        self._collection = collection
        self._patience = patience

    # ---------------------------------------------------------------- reading

    async def newest_active(self, tenant: str | None, purpose: Purpose) -> KeyRecord | None:
        """The key that seals for this tenant now, as a majority has it; None when there is none."""

        async def read() -> Document | None:
            return await self._collection.find_one(active_filter(tenant, purpose))

        found = await self._patience.call("find the active key", read)
        return _record(found) if found is not None else None

    async def get(self, key_id: str) -> KeyRecord | None:
        """A key by its id, destroyed ones included; None when there never was one."""

        async def read() -> Document | None:
            return await self._collection.find_one({"_id": key_id})

        found = await self._patience.call("read key", read)
        return _record(found) if found is not None else None

    async def list_of_tenant(self, tenant: str | None) -> list[KeyRecord]:
        """All keys of a tenant, of both purposes, oldest first, destroyed ones included."""

        async def read() -> list[Document]:
            return await self._collection.find(of_tenant_filter(tenant), sort=[("created_at", 1), ("_id", 1)]).to_list(
                None
            )

        return [_record(found) for found in await self._patience.call("list keys", read)]

    async def page(self, *, after: str | None, limit: int) -> list[KeyRecord]:
        """Keys of all tenants in the order of their ids, from `after` on."""

        async def read() -> list[Document]:
            return await self._collection.find(page_filter(after), sort=[("_id", 1)], limit=limit).to_list(None)

        return [_record(found) for found in await self._patience.call("list keys", read)]

    # ---------------------------------------------------------------- writing

    async def insert_first(self, key: NewKey) -> KeyRecord | None:
        """Keep `key` as the active one of its tenant and purpose, unless there is one; returns the one that is active.

        That may be somebody else's, who was quicker. None when it was destroyed in between. Safe to repeat. Raises
        KeyIdTaken when another key has this id: draw another one.
        """

        async def look() -> Document | None:
            found = await self._collection.find_one(active_filter(key.tenant, key.purpose))
            if (
                found is None
                and await self._collection.find_one({"tenant": key.tenant, "purpose": key.purpose}) is None
            ):
                # Destroyed keys leave a trace, so the one that stands in our way is on the primary alone so far.
                raise errors.AutoReconnect("the first key is not yet on a majority")
            return found

        async def insert() -> None:
            await self._insert(key, None)

        try:
            await self._patience.call("keep key", insert)
        except errors.DuplicateKeyError as error:
            _refuse_taken_id(key, error)
        found = await self._patience.call("find the active key", look)
        return _record(found) if found is not None else None

    async def rotate(self, retiring: str, key: NewKey, *, by: str, reason: str) -> KeyRecord | None:
        """Retire the active key `retiring` and make `key` the active one, together; returns the one that is active.

        When somebody else has rotated or destroyed it since, nothing is changed and theirs is returned, if any. After a
        StoreUnavailable it may have happened; rotating once more does no harm. Raises KeyIdTaken.
        """

        async def once() -> None:
            async with self._driver.session() as session:
                await self._driver.begin(session)

                async def retire() -> bool:
                    retired = await self._collection.update_one(
                        {"_id": retiring, "state": KeyState.ACTIVE},
                        [{"$set": _turned(KeyState.RETIRED, by, reason)}],
                        session=session,
                    )
                    return retired.matched_count == 1

                if not await self._patience.once_in_transaction(retire):
                    return
                await self._patience.once_in_transaction(lambda: self._insert(key, session))
                await self._patience.call("commit", session.commit_transaction, passes=is_worth_committing_again)

        async def look() -> Document | None:
            found = await self._collection.find_one(active_filter(key.tenant, key.purpose))
            if found is not None and found["_id"] == retiring:
                # Somebody else's rotation, which our transaction has seen, is on the primary alone so far.
                raise errors.AutoReconnect("the rotation is not yet on a majority")
            return found

        try:
            await self._patience.transact(once)
        except errors.DuplicateKeyError as error:
            _refuse_taken_id(key, error)
        except errors.PyMongoError as error:
            raise StoreRefused(f"rotate key {retiring}", describe(error)) from None
        found = await self._patience.call("find the active key", look)
        return _record(found) if found is not None else None

    async def rewrap(self, old: KeyRecord, *, master: str, wrapped: bytes) -> bool:
        """Replace what `old` holds by the same key wrapped by another master; False when it was changed meanwhile."""

        async def write() -> bool:
            # The old bytes are the fence: a key that was destroyed meanwhile must not come back.
            done = await self._collection.update_one(
                {"_id": old.key_id, "wrapped": {"$in": [old.wrapped, wrapped]}},
                {"$set": {"master": master, "wrapped": wrapped}},
            )
            return done.matched_count == 1

        return old.wrapped is not None and await self._patience.call("rewrap key", write)

    async def destroy(self, tenant: str | None, *, by: str, reason: str) -> list[KeyRecord]:
        """Overwrite the wrapped bytes of every key of the tenant, and return what is left of them. For good.

        Repeated until nothing is left to destroy, so a key that was being made at the same time goes too.
        """

        async def write() -> int:
            done = await self._collection.update_many(
                {**of_tenant_filter(tenant), "state": {"$ne": KeyState.DESTROYED}},
                [
                    {"$set": _turned(KeyState.DESTROYED, by, reason)},
                    {"$unset": ["wrapped"]},
                ],
            )
            return done.matched_count

        while await self._patience.call("destroy keys", write):
            pass
        return await self.list_of_tenant(tenant)

    async def discard(self, key_id: str, *, by: str, reason: str) -> bool:
        """Overwrite one retired key's wrapped bytes, for good; whether they are gone. Never those of an active one.

        Safe to repeat.
        """

        async def write() -> bool:
            done = await self._collection.update_one(
                {"_id": key_id, "state": KeyState.RETIRED},
                [
                    {"$set": _turned(KeyState.DESTROYED, by, reason)},
                    {"$unset": ["wrapped"]},
                ],
            )
            return done.matched_count == 1

        if await self._patience.call("discard key", write):
            return True
        found = await self.get(key_id)  # ours, the reply lost; or another one's
        return found is not None and found.state is KeyState.DESTROYED

    async def _insert(self, key: NewKey, session: AsyncClientSession | None) -> None:
        content: Document = {
            "purpose": key.purpose,
            "state": {"$ifNull": ["$state", KeyState.ACTIVE]},
            "created_at": {"$ifNull": ["$created_at", "$$NOW"]},
            "master": {"$literal": key.master},
            "wrapped": key.wrapped,
        }
        if key.tenant is not None:
            content["tenant"] = {"$literal": key.tenant}
        # An upsert, because only a pipeline knows the server's time. The wrapped bytes are random, so what it can match
        # is our own insert whose reply was lost, and that one is left as it is by now; another key with this id is not
        # matched, and then inserting fails.
        await self._collection.update_one(
            {"_id": key.key_id, "wrapped": key.wrapped}, [{"$set": content}], upsert=True, session=session
        )


def _refuse_taken_id(key: NewKey, error: errors.DuplicateKeyError) -> None:
    """Raise KeyIdTaken unless it is the tenant's active key that stands in the way, which is an answer."""
    pattern: Any = (error.details or {}).get("keyPattern", {})
    if "_id" in pattern:
        raise KeyIdTaken(key.key_id) from error


# ----------------------------------------------------------- the filters, named so that each plan can be explained


def active_filter(tenant: str | None, purpose: Purpose) -> Document:
    """The one active key of a tenant and purpose. Null also finds the keys of runs without a tenant."""
    return {"tenant": tenant, "purpose": purpose, "state": KeyState.ACTIVE}


def of_tenant_filter(tenant: str | None) -> Document:
    """All keys of a tenant."""
    return {"tenant": tenant}


def page_filter(after: str | None) -> Document:
    """All keys, from an id on."""
    return {"_id": {"$gt": after}} if after is not None else {}


# -------------------------------------------------------------------- documents


def _turned(state: KeyState, by: str, reason: str) -> Document:
    """What is written of a key that comes to this state: from when, by whose wish, and why."""
    said = {f"{state}_by": {"$literal": by}, f"{state}_reason": {"$literal": reason}}
    return {"state": state, f"{state}_at": "$$NOW", **said}


def _record(document: Document) -> KeyRecord:
    wrapped = document.get("wrapped")
    return KeyRecord(
        key_id=document["_id"],
        tenant=document.get("tenant"),
        purpose=Purpose(document["purpose"]),
        state=KeyState(document["state"]),
        created_at=document["created_at"],
        retired_at=document.get("retired_at"),
        retired_by=document.get("retired_by"),
        retired_reason=document.get("retired_reason"),
        destroyed_at=document.get("destroyed_at"),
        destroyed_by=document.get("destroyed_by"),
        destroyed_reason=document.get("destroyed_reason"),
        master=document["master"],
        wrapped=bytes(wrapped) if wrapped is not None else None,
    )
