"""What all ledgers have in common: entries are only ever added, and an entry's `_id` is its request's idempotency key.

So a repeated request finds the entry of the first one and gets the same answer, a refusal included. And a key can be
*closed*: undoing a request that has not arrived takes its key with an entry of its own, so that the request, should a
worker long given up for dead still make it, finds the door shut.
"""

from __future__ import annotations

from typing import Any, Final

from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import DuplicateKeyError

from .network import Refused

__all__ = ["CLOSED", "Document", "Ledger", "enter", "refuse_closed"]

Document = dict[str, Any]
Ledger = AsyncCollection[Document]

CLOSED: Final = "closed"
"""The kind of an entry that keeps a request from ever having its effect."""


async def enter(ledger: Ledger, entry: Document) -> Document:
    """Add `entry` and return it; or, where its key is taken, return what stands there: the first one decides."""
    try:
        await ledger.insert_one(entry)
    except DuplicateKeyError:
        standing = await ledger.find_one({"_id": entry["_id"]})
        assert standing is not None, "entries are never removed"
        return standing
    return entry


def refuse_closed(entry: Document) -> None:
    """Raise Refused when the key was closed before its request arrived."""
    if entry["kind"] == CLOSED:
        raise Refused(f"{entry['_id']} was undone before it arrived")
