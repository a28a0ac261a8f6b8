"""The runs collection: one document per run, with its state, its lease and what it was started with.

Every write by a run's holder carries the claim token in its filter, so a holder that lost its lease changes nothing and
is told so by FenceLost. Every write that changes the state also names the states it may come from, derived from the
state table. All of them are safe to repeat after a lost reply.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from bson import ObjectId
from pymongo import UpdateMany, errors
from pymongo.asynchronous.client_session import AsyncClientSession

from sagas_store.commit import Batching, CommitLoop
from sagas_store.drivers import Collection, Document
from sagas_store.errors import FenceLost, RecordTooLarge, RunExists, StopFirst, StoreError, StoreRefused
from sagas_store.faults import Patience
from sagas_store.inserts import Inserted, InsertTogether
from sagas_store.states import Decision, Phase, State, check_move, origins_of

__all__ = [
    "RUNS_SPEC_NAME",
    "Claim",
    "Held",
    "NewRun",
    "Renewal",
    "RunFilter",
    "RunPosition",
    "RunRecord",
    "Runs",
    "Stop",
]

RUNS_SPEC_NAME: Final = "runs"
_CLAIMABLE: Final = sorted(origins_of(State.RUNNING))
_CLAIM_ROUNDS: Final = 3
"""How often one claim looks for further candidates after losing some to another worker; then the next poll is due."""
_RESUMED_MAX: Final = 16
"""How many looks for due runs in a row may go on where the one before ended; then one begins at the start again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """What a run is started with."""

    run_id: str
    saga: str
    version: int
    fingerprint: str
    input: bytes
    created_at: datetime
    due_at: datetime
    key: str | None = None
    deadline: datetime | None = None
    restarted_from: str | None = None
    """The run that this one was started from anew."""
    started_by: str | None = None
    started_reason: bytes | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to drive a run, proven by `token`; all runs claimed in one batch share it."""

    token: str
    worker: str
    attempt: int
    taken_from: State
    """`pending`: fresh, parked or handed back. `running`: the lease of the attempt before had lapsed."""
    at: datetime
    """The server's clock when the claim was made."""


@dataclass(frozen=True, slots=True)
class Held:
    """Why a run is held, in words without payloads, and since when."""

    reason: str
    since: datetime


