"""The journal collection: one document per entry, keyed by run and sequence number, only ever appended to.

The sequence number is the fence. A worker that takes a run over appends first, at the next number; whoever drove the
before fails on its own next append, because that number is taken. No lock and no second write is needed. What an entry
says is never changed once it is acknowledged; what is sealed in it can be sealed anew (`reseal`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from pymongo import UpdateOne, errors
from pymongo.asynchronous.client_session import AsyncClientSession

from sagas_store.clock import EPOCH
from sagas_store.commit import Alone, Batching, CommitLoop
from sagas_store.drivers import Collection, Document
from sagas_store.entries import Cause, Entry, Kind
from sagas_store.errors import FenceLost, RecordTooLarge, StoreError, StoreRefused
from sagas_store.faults import Patience
from sagas_store.inserts import Inserted, insert_together
from sagas_store.states import State

__all__ = ["JOURNAL_SPEC_NAME", "Journal", "Resealed"]

JOURNAL_SPEC_NAME: Final = "journal"
_SEQ_END: Final = 2**31 - 1
_ENTRY_BYTES: Final = 512
"""What an entry takes beside its payload, roughly; for bounding batches."""
_RESEALED_TOGETHER_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Resealed:
    """One payload or reason of an entry, sealed anew."""

    seq: int
    name: str
    """`payload` or `reason`."""
    old: bytes = field(repr=False)
    new: bytes = field(repr=False)


class Journal:
    """Every question put to the journal."""

    def __init__(self, collection: Collection, patience: Patience, batching: Batching | None = None) -> None:
        self._collection = collection
        self._patience = patience
        self._appends: CommitLoop[Entry, None] = CommitLoop(
            self._append_together,
            batching or Batching(),
            size_of=lambda entry: len(entry.payload or b"") + _ENTRY_BYTES,
        )

    async def append(self, entry: Entry) -> None:
        """Make `entry` durable on a majority, once; together with whatever other runs append at the same time.

        Safe to repeat: an entry found again under the same claim and number is the one whose reply was lost. Raises
        FenceLost when another claim has written that number, RecordTooLarge when the document cannot be stored.
        """
        await self._appends.submit(entry)

    async def _append_together(self, entries: Sequence[Entry]) -> Sequence[StoreError | Alone[None] | None]:
        """One unordered insert; each entry has its own fate."""

        def error_of(place: int, outcome: Inserted) -> StoreError:
            entry = entries[place]
            if outcome is Inserted.TAKEN:
                return FenceLost(entry.run_id, f"entry {entry.seq}")
            if outcome is Inserted.TOO_LARGE:
                return RecordTooLarge(entry.run_id, f"entry {entry.seq}")
            return StoreRefused(f"append entry {entry.seq} of run {entry.run_id}", "it does not fit the schema")

        documents = [_to_document(entry) for entry in entries]
        return await insert_together(self._patience, "append", self._collection, documents, error_of)

    async def append_in(self, session: AsyncClientSession, entry: Entry) -> None:
        """Write `entry` as part of the caller's transaction; it counts when, and only if, that commits.

        Driver errors pass through, so that the transaction can be repeated as a whole.
        """

        async def insert() -> None:
            await self._collection.insert_one(_to_document(entry), session=session)

        try:
            await self._patience.once_in_transaction(insert)
        except errors.DuplicateKeyError as error:
            raise FenceLost(entry.run_id, f"entry {entry.seq}") from error

    async def last_seq_in(self, session: AsyncClientSession, run_id: str) -> int:
        """The newest entry's number as the caller's transaction sees it; 0 when there is none."""

        async def read() -> list[Document]:
            return await self._collection.find(
                journal_filter([run_id]), {"_id": 1}, sort=[("_id", -1)], limit=1, session=session
            ).to_list(None)

        newest = await self._patience.once_in_transaction(read)
        return int(newest[0]["_id"]["seq"]) if newest else 0

    async def find_own(self, entry: Entry) -> Entry | None:
        """The entry at `entry`'s place if it was written under the same claim, as a majority has it; else None."""

        async def look() -> Document | None:
            return await self._collection.find_one({"_id": _key(entry), "token": entry.token})

        found = await self._patience.call("read entry", look)
        return _from_document(found) if found is not None else None

    async def load(self, run_id: str) -> list[Entry]:
        """All entries of one run, oldest first, as a majority has them."""
        return (await self.load_many([run_id]))[run_id]

    async def load_many(self, run_ids: Sequence[str]) -> dict[str, list[Entry]]:
        """All entries of each run, oldest first, in one query; a run without entries has an empty list."""
        journals: dict[str, list[Entry]] = {run_id: [] for run_id in run_ids}
        if not journals:
            return journals

        async def read() -> list[Document]:
            return await self._collection.find(journal_filter(journals), sort=[("_id", 1)]).to_list(None)

        for document in await self._patience.call("read journals", read):
            entry = _from_document(document)
            journals[entry.run_id].append(entry)
        return journals

    async def reseal(self, run_id: str, entries: Sequence[Resealed]) -> int:
        """Put what was sealed anew in the place of exactly the bytes that were read; returns how many were replaced."""
        replaced = 0
        for batch in _batches(entries):

            async def write(batch: Sequence[Resealed] = batch) -> int:
                done = await self._collection.bulk_write(
                    [
                        UpdateOne(
                            {"_id": {"run": run_id, "seq": one.seq}, one.name: one.old}, {"$set": {one.name: one.new}}
                        )
                        for one in batch
                    ],
                    ordered=False,
                )
                return done.matched_count

            replaced += await self._patience.call("seal entries anew", write)
        return replaced

    async def last_context(self, run_id: str) -> tuple[int, bytes] | None:
        """Number and payload of the newest entry that carries a context, or None when no step has succeeded yet."""

        async def read() -> list[Document]:
            return await self._collection.find(
                {
                    **journal_filter([run_id]),
                    "kind": {"$in": [Kind.STEP_SUCCEEDED, Kind.PROBE_SUCCEEDED, Kind.VERDICT]},
                    "payload": {"$exists": True},
                },
                sort=[("_id", -1)],
                limit=1,
            ).to_list(None)

        found = await self._patience.call("read result", read)
        return (found[0]["_id"]["seq"], bytes(found[0]["payload"])) if found else None


