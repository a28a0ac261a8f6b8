"""Runs whose payloads are sealed: end to end, with keys that are away, denied, lost, and back."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest

from sagas import (
    HELD,
    CannotOpen,
    Client,
    InvalidInput,
    KeyConflict,
    KeyDenied,
    KeyLost,
    KeyUnavailable,
    Kind,
    MongoStore,
    NoKeyring,
    Operator,
    OperatorRefused,
    RunHeld,
    RunInfo,
    RunNotFound,
    RunRolledBack,
    Start,
    State,
    StopOutcome,
    Worker,
    WorkerOptions,
)
from sagas.sealing import Slot, keys_needed
from sagas_store.records import NewRun
from tests.sealing.deployment import WHY, Deployment, Order, fulfil

# ------------------------------------------------------------------------------------ sealed, end to end


async def test_a_sealed_run_completes_and_its_result_opens(shop: Deployment) -> None:
    async with shop.working():
        run = await shop.client.start(fulfil, Order(number=1), key="order-1", tenant="vinet")
        assert await run.result(20) == Order(number=1, done=("reserve", "charge"))
    assert shop.shop.tenants == {"vinet"}
    info = await shop.info(run)
    assert (info.tenant, info.key, info.state) == ("vinet", "order-1", State.COMPLETED)


async def test_nothing_that_a_user_gave_lies_in_the_clear(shop: Deployment) -> None:
    canary = f"canary{secrets.token_hex(8)}"
    reasons = {"by": "ann", "reason": f"{canary} why"}
    async with shop.working():
        declined = await shop.client.start(fulfil, Order(note="decline"), key=f"{canary}-1", tenant="vinet")
        with pytest.raises(RunRolledBack, match="charge failed"):
            await declined.result(20)
        completed = await shop.client.start(fulfil, Order(note=canary), key=f"{canary}-2", tenant="vinet")
        await completed.result(20)
        doubtful = await shop.client.start(fulfil, Order(note="doubt"), key=f"{canary}-3", tenant="vinet")
        with pytest.raises(RunHeld):
            await doubtful.result(20)
        await shop.operator.verdict(
            fulfil, doubtful.run_id, happened=True, context=Order(note=canary), by="ann", reason=reasons["reason"]
        )
        assert (await doubtful.result(20)).note == canary
        delayed = await shop.client.start(fulfil, Order(), key=f"{canary}-4", delay=timedelta(hours=1))
        await delayed.stop(**reasons)
        await shop.operator.restart_as_new(declined.run_id, **reasons)
    for name in await shop.database.list_collection_names():
        async for document in shop.database[name].find_raw_batches({}):
            assert canary.encode() not in document
            assert b"declined" not in document
    lines = await shop.client.journal(doubtful.run_id)
    assert f"{canary} why" in [line.reason for line in lines]
    (failed,) = [line for line in await shop.client.journal(declined.run_id) if line.kind is Kind.STEP_FAILED]
    assert failed.error is not None
    assert "the card was declined" in failed.error.message


async def test_a_key_is_idempotent_per_tenant_and_conflicts_are_told(shop: Deployment) -> None:
    first = await shop.client.start(fulfil, Order(number=1), key="order-17", tenant="vinet")
    again = await shop.anew().client.start(fulfil, Order(number=1), key="order-17", tenant="vinet")
    assert (again.run_id, again.created) == (first.run_id, False)
    with pytest.raises(KeyConflict) as conflict:
        await shop.client.start(fulfil, Order(number=2), key="order-17", tenant="vinet")
    assert "order-17" not in str(conflict.value)
    other = await shop.client.start(fulfil, Order(number=2), key="order-17", tenant="hanar")
    assert other.created
    assert (await shop.client.find(fulfil, key="order-17", tenant="hanar")).run_id == other.run_id
    many = await shop.client.start_many(fulfil, [Start(Order(number=1), "order-17", tenant="vinet"), Start(Order())])
    assert [run.created for run in many] == [False, True]


async def test_looking_for_a_run_of_a_tenant_that_nobody_knows_makes_no_keys(shop: Deployment) -> None:
    with pytest.raises(RunNotFound, match="saga 'fulfil': a run of tenant 'mistyped' with this key: not found"):
        await shop.client.find(fulfil, key="order-17", tenant="mistyped")
    assert await shop.keyring.keys("mistyped") == []


async def test_a_worker_without_the_keyring_refuses_to_start(shop: Deployment) -> None:
    await shop.client.start(fulfil, Order(), tenant="vinet")
    worker = Worker(MongoStore(shop.database), [fulfil], options=WorkerOptions(handle_signals=False))
    with pytest.raises(InvalidInput, match="keyring"):
        await worker.run()


async def test_what_is_not_sealed_is_refused_and_held(shop: Deployment) -> None:
    run = await Client(MongoStore(shop.database)).start(fulfil, Order(), key="in-the-clear")
    async with shop.working():
        info = await shop.until(run, lambda info: info.state in HELD, "it is held")
    assert info.state is State.BROKEN
    assert "not sealed" in (info.held_reason or "")
    assert shop.shop.done == []


# ------------------------------------------------------------------------------------ a key that does not open


def blocked_times(count: int) -> Callable[[RunInfo], bool]:
    return lambda info: info.blocked_count == count


@pytest.mark.parametrize("failure", [KeyUnavailable, KeyDenied])
async def test_a_key_that_is_away_costs_a_run_some_seconds_and_is_not_counted(
    shop: Deployment, failure: type[CannotOpen]
) -> None:
    run = await shop.client.start(fulfil, Order(number=1), tenant="vinet")
    shop.lose("vinet", failure=failure)
    other = shop.anew()
    async with other.working():
        info = await other.until(run, lambda info: info.blocked_by is not None, "it is blocked")
        assert (info.state, info.blocked_by, info.blocked_count) == (State.PENDING, failure.__name__, 0)
        assert info.attempts == 0, "a claim that could not read was no attempt"
        shop.restore()
        await shop.make_due(run)
        assert (await run.result(20)).number == 1
    assert (await shop.info(run)).blocked_by is None
    assert [line.kind for line in await shop.client.journal(run.run_id)] == [Kind.STEP_SUCCEEDED] * 2


async def test_a_lost_key_is_quarantined_at_last_and_the_run_goes_on_once_it_is_back(shop: Deployment) -> None:
    lost = [await shop.client.start(fulfil, Order(number=n), key=str(n), tenant="vinet") for n in range(3)]
    healthy = await shop.client.start(fulfil, Order(), tenant="hanar")
    shop.lose("vinet")
    other = shop.anew()
    waits: list[float] = []
    info = await other.info(lost[0])
    async with other.working():
        await healthy.result(20)
        for count in range(1, 10):
            for run in lost:
                info = await other.until(run, blocked_times(count), f"blocked {count} times")
            assert info.state is (State.QUARANTINED if count == 9 else State.PENDING)
            if info.due_at is not None:
                waits.append((info.due_at - other.store.clock.now()).total_seconds())
            for run in lost:
                await shop.make_due(run)
    assert [round(wait / 600) for wait in waits] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert info.blocked_by == "KeyLost"
    (group,) = await other.operator.list_held(status=State.QUARANTINED)
    assert (group.tenant, group.key_id, group.failure, group.count) == ("vinet", info.blocked_key, "KeyLost", 3)

    with pytest.raises(InvalidInput, match="tenant, runs"):
        await other.operator.requeue_quarantined(**WHY)
    with pytest.raises(OperatorRefused, match="requeue"):
        await other.operator.resume(lost[0].run_id, **WHY)
    refused = await other.operator.requeue_quarantined(tenant="vinet", **WHY)
    assert sorted(refused.refused) == sorted(run.run_id for run in lost)
    assert not refused.done

    shop.restore()
    trial = await other.operator.requeue_quarantined(tenant="vinet", dry_run=True, **WHY)
    assert (len(trial.done), trial.refused) == (3, {})
    assert (await shop.info(lost[0])).state is State.QUARANTINED
    done = await other.operator.requeue_quarantined(tenant="vinet", **WHY)
    assert sorted(done.done) == sorted(run.run_id for run in lost)
    assert (await shop.info(lost[0])).blocked_count == 9, "a requeue keeps the count"
    async with other.working():
        for number, run in enumerate(lost):
            assert (await run.result(20)).number == number
    line = (await shop.client.journal(lost[0].run_id))[0]
    assert (line.kind, line.by, line.reason) == (Kind.REQUEUED, WHY["by"], WHY["reason"])


async def test_a_key_lost_midway_leaves_the_step_in_doubt_that_a_dead_worker_had_in_hand(shop: Deployment) -> None:
    run = await shop.client.start(fulfil, Order(), tenant="vinet")
    # A worker claims it and dies in the first step. The next one to claim it cannot read it; the one after that can.
    (_,) = await shop.store.claims.take(
        [("fulfil", 1)], token="dead", worker="dead", lease=timedelta(milliseconds=20), limit=1
    )
    shop.lose("vinet", failure=KeyUnavailable)
    other = shop.anew()
    async with other.working():
        await other.until(run, lambda info: info.blocked_by is not None, "it is blocked")
        answer = await run.stop(**WHY)
        assert answer.outcome is StopOutcome.WILL_BE_UNDONE
        assert "opens again" in answer.next
        shop.restore()
        await shop.make_due(run)
        with pytest.raises(RunRolledBack):
            await run.result(20)
    assert shop.shop.done == [f"{run.run_id}/reserve/compensation"], "what may have happened is undone"
    assert (await shop.info(run)).state is State.CANCELLED


async def test_a_stop_counts_although_its_reason_cannot_be_sealed(shop: Deployment) -> None:
    run = await shop.client.start(fulfil, Order(), tenant="vinet", delay=timedelta(hours=1))
    shop.lose("vinet", failure=KeyUnavailable)
    answer = await shop.anew().client.stop(run.run_id, **WHY)
    assert (answer.outcome, answer.by, answer.reason) == (StopOutcome.CANCELLED, WHY["by"], None)
    keyless = await Client(MongoStore(shop.database)).stop(run.run_id, **WHY)
    assert (keyless.outcome, keyless.reason) == (StopOutcome.CANCELLED, None)


async def test_a_stop_on_a_quarantined_run_waits_for_a_claim_that_can_read(shop: Deployment) -> None:
    run = await shop.client.start(fulfil, Order(), tenant="vinet")
    await shop.database["sagas.runs"].update_one(
        {"_id": run.run_id},
        [{"$set": {"blocked": {"count": 8, "since": "$$NOW", "failure": "KeyLost", "why": "gone"}}}],
    )
    shop.lose("vinet")
    other = shop.anew()
    async with other.working():
        await other.until(run, lambda info: info.state is State.QUARANTINED, "it is quarantined")
        answer = await other.client.stop(run.run_id, **WHY)
        assert (answer.outcome, answer.state) == (StopOutcome.WILL_BE_UNDONE, State.QUARANTINED)
        shop.restore()
        await other.operator.requeue_quarantined(runs=[run.run_id], **WHY)
        with pytest.raises(RunRolledBack):
            await run.result(20)
    assert (await shop.info(run)).state is State.CANCELLED
    assert shop.shop.done == []


async def test_one_lost_key_among_fifty_runs_keeps_none_of_the_others_and_costs_one_call(shop: Deployment) -> None:
    healthy = await shop.client.start_many(fulfil, [Start(Order(number=n), tenant=f"t{n % 7}") for n in range(49)])
    ill = await shop.client.start(fulfil, Order(), tenant="vinet")
    shop.lose("vinet")
    other = shop.anew()
    before = shop.wrapper.calls["unwrap"]
    async with other.working():
        await asyncio.gather(*(run.result(20) for run in healthy))
        await other.until(ill, lambda info: info.blocked_by == "KeyLost", "the other one is blocked")
    assert shop.wrapper.calls["unwrap"] - before == 8, "one call per key, and not per run"


async def test_tampered_payloads_are_told_apart_from_lost_keys(shop: Deployment) -> None:
    run = await shop.client.start(fulfil, Order(), tenant="vinet")
    found = await shop.database["sagas.runs"].find_one({"_id": run.run_id})
    altered = bytearray(found["input"])
    altered[-1] ^= 1
    await shop.database["sagas.runs"].update_one({"_id": run.run_id}, {"$set": {"input": bytes(altered)}})
    async with shop.working():
        info = await shop.until(run, lambda info: info.blocked_by is not None, "it is blocked")
    assert info.blocked_by == "Tampered"
    assert "altered" in (info.blocked_why or "")


async def test_a_journal_whose_key_is_away_is_shown_without_what_is_sealed(shop: Deployment) -> None:
    async with shop.working():
        run = await shop.client.start(fulfil, Order(note="decline"), key="k", tenant="vinet")
        with pytest.raises(RunRolledBack):
            await run.result(20)
    shop.lose("vinet", failure=KeyUnavailable)
    other = shop.anew()
    lines = await other.client.journal(run.run_id)
    (failed,) = [line for line in lines if line.kind is Kind.STEP_FAILED]
    assert (failed.error, failed.step) == (None, "charge")
    assert "gone" in (failed.unopened or "")
    assert (await other.client.get(run.run_id)).key is None
    with pytest.raises(RunRolledBack, match="step charge failed"):
        await other.client.run(fulfil, run_id=run.run_id).result(5)
    keyless = Client(MongoStore(shop.database))
    assert [line.kind for line in await keyless.journal(run.run_id)] == [line.kind for line in lines]


async def test_a_result_that_does_not_open_says_so(shop: Deployment) -> None:
    async with shop.working():
        run = await shop.client.start(fulfil, Order(), tenant="vinet")
        await run.result(20)
    shop.lose("vinet")
    with pytest.raises(KeyLost):
        await shop.anew().client.run(fulfil, run_id=run.run_id).result(5)
    with pytest.raises(NoKeyring):
        await Client(MongoStore(shop.database)).run(fulfil, run_id=run.run_id).result(5)


async def test_after_a_rotation_old_runs_go_on_and_say_which_keys_they_need(shop: Deployment) -> None:
    run = await shop.client.start(fulfil, Order(note="wait"), tenant="vinet")
    old = await shop.keyring.current("vinet")
    new_id = await shop.keyring.rotate("vinet", **WHY)
    async with shop.working():
        await asyncio.wait_for(shop.shop.inside.wait(), 20)
        shop.shop.go_on.set()
        assert (await run.result(20)).done == ("reserve", "charge")
    found = await shop.database["sagas.runs"].find_one({"_id": run.run_id})
    assert sorted(found["keys"]) == sorted([old.key_id, new_id])
    opener = await shop.keyring.opener("vinet", run.run_id, [found["input"]])
    assert b'"wait"' in opener.open(Slot.INPUT, 0, found["input"])


# ------------------------------------------------------------------------------------ whom one reaches


async def test_a_long_list_of_starts_is_sealed_as_it_is_stored(
    shop: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key that was newest when the list began may be discarded before its end: no run needed it yet."""
    insert, batches = shop.store.runs.insert_many, []

    async def then_rotated(runs: Sequence[NewRun]) -> set[str]:
        existing = await insert(runs)
        batches.append({key for run in runs for key in run.keys})
        await shop.operator.keys.rotate("vinet", **WHY)
        return existing

    monkeypatch.setattr(shop.store.runs, "insert_many", then_rotated)
    runs = await shop.client.start_many(fulfil, [Start(Order(number=n), tenant="vinet") for n in range(1001)])
    first, second = batches
    assert len(first) == len(second) == 1
    assert first != second
    stored = await shop.database["sagas.runs"].find_one({"_id": runs[-1].run_id})
    assert keys_needed([stored["input"]]) == set(stored["keys"]) == second


