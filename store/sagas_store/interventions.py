"""What a person does to a run that a worker may hold: stop it, let it go on, cut its wait short.

A stop is one guarded write on the run's document, answered at once, and decided there: before the gate it will be
undone, after it it is refused. The run's holder acts on it and journals it; nobody else may append to a held run's
journal, since the next number belongs to the holder.

An operator's move starts from a state that no worker holds. The move and its entry commit in one transaction, so either
both stand or neither, and of two operators, or an operator and a worker, one is told that the other was quicker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from pymongo import errors
from pymongo.asynchronous.client_session import AsyncClientSession

from sagas_store.drivers import Collection, Document
from sagas_store.entries import Entry
from sagas_store.errors import StoreRefused, WrongState
from sagas_store.faults import Patience, describe
from sagas_store.journal import Journal
from sagas_store.records import RunRecord
from sagas_store.runs import Runs, with_key
from sagas_store.states import HELD, OPEN, Decision, Phase, State, check_move

__all__ = ["Interventions"]

_STOPPABLE: Final = sorted(OPEN | HELD)

Commit = Callable[[Callable[[AsyncClientSession], Awaitable[Entry | None]]], Awaitable[Entry | None]]


class Interventions:
    """Every write that a person causes."""

    def __init__(
        self, collection: Collection, runs: Runs, journal: Journal, patience: Patience, commit_together: Commit
    ) -> None:
        self._collection = collection
        self._runs = runs
        self._journal = journal
        self._patience = patience
        self._commit_together = commit_together

    async def ask_stop(self, run_id: str, *, by: str, reason: bytes | None, key_id: str | None = None) -> bool:
        """Record a stop, unless one stands already or the run is settled; whether this call recorded it.

        `key_id` is the key that the reason is sealed with. A stop counts without its reason too, where it could not be
        sealed: nobody who presses Stop waits for a key service. Safe to repeat: a repeat after a lost reply finds its
        own stop standing and returns False; read the run.
        """
        gate_passed = {"$ne": [{"$type": "$gate_passed_at"}, "missing"]}
        untouched = {"$and": [{"$eq": ["$state", State.PENDING]}, {"$eq": ["$attempts", 0]}]}
        parked = {"$and": [{"$eq": ["$state", State.PENDING]}, {"$not": [gate_passed]}]}
        decision = {
            "$switch": {
                "branches": [
                    {"case": untouched, "then": Decision.CANCELLED},
                    # The pivot failed after its gate: there is nothing left to refuse.
                    {"case": {"$eq": ["$phase", Phase.ROLLING_BACK]}, "then": Decision.WILL_BE_UNDONE},
                    {"case": gate_passed, "then": Decision.REFUSED},
                ],
                "default": Decision.WILL_BE_UNDONE,
            }
        }
        pipeline: list[Document] = [
            {
                "$set": {
                    "stop": {
                        "decision": decision,
                        "by": {"$literal": by},
                        "reason": {"$literal": reason} if reason is not None else "$$REMOVE",
                        "asked_at": "$$NOW",
                    },
                    "keys": with_key(key_id) if key_id is not None else "$keys",
                    # Nothing has run: this very write settles it, and no worker can claim it any more.
                    "state": {"$cond": [untouched, State.CANCELLED, "$state"]},
                    "settled_at": {"$cond": [untouched, "$$NOW", "$$REMOVE"]},
                    # A parked run acts on it at once. A running one keeps its lease, a held one has no due time.
                    "due_at": {
                        "$switch": {
                            "branches": [
                                {"case": untouched, "then": "$$REMOVE"},
                                {"case": parked, "then": "$$NOW"},
                            ],
                            "default": "$due_at",
                        }
                    },
                }
            }
        ]

        async def write() -> bool:
            done = await self._collection.update_one(
                {"_id": run_id, "stop": {"$exists": False}, "state": {"$in": _STOPPABLE}}, pipeline
            )
            return done.matched_count == 1

        return await self._patience.call("stop", write)

    async def move_on(
        self,
        run: RunRecord,
        entry_at: Callable[[int], Entry],
        *,
        key_id: str | None = None,
        in_place: bool = False,
    ) -> Entry:
        """Make a run that no worker holds claimable now, with an entry in its journal.

        With `in_place` it is due since it was created, so it goes before what was started after it.

        `run` is as it was read. The entry's number is chosen here, and `entry_at(number)` makes the entry, which may be
        sealed for its place with the key `key_id`. Raises WrongState when the run has moved since.
        """
        if run.state is not State.PENDING:
            check_move(run.state, State.PENDING)
        unchanged: Document = {
            "_id": run.run_id,
            "state": run.state,
            "attempts": run.attempts,
            "stop": _same_stop(run),
        }
        if run.state is State.PENDING:
            # It is pending before and after, so the state does not tell whether somebody else has cut its wait short.
            unchanged["$expr"] = {"$gt": ["$due_at", "$$NOW"]}
        pipeline: list[Document] = [
            {
                "$set": {
                    "state": State.PENDING,
                    "due_at": {"$min": ["$created_at", "$$NOW"]} if in_place else "$$NOW",
                    # With an entry in the journal the next attempt is not a first one, which would read none.
                    "attempts": {"$max": ["$attempts", 1]},
                    "keys": with_key(key_id) if key_id is not None else "$keys",
                }
            },
            {"$unset": ["held", "settled_at"]},
        ]

        async def body(session: AsyncClientSession) -> Entry | None:
            async def move() -> bool:
                return (await self._collection.update_one(unchanged, pipeline, session=session)).matched_count == 1

            if not await self._patience.once_in_transaction(move):
                return None
            return entry_at(await self._journal.last_seq_in(session, run.run_id) + 1)

        try:
            committed = await self._commit_together(body)
        except errors.PyMongoError as error:  # the body is all ours: nobody else waits for the driver's own error
            raise StoreRefused(f"move run {run.run_id} on", describe(error)) from None
        if committed is None:
            now = await self._runs.get(run.run_id)
            raise WrongState(run.run_id, now.state if now is not None else "gone")
        return committed


def _same_stop(run: RunRecord) -> Document:
    return {"$exists": run.stop is not None}