def journal_filter(run_ids: Iterable[str]) -> Document:
    """One range of `_id` per run: the primary key serves every read of the journal, so it is the only index."""
    ranges = [
        {"_id": {"$gte": {"run": run_id, "seq": 0}, "$lt": {"run": run_id, "seq": _SEQ_END}}} for run_id in run_ids
    ]
    return ranges[0] if len(ranges) == 1 else {"$or": ranges}


def _batches(entries: Sequence[Resealed]) -> Iterator[list[Resealed]]:
    """In order, none much larger than what one reply may be waited for."""
    batch: list[Resealed] = []
    size = 0
    for one in entries:
        batch.append(one)
        size += 2 * len(one.old)
        if size >= _RESEALED_TOGETHER_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _key(entry: Entry) -> Document:
    # The order of the two names is part of the key: ranges compare embedded documents field by field.
    return {"run": entry.run_id, "seq": entry.seq}


_NAMES: Final = tuple({"try_number": "try"}.get(name, name) for name in Entry._fields)
_OPTIONAL_FROM: Final = Entry._fields.index("step")
"""From here on fields are stored only where they say something."""


def _to_document(entry: Entry) -> Document:
    document: Document = {
        "_id": _key(entry),
        "kind": entry.kind,
        "at": entry.at,
        "attempt": entry.attempt,
        "worker": entry.worker,
        "token": entry.token,
    }
    for name, value in zip(_NAMES[_OPTIONAL_FROM:], entry[_OPTIONAL_FROM:], strict=True):
        if value is not None and value is not False:
            document[name] = value
    return document


def _from_document(document: Document) -> Entry:
    """The entry; of kind UNKNOWN where this version cannot read it, so that it harms no run but its own."""
    try:
        return _read(document)
    except (KeyError, TypeError, ValueError):
        key = document["_id"]
        return Entry(run_id=key["run"], seq=key["seq"], kind=Kind.UNKNOWN, at=EPOCH, attempt=0, worker="", token="")


def _read(document: Document) -> Entry:
    payload = document.get("payload")
    reason = document.get("reason")
    cause, taken_from = document.get("cause"), document.get("taken_from")
    return Entry(
        run_id=document["_id"]["run"],
        seq=document["_id"]["seq"],
        kind=Kind(document["kind"]),
        at=document["at"],
        attempt=document["attempt"],
        worker=document["worker"],
        token=document["token"],
        step=document.get("step"),
        try_number=document.get("try"),
        next=document.get("next"),
        due_at=document.get("due_at"),
        in_doubt=document.get("in_doubt", False),
        cause=Cause(cause) if cause is not None else None,
        taken_from=State(taken_from) if taken_from is not None else None,
        by=document.get("by"),
        reason=bytes(reason) if reason is not None else None,
        asked_at=document.get("asked_at"),
        payload=bytes(payload) if payload is not None else None,
    )