async def test_a_key_that_cannot_be_had_is_told_before_anything_of_a_list_is_stored(shop: Deployment) -> None:
    await shop.client.start(fulfil, Order(), tenant="hanar")
    shop.lose("hanar")
    starts = [Start(Order(), tenant=tenant) for tenant in ("vinet", None, "hanar")]
    with pytest.raises(KeyLost):
        await shop.anew().client.start_many(fulfil, starts)
    assert len((await shop.client.runs()).runs) == 1


async def test_a_bound_client_reaches_its_tenant_alone(shop: Deployment) -> None:
    theirs = await shop.client.start(fulfil, Order(), key="theirs", tenant="hanar")
    nobodys = await shop.client.start(fulfil, Order(), key="nobodys")
    bound = Client(shop.store, tenant="vinet")
    operator = Operator(shop.store, tenant="vinet")
    ours = await bound.start(fulfil, Order(), key="theirs")
    assert ours.created
    assert (await bound.get(ours.run_id)).tenant == "vinet"
    assert [info.run_id for info in (await bound.runs()).runs] == [ours.run_id]
    for run in (theirs, nobodys):
        for asked in (
            bound.get(run.run_id),
            bound.journal(run.run_id),
            bound.stop(run.run_id, **WHY),
            bound.preview_stop(run.run_id),
            bound.run(fulfil, run_id=run.run_id).result(1),
            operator.resume(run.run_id, **WHY),
            operator.retry_now(run.run_id, **WHY),
            operator.restart_as_new(run.run_id, **WHY),
            operator.verdict(fulfil, run.run_id, happened=False, **WHY),
        ):
            with pytest.raises(RunNotFound):
                await asked
    with pytest.raises(InvalidInput, match="tenant"):
        await bound.start(fulfil, Order(), tenant="hanar")
    with pytest.raises(InvalidInput, match="tenant"):
        await bound.runs(tenant="hanar")
    stopped = await bound.stop_many(**WHY)
    assert stopped.answers == {StopOutcome.CANCELLED: [ours.run_id]}
    assert (await shop.info(theirs)).stop is None


