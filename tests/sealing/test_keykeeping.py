"""Keys in an operator's hands: sealed anew while others write, who needs one, and when it may go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from sagas import (
    SETTLED,
    Client,
    InvalidInput,
    KeyDenied,
    KeyKeeper,
    KeyLost,
    KeyRefused,
    KeyState,
    Kind,
    MongoStore,
    NoKeyring,
    Operator,
    Rewrap,
    Run,
    RunHeld,
    RunRolledBack,
    Saga,
    Start,
    State,
    Step,
    StoreUnavailable,
    Worker,
    WorkerOptions,
)
from sagas.keykeeping import NeedingRun
from sagas.sealing import keys_needed, place_of_payload
from sagas.wrapping import KeyName
from sagas_store.errors import FenceLost
from sagas_store.journal import Resealed
from sagas_store.records import Blocked, RunRecord
from tests.conftest import DRIVERS
from tests.sealing.deployment import POLL, WHY, Deployment, Order, Shop, fulfil
from tests.store.making import entry

DELAY = timedelta(hours=1)


@pytest.fixture
async def shop(database: Any) -> AsyncIterator[Deployment]:
    deployment = Deployment(database)
    await deployment.store.schema.apply()
    await deployment.store.ready()
    yield deployment
    await deployment.client.close()


@pytest.fixture
def keeper(shop: Deployment) -> KeyKeeper:
    return shop.operator.keys


async def of_every_kind(shop: Deployment) -> dict[str, Run[Order]]:
    """Runs of one tenant that have, among them, every payload that there is."""
    runs: dict[str, Run[Order]] = {}

    async def start(name: str, order: Order, **more: Any) -> None:
        runs[name] = await shop.client.start(fulfil, order, key=name, tenant="vinet", **more)

    await start("delayed", Order(), delay=DELAY)
    await start("stopped", Order(), delay=DELAY)
    await runs["stopped"].stop(**WHY)
    await start("undone", Order(note="wait"))
    async with shop.working():
        await asyncio.wait_for(shop.shop.inside.wait(), 20)
        await runs["undone"].stop(**WHY)  # its reason is copied into the journal
        shop.shop.go_on.set()
        with pytest.raises(RunRolledBack):
            await runs["undone"].result(20)
        await start("completed", Order(number=7))
        await runs["completed"].result(20)
        await start("declined", Order(note="decline"))
        with pytest.raises(RunRolledBack):
            await runs["declined"].result(20)
        for name in ("doubtful", "decided"):
            await start(name, Order(note="doubt"))
            with pytest.raises(RunHeld):
                await runs[name].result(20)
        await shop.operator.verdict(fulfil, runs["decided"].run_id, happened=True, context=Order(number=8), **WHY)
        await runs["decided"].result(20)
    again = await shop.operator.restart_as_new(runs["undone"].run_id, **WHY)
    runs["again"] = shop.client.run(fulfil, run_id=again)
    return runs


async def sealed_with(shop: Deployment) -> set[str]:
    """The ids of the keys that anything in the database is sealed with, wherever it lies."""
    found: set[str] = set()

    def collect(value: Any) -> None:
        if isinstance(value, bytes):
            found.update(keys_needed([value]))
        elif isinstance(value, dict):
            for one in value.values():
                collect(one)

    for name in ("sagas.runs", "sagas.journal"):
        async for document in shop.database[name].find({}):
            collect(document)
    return found


async def keys_on(shop: Deployment, run: Run[Order]) -> list[str]:
    found = await shop.database["sagas.runs"].find_one({"_id": run.run_id})
    return sorted(found["keys"])


async def rotated(shop: Deployment, tenant: str | None = "vinet", *, noticed: bool = True) -> tuple[str, str]:
    """The key before and the key after a rotation, which every process has noticed."""
    old = (await shop.keyring.current(tenant)).key_id
    new = await shop.operator.keys.rotate(tenant, **WHY)
    if noticed:
        await shop.database["sagas.keys"].update_one(
            {"_id": old}, [{"$set": {"retired_at": {"$subtract": ["$retired_at", 3_600_000]}}}]
        )
    return old, new


async def assert_all_opens(shop: Deployment, runs: dict[str, Run[Order]]) -> None:
    assert (await shop.client.run(fulfil, run_id=runs["completed"].run_id).result(5)).number == 7
    assert (await shop.client.run(fulfil, run_id=runs["decided"].run_id).result(5)).number == 8
    for name, run in runs.items():
        lines = await shop.client.journal(run.run_id)
        assert [line.unopened for line in lines] == [None] * len(lines), name
        assert (await shop.client.get(run.run_id)).key == (name if name != "again" else None)
    assert (await shop.client.stop(runs["stopped"].run_id, **WHY)).reason == WHY["reason"]
    (begun,) = [line for line in await shop.client.journal(runs["undone"].run_id) if line.kind is Kind.ROLLBACK_BEGUN]
    assert begun.reason == WHY["reason"]
    (failed,) = [line for line in await shop.client.journal(runs["declined"].run_id) if line.kind is Kind.STEP_FAILED]
    assert failed.error is not None
    assert "declined" in failed.error.message


# ------------------------------------------------------------------------------------ sealing anew


@pytest.mark.parametrize("driver", DRIVERS)
async def test_everything_is_sealed_anew_and_opens_once_the_old_key_is_gone(
    shop: Deployment, keeper: KeyKeeper
) -> None:
    runs = await of_every_kind(shop)
    hanar = await shop.client.start(fulfil, Order(), tenant="hanar", delay=DELAY)
    theirs = await keys_on(shop, hanar)
    old, new = await rotated(shop)
    seen: list[tuple[int, int, int]] = []

    done = await keeper.rewrap("vinet", progress=lambda now: seen.append((now.seen, now.done, now.total)))

    assert done.complete
    assert (done.key_id, done.older, done.total, done.done) == (new, (old,), len(runs), len(runs))
    assert seen == [(len(runs), len(runs), len(runs))]
    assert done.payloads > 2 * len(runs)
    assert await sealed_with(shop) == {new, *theirs}
    for run in runs.values():
        assert await keys_on(shop, run) == [new]
    await keeper.discard("vinet", old, confirm=old, **WHY)
    await assert_all_opens(shop.anew(), runs)
    other = shop.anew()
    await other.operator.verdict(fulfil, runs["doubtful"].run_id, happened=False, **WHY)
    async with other.working():
        with pytest.raises(RunRolledBack):
            await other.client.run(fulfil, run_id=runs["doubtful"].run_id).result(20)
        assert (await other.client.run(fulfil, run_id=runs["again"].run_id).result(20)).done == ("reserve", "charge")


async def test_repeating_it_does_nothing_and_a_second_rotation_is_caught_up_with(
    shop: Deployment, keeper: KeyKeeper
) -> None:
    runs = await of_every_kind(shop)
    await rotated(shop)
    await keeper.rewrap("vinet")
    again = await keeper.rewrap("vinet")
    assert (again.total, again.payloads, again.complete) == (0, 0, True)
    await rotated(shop)
    _, newest = await rotated(shop)
    last = await keeper.rewrap("vinet")
    assert (last.key_id, len(last.older), last.complete) == (newest, 3, True)
    assert await sealed_with(shop) == {newest}
    await assert_all_opens(shop.anew(), runs)


async def test_runs_without_a_tenant_are_sealed_anew_too(shop: Deployment, keeper: KeyKeeper) -> None:
    run = await shop.client.start(fulfil, Order(), delay=DELAY)
    old, new = await rotated(shop, None)
    assert (await keeper.rewrap()).complete
    assert await keys_on(shop, run) == [new]
    await keeper.discard(None, old, confirm=old, **WHY)


async def test_a_running_run_is_left_over_and_a_later_pass_gets_it(shop: Deployment, keeper: KeyKeeper) -> None:
    run = await shop.client.start(fulfil, Order(note="wait"), tenant="vinet")
    async with shop.working():
        await asyncio.wait_for(shop.shop.inside.wait(), 20)
        old, new = await rotated(shop)
        done = await keeper.rewrap("vinet")
        assert (done.left, done.complete, done.payloads) == ({run.run_id: "it is running"}, False, 0)
        with pytest.raises(KeyRefused, match="1 run may still need it"):
            await keeper.discard("vinet", old, confirm=old, **WHY)
        shop.shop.go_on.set()
        await run.result(20)
    assert old in await keys_on(shop, run), "its attempt had begun with it"
    assert (await keeper.rewrap("vinet")).complete
    assert await keys_on(shop, run) == [new]


async def test_a_key_that_is_lost_is_named_and_what_it_sealed_stays_as_it_is(
    shop: Deployment, keeper: KeyKeeper
) -> None:
    await shop.client.start(fulfil, Order(), tenant="vinet", delay=DELAY)
    first, second = await rotated(shop)
    await shop.client.start(fulfil, Order(), tenant="vinet", delay=DELAY)
    await rotated(shop)
    other = shop.anew()
    shop.wrapper.failing = lambda name: KeyDenied("vinet", first, "not ours") if name.key_id == first else None
    done = await other.operator.keys.rewrap("vinet")
    assert (done.lost, done.older, done.done, done.complete) == ({first: "not ours"}, (second,), 1, False)
    assert await sealed_with(shop) == {first, done.key_id}


async def test_what_was_tampered_with_is_left_over_and_the_rest_is_sealed_anew(
    shop: Deployment, keeper: KeyKeeper
) -> None:
    async with shop.working():
        run = await shop.client.start(fulfil, Order(), key="k", tenant="vinet")
        await run.result(20)
    found = await shop.database["sagas.runs"].find_one({"_id": run.run_id})
    altered = found["input"][:-1] + bytes([found["input"][-1] ^ 1])
    await shop.database["sagas.runs"].update_one({"_id": run.run_id}, {"$set": {"input": altered}})
    old, new = await rotated(shop)
    done = await keeper.rewrap("vinet")
    assert done.left[run.run_id].startswith("Tampered: run ")
    assert await keys_on(shop, run) == sorted([old, new])
    assert (await shop.database["sagas.runs"].find_one({"_id": run.run_id}))["input"] == altered
    assert (await shop.anew().client.run(fulfil, run_id=run.run_id).result(5)).done == ("reserve", "charge")


async def test_an_entry_of_a_newer_version_keeps_the_key(
    shop: Deployment, keeper: KeyKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shop.working():
        run = await shop.client.start(fulfil, Order(), tenant="vinet")
        await run.result(20)
    await rotated(shop)
    load = shop.store.journal.load

    async def unknown(run_id: str) -> Any:
        return [entry._replace(kind=Kind.UNKNOWN, payload=None) for entry in await load(run_id)]

    monkeypatch.setattr(shop.store.journal, "load", unknown)
    done = await keeper.rewrap("vinet")
    assert "cannot read all entries" in done.left[run.run_id]


# ------------------------------------------------------------------------------------ while others write

Meanwhile = Callable[[Deployment, Run[Order], Deployment], Awaitable[Any]]


async def claim_and_block(shop: Deployment, run: Run[Order], late: Deployment) -> None:
    """A claim that cannot open the run leaves its state and its count as they were."""
    (claimed,) = await shop.store.claims.take(
        [("fulfil", 1)], token="blocked", worker="w", lease=timedelta(minutes=5), limit=1
    )
    blocked = Blocked(count=0, since=shop.store.clock.now(), failure="KeyUnavailable", why="away")
    await shop.store.runs.block(claimed, blocked, wait=timedelta(0), quarantine=None)


async def claim_and_hand_back(shop: Deployment, run: Run[Order], late: Deployment) -> None:
    (claimed,) = await shop.store.claims.take(
        [("fulfil", 1)], token="parked", worker="w", lease=timedelta(minutes=5), limit=1
    )
    await shop.store.runs.park(claimed, wait=timedelta(0))


async def press_stop(shop: Deployment, run: Run[Order], late: Deployment) -> None:
    await late.client.stop(run.run_id, **WHY)


async def cut_its_wait_short(shop: Deployment, run: Run[Order], late: Deployment) -> None:
    await late.operator.retry_now(run.run_id, **WHY)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("meanwhile", [press_stop, cut_its_wait_short, claim_and_hand_back, claim_and_block])
async def test_a_key_that_somebody_has_used_meanwhile_is_not_taken_away(
    shop: Deployment, keeper: KeyKeeper, meanwhile: Meanwhile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last look at a run and the write that takes its key away, a process that does not know of the
    rotation yet writes to it."""
    run = await shop.client.start(fulfil, Order(), tenant="vinet")
    if meanwhile in (press_stop, cut_its_wait_short):  # neither would leave a run pending that nobody has attempted
        later = {"$dateAdd": {"startDate": "$$NOW", "unit": "hour", "amount": 1}}
        await shop.database["sagas.runs"].update_one({"_id": run.run_id}, [{"$set": {"attempts": 1, "due_at": later}}])
    late = shop.anew()
    await late.keyring.current("vinet")
    _, new = await rotated(shop)
    keep = shop.store.resealing.keep_keys
    kept: list[bool] = []

    async def interrupted(run_as_read: RunRecord, keys: Sequence[str], *, last_seq: int) -> bool:
        if not kept:
            await meanwhile(shop, run, late)
        kept.append(await keep(run_as_read, keys, last_seq=last_seq))
        return kept[-1]

    monkeypatch.setattr(shop.store.resealing, "keep_keys", interrupted)
    done = await keeper.rewrap("vinet")
    assert kept[0] is False
    used = await sealed_with(shop)
    assert used <= set(await keys_on(shop, run))
    assert (done.complete, used) == (True, {new}), "it has looked again"
    lines = await shop.anew().client.journal(run.run_id)
    assert [line.unopened for line in lines] == [None] * len(lines)