@dataclass(frozen=True, slots=True)
class Stop:
    """A person's stop, and what was decided of it at the moment of pressing."""

    decision: Decision
    by: str
    reason: bytes
    asked_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run as the database has it. Times are the server's, aware UTC."""

    run_id: str
    saga: str
    version: int
    fingerprint: str
    key: str | None
    state: State
    phase: Phase
    attempts: int
    created_at: datetime
    due_at: datetime | None
    settled_at: datetime | None
    gate_passed_at: datetime | None
    claim: Claim | None
    """The claim it is held under, or the last one."""
    held: Held | None
    input: bytes | None
    """None where the question did not ask for it."""
    stop: Stop | None = None
    deadline: datetime | None = None
    overdue: bool = False
    """The deadline passed after the gate; the run goes on."""
    restarted_from: str | None = None


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a worker learns when it renews its leases."""

    lost: frozenset[str]
    """Runs that are no longer held under their token: stop working on those, write nothing."""
    stopped: frozenset[str]
    """Runs with a stop recorded, seen before or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Which runs a list or a bulk verb means. The states are served by an index, the rest narrows what it finds."""

    states: frozenset[State]
    saga: str | None = None
    key_prefix: str | None = None
    created_before: datetime | None = None
    stopped: bool | None = None
    """Only runs with (or without) a stop recorded."""


@dataclass(frozen=True, slots=True)
class RunPosition:
    """A place in the list of runs, newest first: the page continues after it."""

    created_at: datetime
    run_id: str


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


@dataclass(slots=True)
class _Scan:
    """How far looks for due runs have come. Behind it lie the index entries of runs that were claimed just now.

    The server walks over those for as long as it keeps them, so a busy worker's looks go on where the last one ended.
    Nothing is missed: a look that finds too little, and every so-and-so-many-th, begins at the start again, which is
    where a run stands that was started or let go with an earlier due time meanwhile.
    """

    came_to: datetime | None = None
    """The due time of the last run that was taken; None to begin at the start."""
    resumed: int = 0

    def begin(self) -> datetime | None:
        """From where to look now."""
        if self.came_to is not None and self.resumed >= _RESUMED_MAX:
            self.restart()
        if self.came_to is not None:
            self.resumed += 1
        return self.came_to

    def restart(self) -> None:
        """The next look begins at the start."""
        self.came_to, self.resumed = None, 0


class Runs:
    """Every question put to the runs collection."""

    def __init__(self, collection: Collection, patience: Patience, batching: Batching | None = None) -> None:
        batching = batching or Batching()
        self._collection = collection
        self._patience = patience
        self._starts: CommitLoop[NewRun, None] = CommitLoop(
            self._insert_together, batching, size_of=lambda run: len(run.input)
        )
        self._moves: CommitLoop[_Move, None] = CommitLoop(self._move_together, batching)
        self._scans: dict[tuple[tuple[str, int], ...], _Scan] = {}

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
            await self._collection.insert_one(_new_document(run), session=session)
        except errors.DuplicateKeyError as error:
            raise RunExists(run.run_id) from error

    async def insert_many(self, runs: Sequence[NewRun]) -> set[str]:
        """Make many new runs durable in one write; returns the ids that existed before.

        Raises RecordTooLarge once the others are stored.
        """
        fates = await self._insert_together(runs, "start many")
        existing = {run.run_id for run, fate in zip(runs, fates, strict=True) if isinstance(fate, RunExists)}
        for fate in fates:
            if fate is not None and not isinstance(fate, RunExists):
                raise fate
        return existing

    async def _insert_together(self, runs: Sequence[NewRun], operation: str = "start") -> list[StoreError | None]:
        outcomes = await self._patience.call(
            operation, InsertTogether(self._collection, [_new_document(run) for run in runs])
        )
        fates: dict[Inserted, Callable[[str], StoreError | None]] = {
            Inserted.YES: lambda _: None,
            Inserted.TAKEN: RunExists,
            Inserted.TOO_LARGE: lambda run_id: RecordTooLarge(run_id, "start"),
            Inserted.REFUSED: lambda run_id: StoreRefused(f"start run {run_id}", "it does not fit the schema"),
        }
        return [fates[outcome](run.run_id) for run, outcome in zip(runs, outcomes, strict=True)]

    # ---------------------------------------------------------------- claiming

    async def claim_due(
        self, definitions: Sequence[tuple[str, int]], *, token: str, worker: str, lease: timedelta, limit: int
    ) -> list[RunRecord]:
        """Take up to `limit` runs of the (saga, version) pairs that are due, the longest due first, under one token.

        Two workers never hold one run: the stamp is one guarded update, and only what it stamped is read back. Losing
        candidates to another worker means looking for further ones, a few times. Leases end at server time + `lease`.
        While more is due than is taken, a run that has become due before those taken last may wait for a few claims.
        """
        claimed: list[RunRecord] = []
        if not definitions:
            return claimed
        scan = self._scans.setdefault(tuple(definitions), _Scan())
        for _ in range(_CLAIM_ROUNDS):
            wanted = limit - len(claimed)
            if wanted <= 0:  # the server takes a limit of 0 for no limit
                break
            since = scan.begin()
            candidates = await self._due(definitions, wanted, since)
            if candidates:
                claimed += await self._stamp([found["_id"] for found in candidates], token, worker, lease)
            # Only now: what was found and could not be stamped is still due.
            if len(candidates) == wanted:
                scan.came_to = candidates[-1]["due_at"]
            else:
                scan.restart()
                if since is None:
                    break
        return claimed

    async def _due(
        self, definitions: Sequence[tuple[str, int]], limit: int, since: datetime | None = None
    ) -> list[Document]:
        async def find() -> list[Document]:
            return await self._collection.find(
                due_filter(definitions, since), {"due_at": 1}, sort=[("due_at", 1)], limit=limit
            ).to_list(None)

        return await self._patience.call("find due runs", find)

    async def _stamp(self, run_ids: list[str], token: str, worker: str, lease: timedelta) -> list[RunRecord]:
        ours = {"_id": {"$in": run_ids}, "claim.token": token}

        async def stamp() -> int:
            done = await self._collection.update_many(
                {
                    "_id": {"$in": run_ids},
                    "state": {"$in": _CLAIMABLE},
                    # By the server's clock at the moment of writing: what another worker just leased is no longer due.
                    "$expr": {"$lte": ["$due_at", "$$NOW"]},
                },
                [
                    {
                        "$set": {
                            "state": State.RUNNING,
                            "due_at": _from_now(lease),
                            "attempts": {"$add": ["$attempts", 1]},
                            "claim": {
                                "token": {"$literal": token},
                                "worker": {"$literal": worker},
                                "taken_from": "$state",
                                "at": "$$NOW",
                            },
                        }
                    }
                ],
            )
            return done.matched_count

        # Repeated after a lost reply it matches nothing: what we stamped is no longer due. The token still finds it.
        await self._patience.call("claim", stamp)

        async def read_back() -> list[Document]:
            return await self._collection.find(ours).to_list(None)

        found = {one["_id"]: one for one in await self._patience.call("read claimed runs", read_back)}
        return [_record(found[run_id]) for run_id in run_ids if run_id in found]

    async def next_due_at(self, definitions: Sequence[tuple[str, int]]) -> datetime | None:
        """When the next run of these definitions is due (it may be in the past), or None when none ever is."""

        async def find() -> list[Document]:
            return await self._collection.find(
                next_due_filter(definitions), {"due_at": 1}, sort=[("due_at", 1)], limit=1
            ).to_list(None)

        found = await self._patience.call("find next due run", find)
        return found[0]["due_at"] if found else None

    # ---------------------------------------------------------------- holding

    async def renew(self, held: dict[str, str], *, lease: timedelta) -> Renewal:
        """Push the end of every lease in `held` (run id -> token) to server time + `lease`, in one trip.

        Tells in the same trip which runs are no longer held under their token, and which have a stop recorded.
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
            done = await self._collection.update_many(mine, [{"$set": {"due_at": _from_now(lease), **_OVERDUE}}])
            return done.matched_count

        async def find_stopped() -> list[Document]:
            return await self._collection.find({**mine, "stop": {"$exists": True}}, {"_id": 1}).to_list(None)

        renewed, stopped = await asyncio.gather(
            self._patience.call("renew", push), self._patience.call("read stops", find_stopped)
        )
        ids = frozenset(found["_id"] for found in stopped)
        if renewed == len(held):
            return Renewal(frozenset(), ids)

        async def read() -> list[Document]:
            return await self._collection.find(mine, {"_id": 1}).to_list(None)

        kept = {found["_id"] for found in await self._patience.call("read renewed", read)}
        return Renewal(frozenset(held) - kept, ids)

    async def pass_gate(self, run: RunRecord) -> None:
        """Record that the pivot may now begin: from here on a stop is refused. Repeating keeps the first time.

        Raises StopFirst when a stop was recorded, or the deadline has passed, before; FenceLost.
        """
        since = {"$ifNull": ["$gate_passed_at", "$$NOW"]}
        # Passed already by ourselves, the reply lost; or neither a stop nor the deadline stands in the way. A stop's
        # own write asks the same question the other way round, and one document decides between them.
        way_is_free = [
            {"gate_passed_at": {"$exists": True}},
            {"stop": {"$exists": False}, "deadline": {"$exists": False}},
            {"stop": {"$exists": False}, "$expr": {"$gt": ["$deadline", "$$NOW"]}},
        ]
        changes = {"gate_passed_at": since, "phase": Phase.PAST_GATE}
        # The usual case: nothing stands in the way, and it was not passed before.
        first = {"gate_passed_at": {"$exists": False}, "stop": {"$exists": False}, "deadline": {"$exists": False}}
        plain = (first, {"$set": {"phase": Phase.PAST_GATE}, "$currentDate": {"gate_passed_at": True}})
        await self._as_holder(
            run, "pass the gate", changes, {"$or": way_is_free}, plain=plain if run.deadline is None else None
        )

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
            change=(operation, plain is None),
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
        due_at = _from_now(wait)
        await self._let_go(run, State.PENDING, {"due_at": due_at}, (), str(due_at), stop_known=stop_known)

    async def settle(self, run: RunRecord, state: State, *, stop_known: bool = False) -> None:
        """The end of the run. The journal must prove `state` before this is called."""
        plain = {"$set": {"state": state}, "$currentDate": {"settled_at": True}, "$unset": {"due_at": ""}}
        changes = {"settled_at": "$$NOW"}
        await self._let_go(
            run, state, changes, ("due_at",), stop_known=stop_known, plain=plain if run.deadline is None else None
        )

    async def hold(self, run: RunRecord, state: State, reason: str, *, stop_known: bool = False) -> None:
        """Put the run aside for an operator. `reason` is stored in the clear: no payload in it."""
        held = {"reason": {"$literal": reason}, "since": "$$NOW"}
        await self._let_go(run, state, {"held": held}, ("due_at",), reason, stop_known=stop_known)

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
        pipeline: tuple[Document, ...] = ({"$set": {"state": state, **_OVERDUE, **changes}},)
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

    async def get(self, run_id: str) -> RunRecord | None:
        """The run as a majority has it, its input included."""
        return (await self.get_many([run_id])).get(run_id)

    async def get_many(self, run_ids: Sequence[str]) -> dict[str, RunRecord]:
        """Runs by id, their inputs included; unknown ids are left out."""

        async def read() -> list[Document]:
            return await self._collection.find({"_id": {"$in": list(run_ids)}}).to_list(None)

        return {found["_id"]: _record(found) for found in await self._patience.call("read runs", read)}

    async def get_in(self, session: AsyncClientSession, run_id: str) -> RunRecord | None:
        """The run as the caller's transaction sees it. Driver errors pass through, as for `insert_in`."""
        found = await self._collection.find_one({"_id": run_id}, session=session)
        return _record(found) if found is not None else None

    async def at_rest(self, run_ids: Sequence[str]) -> list[str]:
        """Which of these runs are held or settled: no worker moves them on."""

        async def read() -> list[Document]:
            return await self._collection.find(at_rest_filter(run_ids), {"_id": 1}).to_list(None)

        return [found["_id"] for found in await self._patience.call("read states", read)]

    async def page(self, chosen: RunFilter, *, after: RunPosition | None, limit: int) -> list[RunRecord]:
        """The chosen runs, newest first, from `after` on, without their inputs."""

        async def read() -> list[Document]:
            return await self._collection.find(
                page_filter(chosen, after), {"input": 0}, sort=PAGE_ORDER, limit=limit
            ).to_list(None)

        return [_record(found) for found in await self._patience.call("list runs", read)]