async def test_tenants_with_due_runs_take_turns(shop: Deployment) -> None:
    await shop.client.start_many(fulfil, [Start(Order(), tenant="aaa") for _ in range(300)])
    await shop.client.start_many(fulfil, [Start(Order(), tenant="zzz") for _ in range(300)])
    late = await shop.client.start(fulfil, Order(), tenant="mmm")
    claims = 0
    while (await shop.info(late)).state is not State.RUNNING:
        claims += 1
        taken = await shop.store.claims.take(
            [("fulfil", 1)], token=f"t{claims}", worker="w", lease=timedelta(minutes=5), limit=8
        )
        assert len(taken) == 8
    assert claims <= 3, "one round of turns"


async def test_with_several_workers_no_tenant_waits_for_more_than_a_round_of_turns(shop: Deployment) -> None:
    tenants = [f"t{number:02}" for number in range(20)]
    await shop.client.start_many(fulfil, [Start(Order(), tenant=one) for _ in range(100) for one in tenants])
    late = [await shop.client.start(fulfil, Order(), tenant=name) for name in ("a", "t10 late", "z")]
    workers = [shop.store, shop.anew().store, shop.anew().store]
    claimed: set[str] = set()
    for count in range(len(tenants) + len(late)):
        claims = (
            store.claims.take(
                [("fulfil", 1)], token=f"{count} {number}", worker="w", lease=timedelta(minutes=5), limit=8
            )
            for number, store in enumerate(workers)
        )
        taken = [run.run_id for runs in await asyncio.gather(*claims) for run in runs]
        assert not claimed & set(taken), "no run is claimed twice"
        assert len(taken) == len(set(taken)) >= 8
        claimed |= set(taken)
    assert {run.run_id for run in late} <= claimed


async def test_a_tenant_can_be_limited(shop: Deployment) -> None:
    runs = await shop.client.start_many(
        fulfil, [Start(Order(note="wait"), tenant="vinet") for _ in range(5)] + [Start(Order(), tenant="hanar")]
    )
    async with shop.working(tenant_concurrency=2, concurrency=4):
        await runs[-1].result(20)
        running = (await shop.client.runs(state=State.RUNNING)).runs
        assert len(running) == 2
        shop.shop.go_on.set()
        await asyncio.gather(*(run.result(20) for run in runs))
