"""The runs collection: one document per run, with its state, its lease and what it was started with.

Every write by a run's holder carries the claim token in its filter, so a holder that lost its lease changes nothing and
is told so by FenceLost. Every write that changes the state also names the states it may come from, derived from the
state table. All of them are safe to repeat after a lost reply; only `end_lease`, which spends its token, says FenceLost
then, although it has ended the lease.

Longer than most modules: who asks a question of this collection finds it here and nowhere else, and a holder's writes
are worded so that those of many runs can go together. What is asked about and answered with is in `records`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from pymongo import UpdateMany, errors
from pymongo.asynchronous.client_session import AsyncClientSession

from sagas_store.commit import Alone, Batching, CommitLoop
from sagas_store.drivers import Collection, Document
from sagas_store.errors import FenceLost, RecordTooLarge, RunExists, StopFirst, StoreError, StoreRefused
from sagas_store.faults import Patience
from sagas_store.inserts import Inserted, insert_together
from sagas_store.records import (
    Blocked,
    Claim,
    HeldGroup,
    NewRun,
    Renewal,
    RunFilter,
    RunPosition,
    RunRecord,
    new_document,
    readable_part,
    record_of,
    state_of,
)
from sagas_store.states import Phase, State, check_move

__all__ = ["PAGE_ORDER", "RENEWALS_PER_LEASE", "RUNS_SPEC_NAME", "Runs", "from_now", "page_filter", "with_key"]

RUNS_SPEC_NAME: Final = "runs"
_COUNTED_TOGETHER: Final = 2_000
_NO_INPUT: Final = {"input": 0}
RENEWALS_PER_LEASE: Final = 6
"""How often leases are renewed in their length, and so for how many renewals without an answer a lease has time."""
_RENEWAL_LEAST_S: Final = 0.5
"""However short the lease: an ordinary write to a majority's disks may take so long when the server is busy."""


@dataclass(frozen=True, slots=True)
class _Move:
    """A write by a run's holder."""

    run_id: str
    token: str
    operation: str
    pipeline: tuple[Document, ...]
    provided: Document
    """What must hold beside the claim; where it does not although the claim does, a stop came first."""
    becomes: State
    change: tuple[object, ...]
    """What tells its pipeline and what must hold from others: the same for moves that can be one update of many."""
    plain: tuple[Document, Document] | None = None
    """The same move as what must hold and an update without a pipeline, which costs the server less; for moves that go
    together. It may ask for more: what it does not match is moved by itself, with the pipeline."""


def _together(alike: Sequence[_Move]) -> UpdateMany:
    """The update of many runs under one claim token."""
    first = alike[0]
    provided, update = first.plain if first.plain is not None else (first.provided, list(first.pipeline))
    guard = {
        "_id": {"$in": [move.run_id for move in alike]},
        "claim.token": first.token,  # the fence: a claim made since has its own token
        "state": State.RUNNING,  # pending under our token is our own park whose reply was lost
        **provided,
    }
    return UpdateMany(guard, update)


