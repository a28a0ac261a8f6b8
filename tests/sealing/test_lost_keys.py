"""A tenant's key is lost, and comes back; or is destroyed, and does not."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from sagas import (
    CannotOpen,
    FenceLost,
    KeyDenied,
    KeyLost,
    Kind,
    RunHeld,
    RunRolledBack,
    State,
    StopOutcome,
)
from sagas.clock import new_token
from sagas_store.records import Blocked
from tests.sealing.deployment import WHY, Deployment, Order, fulfil, nothing_is_due
from tests.sealing.parcels import TENANTS, WAYS, Warehouse, parcels
from tests.support.crashing import working

LEASE_MS = 5 * 60 * 1000


async def crash(shop: Deployment) -> int:
    """A worker claims whatever is due, and dies at once: its leases lapse. How many runs it had."""
    claimed = await shop.store.claims.take(
        [("parcels", 1)], token=new_token(), worker="dies", lease=timedelta(hours=1), limit=1000
    )
    await shop.database["sagas.runs"].update_many({"state": "running"}, [{"$set": {"due_at": "$$NOW"}}])
    return len(claimed)


async def test_runs_whose_key_is_lost_are_quarantined_on_the_ninth_failed_open_and_then_end_as_they_would_have(
    shop: Deployment,
) -> None:
    warehouse = Warehouse(shop, each=2)
    await warehouse.prepare()
    runs, count = shop.database["sagas.runs"], len(warehouse.ways)
    before = {run["_id"]: run async for run in runs.find()}
    entries = await shop.database["sagas.journal"].count_documents({})
    calls = warehouse.depot.calls.copy()
    shop.lose(*TENANTS)
    other = shop.anew()
    for failed in range(1, 10):
        await warehouse.make_due()
        if failed % 3 == 0:
            assert await crash(shop) == count
        async with working(other.store, parcels, resources=warehouse.depot):
            await nothing_is_due(shop.database)
        now = other.store.clock.now()
        async for run in runs.find():
            assert run["blocked"]["count"] == failed, "crashes are not counted"
            assert (run["state"] == "quarantined") == (failed == 9)
            if failed < 9:
                assert run["due_at"].replace(tzinfo=now.tzinfo) - now == pytest.approx(
                    timedelta(milliseconds=LEASE_MS << failed), abs=timedelta(seconds=20)
                )
    assert warehouse.depot.calls == calls, "nothing was executed, and nothing compensated"
    assert await shop.database["sagas.journal"].count_documents({}) == entries
    groups = await other.operator.list_held(status=State.QUARANTINED)
    assert {group.tenant: group.count for group in groups} == dict.fromkeys(TENANTS, count // 2)

    # A stop that is asked meanwhile is decided at once, and acted on when the key is back.
    ends = {run_id: WAYS[way][1] for run_id, way in warehouse.ways.items()}
    for way, outcome in {"midway": StopOutcome.WILL_BE_UNDONE, "late": StopOutcome.REFUSED}.items():
        run_id = next(run_id for run_id, its in warehouse.ways.items() if its == way)
        answer = await other.client.stop(run_id, **WHY)
        assert (answer.outcome, answer.state) == (outcome, State.QUARANTINED)
        if outcome is StopOutcome.WILL_BE_UNDONE:
            ends[run_id] = State.CANCELLED

    shop.restore()
    for tenant in TENANTS:
        assert len((await shop.operator.requeue_quarantined(tenant=tenant, **WHY)).done) == count // 2
    async for run in runs.find():
        assert run["created_at"] == before[run["_id"]]["created_at"]
        assert run["blocked"]["count"] == 9, "a requeue keeps the count"
    await warehouse.work()
    for run_id, state in ends.items():
        info = await shop.client.get(run_id)
        assert (info.state, info.blocked_by) == (state, None), warehouse.ways[run_id]
        kinds = [line.kind for line in await shop.client.journal(run_id)]
        assert (Kind.STOP_REFUSED in kinds) == (info.stop == "refused")
    assert sum(warehouse.depot.calls.values()) > sum(calls.values())


async def test_requeued_runs_go_in_the_order_in_which_they_were_started(shop: Deployment) -> None:
    started = [await shop.client.start(fulfil, Order(number=number), tenant="vinet") for number in range(6)]
    held = {"state": "quarantined", "held": {"reason": "KeyLost: gone", "since": "$$NOW"}}
    await shop.database["sagas.runs"].update_many({}, [{"$set": held}, {"$unset": ["due_at"]}])
    later = await shop.client.start(fulfil, Order(), tenant="vinet")
    assert len((await shop.operator.requeue_quarantined(tenant="vinet", **WHY)).done) == 6
    claimed = await shop.store.claims.take(
        [("fulfil", 1)], token=new_token(), worker="w", lease=timedelta(minutes=1), limit=10
    )
    assert [run.run_id for run in claimed] == [run.run_id for run in (*started, later)]


async def test_a_claim_that_opens_a_run_ends_its_block_also_if_its_worker_dies_then(shop: Deployment) -> None:
    run = await shop.client.start(fulfil, Order(note="wait"), tenant="vinet")
    runs = shop.database["sagas.runs"]
    since = {"$subtract": ["$$NOW", 2 * 60 * 60 * 1000]}
    denied = {"count": 5, "since": since, "denied_since": since, "failure": "KeyDenied", "why": "no"}
    await runs.update_one({"_id": run.run_id}, [{"$set": {"blocked": denied}}])
    async with shop.working(concurrency=1):
        await asyncio.wait_for(shop.shop.inside.wait(), 20)
        # Its worker is as good as dead, and the key service refuses the next one: not since two hours, but for once.
        shop.lose("vinet", failure=KeyDenied)
        await runs.update_one({"_id": run.run_id}, [{"$set": {"due_at": "$$NOW"}}])
        async with shop.anew().working():
            info = await shop.until(run, lambda info: info.blocked_by is not None, "it is blocked")
        assert info.blocked_count == 0


async def test_a_holder_that_was_fenced_off_blocks_nothing(shop: Deployment) -> None:
    run = await shop.client.start(fulfil, Order(), tenant="vinet")
    claims = []
    for name in ("slow", "quick"):
        await shop.database["sagas.runs"].update_one({"_id": run.run_id}, [{"$set": {"due_at": "$$NOW"}}])
        claims += await shop.store.claims.take(
            [("fulfil", 1)], token=name, worker=name, lease=timedelta(hours=1), limit=1
        )
    before = await shop.database["sagas.runs"].find_one({"_id": run.run_id})
    blocked = Blocked(count=9, since=shop.store.clock.now(), failure="KeyLost", why="gone")
    for quarantine in (None, "KeyLost: gone"):
        with pytest.raises(FenceLost):
            await shop.store.runs.block(claims[0], blocked, wait=timedelta(hours=1), quarantine=quarantine)
    assert await shop.database["sagas.runs"].find_one({"_id": run.run_id}) == before
    await shop.store.runs.block(claims[1], blocked, wait=timedelta(hours=1), quarantine=None)
    assert (await shop.info(run)).blocked_count == 9


async def test_who_presses_stop_does_not_wait_for_a_key_service_that_hangs(shop: Deployment) -> None:
    run = await shop.client.start(fulfil, Order(), tenant="vinet", delay=timedelta(hours=1))
    other = shop.anew()
    shop.wrapper.release.clear()
    began = asyncio.get_running_loop().time()
    answer = await other.client.stop(run.run_id, **WHY)
    again = await other.client.stop(run.run_id, **WHY)
    took = asyncio.get_running_loop().time() - began
    shop.wrapper.release.set()
    assert [one.outcome for one in (answer, again)] == [StopOutcome.CANCELLED] * 2
    assert (answer.reason, answer.by) == (None, WHY["by"])
    assert took < 8, "the service alone would have kept them for ten seconds, twice"


# ------------------------------------------------------------------------------------ destroyed


class Clock:
    """What the age of keys is told by."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def cannot(call: Any, kind: type[CannotOpen] = KeyLost) -> None:
    with pytest.raises(kind, match="destroyed"):
        await call