# ----------------------------------------------------------- the filters, named so that each plan can be explained


def due_filter(definitions: Sequence[tuple[str, int]], since: datetime | None = None) -> Document:
    """Runs of these definitions that are due by the server's clock. Held and settled runs have no `due_at`.

    With `since`, only those that are due since then.
    """
    # Either lets the planner use the partial index. `since` itself is included: runs may be due at the same moment.
    due_at: Document = {"$exists": True} if since is None else {"$gte": since}
    return {
        "$or": [
            {
                "saga": saga,
                "version": version,
                "due_at": due_at,
                "$expr": {"$lte": ["$due_at", "$$NOW"]},
            }
            for saga, version in definitions
        ]
    }


def next_due_filter(definitions: Sequence[tuple[str, int]]) -> Document:
    """Runs of these definitions that any worker will ever claim."""
    return {"$or": [{"saga": saga, "version": version, "due_at": {"$exists": True}} for saga, version in definitions]}


def at_rest_filter(run_ids: Sequence[str]) -> Document:
    """Those of the runs that no worker moves on."""
    return {"_id": {"$in": list(run_ids)}, "due_at": {"$exists": False}}


PAGE_ORDER: Final = [("created_at", -1), ("_id", -1)]


def page_filter(chosen: RunFilter, after: RunPosition | None = None) -> Document:
    """The chosen runs (a merge of one index range per state), after a position."""
    filter_: Document = {"state": {"$in": sorted(chosen.states)}}
    if chosen.saga is not None:
        filter_["saga"] = chosen.saga
    if chosen.key_prefix is not None:
        filter_["key"] = {"$gte": chosen.key_prefix, "$lt": chosen.key_prefix + "\U0010ffff"}
    if chosen.stopped is not None:
        filter_["stop"] = {"$exists": chosen.stopped}
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


