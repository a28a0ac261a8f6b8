"""Runs that do not open: how little they cost the others, and that an hour without the key service costs nothing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from sagas import CannotOpen, KeyDenied, KeyLost, KeyUnavailable, Kind, Run, Start
from tests.sealing.deployment import Deployment, Order, fulfil, nothing_is_due
from tests.sealing.parcels import TENANTS, Warehouse, parcels
from tests.support.crashing import working

BACKLOG = 5000


class Rounds:
    """The claim rounds of one process, and who was claimed in each."""

    def __init__(self, shop: Deployment) -> None:
        self.claimed: list[set[str]] = []
        """Ids of runs, by round."""
        self.tenants: list[set[str | None]] = []
        self._take = shop.store.claims.take
        shop.store.claims.take = self._claim  # type: ignore[method-assign]

    async def _claim(self, *definitions: Any, **options: Any) -> Any:
        self.claimed.append(set())
        self.tenants.append(set())
        runs = await self._take(*definitions, **options)
        self.claimed[-1] = {run.run_id for run in runs}
        self.tenants[-1] = {run.tenant for run in runs}
        return runs

    def round_of(self, run: Run[Any]) -> int:
        """The round that claimed it, from 1."""
        return next(number for number, ids in enumerate(self.claimed, 1) if run.run_id in ids)


@pytest.mark.slow
@pytest.mark.parametrize("failure", [KeyLost, KeyUnavailable])
# The backlog's tenant has others before and behind it in the order of names.
@pytest.mark.parametrize("ill", ["mmm", None], ids=["of a tenant", "of no tenant"])
async def test_a_healthy_run_behind_thousands_of_blocked_ones_starts_within_two_claim_rounds(
    shop: Deployment, ill: str | None, failure: type[CannotOpen]
) -> None:
    await shop.client.start_many(fulfil, [Start(Order(), tenant=ill) for _ in range(BACKLOG)])
    healthy = await shop.client.start(fulfil, Order(), tenant="zzz")
    shop.lose(ill, failure=failure)
    other = shop.anew()
    key = (await shop.keyring.current(ill)).key_id
    before = shop.wrapper.unwrapped[key]
    rounds = Rounds(other)
    async with other.working():
        await healthy.result(20)
        assert rounds.round_of(healthy) <= 2
        behind = 0
        for number in range(10):
            one = await shop.client.start(fulfil, Order(number=number), tenant=f"{'az'[number % 2]}{number}")
            begun = len(rounds.claimed)
            await one.result(20)
            assert rounds.round_of(one) <= begun + 2
            behind += ill in rounds.tenants[-1] | rounds.tenants[-2]
        assert behind >= 3, "the backlog was worked off before"
    calls = shop.wrapper.unwrapped[key] - before
    assert 0 < calls <= sum(ill in tenants for tenants in rounds.tenants), "one call per key and round"
    blocked = await shop.database["sagas.runs"].count_documents({"blocked.failure": failure.__name__})
    assert blocked >= 64
    assert await shop.database["sagas.journal"].count_documents({}) == 11 * 2


@pytest.mark.parametrize("failure", [KeyUnavailable, KeyDenied])
async def test_an_hour_without_the_key_service_loses_nothing(shop: Deployment, failure: type[CannotOpen]) -> None:
    warehouse = Warehouse(shop, each=2)
    await warehouse.prepare()
    runs = shop.database["sagas.runs"]
    before = {run["_id"]: (run["attempts"], run["created_at"]) async for run in runs.find()}
    entries = await shop.database["sagas.journal"].count_documents({})
    calls = warehouse.depot.calls.copy()
    shop.lose(*TENANTS, failure=failure)
    async with working(shop.anew().store, parcels, resources=warehouse.depot):
        for _ in range(0, 60 * 60, 5 * 60):
            await nothing_is_due(shop.database)
            # Five minutes later, but for the hour's end.
            earlier = {"$subtract": ["$blocked.denied_since", int(timedelta(minutes=4.9) / timedelta(milliseconds=1))]}
            away = {"blocked.denied_since": earlier} if failure is KeyDenied else {}
            done = await runs.update_many({"state": "pending"}, [{"$set": {"due_at": "$$NOW", **away}}])
            assert done.matched_count == len(warehouse.ways), "all wait, none is quarantined"
        await nothing_is_due(shop.database)
        async for run in runs.find():
            assert (run["blocked"]["failure"], run["blocked"]["count"]) == (failure.__name__, 0)
            assert (run["attempts"], run["created_at"]) == before[run["_id"]]
    assert warehouse.depot.calls == calls, "nothing was executed, and nothing compensated"
    assert await shop.database["sagas.journal"].count_documents({}) == entries
    shop.restore()
    await warehouse.make_due()
    await warehouse.work()
    await warehouse.assert_all_ended(but=set())


async def test_a_key_that_is_denied_for_longer_than_an_hour_counts_as_lost(shop: Deployment) -> None:
    run = await shop.client.start(fulfil, Order(), tenant="vinet")
    shop.lose("vinet", failure=KeyDenied)
    runs = shop.database["sagas.runs"]
    async with shop.anew().working():
        for minutes, count in ((0, 0), (59, 0), (61, 1), (122, 2)):
            ago = {"$subtract": ["$$NOW", minutes * 60_000]}
            if minutes:
                await runs.update_one({"_id": run.run_id}, [{"$set": {"blocked.denied_since": ago, "due_at": "$$NOW"}}])
            await nothing_is_due(shop.database)
            found = await runs.find_one({"_id": run.run_id})  # the newest there is, and not yet a majority's
            assert (found["state"], found["blocked"]["count"]) == ("pending", count), minutes
        shop.restore()
        await shop.make_due(run)
        await run.result(20)
    assert [line.kind for line in await shop.client.journal(run.run_id)] == [Kind.STEP_SUCCEEDED] * 2
