"""Claiming: which runs are due, whose turn it is, and the stamp that makes them a worker's.

A claim looks (what is due longest; the tenants whose turn it is), stamps in one guarded update, and reads back what it
has stamped, so two workers never hold one run.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from pymongo import errors

from sagas_store.clock import Monotonic, monotonic
from sagas_store.drivers import Collection, Document
from sagas_store.errors import StoreError, StoreRefused
from sagas_store.faults import Patience, describe, is_transient
from sagas_store.records import RunRecord, readable_part
from sagas_store.runs import from_now
from sagas_store.states import State, origins_of

__all__ = ["CLAIM_INDEX", "TURN_INDEX", "Claims", "due_filter", "next_due_filter", "turn_filter"]

# The server would have to guess how much is due, and of whom, to choose between these two by itself.
CLAIM_INDEX: Final = "claim"
TURN_INDEX: Final = "turn"
_NO_TENANT: Final = ""
"""Comes before all names; runs without a tenant take turns like those of one."""
_CLAIMABLE: Final = sorted(origins_of(State.RUNNING))
_CLAIM_ROUNDS: Final = 3
"""How often one claim looks for further candidates after losing some to another worker; then the next poll is due."""
_RESUMED_MAX: Final = 16
"""How many looks for due runs in a row may go on where the one before ended; then one begins at the start again."""
_RESUMED_MAX_S: Final = 1.0
"""And for how long, in seconds."""
_REFUSED_S: Final = 60.0
"""For how long claims leave out a run whose document the server lets nobody write to."""
_REFUSED_MAX: Final = 256
"""How many such runs are left out. Where there are more, it is not the runs: claims fail, and say why."""


class _Room:
    """For how many more runs of each tenant there is room in this claim."""

    def __init__(self, per_tenant: int | None, taken: Counter[str]) -> None:
        self.bounded = per_tenant is not None
        self.full = sorted(tenant for tenant, count in taken.items() if per_tenant is not None and count >= per_tenant)
        self._per_tenant = per_tenant
        self._taken = taken

    def fit(self, candidates: Sequence[Document], limit: int) -> list[str]:
        """The first `limit` of these that there is room for, each once."""
        fitting: dict[str, None] = {}
        for found in candidates:
            tenant = found.get("tenant")
            if found["_id"] in fitting:
                continue
            if tenant is not None:
                if self._per_tenant is not None and self._taken[tenant] >= self._per_tenant:
                    continue
                self._taken[tenant] += 1
            fitting[found["_id"]] = None
            if len(fitting) == limit:
                break
        return list(fitting)


@dataclass(slots=True)
class _Scan:
    """How far looks for due runs have come. Behind it lie the index entries of runs that were claimed just now.

    The server walks over those for as long as it keeps them, so a busy worker's looks go on where the last one ended.
    Nothing is missed: a look that finds too little, every so-and-so-many-th, and one after a while, begins at the start
    again, which is where a run stands that was started or let go with an earlier due time meanwhile.
    """

    came_to: datetime | None = None
    """The due time of the last run that was taken; None to begin at the start."""
    resumed: int = 0
    began_at: float = field(default_factory=monotonic)
    """When a look began at the start."""

    def begin(self) -> datetime | None:
        """From where to look now."""
        if self.resumed >= _RESUMED_MAX or monotonic() - self.began_at > _RESUMED_MAX_S:
            self.restart()
        if self.came_to is not None:
            self.resumed += 1
        return self.came_to

    def restart(self) -> None:
        """The next look begins at the start."""
        self.came_to, self.resumed, self.began_at = None, 0, monotonic()


class Claims:
    """What makes due runs a worker's."""

    def __init__(self, collection: Collection, patience: Patience, clock: Monotonic = monotonic) -> None:
        self._collection = collection
        self._patience = patience
        self._monotonic = clock
        self._refused: dict[str, float] = {}
        """Runs that are left out, damaged as they are, and until when."""
        self._scans: dict[tuple[tuple[str, int], ...], _Scan] = {}
        self._turn: str | None = None
        """The tenant whose turn it was last; see `_choose`."""
        self._odd = 0

    async def take(
        self,
        definitions: Sequence[tuple[str, int]],
        *,
        token: str,
        worker: str,
        lease: timedelta,
        limit: int,
        per_tenant: int | None = None,
        running: Mapping[str, int] | None = None,
        refused: Callable[[StoreRefused], None] = lambda _: None,
    ) -> list[RunRecord]:
        """Take up to `limit` runs of the (saga, version) pairs that are due under one token.

        Where all that is due does not fit, half of the places go to the runs that are due longest and half to the
        tenants in turn, so that no tenant's backlog keeps another waiting for more than a round of turns. With
        `per_tenant`, no more runs of a tenant than that are taken, counting those that `running` says are.
        Two workers never hold one run: the stamp is one guarded update, and only what it stamped is read back. Losing
        candidates to another worker means looking for further ones, a few times. Leases end at server time + `lease`.
        While more is due than is taken, a run that has become due before those taken last may wait for a few claims.
        A run whose document is damaged, so that its validator lets nobody write to it, keeps no other waiting:
        `refused` is told of it, and it is left out for a minute.
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
            room = _Room(per_tenant, Counter(running) + Counter(run.tenant for run in claimed if run.tenant))
            try:
                longest_due, in_turn = await self._look(definitions, wanted, since, room)
                candidates = self._choose(wanted, longest_due, in_turn, room)
                if candidates:
                    claimed += await self._stamp(candidates, token, worker, lease, refused)
            except StoreError:
                if not claimed:
                    raise
                break  # what was stamped in the rounds before is to be driven, not to wait for the end of its lease
            # Only now: what was found and could not be stamped is still due.
            if len(longest_due) == wanted:
                taken = set(candidates)
                left = (found["due_at"] for found in longest_due if found["_id"] not in taken)
                scan.came_to = next(left, longest_due[-1]["due_at"])
                if not candidates:
                    break
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
                due_filter(definitions, since, self._left_out()),
                {"due_at": 1, "tenant": 1},
                sort=[("due_at", 1)],
                limit=limit,
                hint=CLAIM_INDEX,
            ).to_list(None)

        return await self._patience.call("find due runs", find)

    async def _look(
        self, definitions: Sequence[tuple[str, int]], limit: int, since: datetime | None, room: _Room
    ) -> tuple[list[Document], list[Document]]:
        """Up to `limit` runs that are due longest; and, where there is not room for all that is due, tenants' in turn.

        Both at once where the look before found more than there was room for: so will this one, probably.
        """
        # Where tenants have their limits, those that are due longest may not fit, and turns fill all the places.
        turns = functools.partial(self._in_turn, definitions, limit if room.bounded else self._share(limit), room.full)
        if since is not None:
            longest_due, in_turn = await asyncio.gather(self._due(definitions, limit, since), turns())
            return longest_due, in_turn
        longest_due = await self._due(definitions, limit, since)
        return longest_due, await turns() if len(longest_due) == limit else []

    def _choose(self, limit: int, longest_due: list[Document], in_turn: list[Document], room: _Room) -> list[str]:
        """Which runs to claim. Where there is not room for all that is due, tenants take turns for half of it."""
        if len(longest_due) < limit:
            return room.fit(longest_due, limit)
        share, self._odd = self._share(limit), (limit + self._odd) % 2
        turns, more = in_turn[:share], in_turn[share:] if room.bounded else []
        chosen = room.fit([*turns, *longest_due, *more], limit)
        by_age = {found["_id"] for found in longest_due}
        taken = set(chosen)
        for found in (*turns, *(one for one in more if one["_id"] not in by_age)):
            if found["_id"] in taken:  # a turn that was not taken is still to come
                self._turn = found.get("tenant", _NO_TENANT)
        return chosen

    def _share(self, limit: int) -> int:
        """How many of so many places are given in turn: half of them, over several claims."""
        return (limit + self._odd) // 2

    async def _in_turn(
        self, definitions: Sequence[tuple[str, int]], limit: int, passed_over: Sequence[str]
    ) -> list[Document]:
        """Up to `limit` due runs of the tenants whose turn it is: by name, none first, and round again.

        None at all where only runs without a tenant are due: those that are due longest are all that matter then.
        """

        def find(after: str | None, limit: int) -> Awaitable[list[Document]]:
            async def ask() -> list[Document]:
                return await self._collection.find(
                    turn_filter(definitions, after, passed_over, self._left_out()),
                    {"tenant": 1},
                    sort=[("tenant", 1), ("due_at", 1)],
                    limit=limit,
                    hint=TURN_INDEX,
                ).to_list(None)

            return self._patience.call("find tenants' due runs", ask)

        if limit == 0:  # the server takes it for no limit
            return []
        turn = self._turn
        if turn is None:
            return await find(None, limit)
        found = await find(turn, limit)
        if not found and turn == _NO_TENANT and not passed_over:
            return []  # no tenant has a due run, so there is nobody to take turns with
        if len(found) < limit:
            found += await find(None, limit - len(found))
        return found

    def _left_out(self) -> list[str]:
        """Runs that were refused within the last minute."""
        if self._refused:
            now = self._monotonic()
            self._refused = {run_id: until for run_id, until in self._refused.items() if now < until}
        return list(self._refused)

    async def _stamp(
        self, run_ids: list[str], token: str, worker: str, lease: timedelta, refused: Callable[[StoreRefused], None]
    ) -> list[RunRecord]:
        """Those of the runs that are ours now; one that this version cannot read, as far as it can.

        Raises StoreRefused, which names a run, where none is ours and more are damaged than can be left out.
        """
        stamp = [
            {
                "$set": {
                    "state": State.RUNNING,
                    "due_at": from_now(lease),
                    "attempts": {"$add": ["$attempts", 1]},
                    "claim": {
                        "token": {"$literal": token},
                        "worker": {"$literal": worker},
                        "taken_from": "$state",
                        "at": "$$NOW",
                    },
                }
            }
        ]

        async def update(candidates: list[str]) -> str | None:
            """What the server has against one of the documents. That we may not write at all is raised."""
            due = {
                "_id": {"$in": candidates},
                "state": {"$in": _CLAIMABLE},
                # By the server's clock at the moment of writing: what another worker just leased is no longer due.
                "$expr": {"$lte": ["$due_at", "$$NOW"]},
            }
            try:
                await self._collection.update_many(due, stamp)
            except errors.WriteError as error:
                if is_transient(error):
                    raise
                return describe(error)
            return None

        # Repeated after a lost reply it matches nothing: what we stamped is no longer due. The token still finds it.
        over: StoreRefused | None = None
        if await self._patience.call("claim", functools.partial(update, run_ids)) is not None:
            for run_id in run_ids:  # one of them is damaged: the others do not wait for it
                operation = f"claim run {run_id}"
                why = await self._patience.call(operation, functools.partial(update, [run_id]))
                if why is not None and len(self._refused) < _REFUSED_MAX:
                    self._refused[run_id] = self._monotonic() + _REFUSED_S
                    refused(StoreRefused(operation, why))
                elif why is not None:
                    over = StoreRefused(operation, why)

        async def read_back() -> list[Document]:
            return await self._collection.find({"_id": {"$in": run_ids}, "claim.token": token}).to_list(None)

        found = {one["_id"]: one for one in await self._patience.call("read claimed runs", read_back)}
        if over is not None and not found:
            raise over
        return [readable_part(found[run_id]) for run_id in run_ids if run_id in found]

    async def next_due_at(self, definitions: Sequence[tuple[str, int]]) -> datetime | None:
        """When the next run of these definitions is due (it may be in the past), or None when none ever is."""

        async def find() -> list[Document]:
            return await self._collection.find(
                next_due_filter(definitions, self._left_out()),
                {"due_at": 1},
                sort=[("due_at", 1)],
                limit=1,
                hint=CLAIM_INDEX,
            ).to_list(None)

        found = await self._patience.call("find next due run", find)
        return found[0]["due_at"] if found else None


# ----------------------------------------------------------- the filters, named so that each plan can be explained


def due_filter(
    definitions: Sequence[tuple[str, int]], since: datetime | None = None, left_out: Sequence[str] = ()
) -> Document:
    """Runs of these definitions that are due by the server's clock. Held and settled runs have no `due_at`.

    With `since`, only those that are due since then; without those of `left_out`.
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
                **_but(left_out),
            }
            for saga, version in definitions
        ]
    }


