"""The keyring: one unwrap per key, a bounded memory, and failures that are told apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pymongo
import pytest
from pymongo import AsyncMongoClient

from sagas.clock import random_bytes
from sagas.errors import (
    CannotOpen,
    InvalidInput,
    KeyDenied,
    KeyLost,
    KeyUnavailable,
    NoKeyring,
    StoreUnavailable,
    Tampered,
)
from sagas.keyring import ClaimRound, Keyring, NoKeys
from sagas.sealing import Slot
from sagas.wrapping import KeyName, LocalKeyWrapper
from sagas_store import MongoStore
from sagas_store.keys import KeyState, Purpose
from tests.sealing.deployment import WHY
from tests.sealing.wrapping import CountingWrapper
from tests.support.waiting import eventually

RUN = "0123456789abcdef0123456789abcdef"
AGE = timedelta(minutes=5)
PAYLOAD = b'\x01{"order_id":10248}'


class Clock:
    """A monotonic clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def wrapper() -> CountingWrapper:
    return CountingWrapper()


@pytest.fixture
def keyring(store: MongoStore, wrapper: CountingWrapper, clock: Clock) -> Keyring:
    return bound(store, wrapper, clock)


def bound(store: MongoStore, wrapper: CountingWrapper, clock: Clock, **more: Any) -> Keyring:
    """As another process would have it."""
    keyring = Keyring(wrapper, max_age=AGE, monotonic=clock, **more)
    keyring.bind(store.keys)
    return keyring


def unavailable(name: KeyName) -> Exception:
    return KeyUnavailable(name.tenant, name.key_id, "throttled")


def denied(name: KeyName) -> Exception:
    return KeyDenied(name.tenant, name.key_id, "no right to it")


def lost(name: KeyName) -> Exception:
    return KeyLost(name.tenant, name.key_id, "disabled")


# --- keys are made, kept and shared -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tenant", ["vinet", None])
async def test_what_one_process_seals_another_opens(
    store: MongoStore, keyring: Keyring, clock: Clock, tenant: str | None
) -> None:
    stored = (await keyring.sealer(tenant, RUN)).seal(Slot.INPUT, 0, PAYLOAD)
    elsewhere = bound(store, CountingWrapper(), clock)
    assert (await elsewhere.opener(tenant, RUN, [stored])).open(Slot.INPUT, 0, stored) == PAYLOAD
    assert (await elsewhere.sealer(tenant, RUN, [stored])).open(Slot.INPUT, 0, stored) == PAYLOAD


async def test_the_first_use_makes_a_lookup_key_and_a_data_key(keyring: Keyring) -> None:
    current = await keyring.current("vinet")
    lookup = await keyring.lookup_key("vinet")
    keys = await keyring.keys("vinet")
    assert [(key.key_id, key.purpose, key.state) for key in keys] == [
        (lookup.key_id, Purpose.LOOKUP, KeyState.ACTIVE),
        (current.key_id, Purpose.DATA, KeyState.ACTIVE),
    ]


async def test_processes_that_use_a_tenant_first_at_once_agree(store: MongoStore, clock: Clock) -> None:
    rings = [bound(store, CountingWrapper(), clock) for _ in range(8)]
    currents = await asyncio.gather(*(ring.current("vinet") for ring in rings))
    lookups = await asyncio.gather(*(ring.lookup_key("vinet") for ring in rings))
    assert len({key.key_id for key in currents}) == 1
    assert len({key.run_id("fulfil-order", "order-10248") for key in lookups}) == 1
    assert len(await rings[0].keys("vinet")) == 2


async def test_a_tenant_has_its_own_keys(keyring: Keyring) -> None:
    tenants = ["vinet", "hanar", None]
    assert len({(await keyring.current(tenant)).key_id for tenant in tenants}) == 3
    assert len({(await keyring.lookup_key(tenant)).run_id("s", "k") for tenant in tenants}) == 3