def _from_now(wait: timedelta) -> Document:
    return {"$add": ["$$NOW", int(wait / timedelta(milliseconds=1))]}


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


def _claim_of(run: RunRecord) -> Claim:
    if run.claim is None:
        raise ValueError(f"run {run.run_id} was not claimed: only its holder writes to it")
    return run.claim


def _new_document(run: NewRun) -> Document:
    document: Document = {
        "_id": run.run_id,
        "saga": run.saga,
        "version": run.version,
        "fingerprint": run.fingerprint,
        "state": State.PENDING,
        "phase": Phase.FORWARD,
        "attempts": 0,
        "created_at": run.created_at,
        "due_at": run.due_at,
        "input": run.input,
        # Tells a run of ours whose reply was lost from one that somebody else has started under the same key.
        "token": str(ObjectId()),
    }
    for name in ("key", "deadline", "restarted_from", "started_by", "started_reason"):
        if (value := getattr(run, name)) is not None:
            document[name] = value
    return document


def _record(document: Document) -> RunRecord:
    claim: Any = document.get("claim")
    held: Any = document.get("held")
    stop: Any = document.get("stop")
    payload = document.get("input")
    return RunRecord(
        run_id=document["_id"],
        saga=document["saga"],
        version=document["version"],
        fingerprint=document["fingerprint"],
        key=document.get("key"),
        state=State(document["state"]),
        phase=Phase(document["phase"]),
        attempts=document["attempts"],
        created_at=document["created_at"],
        due_at=document.get("due_at"),
        settled_at=document.get("settled_at"),
        gate_passed_at=document.get("gate_passed_at"),
        claim=Claim(
            token=claim["token"],
            worker=claim["worker"],
            attempt=document["attempts"],
            taken_from=State(claim["taken_from"]),
            at=claim["at"],
        )
        if claim
        else None,
        held=Held(held["reason"], held["since"]) if held else None,
        stop=Stop(Decision(stop["decision"]), stop["by"], bytes(stop["reason"]), stop["asked_at"]) if stop else None,
        deadline=document.get("deadline"),
        overdue=document.get("overdue", False),
        restarted_from=document.get("restarted_from"),
        input=bytes(payload) if payload is not None else None,
    )