def turn_filter(
    definitions: Sequence[tuple[str, int]],
    after: str | None,
    passed_over: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> Document:
    """Due runs of these definitions: of all tenants and of none, or of those after a tenant in the order of names.

    Without those of the tenants in `passed_over`, and without those of `left_out`.
    """
    whose: Document = {}
    if after is not None:
        whose["$gt"] = after
    if passed_over:
        whose["$nin"] = list(passed_over)
    return {
        "$or": [
            {
                "saga": saga,
                "version": version,
                **({"tenant": whose} if whose else {}),
                "due_at": {"$exists": True},
                "$expr": {"$lte": ["$due_at", "$$NOW"]},
                **_but(left_out),
            }
            for saga, version in definitions
        ]
    }


def next_due_filter(definitions: Sequence[tuple[str, int]], left_out: Sequence[str] = ()) -> Document:
    """Runs of these definitions that any worker will ever claim, without those of `left_out`."""
    but = _but(left_out)
    return {
        "$or": [{"saga": saga, "version": version, "due_at": {"$exists": True}, **but} for saga, version in definitions]
    }


def _but(left_out: Sequence[str]) -> Document:
    """In each branch, beside what its index is chosen for; nothing where nothing is left out, as nearly always."""
    return {"_id": {"$nin": list(left_out)}} if left_out else {}