async def test_another_tenants_key_is_as_unknown_as_none(keyring: Keyring, wrapper: CountingWrapper) -> None:
    stored = (await keyring.sealer("vinet", RUN)).seal(Slot.INPUT, 0, PAYLOAD)
    calls = wrapper.calls.total()
    with pytest.raises(KeyLost, match=r"tenant 'hanar', key .*: this tenant has no data key of that id"):
        await keyring.opener("hanar", RUN, [stored])
    assert wrapper.calls.total() == calls


async def test_a_lookup_key_seals_nothing(keyring: Keyring) -> None:
    with pytest.raises(KeyLost, match="no data key of that id"):
        await keyring.get("vinet", (await keyring.lookup_key("vinet")).key_id)


async def test_a_process_that_died_between_the_two_first_keys_is_made_good_by_the_next(
    store: MongoStore, clock: Clock
) -> None:
    class Dies(CountingWrapper):
        async def wrap(self, name: KeyName, key: bytes) -> Any:
            if name.purpose == Purpose.DATA:
                raise KeyDenied(name.tenant, name.key_id, "died")
            return await super().wrap(name, key)

    with pytest.raises(KeyDenied):
        await bound(store, Dies(), clock).current("vinet")
    keyring = bound(store, CountingWrapper(), clock)
    (left,) = await keyring.keys("vinet")
    await keyring.current("vinet")
    assert (await keyring.lookup_key("vinet")).key_id == left.key_id


async def test_without_leave_no_key_is_made_on_first_use(store: MongoStore, clock: Clock) -> None:
    keyring = bound(store, CountingWrapper(), clock, create_on_first_use=False)
    for ask in (keyring.current, keyring.lookup_key):
        with pytest.raises(KeyLost, match="make one: sagas keys create"):
            await ask("vinet")
    assert await keyring.create("vinet") == (await keyring.current("vinet")).key_id
    assert await keyring.create("vinet") == (await keyring.current("vinet")).key_id
    assert len(await keyring.keys("vinet")) == 2


async def test_an_id_that_is_taken_is_drawn_again(store: MongoStore, wrapper: CountingWrapper, clock: Clock) -> None:
    ids = iter([bytes(8), bytes(8), bytes([1]) * 8])
    keyring = bound(store, wrapper, clock, random_bytes=lambda count: next(ids) if count == 8 else random_bytes(count))
    await keyring.current("vinet")
    assert [key.key_id for key in await keyring.keys("vinet")] == ["00" * 8, "01" * 8]


# --- how often the key service is asked -------------------------------------------------------------------------------


async def test_a_hundred_who_ask_at_once_cost_one_unwrap(
    store: MongoStore, keyring: Keyring, wrapper: CountingWrapper, clock: Clock
) -> None:
    stored = (await keyring.sealer("vinet", RUN)).seal(Slot.INPUT, 0, PAYLOAD)
    other = CountingWrapper()
    other.release.clear()
    elsewhere = bound(store, other, clock)
    asking = [asyncio.create_task(elsewhere.sealer("vinet", f"run {n}", [stored])) for n in range(100)]
    while not other.calls:
        await asyncio.sleep(0)
    other.release.set()
    await asyncio.gather(*asking)
    assert other.calls == {"unwrap": 1}


async def test_a_key_is_unwrapped_once_for_many_runs(
    store: MongoStore, keyring: Keyring, wrapper: CountingWrapper, clock: Clock
) -> None:
    stored = (await keyring.sealer("vinet", RUN)).seal(Slot.INPUT, 0, PAYLOAD)
    assert wrapper.calls == {"wrap": 2, "unwrap": 1}
    for n in range(50):
        await keyring.sealer("vinet", f"run {n}", [stored])
        await keyring.opener("vinet", f"run {n}", [stored])
    assert wrapper.calls == {"wrap": 2, "unwrap": 1}


async def test_whoever_is_cancelled_while_asking_takes_nobody_along(
    store: MongoStore, keyring: Keyring, clock: Clock
) -> None:
    key_id = (await keyring.current("vinet")).key_id
    other = CountingWrapper()
    other.release.clear()
    elsewhere = bound(store, other, clock)
    first, second = (asyncio.create_task(elsewhere.get("vinet", key_id)) for _ in range(2))
    while not other.calls:
        await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    other.release.set()
    assert (await second).key_id == key_id
    assert other.calls == {"unwrap": 1}