async def test_a_claim_meanwhile_keeps_the_key(
    shop: Deployment, keeper: KeyKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await shop.client.start(fulfil, Order(), tenant="vinet")
    old, new = await rotated(shop)
    keep = shop.store.resealing.keep_keys

    async def interrupted(run_as_read: RunRecord, keys: Sequence[str], *, last_seq: int) -> bool:
        await shop.store.claims.take([("fulfil", 1)], token="t", worker="w", lease=DELAY, limit=1)
        return await keep(run_as_read, keys, last_seq=last_seq)

    monkeypatch.setattr(shop.store.resealing, "keep_keys", interrupted)
    assert (await keeper.rewrap("vinet")).left == {run.run_id: "it is running"}
    assert await keys_on(shop, run) == sorted([old, new])


async def test_what_is_replaced_meanwhile_is_not_overwritten(
    shop: Deployment, keeper: KeyKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await shop.client.start(fulfil, Order(), tenant="vinet", delay=DELAY)
    await rotated(shop)
    replace = shop.store.resealing.replace
    theirs = shop.anew().operator.keys
    seals: list[bytes] = []

    async def interrupted(*arguments: Any) -> int:
        await theirs.rewrap("vinet")
        seals.append((await shop.database["sagas.runs"].find_one({"_id": run.run_id}))["input"])
        return await replace(*arguments)

    monkeypatch.setattr(shop.store.resealing, "replace", interrupted)
    done = await keeper.rewrap("vinet")
    assert (done.payloads, done.complete) == (0, True)
    assert (await shop.database["sagas.runs"].find_one({"_id": run.run_id}))["input"] == seals[0]


async def test_a_frozen_attempt_that_nobody_has_fenced_off_keeps_its_key(shop: Deployment, keeper: KeyKeeper) -> None:
    """Its lease is over, and the claim that followed could not open the run: its next entry's number is still free."""
    run = await shop.client.start(fulfil, Order(), tenant="vinet")

    async def claimed(token: str) -> RunRecord:
        (one,) = await shop.store.claims.take([("fulfil", 1)], token=token, worker="w", lease=DELAY, limit=1)
        return one

    await claimed("frozen")
    await shop.database["sagas.runs"].update_one(
        {"_id": run.run_id}, [{"$set": {"due_at": {"$subtract": ["$$NOW", 1]}}}]
    )
    blocked = Blocked(count=0, since=shop.store.clock.now(), failure="KeyUnavailable", why="away")
    await shop.store.runs.block(await claimed("blocked"), blocked, wait=DELAY, quarantine=None)
    old, new = await rotated(shop)
    done = await keeper.rewrap("vinet")
    assert "an attempt before may still write" in done.left[run.run_id]
    assert await keys_on(shop, run) == sorted([old, new])
    await shop.operator.requeue_quarantined(runs=[run.run_id], **WHY)  # has an entry, which fences it off
    assert (await keeper.rewrap("vinet")).complete
    with pytest.raises(FenceLost):
        await shop.store.journal.append(entry(run.run_id, 1, token="frozen"))


async def test_it_may_die_at_any_write_and_a_repeat_finishes_it(shop: Deployment, keeper: KeyKeeper) -> None:
    runs = await of_every_kind(shop)
    _, new = await rotated(shop)
    at = shop.store.resealing
    writes = [(at, "replace"), (shop.store.journal, "reseal"), (at, "keep_keys")]
    made = 0
    dies_at = 0

    def dying(inner: Callable[..., Awaitable[Any]], *, after: bool) -> Callable[..., Awaitable[Any]]:
        async def write(*arguments: Any, **more: Any) -> Any:
            nonlocal made
            made += 1
            dies = made >= dies_at
            if made > dies_at or (dies and not after):
                raise StoreUnavailable("a write", "killed")
            answer = await inner(*arguments, **more)
            if dies:
                raise StoreUnavailable("a write", "killed")
            return answer

        return write

    for number, (owner, name) in enumerate(writes):
        setattr(owner, name, dying(getattr(owner, name), after=number != 1))
    deaths = 0
    while True:
        made, dies_at = 0, dies_at + 1
        try:
            done = await keeper.rewrap("vinet", at_once=1)
        except StoreUnavailable:
            deaths += 1
            for run in runs.values():  # whatever a run is sealed with, it names
                found = await shop.database["sagas.runs"].find_one({"_id": run.run_id})
                entries = await shop.store.journal.load(run.run_id)
                held = [found["input"], *(one.payload for one in entries), *(one.reason for one in entries)]
                assert keys_needed(held) <= set(found["keys"])
            dies_at = 0 if deaths % 3 == 0 else dies_at  # now near the beginning, now further on
            continue
        break
    assert deaths > len(runs)
    assert done.complete
    assert await sealed_with(shop) == {new}
    await assert_all_opens(shop.anew(), runs)


async def test_two_at_once_do_each_others_work_no_harm(shop: Deployment, keeper: KeyKeeper) -> None:
    runs = await of_every_kind(shop)
    more = await shop.client.start_many(fulfil, [Start(Order(), tenant="vinet", delay=DELAY) for _ in range(120)])
    _, new = await rotated(shop)
    calls: list[Rewrap] = []
    both = await asyncio.gather(
        keeper.rewrap("vinet", progress=calls.append), shop.anew().operator.keys.rewrap("vinet")
    )
    assert [done.left for done in both] == [{}, {}]
    assert len(calls) >= 1
    assert await sealed_with(shop) == {new}
    assert await keys_on(shop, more[-1]) == [new]
    await assert_all_opens(shop.anew(), runs)


book = Saga("book", Order)


@book.step(transactional=True, no_compensation=True)
async def enter(order: Order, step: Step[Shop]) -> Order:
    return order.model_copy(update={"done": ("enter",)})


@book.step(no_compensation=True)
async def announce(order: Order, step: Step[Shop]) -> Order:
    return order.model_copy(update={"done": (*order.done, "announce")})


async def test_an_entry_of_a_transaction_that_was_sealed_anew_before_it_was_read_back_opens(
    shop: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply to a commit is lost; the entry is found again, under a key that came after the attempt's own."""
    run = await shop.client.start(book, Order(number=7), tenant="vinet")
    commit = shop.store.commit_together

    async def lost_and_found(body: Any) -> Any:
        committed = await commit(body)
        assert committed is not None
        assert committed.payload is not None
        await rotated(shop)
        sealer = await shop.keyring.sealer("vinet", run.run_id, [committed.payload])
        place = place_of_payload(committed.kind, committed.seq)
        anew = sealer.seal(*place, sealer.open(*place, committed.payload))
        await shop.store.journal.reseal(run.run_id, [Resealed(committed.seq, "payload", committed.payload, anew)])
        return committed._replace(payload=anew)

    monkeypatch.setattr(shop.store, "commit_together", lost_and_found)
    worker = Worker(shop.store, [book], options=WorkerOptions(poll=POLL, handle_signals=False))
    running = asyncio.create_task(worker.run())
    assert await run.result(20) == Order(number=7, done=("enter", "announce"))
    worker.stop()
    await asyncio.wait_for(running, 20)
    assert (await shop.info(run)).attempts == 1


# ------------------------------------------------------------------------------------ who needs a key


async def test_a_key_says_which_runs_need_it_and_whether_it_may_go(shop: Deployment, keeper: KeyKeeper) -> None:
    runs = await of_every_kind(shop)
    old = (await shop.keyring.current("vinet")).key_id
    usage = await keeper.usage("vinet", old)
    assert (usage.open, usage.held, usage.settled) == (2, 1, 5)
    assert (usage.key.state, usage.discardable) == (KeyState.ACTIVE, False)
    assert "rotate first" in usage.why
    _, new = await rotated(shop, noticed=False)
    early = await keeper.usage("vinet", old)
    assert (early.key.state, early.discardable) == (KeyState.RETIRED, False)
    assert "may not have noticed" in early.why
    await rotated(shop)  # the clock of `old` stands; only `new` is made older
    await shop.database["sagas.keys"].update_one({"_id": old}, {"$unset": {"retired_at": 1}})
    needed = await keeper.usage("vinet", old)
    assert needed.why == "8 runs may still need it; seal them anew: rewrap"
    assert sum(needed.runs.values()) == len(runs)
    ids = sorted(run.run_id for run in runs.values())
    first = await keeper.runs_needing("vinet", old, limit=5)
    rest = await keeper.runs_needing("vinet", old, after=first[-1].run_id)
    assert [one.run_id for one in [*first, *rest]] == ids
    (held,) = await keeper.runs_needing("vinet", old, states=[State.IN_DOUBT])
    assert held == NeedingRun(runs["doubtful"].run_id, State.IN_DOUBT)
    assert len(await keeper.runs_needing("vinet", old, states=SETTLED)) == 5
    await keeper.rewrap("vinet")
    free = await keeper.usage("vinet", old)
    assert (free.runs, free.discardable, free.why) == ({}, True, "no run needs it")
    assert (await keeper.usage("vinet", new)).runs == {}


async def test_only_a_retired_key_that_nothing_needs_is_destroyed(shop: Deployment, keeper: KeyKeeper) -> None:
    run = await shop.client.start(fulfil, Order(), tenant="vinet", delay=DELAY)
    old = (await shop.keyring.current("vinet")).key_id
    with pytest.raises(InvalidInput, match="confirm"):
        await keeper.discard("vinet", old, confirm="vinet", **WHY)
    with pytest.raises(KeyRefused, match="rotate first"):
        await keeper.discard("vinet", old, confirm=old, **WHY)
    await rotated(shop)
    with pytest.raises(KeyRefused, match="1 run may still need it"):
        await keeper.discard("vinet", old, confirm=old, **WHY)
    await keeper.rewrap("vinet")
    await shop.keyring.get("vinet", old)
    await keeper.discard("vinet", old, confirm=old, by="$$NOW", reason="$nothing")
    await keeper.discard("vinet", old, confirm=old, **WHY)  # a repeat after a lost reply
    gone = next(key for key in await keeper.of_tenant("vinet") if key.key_id == old)
    assert (gone.retired_by, gone.retired_reason) == (WHY["by"], WHY["reason"])
    assert (gone.destroyed_by, gone.destroyed_reason) == ("$$NOW", "$nothing")
    for nobody in ({"by": "", "reason": "why"}, {"by": "ann@shop", "reason": " "}):
        for refused in (
            keeper.rotate("vinet", **nobody),
            keeper.discard("vinet", old, confirm=old, **nobody),
            keeper.destroy("vinet", confirm="vinet", **nobody),
        ):
            with pytest.raises(InvalidInput, match="must be a text that says"):
                await refused
    with pytest.raises(KeyLost, match="destroyed"):
        await shop.keyring.get("vinet", old)
    states = {key.key_id: key.state for key in await keeper.of_tenant("vinet")}
    assert states[old] is KeyState.DESTROYED
    assert "destroyed already" in (await keeper.usage("vinet", old)).why
    assert (await shop.anew().client.get(run.run_id)).state is State.PENDING
    again = await keeper.rewrap("vinet")
    assert (again.older, again.complete) == ((), True)


async def test_the_lookup_key_and_unknown_keys_are_refused(shop: Deployment, keeper: KeyKeeper) -> None:
    await shop.client.start(fulfil, Order(), tenant="vinet", key="k", delay=DELAY)
    theirs = (await shop.keyring.current("hanar")).key_id
    lookup = next(key.key_id for key in await keeper.of_tenant("vinet") if key.purpose == "lookup")
    with pytest.raises(KeyRefused, match="never rotated"):
        await keeper.discard("vinet", lookup, confirm=lookup, **WHY)
    for tenant, key_id in (("vinet", theirs), ("vinet", "0" * 16), (None, theirs)):
        for asked in (
            keeper.usage(tenant, key_id),
            keeper.runs_needing(tenant, key_id),
            keeper.discard(tenant, key_id, confirm=key_id, **WHY),
        ):
            with pytest.raises(KeyRefused, match="no key of that id"):
                await asked


async def test_a_tenant_is_destroyed_and_begins_anew_when_confirmed(shop: Deployment, keeper: KeyKeeper) -> None:
    run = await shop.client.start(fulfil, Order(), tenant="vinet", delay=DELAY)
    nobodys = await shop.client.start(fulfil, Order(), delay=DELAY)
    lookup, run_key = [key.key_id for key in await keeper.of_tenant("vinet")]
    for tenant, wrong in (("vinet", "hanar"), ("vinet", "no tenant"), (None, ""), (None, "vinet")):
        with pytest.raises(InvalidInput, match="confirm"):
            await keeper.destroy(tenant, confirm=wrong, **WHY)
    assert await keeper.destroy("vinet", confirm="vinet", **WHY) == [lookup, run_key]
    assert len(await keeper.destroy(confirm="no tenant", **WHY)) == 2, "a lookup key and a data key"
    with pytest.raises(KeyLost):
        await keeper.rewrap("vinet")
    with pytest.raises(KeyLost):
        await keeper.rotate("vinet", **WHY)
    fresh = await keeper.create("vinet")
    assert (await shop.client.start(fulfil, Order(), tenant="vinet", delay=DELAY)).created
    assert (await keeper.rewrap("vinet")).key_id == fresh
    for one in (run, nobodys):
        assert (await shop.client.get(one.run_id)).state is State.PENDING, "its runs stay listed"


# ------------------------------------------------------------------------------------ whom one reaches


async def test_a_bound_operator_reaches_its_own_tenants_keys_alone(shop: Deployment) -> None:
    theirs = (await shop.keyring.current("hanar")).key_id
    ours = (await shop.keyring.current("vinet")).key_id
    bound = Operator(shop.store, tenant="vinet").keys
    assert {key.tenant for key in await bound.of_tenant()} == {"vinet"}
    assert {key.tenant async for key in bound.every()} == {"vinet"}
    assert (await bound.usage(None, ours)).key.key_id == ours
    with pytest.raises(KeyRefused, match="no key of that id"):
        await bound.usage(None, theirs)
    for asked in (
        bound.of_tenant("hanar"),
        bound.usage("hanar", theirs),
        bound.runs_needing("hanar", theirs),
        bound.create("hanar"),
        bound.rotate("hanar", **WHY),
        bound.rewrap("hanar"),
        bound.discard("hanar", theirs, confirm=theirs, **WHY),
        bound.destroy("hanar", confirm="hanar", **WHY),
        bound.rewrap_master(),
    ):
        with pytest.raises(InvalidInput, match="tenant"):
            await asked
    with pytest.raises(InvalidInput, match="confirm"):
        await bound.destroy(confirm="no tenant", **WHY)
    new = await bound.rotate(**WHY)
    assert (await bound.rewrap()).key_id == new
    assert await bound.create() == new
    assert (await bound.destroy(confirm="vinet", **WHY))[-2:] == [ours, new]
    assert (await shop.operator.keys.usage("hanar", theirs)).key.state is KeyState.ACTIVE
    unbound = {key.tenant async for key in shop.operator.keys.every()}
    assert unbound == {"vinet", "hanar"}


async def test_without_a_keyring_one_may_look_and_destroy(shop: Deployment) -> None:
    run = await shop.client.start(fulfil, Order(), tenant="vinet", delay=DELAY)
    old, _ = await rotated(shop)
    keyless = Operator(MongoStore(shop.database)).keys
    assert (await keyless.of_tenant("vinet"))[1].key_id == old
    assert (await keyless.usage("vinet", old)).runs == {State.PENDING: 1}
    for asked in (
        keyless.rotate("vinet", **WHY),
        keyless.create("vinet"),
        keyless.rewrap("vinet"),
        keyless.rewrap_master(),
    ):
        with pytest.raises(InvalidInput, match="keyring"):
            await asked
    with pytest.raises(KeyRefused, match="may still need it"):
        await keyless.discard("vinet", old, confirm=old, **WHY)
    await shop.operator.keys.rewrap("vinet")
    await keyless.discard("vinet", old, confirm=old, **WHY)
    assert len(await keyless.destroy("vinet", confirm="vinet", **WHY)) == 3
    assert (await Client(MongoStore(shop.database)).get(run.run_id)).tenant == "vinet"


async def test_an_operator_without_the_keyring_puts_no_reason_of_a_sealed_run_in_the_clear(shop: Deployment) -> None:
    run = await shop.client.start(fulfil, Order(), tenant="vinet", delay=DELAY)
    await shop.database["sagas.runs"].update_one({"_id": run.run_id}, {"$set": {"attempts": 1}})
    keyless = Operator(MongoStore(shop.database))
    with pytest.raises(NoKeyring, match="in the clear"):
        await keyless.retry_now(run.run_id, **WHY)
    assert await shop.client.journal(run.run_id) == []


async def test_master_keys_are_rewrapped_for_all(shop: Deployment, keeper: KeyKeeper) -> None:
    await shop.keyring.current("vinet")
    await shop.keyring.current(None)
    done = await keeper.rewrap_master()
    assert (len(done.done), done.failed) == (4, {}), "two tenants' lookup and data keys"

    def refuses(name: KeyName) -> Exception | None:
        return KeyLost(name.tenant, name.key_id, "gone") if name.tenant == "vinet" else None

    shop.wrapper.failing = refuses
    done = await keeper.rewrap_master()
    assert (len(done.done), len(done.failed)) == (2, 2)