class Runs:
    """Every question put to the runs collection."""

    def __init__(self, collection: Collection, patience: Patience, batching: Batching | None = None) -> None:
        batching = batching or Batching()
        self._collection = collection
        self._patience = patience
        self._starts: CommitLoop[NewRun, None] = CommitLoop(
            self._insert_together, batching, size_of=lambda run: len(run.input)
        )
        self._many_starts: CommitLoop[NewRun, None] = CommitLoop(
            functools.partial(self._insert_together, operation="start many"),
            batching,
            size_of=lambda run: len(run.input),
        )
        """Beside the other, so that nobody's single start waits behind a long list."""
        self._moves: CommitLoop[_Move, None] = CommitLoop(self._move_together, batching)

    # ---------------------------------------------------------------- starting

    async def insert(self, run: NewRun) -> None:
        """Make a new run durable on a majority, together with whatever others are started at the same time.

        Raises RunExists, RecordTooLarge.
        """
        await self._starts.submit(run)

    async def insert_in(self, session: AsyncClientSession, run: NewRun) -> None:
        """Start `run` inside the caller's transaction. Raises RunExists, before the transaction is spoilt by it.

        Driver errors pass through, so that the caller's own retry of the transaction works.
        """
        if await self._collection.find_one({"_id": run.run_id}, {"_id": 1}, session=session) is not None:
            raise RunExists(run.run_id)
        try:
            await self._collection.insert_one(new_document(run), session=session)
        except errors.DuplicateKeyError as error:
            raise RunExists(run.run_id) from error

    async def insert_many(self, runs: Sequence[NewRun]) -> set[str]:
        """Make any number of new runs durable, in as many writes as it takes; returns the ids that existed before.

        Raises RecordTooLarge, StoreUnavailable once the others are stored.
        """
        fates = await asyncio.gather(*map(self._many_starts.submit, runs), return_exceptions=True)
        for fate in fates:
            if fate is not None and not isinstance(fate, RunExists):
                raise fate
        return {run.run_id for run, fate in zip(runs, fates, strict=True) if fate is not None}

    async def _insert_together(
        self, runs: Sequence[NewRun], operation: str = "start"
    ) -> list[StoreError | Alone[None] | None]:
        def error_of(place: int, outcome: Inserted) -> StoreError:
            run_id = runs[place].run_id
            if outcome is Inserted.TAKEN:
                return RunExists(run_id)
            if outcome is Inserted.TOO_LARGE:
                return RecordTooLarge(run_id, "start")
            return StoreRefused(f"start run {run_id}", "it does not fit the schema")

        documents = [new_document(run) for run in runs]
        return await insert_together(self._patience, operation, self._collection, documents, error_of)

    # ---------------------------------------------------------------- holding

    async def renew(self, held: dict[str, str], *, lease: timedelta) -> Renewal:
        """Push the end of every lease in `held` (run id -> token) to server time + `lease`, in one trip.

        Tells in the same trip which runs are no longer held under their token, and which have a stop recorded. Given up
        after a sixth of the lease, or after one reply's time: it is to be asked anew while the lease holds, and by then
        other runs are held, and some of these no longer driven.
        """
        if not held:
            return Renewal(frozenset(), frozenset())
        batches: dict[str, list[str]] = {}
        for run_id, token in held.items():
            batches.setdefault(token, []).append(run_id)
        mine: Document = {
            "$or": [{"_id": {"$in": run_ids}, "claim.token": token} for token, run_ids in batches.items()],
            "state": State.RUNNING,
        }

        async def push() -> int:
            done = await self._collection.update_many(mine, [{"$set": {"due_at": from_now(lease), **_OVERDUE}}])
            return done.matched_count

        async def find_stopped() -> list[Document]:
            return await self._collection.find({**mine, "stop": {"$exists": True}}, {"_id": 1}).to_list(None)

        within_s = min(self._patience.reply_s, max(lease.total_seconds() / RENEWALS_PER_LEASE, _RENEWAL_LEAST_S))
        renewed, stopped = await asyncio.gather(
            self._patience.call("renew", push, within_s=within_s),
            self._patience.call("read stops", find_stopped, within_s=within_s),
        )
        ids = frozenset(found["_id"] for found in stopped)
        if renewed == len(held):
            return Renewal(frozenset(), ids)

        async def read() -> list[Document]:
            return await self._collection.find(mine, {"_id": 1}).to_list(None)

        kept = {found["_id"] for found in await self._patience.call("read renewed", read, within_s=within_s)}
        return Renewal(frozenset(held) - kept, ids)

    async def pass_gate(self, run: RunRecord) -> None:
        """Record that the pivot may now begin: from here on a stop is refused. Repeating keeps the first time.

        Raises StopFirst when a stop was recorded, or the deadline has passed, before; FenceLost.
        """
        plain = _GATE_PLAIN if run.deadline is None else None
        await self._as_holder(run, "pass the gate", _GATE_CHANGES, _GATE_WAY_IS_FREE, plain=plain)

    async def end_lease(self, run: RunRecord) -> None:
        """Let any worker claim the run at once, as if its lease had lapsed: what was in hand is in doubt.

        The token is no longer good for anything, so a renewal that is still on its way does not lease the run again
        when nobody drives it. Raises FenceLost, also where an earlier try got through and its reply was lost.
        """
        spent = {"$concat": ["$claim.token", " (ended)"]}
        await self._as_holder(run, "end the lease", {"due_at": "$$NOW", "claim.token": spent})

    async def show_rolling_back(self, run: RunRecord) -> None:
        """Show in lists that the run is rolling back; the journal says so already. Raises FenceLost."""
        await self._as_holder(run, "show rolling back", {"phase": Phase.ROLLING_BACK})

    async def _as_holder(
        self,
        run: RunRecord,
        operation: str,
        changes: Document,
        provided: Document | None = None,
        *,
        plain: tuple[Document, Document] | None = None,
    ) -> None:
        move = _Move(
            run.run_id,
            _claim_of(run).token,
            operation,
            ({"$set": changes},),
            provided or {},
            becomes=State.RUNNING,
            change=(operation, "" if plain is not None else repr(changes)),
            plain=plain,
        )
        await self._moves.submit(move)

    async def _exists(self, filter_: Document) -> bool:
        return await self._collection.find_one(filter_, {"_id": 1}) is not None

    # ---------------------------------------------------------------- letting go

    # Each of these fails with StopFirst when a stop was recorded that the holder does not know of: a stop must not be
    # slept through by a parked run, nor overtaken by the settling of a run without a pivot, nor stay unanswered in the
    # journal. `stop_known` says that the holder has seen it.

    async def park(self, run: RunRecord, *, wait: timedelta, stop_known: bool = False) -> None:
        """Free the worker: the run is pending again, due at server time + `wait`. Zero hands it back at once."""
        due_at = from_now(wait)
        await self._let_go(run, State.PENDING, {"due_at": due_at}, (), str(due_at), stop_known=stop_known)

    async def settle(self, run: RunRecord, state: State, *, stop_known: bool = False) -> None:
        """The end of the run. The journal must prove `state` before this is called."""
        plain: Document = {**_SETTLE_PLAIN, "$set": {"state": state}}
        changes = {"settled_at": "$$NOW"}
        await self._let_go(
            run, state, changes, ("due_at",), stop_known=stop_known, plain=plain if run.deadline is None else None
        )

    async def hold(self, run: RunRecord, state: State, reason: str, *, stop_known: bool = False) -> None:
        """Put the run aside for an operator. `reason` is stored in the clear: no payload in it."""
        held = {"reason": {"$literal": reason}, "since": "$$NOW"}
        await self._let_go(run, state, {"held": held}, ("due_at",), reason, stop_known=stop_known)

    async def give_back(self, run: RunRecord) -> None:
        """Let any worker claim the run at once: this claim could not read what it needs, so it was no attempt at it.

        As with `block` a stop recorded meanwhile does not matter. Whether the run is blocked stays as it was.
        """
        changes: Document = {"attempts": _NO_ATTEMPT, "blocked": "$blocked", "due_at": "$$NOW"}
        await self._let_go(run, State.PENDING, changes, (), "no attempt", stop_known=True)

    async def block(self, run: RunRecord, blocked: Blocked, *, wait: timedelta, quarantine: str | None) -> None:
        """Give back a run whose payloads do not open: due at server time + `wait`, or quarantined, with the reason.

        A claim that could not read the run was no attempt at it. A stop recorded meanwhile does not matter: it waits
        for a claim that can read.
        """
        changes: Document = {
            "attempts": _NO_ATTEMPT,
            "blocked": {
                "count": blocked.count,
                "since": {"$ifNull": ["$blocked.since", "$$NOW"]},
                "failure": blocked.failure,
                "why": {"$literal": blocked.why},
                "key_id": blocked.key_id if blocked.key_id is not None else "$$REMOVE",
                "denied_since": blocked.denied_since if blocked.denied_since is not None else "$$REMOVE",
            },
        }
        if quarantine is None:
            due = {"due_at": from_now(wait)}
            await self._let_go(run, State.PENDING, {**changes, **due}, (), f"{wait} {blocked}", stop_known=True)
        else:
            held = {"held": {"reason": {"$literal": quarantine}, "since": "$$NOW"}}
            await self._let_go(run, State.QUARANTINED, {**changes, **held}, ("due_at",), str(blocked), stop_known=True)

    async def note_opened(self, run: RunRecord, key_id: str | None) -> None:
        """Record that this claim could open the run: it is blocked no longer, also if its worker dies from here on.

        And that payloads will be sealed with that key, before the first of them is. Raises FenceLost.
        """
        keys = with_key(key_id) if key_id is not None else "$keys"
        await self._as_holder(run, "note that it opened", {"keys": keys, "blocked": "$$REMOVE"})

    async def _let_go(
        self,
        run: RunRecord,
        state: State,
        changes: Document,
        removed: Sequence[str],
        detail: str = "",
        *,
        stop_known: bool,
        plain: Document | None = None,
    ) -> None:
        """`detail` is what `changes` depend on beside the state; `plain` is the same without a pipeline."""
        check_move(State.RUNNING, state)
        # Whoever lets go otherwise than by `block` or `give_back` could open the run.
        pipeline: tuple[Document, ...] = ({"$set": {"state": state, "blocked": "$$REMOVE", **_OVERDUE, **changes}},)
        if removed:
            pipeline += ({"$unset": list(removed)},)
        unseen: Document = {} if stop_known else {"stop": {"$exists": False}}
        move = _Move(
            run.run_id,
            _claim_of(run).token,
            f"move to {state}",
            pipeline,
            unseen,
            becomes=state,
            change=(state, stop_known, detail, plain is None),
            plain=(unseen, plain) if plain is not None else None,
        )
        await self._moves.submit(move)

    # ---------------------------------------------------------------- a holder's writes, together

    async def _move_together(self, moves: Sequence[_Move]) -> list[StoreError | None]:
        """Moves that share a claim token and a change as one guarded update of many, all of them in one write.

        Where fewer runs matched than were meant, each of those moves is made by itself, and so told its own fate.
        """
        groups: dict[object, list[_Move]] = {}
        for move in moves:
            groups.setdefault((move.token, move.change), []).append(move)
        if len(moves) == 1:
            return [await self._move_alone(moves[0])]

        async def write() -> int:
            done = await self._collection.bulk_write([_together(alike) for alike in groups.values()], ordered=False)
            return done.matched_count

        with contextlib.suppress(errors.BulkWriteError):  # the validator refused one of them: see which
            if await self._patience.call("move runs", write) == len(moves):
                return [None] * len(moves)
        return list(await asyncio.gather(*(self._move_alone(move) for move in moves)))

    async def _move_alone(self, move: _Move) -> StoreError | None:
        mine: Document = {"_id": move.run_id, "claim.token": move.token, "state": State.RUNNING}

        async def write() -> StoreError | None:
            done = await self._collection.update_one({**mine, **move.provided}, list(move.pipeline))
            if done.matched_count:
                return None
            # The token stays on the document, so a move whose reply was lost is recognised by where it led.
            if move.becomes is not State.RUNNING and await self._exists({**mine, "state": move.becomes}):
                return None
            if move.provided and await self._exists(mine):
                return StopFirst(move.run_id)
            return FenceLost(move.run_id, move.operation)

        try:
            return await self._patience.call(move.operation, write)
        except StoreError as error:
            return error

    # ---------------------------------------------------------------- reading

    async def get(self, run_id: str, *, with_input: bool = False) -> RunRecord | None:
        """The run as a majority has it. Raises UnreadableRun."""
        return (await self.get_many([run_id], with_input=with_input)).get(run_id)

    async def get_many(self, run_ids: Sequence[str], *, with_input: bool = False) -> dict[str, RunRecord]:
        """Runs by id; unknown ids are left out. Raises UnreadableRun.

        An input may be as large as a document, so it is read for those alone who use it.
        """

        async def read() -> list[Document]:
            projection = None if with_input else _NO_INPUT
            return await self._collection.find({"_id": {"$in": list(run_ids)}}, projection).to_list(None)

        return {found["_id"]: record_of(found) for found in await self._patience.call("read runs", read)}

    async def get_in(self, session: AsyncClientSession, run_id: str) -> RunRecord | None:
        """The run as the caller's transaction sees it, with its input. Driver errors pass through, as for `insert_in`.

        Raises UnreadableRun.
        """
        found = await self._collection.find_one({"_id": run_id}, session=session)
        return record_of(found) if found is not None else None

    async def beginning_with(self, beginning: str, *, limit: int) -> list[str]:
        """Ids that begin so, in their order."""

        async def read() -> list[Document]:
            return await self._collection.find(
                {"_id": prefix_range(beginning)}, {"_id": 1}, sort=[("_id", 1)], limit=limit
            ).to_list(None)

        return [found["_id"] for found in await self._patience.call("find runs", read)]

    async def at_rest(self, run_ids: Sequence[str]) -> list[str]:
        """Which of these runs are held or settled: no worker moves them on."""

        async def read() -> list[Document]:
            return await self._collection.find(at_rest_filter(run_ids), {"_id": 1}).to_list(None)

        return [found["_id"] for found in await self._patience.call("read states", read)]

    async def page(self, chosen: RunFilter, *, after: RunPosition | None, limit: int) -> list[RunRecord]:
        """The chosen runs, newest first, from `after` on, without their inputs.

        One that this version cannot read is there as far as it can; so with `needing_key`.
        """

        async def read() -> list[Document]:
            return await self._collection.find(
                page_filter(chosen, after), _NO_INPUT, sort=PAGE_ORDER, limit=limit
            ).to_list(None)

        return [readable_part(found) for found in await self._patience.call("list runs", read)]

    async def needing_key(
        self, key_id: str, *, states: frozenset[State] | None = None, after: str = "", limit: int
    ) -> list[RunRecord]:
        """Runs that may have a payload sealed with this key, in the order of their ids, without their inputs.

        None that has one is missing. One that has none can be among them: a run names a key before it is used.
        """

        async def read() -> list[Document]:
            return await self._collection.find(
                needing_key_filter(key_id, states, after), _NO_INPUT, sort=[("_id", 1)], limit=limit
            ).to_list(None)

        return [readable_part(found) for found in await self._patience.call("list runs of a key", read)]

    async def count_needing_key(self, key_id: str) -> dict[State, int]:
        """How many runs may have a payload sealed with this key, by state."""
        counts: Counter[State] = Counter()
        after = ""
        while True:  # a page at a time: however many there are, no single answer takes longer than one is waited for

            async def read(after: str = after) -> list[Document]:
                return await self._collection.find(
                    needing_key_filter(key_id, after=after), {"state": 1}, sort=[("_id", 1)], limit=_COUNTED_TOGETHER
                ).to_list(None)

            page = await self._patience.call("count runs of a key", read)
            counts.update(state_of(found["state"]) for found in page)
            if len(page) < _COUNTED_TOGETHER:
                return dict(counts)
            after = page[-1]["_id"]

    async def groups(self, chosen: RunFilter) -> list[HeldGroup]:
        """The chosen runs, which are held or blocked, counted; the largest groups first."""
        group = {
            "state": "$state",
            "tenant": "$tenant",
            "key_id": "$blocked.key_id",
            "failure": "$blocked.failure",
        }
        since = {"$ifNull": ["$held.since", "$blocked.since"]}
        pipeline: list[Document] = [
            {"$match": page_filter(chosen)},
            {"$group": {"_id": group, "count": {"$sum": 1}, "since": {"$min": since}}},
            {"$sort": {"count": -1, "_id": 1}},
        ]

        async def read() -> list[Document]:
            found: Any = self._collection.aggregate(pipeline)
            cursor: Any = await found if hasattr(found, "__await__") else found  # Motor gives the cursor itself
            groups: list[Document] = await cursor.to_list(None)
            return groups

        return [
            HeldGroup(
                state=State(found["_id"]["state"]),
                tenant=found["_id"].get("tenant"),
                key_id=found["_id"].get("key_id"),
                failure=found["_id"].get("failure"),
                count=found["count"],
                since=found["since"],
            )
            for found in await self._patience.call("count runs that wait for somebody", read)
        ]