async def test_the_deadline_of_one_who_asks_is_not_that_of_all(
    store: MongoStore, keyring: Keyring, clock: Clock
) -> None:
    key_id = (await keyring.current("vinet")).key_id
    other = CountingWrapper()
    other.release.clear()
    elsewhere = bound(store, other, clock)
    with pymongo.timeout(0.0001):
        first = asyncio.create_task(elsewhere.get("vinet", key_id))
        await asyncio.sleep(0.01)
    other.release.set()
    assert (await first).key_id == key_id


async def test_a_key_is_asked_for_again_when_half_its_age_is_over(
    keyring: Keyring, wrapper: CountingWrapper, clock: Clock
) -> None:
    key_id = (await keyring.current("vinet")).key_id
    clock.move(AGE.total_seconds() / 2 - 0.1)
    await keyring.current("vinet")
    assert wrapper.unwrapped[key_id] == 1
    clock.move(0.1)
    await keyring.current("vinet")
    await keyring.current("vinet")
    assert wrapper.unwrapped[key_id] == 2


async def test_a_key_service_that_is_away_is_not_noticed_before_the_age_is_over(
    keyring: Keyring, wrapper: CountingWrapper, clock: Clock
) -> None:
    key_id = (await keyring.current("vinet")).key_id
    wrapper.failure = unavailable
    clock.move(AGE.total_seconds() * 0.6)
    assert (await keyring.current("vinet")).key_id == key_id
    clock.move(AGE.total_seconds() * 0.39)
    assert (await keyring.current("vinet")).key_id == key_id
    clock.move(AGE.total_seconds() * 0.02)
    with pytest.raises(KeyUnavailable, match="throttled"):
        await keyring.get("vinet", key_id)


async def test_a_right_that_was_taken_away_ends_at_half_the_age(
    keyring: Keyring, wrapper: CountingWrapper, clock: Clock
) -> None:
    key_id = (await keyring.current("vinet")).key_id
    wrapper.failure = denied
    await keyring.get("vinet", key_id)
    clock.move(AGE.total_seconds() / 2)
    with pytest.raises(KeyDenied):
        await keyring.get("vinet", key_id)
    wrapper.failure = unavailable
    with pytest.raises(KeyUnavailable):  # what was remembered of the key went with the right to it
        await keyring.get("vinet", key_id)


async def test_keys_that_nobody_asks_for_are_let_go(keyring: Keyring, clock: Clock) -> None:
    await keyring.current("vinet")
    clock.move(AGE.total_seconds() * 1.1)
    await keyring.current("hanar")
    assert {question[1] for question in keyring._known} == {"hanar"}  # type: ignore[index]


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_a_throttled_key_service_is_left_alone_for_a_moment(
    store: MongoStore, keyring: Keyring, clock: Clock
) -> None:
    key_id = (await keyring.current("vinet")).key_id
    other = CountingWrapper()
    other.failure = unavailable
    elsewhere = bound(store, other, clock, pause=timedelta(seconds=1))
    for _ in range(10):
        with pytest.raises(KeyUnavailable):
            await elsewhere.get("vinet", key_id)
    assert other.calls == {"unwrap": 1}
    clock.move(1.0)
    other.failure = None
    assert (await elsewhere.get("vinet", key_id)).key_id == key_id


@pytest.mark.parametrize("failure", [unavailable, denied, lost])
async def test_a_key_that_does_not_open_costs_one_call_per_claim_round(
    store: MongoStore, keyring: Keyring, clock: Clock, failure: Any
) -> None:
    stored = (await keyring.sealer("vinet", RUN)).seal(Slot.INPUT, 0, PAYLOAD)
    other = CountingWrapper()
    other.failure = failure
    elsewhere = bound(store, other, clock)
    for rounds in (1, 2):
        this_round = ClaimRound()
        for n in range(64):  # one after the other: they do not even meet
            with pytest.raises(CannotOpen):
                await elsewhere.sealer("vinet", f"run {n}", [stored], claim_round=this_round)
            clock.move(0.1)
        assert other.calls == {"unwrap": rounds}
        clock.move(10)


