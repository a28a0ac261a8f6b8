"""Many inserts in one unordered write, each with a fate of its own, safe to repeat after a lost reply."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, Final

from pymongo import errors

from sagas_store.drivers import Collection, Document

__all__ = ["PAYLOAD_BYTES_MAX", "InsertTogether", "Inserted"]

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


class InsertTogether:
    """A write to be awaited until it gets through: `await patience.call("append", InsertTogether(...))`.

    A document's `token` tells our own from another's: one found under its key with its token is the one whose reply was
    lost. Documents without a token can only be told apart by their key.
    """

    def __init__(self, collection: Collection, documents: Sequence[Document]) -> None:
        self._collection = collection
        self._documents = documents
        self._fates: list[Inserted | None] = [Inserted.TOO_LARGE if _too_large(one) else None for one in documents]

    async def __call__(self) -> list[Inserted]:
        """Try once; what is settled already is not sent again. Raises driver errors that are worth a repeat."""
        while open_ := [index for index, fate in enumerate(self._fates) if fate is None]:
            documents = [self._documents[index] for index in open_]
            try:
                if len(documents) == 1:
                    await self._collection.insert_one(documents[0])
                else:
                    await self._collection.insert_many(documents, ordered=False)
            except errors.DuplicateKeyError:
                await self._found(open_)
            except errors.WriteError as error:
                if error.code != _INVALID:
                    raise
                self._fates[open_[0]] = Inserted.REFUSED
            except errors.BulkWriteError as error:
                await self._sort(open_, error)
            else:
                for index in open_:
                    self._fates[index] = Inserted.YES
        return [fate for fate in self._fates if fate is not None]

    async def _sort(self, open_: list[int], error: errors.BulkWriteError) -> None:
        failed: dict[int, int] = {open_[one["index"]]: one["code"] for one in error.details.get("writeErrors", ())}
        if error.details.get("writeConcernErrors"):
            raise error  # nothing of the batch is known to be durable; a repeat finds what is there
        for index in open_:
            if index not in failed:
                self._fates[index] = Inserted.YES
        await self._found([index for index, code in failed.items() if code == _DUPLICATE])
        for index, code in failed.items():
            if code == _INVALID:
                self._fates[index] = Inserted.REFUSED
            elif code in _TOO_LARGE:
                self._fates[index] = Inserted.TOO_LARGE
            elif code != _DUPLICATE:
                raise error

    async def _found(self, indexes: list[int]) -> None:
        """Their keys exist: tell our own work from another's."""
        if not indexes:
            return
        keys = [self._documents[index]["_id"] for index in indexes]
        # A majority read: what stands on the primary alone can vanish with it. Not yet visible means "ask again", and
        # the repeat inserts it anew should it have been rolled back.
        documents: list[Document]
        if len(keys) == 1:
            one = await self._collection.find_one({"_id": keys[0]}, {"token": 1})
            documents = [one] if one is not None else []
        else:
            documents = await self._collection.find({"_id": {"$in": keys}}, {"token": 1}).to_list(None)
        found: dict[Any, Any] = {_hashable(one["_id"]): one.get("token") for one in documents}
        for index, key in zip(indexes, map(_hashable, keys), strict=True):
            if key not in found:
                raise errors.AutoReconnect("a document with this key exists and is not yet on a majority")
            token = self._documents[index].get("token")
            ours = token is not None and found[key] == token
            self._fates[index] = Inserted.YES if ours else Inserted.TAKEN


def _hashable(key: Any) -> Any:
    return tuple(key.items()) if isinstance(key, dict) else key


def _too_large(document: Document) -> bool:
    """Whether the server would not take it, or not take what will have to be added to it."""
    size = 0
    for value in document.values():
        if type(value) is bytes:
            size += len(value)
    return size > PAYLOAD_BYTES_MAX
