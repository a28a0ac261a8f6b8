"""Many inserts in one unordered write, each with a fate of its own, safe to repeat after a lost reply."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, Final

from pymongo import errors

from sagas_store.clock import monotonic
from sagas_store.commit import Alone
from sagas_store.drivers import Collection, Document
from sagas_store.errors import StoreError
from sagas_store.faults import Patience

__all__ = ["PAYLOAD_BYTES_MAX", "InsertTogether", "Inserted", "insert_together"]

PAYLOAD_BYTES_MAX: Final = 15 * 1024 * 1024
"""MongoDB's limit is 16 MiB for a whole document; the rest is room for the claim, the stop and the state to come."""
_DUPLICATE: Final = 11000
_INVALID: Final = 121
_TOO_LARGE: Final = frozenset({10334, 17419, 17420})


class Inserted(Enum):
    """What became of one document."""

    YES = auto()
    """It is there, durably; inserted now, or by an earlier try of this very write whose reply was lost."""
    TAKEN = auto()
    """Another document has its key."""
    TOO_LARGE = auto()
    REFUSED = auto()
    """It does not fit the collection's validator."""
    OPEN = auto()
    """Not known yet."""


async def insert_together(
    patience: Patience,
    operation: str,
    collection: Collection,
    documents: Sequence[Document],
    error_of: Callable[[int, Inserted], StoreError],
) -> list[StoreError | Alone[None] | None]:
    """Make these documents durable and say what came of each: None where it is there, `error_of(place, what)` if not.

    What one try as a batch has not settled goes on by itself, with what is left of the patience, whether the server
    said that it took too long or nothing at all was heard: an open transaction may hold one key for a minute, and the
    server tries what comes after it in the batch no sooner. One reply is waited for in any case, so that none fails for
    its neighbour's sake: it may take so much longer than the patience. Raises StoreUnavailable, StoreRefused: nothing
    is known of any then.
    """
    begun = monotonic()

    async def alone(place: int) -> None:
        left_s = max(patience.total_s - (monotonic() - begun), patience.reply_s)
        (outcome,) = await patience.call(
            operation, InsertTogether(collection, [documents[place]], alone=True), within_s=left_s
        )
        if outcome is not Inserted.YES:
            raise error_of(place, outcome)

    fates: list[StoreError | Alone[None] | None] = []
    for place, outcome in enumerate(await patience.call(operation, InsertTogether(collection, documents))):
        if outcome is Inserted.YES:
            fates.append(None)
        elif outcome is Inserted.OPEN:
            fates.append(Alone(functools.partial(alone, place)))
        else:
            fates.append(error_of(place, outcome))
    return fates


class InsertTogether:
    """A write to be awaited until it gets through: `await patience.call("append", InsertTogether(...))`.

    A document's `token` tells our own from another's: one found under its key with its token is the one whose reply was
    lost. Documents without a token can only be told apart by their key.
    """

    def __init__(self, collection: Collection, documents: Sequence[Document], *, alone: bool = False) -> None:
        """With `alone` its one document has no neighbours left, and is tried until its fate is known."""
        self._collection = collection
        self._documents = documents
        self._alone = alone
        self._fates = [Inserted.TOO_LARGE if _too_large(one) else Inserted.OPEN for one in documents]

    async def __call__(self) -> list[Inserted]:
        """Try once; what is settled already is not sent again. Raises driver errors that are worth a repeat.

        What is OPEN in the end is to be tried alone.
        """
        open_ = [place for place, fate in enumerate(self._fates) if fate is Inserted.OPEN]
        try:
            if len(open_) == 1:
                await self._insert_one(open_[0])
            elif open_:
                await self._insert_many(open_)
        except (errors.ExecutionTimeout, errors.NetworkTimeout):
            # The server took too long, or is not heard of. What keeps it waiting may be one of these, and would the
            # next time too.
            if self._alone:
                raise
        return self._fates

    async def _insert_one(self, place: int) -> None:
        try:
            await self._collection.insert_one(self._documents[place])
        except errors.DuplicateKeyError:
            await self._found([place])
        except errors.WriteError as error:
            if error.code == _INVALID:
                self._fates[place] = Inserted.REFUSED
            elif self._alone:
                raise
        else:
            self._fates[place] = Inserted.YES

    async def _insert_many(self, open_: list[int]) -> None:
        try:
            await self._collection.insert_many([self._documents[place] for place in open_], ordered=False)
        except errors.BulkWriteError as error:
            await self._sort(open_, error)
        else:
            for place in open_:
                self._fates[place] = Inserted.YES

    async def _sort(self, open_: list[int], error: errors.BulkWriteError) -> None:
        failed: dict[int, int] = {open_[one["index"]]: one["code"] for one in error.details.get("writeErrors", ())}
        if error.details.get("writeConcernErrors"):
            raise error  # nothing of the batch is known to be durable; a repeat finds what is there
        for place in open_:
            if place not in failed:
                self._fates[place] = Inserted.YES
        for place, code in failed.items():
            if code == _INVALID:
                self._fates[place] = Inserted.REFUSED
            elif code in _TOO_LARGE:
                self._fates[place] = Inserted.TOO_LARGE
        await self._found([place for place, code in failed.items() if code == _DUPLICATE])

    async def _found(self, places: list[int]) -> None:
        """Their keys exist: tell our own work from another's."""
        if not places:
            return
        keys = [self._documents[place]["_id"] for place in places]
        # A majority read: what stands on the primary alone can vanish with it. Not yet visible means "ask again", and
        # the repeat inserts it anew should it have been rolled back.
        documents: list[Document]
        if len(keys) == 1:
            one = await self._collection.find_one({"_id": keys[0]}, {"token": 1})
            documents = [one] if one is not None else []
        else:
            documents = await self._collection.find({"_id": {"$in": keys}}, {"token": 1}).to_list(None)
        found: dict[Any, Any] = {_hashable(one["_id"]): one.get("token") for one in documents}
        for place, key in zip(places, map(_hashable, keys), strict=True):
            if key not in found:
                if self._alone:
                    raise errors.AutoReconnect("a document with this key exists and is not yet on a majority")
                continue
            token = self._documents[place].get("token")
            ours = token is not None and found[key] == token
            self._fates[place] = Inserted.YES if ours else Inserted.TAKEN


def _hashable(key: Any) -> Any:
    return tuple(key.items()) if isinstance(key, dict) else key


def _too_large(document: Document) -> bool:
    """Whether the server would not take it, or not take what will have to be added to it."""
    size = 0
    for value in document.values():
        if type(value) is bytes:
            size += len(value)
    return size > PAYLOAD_BYTES_MAX