async def test_a_key_that_came_back_is_seen_by_the_next_claim(
    store: MongoStore, keyring: Keyring, clock: Clock
) -> None:
    stored = (await keyring.sealer("vinet", RUN)).seal(Slot.INPUT, 0, PAYLOAD)
    other = CountingWrapper()
    other.failure = lost
    elsewhere = bound(store, other, clock)
    with pytest.raises(KeyLost):
        await elsewhere.sealer("vinet", RUN, [stored], claim_round=ClaimRound())
    other.failure = None
    sealer = await elsewhere.sealer("vinet", RUN, [stored], claim_round=ClaimRound())
    assert sealer.open(Slot.INPUT, 0, stored) == PAYLOAD


async def test_one_tenants_lost_key_is_nobody_elses(keyring: Keyring, wrapper: CountingWrapper) -> None:
    def only_vinet(name: KeyName) -> Exception | None:
        return lost(name) if name.tenant == "vinet" else None

    wrapper.failure = only_vinet  # type: ignore[assignment]
    this_round = ClaimRound()
    with pytest.raises(KeyLost):
        await keyring.sealer("vinet", RUN, claim_round=this_round)
    wrapper.failure = None
    await keyring.sealer("hanar", RUN, claim_round=this_round)


async def test_a_key_service_that_says_nothing_is_given_up_on(
    store: MongoStore, wrapper: CountingWrapper, clock: Clock
) -> None:
    wrapper.release.clear()
    keyring = bound(store, wrapper, clock, call_timeout=timedelta(milliseconds=10))
    with pytest.raises(KeyUnavailable, match=r"no answer within 0\.01 s"):
        await keyring.current("vinet")


async def test_a_key_service_that_hangs_holds_up_nobody_whose_key_is_at_hand(
    keyring: Keyring, wrapper: CountingWrapper, clock: Clock
) -> None:
    key_id = (await keyring.current("vinet")).key_id
    clock.move(AGE.total_seconds() * 0.6)
    wrapper.release.clear()
    async with asyncio.timeout(5):  # half of what one answer is waited for
        for _ in range(20):
            assert (await keyring.current("vinet")).key_id == key_id
    assert wrapper.unwrapped[key_id] == 2, "one question hangs, and no other is asked meanwhile"
    wrapper.failure = lost
    wrapper.release.set()

    async def told() -> bool:
        try:
            await keyring.get("vinet", key_id)
        except KeyLost:
            return True
        return False

    await eventually(told, what="the answer that came late counts")


async def test_nothing_is_concluded_from_a_wrapper_that_breaks(keyring: Keyring, wrapper: CountingWrapper) -> None:
    wrapper.failure = lambda _: ValueError("canary")
    with pytest.raises(KeyUnavailable, match="the key wrapper failed with ValueError") as failed:
        await keyring.current("vinet")
    assert "canary" not in str(failed.value)


async def test_each_who_asks_is_told_in_an_exception_of_its_own(keyring: Keyring, wrapper: CountingWrapper) -> None:
    wrapper.failure = lost
    told = await asyncio.gather(*(keyring.current("vinet") for _ in range(5)), return_exceptions=True)
    assert {type(one) for one in told} == {KeyLost}
    assert len({id(one) for one in told}) == 5
    assert all(isinstance(one, KeyLost) and one.__context__ is None and one.tenant == "vinet" for one in told)


async def test_a_database_that_is_away_is_not_a_lost_key(clock: Clock) -> None:
    moment = timedelta(milliseconds=100)
    async with AsyncMongoClient[Any]("mongodb://127.0.0.1:1") as nowhere:
        store = MongoStore(nowhere["nowhere"], patience=moment, reply=moment)
        with pytest.raises(StoreUnavailable):
            await bound(store, CountingWrapper(), clock).current("vinet")