# ----------------------------------------------------------- the filters, named so that each plan can be explained


def at_rest_filter(run_ids: Sequence[str]) -> Document:
    """Those of the runs that no worker moves on."""
    return {"_id": {"$in": list(run_ids)}, "due_at": {"$exists": False}}


def prefix_range(prefix: str) -> Document:
    """Texts that begin so."""
    return {"$gte": prefix, "$lt": prefix + "\U0010ffff"}


def needing_key_filter(key_id: str, states: frozenset[State] | None = None, after: str = "") -> Document:
    """Runs that name this key among theirs."""
    narrowed: Document = {"state": {"$in": sorted(states)}} if states is not None else {}
    return {"keys": key_id, "_id": {"$gt": after}, **narrowed}


PAGE_ORDER: Final = [("created_at", -1), ("_id", -1)]


def page_filter(chosen: RunFilter, after: RunPosition | None = None) -> Document:
    """The chosen runs (a merge of one index range per state), after a position."""
    filter_: Document = {"state": {"$in": sorted(chosen.states)}}
    narrowed = {"tenant": chosen.tenant, "saga": chosen.saga}
    filter_ |= {field: value for field, value in narrowed.items() if value is not None}
    present = {"stop": chosen.stopped, "blocked": chosen.blocked}
    filter_ |= {field: {"$exists": value} for field, value in present.items() if value is not None}
    if chosen.tenanted is not None:
        filter_["tenant"] = {"$exists": chosen.tenanted}
    if chosen.key_prefix is not None:
        filter_["key"] = prefix_range(chosen.key_prefix)
    if chosen.waiting:
        filter_["$nor"] = [{"attempts": 0, "blocked": {"$exists": False}}]
        filter_["$expr"] = {"$gt": ["$due_at", "$$NOW"]}
    created: Document = {}
    if chosen.created_before is not None:
        created["$lt"] = chosen.created_before
    if after is not None:
        created["$lte"] = after.created_at
        filter_["$or"] = [{"created_at": {"$lt": after.created_at}}, {"_id": {"$lt": after.run_id}}]
    if created:
        filter_["created_at"] = created
    return filter_