async def test_what_a_destroyed_key_has_sealed_opens_nowhere_once_caches_are_over(shop: Deployment) -> None:
    clock = Clock()
    other = Deployment(shop.database, shop.wrapper, monotonic=clock)
    async with other.working():
        done = await other.client.start(fulfil, Order(note="decline"), key="declined", tenant="vinet")
        with pytest.raises(RunRolledBack):
            await done.result(20)
        in_hand = await other.client.start(fulfil, Order(note="wait"), key="in hand", tenant="vinet")
        await asyncio.wait_for(other.shop.inside.wait(), 20)
        waiting = await other.client.start(fulfil, Order(), key="waiting", tenant="vinet", delay=timedelta(hours=1))
        theirs = await other.client.start(fulfil, Order(number=7), key="theirs", tenant="hanar")
        assert (await theirs.result(20)).number == 7

        await shop.keyring.destroy("vinet", confirm="vinet", **WHY)
        assert (await other.client.get(done.run_id)).key == "declined", "it remembers the key, for a bounded time"
        clock.now += timedelta(minutes=5).total_seconds()

        # Nothing opens any more, in the process that destroyed it or in any other.
        for process in (shop, other, other.anew()):
            assert (await process.client.get(done.run_id)).key is None
            (line,) = [one for one in await process.client.journal(done.run_id) if one.kind is Kind.STEP_FAILED]
            assert line.error is None
            assert "destroyed" in (line.unopened or "")
            await cannot(process.client.start(fulfil, Order(), tenant="vinet"))
            await cannot(process.client.start(fulfil, Order(), key="in hand", tenant="vinet"))
            await cannot(process.client.find(fulfil, key="in hand", tenant="vinet"))
            await cannot(process.operator.restart_as_new(done.run_id, **WHY))
        await other.make_due(waiting)
        info = await other.until(waiting, lambda info: info.blocked_count == 1, "it is blocked")
        assert (info.blocked_by, info.state) == ("KeyLost", State.PENDING)

        # What was in hand goes on under the key of its own run: its outcomes have happened, and are journaled.
        other.shop.go_on.set()
        await other.until(in_hand, lambda info: info.state is State.COMPLETED, "the attempt under way ends")
        await cannot(in_hand.result(20))
        # Nobody else notices anything.
        assert (await theirs.result(20)).number == 7
        assert (await (await other.client.start(fulfil, Order(number=8), tenant="hanar")).result(20)).number == 8

    listed = (await shop.client.runs(tenant="vinet")).runs
    assert {info.run_id for info in listed} == {done.run_id, in_hand.run_id, waiting.run_id}
    await shop.database["sagas.runs"].update_one({"_id": waiting.run_id}, {"$set": {"blocked.count": 8}})
    async with shop.working():
        await shop.make_due(waiting)
        with pytest.raises(RunHeld):
            await waiting.result(20)
    (group,) = await shop.operator.list_held(tenant="vinet")
    assert (group.state, group.count, group.failure) == (State.QUARANTINED, 1, "KeyLost")
    (sealed_with,) = (await shop.store.runs.get_many([waiting.run_id]))[waiting.run_id].keys
    assert group.key_id == sealed_with, "the key that this run needs, although its tenant has none at all any more"
    stopped = await shop.client.stop(waiting.run_id, **WHY)
    assert (stopped.outcome, stopped.reason) == (StopOutcome.WILL_BE_UNDONE, None)
    refused = await shop.operator.requeue_quarantined(tenant="vinet", **WHY)
    assert "destroyed" in refused.refused[waiting.run_id]