async def test_wrapped_bytes_that_were_altered_are_told_from_a_lost_key(
    store: MongoStore, keyring: Keyring, clock: Clock, database: Any
) -> None:
    key_id = (await keyring.current("vinet")).key_id
    await database["sagas.keys"].update_one({"_id": key_id}, {"$set": {"wrapped": bytes(61)}})
    with pytest.raises(Tampered, match="do not authenticate"):
        await bound(store, CountingWrapper(), clock).current("vinet")
    await database["sagas.keys"].delete_one({"_id": key_id})
    with pytest.raises(KeyLost, match="left no trace"):
        await bound(store, CountingWrapper(), clock).get("vinet", key_id)


async def test_a_key_moved_to_another_tenants_record_does_not_open(
    store: MongoStore, keyring: Keyring, clock: Clock, database: Any
) -> None:
    mine, yours = await keyring.current("vinet"), await keyring.current("hanar")
    taken = await database["sagas.keys"].find_one({"_id": yours.key_id})
    await database["sagas.keys"].update_one({"_id": mine.key_id}, {"$set": {"wrapped": taken["wrapped"]}})
    with pytest.raises(Tampered):
        await bound(store, CountingWrapper(), clock).current("vinet")


# --- rotating and rewrapping ------------------------------------------------------------------------------------------


async def test_after_a_rotation_new_payloads_use_the_new_key_and_old_ones_still_open(keyring: Keyring) -> None:
    old = await keyring.sealer("vinet", RUN)
    stored = old.seal(Slot.INPUT, 0, PAYLOAD)
    new_id = await keyring.rotate("vinet", **WHY)
    sealer = await keyring.sealer("vinet", RUN, [stored])
    assert sealer.key_id == new_id
    assert sealer.open(Slot.INPUT, 0, stored) == PAYLOAD
    again = sealer.seal(Slot.CONTEXT, 1, PAYLOAD)
    assert (await keyring.opener("vinet", RUN, [stored, again])).open(Slot.CONTEXT, 1, again) == PAYLOAD


async def test_another_process_notices_a_rotation_within_half_the_age(
    store: MongoStore, keyring: Keyring, clock: Clock
) -> None:
    elsewhere = bound(store, CountingWrapper(), clock)
    await elsewhere.current("vinet")
    new_id = await keyring.rotate("vinet", **WHY)
    clock.move(AGE.total_seconds() / 2)
    assert (await elsewhere.current("vinet")).key_id == new_id


async def test_a_rotation_keeps_the_run_ids(keyring: Keyring) -> None:
    before = (await keyring.lookup_key("vinet")).run_id("fulfil-order", "order-10248")
    await keyring.rotate("vinet", **WHY)
    assert (await keyring.lookup_key("vinet")).run_id("fulfil-order", "order-10248") == before


async def test_rotations_at_once_leave_one_active_key_which_all_name(
    store: MongoStore, keyring: Keyring, clock: Clock
) -> None:
    await keyring.current("vinet")
    rings = [bound(store, CountingWrapper(), clock) for _ in range(4)]
    await asyncio.gather(*(ring.rotate("vinet", **WHY) for ring in rings))
    active = [key for key in await keyring.keys("vinet") if key.state is KeyState.ACTIVE and key.purpose == "data"]
    assert len(active) == 1
    assert {(await bound(store, CountingWrapper(), clock).current("vinet")).key_id} == {active[0].key_id}


async def test_a_tenant_without_a_key_has_nothing_to_rotate(keyring: Keyring) -> None:
    with pytest.raises(KeyLost, match="no active data key to rotate"):
        await keyring.rotate("vinet", **WHY)


async def test_after_rewrapping_the_old_master_key_can_go(store: MongoStore, clock: Clock) -> None:
    def ring(*names: str) -> Keyring:
        keyring = Keyring(LocalKeyWrapper({name: name.encode() * 8 for name in names}), monotonic=clock)
        keyring.bind(store.keys)
        return keyring

    stored = {tenant: (await ring("2025").sealer(tenant, RUN)).seal(Slot.INPUT, 0, PAYLOAD) for tenant in "abc"}
    await ring("2025").destroy("c", confirm="c", **WHY)
    done = await ring("2025", "2026").rewrap_keys()
    assert (len(done.done), done.failed) == (4, {})
    assert {key.master for tenant in "ab" for key in await ring("2026").keys(tenant)} == {"2026"}
    for tenant in "ab":
        opener = await ring("2026").opener(tenant, RUN, [stored[tenant]])
        assert opener.open(Slot.INPUT, 0, stored[tenant]) == PAYLOAD