# -------------------------------------------------------------------- documents


def with_key(key_id: str) -> Document:
    """The ids of a run's keys with one more, as an expression."""
    return {"$setUnion": [{"$ifNull": ["$keys", []]}, [key_id]]}


def from_now(wait: timedelta) -> Document:
    return {"$add": ["$$NOW", int(wait / timedelta(milliseconds=1))]}


_NO_ATTEMPT: Final = {
    "$cond": [{"$eq": ["$claim.taken_from", State.RUNNING]}, "$attempts", {"$subtract": ["$attempts", 1]}]
}
"""The count of attempts after a claim that was none. Where the lease of the attempt before had lapsed it stays, because
the gap in the count is what tells the next attempt of that."""

_OVERDUE: Final = {
    "overdue": {
        # Only where there is a deadline and the gate has been passed; otherwise the field is not written at all.
        "$cond": [
            {
                "$and": [
                    {"$ne": [{"$type": "$deadline"}, "missing"]},
                    {"$ne": [{"$type": "$gate_passed_at"}, "missing"]},
                ]
            },
            {"$lt": ["$deadline", "$$NOW"]},
            "$$REMOVE",
        ]
    }
}
"""Every write by a holder also marks a run whose deadline has passed after the gate."""

_GATE_CHANGES: Final = {"gate_passed_at": {"$ifNull": ["$gate_passed_at", "$$NOW"]}, "phase": Phase.PAST_GATE}
# Passed already by ourselves, the reply lost; or neither a stop nor the deadline stands in the way. A stop's own write
# asks the same question the other way round, and one document decides between them.
_GATE_WAY_IS_FREE: Final = {
    "$or": [
        {"gate_passed_at": {"$exists": True}},
        {"stop": {"$exists": False}, "deadline": {"$exists": False}},
        {"stop": {"$exists": False}, "$expr": {"$gt": ["$deadline", "$$NOW"]}},
    ]
}
# The usual case: nothing stands in the way, and it was not passed before.
_GATE_PLAIN: Final[tuple[Document, Document]] = (
    {"gate_passed_at": {"$exists": False}, "stop": {"$exists": False}, "deadline": {"$exists": False}},
    {"$set": {"phase": Phase.PAST_GATE}, "$currentDate": {"gate_passed_at": True}},
)
_SETTLE_PLAIN: Final = {"$currentDate": {"settled_at": True}, "$unset": {"due_at": "", "blocked": ""}}


def _claim_of(run: RunRecord) -> Claim:
    if run.claim is None:
        raise ValueError(f"run {run.run_id} was not claimed: only its holder writes to it")
    return run.claim
