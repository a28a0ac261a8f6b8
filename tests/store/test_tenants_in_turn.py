"""Whose runs a claim takes where more is due than fits: nobody waits for more than a round of turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from sagas_store import MongoStore
from sagas_store.errors import StoreUnavailable
from sagas_store.records import RunRecord
from sagas_store.states import State
from tests.store.making import DEFINITIONS, LEASE, new_run
from tests.support.changing import replace

HOUR = timedelta(hours=1)


async def backlog(store: MongoStore, tenant: str | None, count: int, *, age: timedelta = HOUR) -> list[str]:
    runs = [replace(new_run(store, due_in=-age), tenant=tenant) for _ in range(count)]
    await store.runs.insert_many(runs)
    return [run.run_id for run in runs]


class Claimer:
    """Claims over and over, with so many places; each run that it holds is let go of when another is wanted."""

    def __init__(self, store: MongoStore, *, limit: int, per_tenant: int | None = None, held: int = 0) -> None:
        self.store, self.limit, self.per_tenant, self.held = store, limit, per_tenant, held
        self.running: list[RunRecord] = []
        self.claims = 0

    async def claim(self) -> list[RunRecord]:
        while len(self.running) > self.held:
            await self.store.runs.settle(self.running.pop(0), State.COMPLETED)
        self.claims += 1
        taken = await self.store.claims.take(
            DEFINITIONS,
            token=f"claim {self.claims}",
            worker="w",
            lease=LEASE,
            limit=self.limit,
            per_tenant=self.per_tenant,
            running=Counter(run.tenant for run in self.running if run.tenant is not None),
        )
        self.running += taken
        return taken

    async def until(self, run_id: str, within: int) -> None:
        while run_id not in {run.run_id for run in await self.claim()}:
            assert self.claims < within, f"not claimed in {within} claims"


@pytest.mark.parametrize("limit", [1, 2, 8])
@pytest.mark.parametrize("per_tenant", [None, 3])
@pytest.mark.parametrize("others", [["a"], ["a", "b"], ["a", "b", "d"], ["a", "b", "d", None], [None]])
@pytest.mark.parametrize("late", ["c", None])
async def test_a_single_run_waits_for_a_round_of_turns_at_most(
    store: MongoStore, limit: int, per_tenant: int | None, others: Sequence[str | None], late: str | None
) -> None:
    for tenant in {*others} - {late}:
        await backlog(store, tenant, 60)
    (single,) = await backlog(store, late, 1, age=timedelta(0))
    await Claimer(store, limit=limit, per_tenant=per_tenant).until(single, within=2 * len(others) + 4)


async def test_a_run_without_a_tenant_is_taken_although_all_that_is_older_is_of_a_tenant_without_room(
    store: MongoStore,
) -> None:
    await backlog(store, "a", 200)
    claimer = Claimer(store, limit=56, per_tenant=8, held=9)
    assert Counter(run.tenant for run in await claimer.claim()) == {"a": 8}
    (single,) = await backlog(store, None, 1, age=timedelta(0))
    assert [run.run_id for run in await claimer.claim()] == [single]
    assert await claimer.claim() == [], "there is room for nothing else"


async def test_what_a_claim_has_taken_is_not_lost_when_its_search_for_more_fails(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await backlog(store, None, 8)
    stamp, asked = store.claims._stamp, []

    async def loses_some_and_fails_later(run_ids: list[str], *arguments: Any) -> list[RunRecord]:
        asked.append(run_ids)
        if len(asked) > 1:
            raise StoreUnavailable("claim", "the test says so")
        return await stamp(run_ids[:5], *arguments)  # as if another worker had taken the others

    monkeypatch.setattr(store.claims, "_stamp", loses_some_and_fails_later)
    taken = await store.claims.take(DEFINITIONS, token="t", worker="w", lease=LEASE, limit=8)
    assert len(asked) == 2
    assert len({run.run_id for run in taken} & set(ids)) == 5