async def test_rewrapping_goes_on_past_a_key_that_does_not_open_and_names_it(
    store: MongoStore, keyring: Keyring, clock: Clock, database: Any
) -> None:
    broken, fine = await keyring.current("vinet"), await keyring.current("hanar")
    await database["sagas.keys"].update_one({"_id": broken.key_id}, {"$set": {"wrapped": b"x"}})
    done = await keyring.rewrap_keys()
    assert list(done.failed) == [broken.key_id]
    assert fine.key_id in done.done
    assert len(done.done) == 3


# --- destroying -------------------------------------------------------------------------------------------------------


async def test_what_a_destroyed_tenant_sealed_opens_nowhere_any_more(
    store: MongoStore, keyring: Keyring, clock: Clock
) -> None:
    elsewhere = bound(store, CountingWrapper(), clock)
    stored = (await keyring.sealer("vinet", RUN)).seal(Slot.INPUT, 0, PAYLOAD)
    under_way = await elsewhere.sealer("vinet", RUN, [stored])
    kept = {key.key_id for key in await keyring.keys("vinet")}
    assert set(await keyring.destroy("vinet", confirm="vinet", **WHY)) == kept
    with pytest.raises(KeyLost, match="it was destroyed at 20"):
        await keyring.opener("vinet", RUN, [stored])  # at once where it was destroyed
    await elsewhere.opener("vinet", RUN, [stored])
    clock.move(AGE.total_seconds() / 2)
    with pytest.raises(KeyLost, match="it was destroyed at 20"):
        await elsewhere.opener("vinet", RUN, [stored])  # elsewhere within the age
    assert under_way.open(Slot.INPUT, 0, stored) == PAYLOAD  # what is under way keeps its own run's key


async def test_a_key_that_is_on_its_way_while_it_is_destroyed_is_not_remembered(
    store: MongoStore, keyring: Keyring, wrapper: CountingWrapper, clock: Clock
) -> None:
    key_id = (await keyring.current("vinet")).key_id
    clock.move(AGE.total_seconds())
    wrapper.release.clear()
    calls = wrapper.unwrapped[key_id]
    under_way = asyncio.create_task(keyring.get("vinet", key_id))
    while wrapper.unwrapped[key_id] == calls:
        await asyncio.sleep(0)
    await keyring.destroy("vinet", confirm="vinet", **WHY)
    wrapper.release.set()
    for _ in range(2):
        with pytest.raises(KeyLost, match="it was destroyed"):
            await keyring.get("vinet", key_id)
        await under_way


async def test_a_destroyed_tenant_is_not_given_new_keys_by_accident(keyring: Keyring) -> None:
    before = (await keyring.lookup_key("vinet")).run_id("fulfil-order", "order-10248")
    await keyring.destroy("vinet", confirm="vinet", **WHY)
    for ask in (keyring.sealer("vinet", RUN), keyring.lookup_key("vinet"), keyring.rotate("vinet", **WHY)):
        with pytest.raises(KeyLost):
            await ask
    assert await keyring.create("vinet") == (await keyring.current("vinet")).key_id
    assert (await keyring.lookup_key("vinet")).run_id("fulfil-order", "order-10248") != before


async def test_another_process_finds_the_new_key_of_a_tenant_that_began_anew(
    store: MongoStore, keyring: Keyring, clock: Clock
) -> None:
    elsewhere = bound(store, CountingWrapper(), clock)
    await elsewhere.current("vinet")
    await keyring.destroy("vinet", confirm="vinet", **WHY)
    new_id = await keyring.create("vinet")
    clock.move(AGE.total_seconds() / 2)
    assert (await elsewhere.current("vinet")).key_id == new_id


