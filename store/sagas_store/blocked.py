"""Runs whose payloads do not open, as whoever lets them go on once the key is back wants them: oldest first.

A run that is let go on keeps its place, which is the time at which it was started. So the oldest must be due before the
next ones are, else workers that look in between take what is newest; and of a limited number the oldest are meant.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace
from typing import Final

from sagas_store.drivers import Collection, Document
from sagas_store.faults import Patience
from sagas_store.records import RunFilter, RunPosition
from sagas_store.runs import PAGE_ORDER, page_filter
from sagas_store.states import State

__all__ = ["BlockedRuns"]

_PAGE: Final = 1_000
_ORDER: Final = [(name, -direction) for name, direction in PAGE_ORDER]  # the index of lists, from its other end


class BlockedRuns:
    """Every question about runs that do not open."""

    def __init__(self, collection: Collection, patience: Patience) -> None:
        self._collection = collection
        self._patience = patience

    async def any_tenanted(self) -> bool:
        """Whether any of them is of a tenant."""
        for chosen in _chosen(tenanted=True):
            if await self._page(chosen, None, 1):
                return True
        return False

    async def oldest(self, tenant: str | None, *, limit: int) -> list[str]:
        """Ids of the runs that were started first, at most `limit`, of all tenants or of one.

        Held ones and those that wait for their next try are one order. Only ids are read.
        """
        found = [await self._all(chosen, limit) for chosen in _chosen(tenant=tenant)]
        merged = heapq.merge(*found, key=lambda one: (one.created_at, one.run_id))
        # One that was quarantined between the two questions is in both answers.
        return list(itertools.islice(dict.fromkeys(one.run_id for one in merged), limit))

    async def _all(self, chosen: RunFilter, limit: int) -> list[RunPosition]:
        found: list[RunPosition] = []
        while len(found) < limit:
            wanted = min(_PAGE, limit - len(found))
            page = await self._page(chosen, found[-1] if found else None, wanted)
            found += page
            if len(page) < wanted:
                break
        return found

    async def _page(self, chosen: RunFilter, after: RunPosition | None, limit: int) -> list[RunPosition]:
        async def read() -> list[Document]:
            return await self._collection.find(
                oldest_filter(chosen, after), {"created_at": 1}, sort=_ORDER, limit=limit
            ).to_list(None)

        found = await self._patience.call("list runs that do not open", read)
        return [RunPosition(one["created_at"], one["_id"]) for one in found]


def oldest_filter(chosen: RunFilter, after: RunPosition | None = None) -> Document:
    """The chosen runs that were started after a position."""
    filter_ = page_filter(chosen)
    if after is not None:
        filter_["created_at"] = {"$gte": after.created_at}
        filter_["$or"] = [{"created_at": {"$gt": after.created_at}}, {"_id": {"$gt": after.run_id}}]
    return filter_


def _chosen(*, tenant: str | None = None, tenanted: bool | None = None) -> list[RunFilter]:
    held = RunFilter(states=frozenset({State.QUARANTINED}), tenant=tenant, tenanted=tenanted)
    return [held, replace(held, states=frozenset({State.PENDING}), blocked=True, waiting=True)]
