"""Payloads sealed anew with another key, in place, while workers go on.

The one writer that changes what a journal holds, and it changes only how it is sealed, never what it says. Each write
replaces exactly the bytes that were read, so what somebody else has written meanwhile is never overwritten, and a
repeat after a lost reply, or after the caller died, finds its own work done.

`keys` on a run names every key that any of its payloads is sealed with, at every moment: a key is added before the
first payload is sealed with it, and taken away only here, once nothing is sealed with it and nothing can come to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pymongo import UpdateOne, errors

from sagas_store.drivers import Collection, Document, Driver
from sagas_store.errors import StoreRefused
from sagas_store.faults import Patience, describe, is_worth_committing_again
from sagas_store.journal import Journal, Resealed
from sagas_store.records import RunRecord
from sagas_store.runs import with_key
from sagas_store.states import State

__all__ = ["ResealedField", "Resealing"]


@dataclass(frozen=True, slots=True)
class ResealedField:
    """One payload in a run's own document."""

    name: str
    """Where in the document; `stop.reason` reaches inside."""
    old: bytes = field(repr=False)
    new: bytes = field(repr=False)


class Resealing:
    """Every write that seals anew."""

    def __init__(self, driver: Driver, collection: Collection, journal: Journal, patience: Patience) -> None:
        self._driver = driver
        self._collection = collection
        self._journal = journal
        self._patience = patience

    async def replace(
        self, run_id: str, key_id: str, fields: Sequence[ResealedField], entries: Sequence[Resealed]
    ) -> int:
        """Put payloads sealed with `key_id` in the place of exactly those that were read; returns how many were.

        The run names the key first, so that it never lacks one that it needs.
        """

        async def note() -> None:
            await self._collection.update_one(
                {"_id": run_id, "keys": {"$ne": key_id}}, [{"$set": {"keys": with_key(key_id)}}]
            )

        await self._patience.call("note the key", note)

        async def write() -> int:
            done = await self._collection.bulk_write(
                [UpdateOne({"_id": run_id, one.name: one.old}, {"$set": {one.name: one.new}}) for one in fields],
                ordered=False,
            )
            return done.matched_count

        replaced = await self._patience.call("seal a run anew", write) if fields else 0
        return replaced + await self._journal.reseal(run_id, entries)

    async def keep_keys(self, run: RunRecord, keys: Sequence[str], *, last_seq: int) -> bool:
        """Let the run name these keys alone, if it stands as it was read; whether it does now.

        `run` and the number of its newest entry are as they were when all of its payloads were seen to be sealed with
        `keys`. Refused while it is running: its holder seals with the key that was newest when its attempt began.
        """
        unchanged: Document = {
            "_id": run.run_id,
            "$and": [{"state": run.state}, {"state": {"$ne": State.RUNNING}}],
            "attempts": run.attempts,
            # A claim that could not open the run takes its count back and leaves its token.
            "claim.token": run.claim.token if run.claim is not None else {"$exists": False},
            # A stop may be recorded with a reason sealed with an older key, which the run names already.
            "stop": {"$exists": run.stop is not None},
            "keys": list(run.keys),
        }

        async def once() -> bool:
            async with self._driver.session() as session:
                await self._driver.begin(session)

                async def name_them() -> bool:
                    done = await self._collection.update_one(unchanged, {"$set": {"keys": list(keys)}}, session=session)
                    return done.matched_count == 1

                # An operator's move writes its entry together with the run, and may leave all of the above as it was:
                # either it comes before this transaction and is seen here, or the server lets only one of them commit.
                stands = await self._patience.once_in_transaction(name_them)
                if not stands or await self._journal.last_seq_in(session, run.run_id) != last_seq:
                    return False
                await self._patience.call("commit", session.commit_transaction, passes=is_worth_committing_again)
                return True

        try:
            return await self._patience.transact(once)
        except errors.PyMongoError as error:
            raise StoreRefused(f"name the keys of run {run.run_id}", describe(error)) from None