async def test_a_key_found_destroyed_is_no_longer_taken_for_the_newest(
    store: MongoStore, keyring: Keyring, clock: Clock
) -> None:
    elsewhere = bound(store, CountingWrapper(), clock)
    await elsewhere.get("vinet", (await keyring.current("vinet")).key_id)
    clock.move(AGE.total_seconds() * 0.4)
    await elsewhere.current("vinet")  # learns only now that this is the newest one
    await keyring.destroy("vinet", confirm="vinet", **WHY)
    new_id = await keyring.create("vinet")
    clock.move(AGE.total_seconds() * 0.1)
    with pytest.raises(KeyLost, match="it was destroyed"):
        await elsewhere.current("vinet")
    assert (await elsewhere.current("vinet")).key_id == new_id


@pytest.mark.parametrize("confirm", ["", "hanar", "VINET", None])
async def test_destroying_without_naming_the_tenant_is_refused(keyring: Keyring, confirm: str | None) -> None:
    key_id = (await keyring.current("vinet")).key_id
    with pytest.raises(InvalidInput, match="must repeat the tenant"):
        await keyring.destroy("vinet", confirm=confirm, **WHY)
    assert (await keyring.current("vinet")).key_id == key_id


async def test_a_lost_lookup_key_is_not_replaced_by_another_one(
    store: MongoStore, keyring: Keyring, clock: Clock, database: Any
) -> None:
    lookup = await keyring.lookup_key("vinet")
    await database["sagas.keys"].delete_one({"_id": lookup.key_id})
    elsewhere = bound(store, CountingWrapper(), clock)
    for ask in (elsewhere.lookup_key, elsewhere.create):
        with pytest.raises(KeyLost, match="its lookup key is missing"):
            await ask("vinet")


# --- how it is made ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [{"by": ""}, {"by": None}, {"reason": " "}, {"reason": "r" * 4001}, {"by": "\ud800"}])
async def test_a_rotation_or_destruction_that_nobody_answers_for_is_refused(
    keyring: Keyring, words: dict[str, Any]
) -> None:
    key_id = (await keyring.current("vinet")).key_id
    with pytest.raises(InvalidInput) as refused:
        await keyring.rotate("vinet", **{**WHY, **words})
    assert refused.value.field in words
    with pytest.raises(InvalidInput):
        await keyring.destroy("vinet", confirm="vinet", **{**WHY, **words})
    assert (await keyring.current("vinet")).key_id == key_id


async def test_a_keyring_serves_one_store(store: MongoStore, keyring: Keyring, database: Any) -> None:
    keyring.bind(store.keys)
    with pytest.raises(InvalidInput, match="give each store a keyring of its own"):
        keyring.bind(MongoStore(database).keys)
    with pytest.raises(RuntimeError, match="not bound to a store yet"):
        await Keyring(CountingWrapper()).keys("vinet")


@pytest.mark.parametrize("wrong", [{"max_age": timedelta(0)}, {"call_timeout": timedelta(0)}, {"pause": -AGE}])
def test_times_that_make_no_sense_are_refused(wrong: dict[str, timedelta]) -> None:
    with pytest.raises(InvalidInput):
        Keyring(CountingWrapper(), **wrong)  # type: ignore[arg-type]


async def test_without_a_keyring_nothing_is_sealed_and_what_is_sealed_is_refused(keyring: Keyring) -> None:
    none = NoKeys()
    sealer = await none.sealer("vinet", RUN, [PAYLOAD], claim_round=ClaimRound())
    assert sealer.seal(Slot.INPUT, 0, PAYLOAD) == PAYLOAD
    assert (await none.opener("vinet", RUN, [PAYLOAD])).open(Slot.INPUT, 0, PAYLOAD) == PAYLOAD
    assert await none.lookup_key("vinet") is None
    stored = (await keyring.sealer("vinet", RUN)).seal(Slot.INPUT, 0, PAYLOAD)
    with pytest.raises(NoKeyring):
        (await none.opener("vinet", RUN, [stored])).open(Slot.INPUT, 0, stored)


@pytest.fixture(autouse=True)
async def _nothing_is_left_running() -> AsyncIterator[None]:
    yield
    left = [task for task in asyncio.all_tasks() if "Keyring" in repr(task.get_coro())]
    assert left == []
