"""Sealing one run's payloads: what goes in comes out, at the same place and nowhere else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagas.clock import random_bytes
from sagas.errors import KeyUnavailable, NoKeyring, SagaError, Tampered, Unreadable
from sagas.sealing import (
    SEALED_OVERHEAD_BYTES,
    DataKey,
    LookupKey,
    RunOpener,
    RunSealer,
    Slot,
    Unsealed,
    keys_needed,
)

RUN = "0123456789abcdef0123456789abcdef"
OLD = DataKey("vinet", "00" * 8, bytes(32))
NEW = DataKey("vinet", "11" * 8, bytes([1]) * 32)

payloads = st.binary(max_size=300)
slots = st.sampled_from(Slot)
numbers = st.integers(0, 2**63 - 1)
tenants = st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


def sealer(*, run_id: str = RUN, current: DataKey = NEW, older: tuple[DataKey, ...] = (OLD,)) -> RunSealer:
    return RunSealer("vinet", run_id, current, older)


# --- round trips ------------------------------------------------------------------------------------------------------


@given(payloads, slots, numbers, tenants, st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_what_was_sealed_opens_at_its_place(
    payload: bytes, slot: Slot, seq: int, tenant: str | None, run_id: str
) -> None:
    key = DataKey(tenant, "22" * 8, random_bytes(32))
    stored = RunSealer(tenant, run_id, key).seal(slot, seq, payload)
    assert RunOpener(tenant, run_id, [key]).open(slot, seq, stored) == payload


@given(payloads)
def test_sealing_costs_37_bytes_and_no_more_than_40(payload: bytes) -> None:
    assert SEALED_OVERHEAD_BYTES == 37
    assert len(sealer().seal(Slot.CONTEXT, 1, payload)) == len(payload) + SEALED_OVERHEAD_BYTES <= len(payload) + 40


def test_the_size_tells_nothing_but_the_payloads_size() -> None:
    assert len(sealer().seal(Slot.INPUT, 0, b"a" * 5000)) == len(sealer().seal(Slot.INPUT, 0, random_bytes(5000)))


def test_the_same_payload_never_looks_the_same_twice() -> None:
    one = sealer()
    stored = {one.seal(Slot.CONTEXT, 1, b"\x01{}") for _ in range(100)}
    assert len(stored) == 100
    assert len({each[9:21] for each in stored}) == 100


def test_two_runs_have_two_keys() -> None:
    nonce: Callable[[int], bytes] = bytes  # the same nonce in both: only the key differs
    first, second = (
        RunSealer("vinet", run_id, NEW, random_bytes=nonce).seal(Slot.INPUT, 0, bytes(100)) for run_id in ("a", "b")
    )
    assert first[:21] == second[:21]
    assert first[21:-16] != second[21:-16]


# --- what does not open -----------------------------------------------------------------------------------------------


@given(payloads, st.data())
def test_no_altered_bit_goes_unnoticed(payload: bytes, data: st.DataObject) -> None:
    stored = sealer().seal(Slot.CONTEXT, 3, payload)
    position = data.draw(st.integers(0, len(stored) * 8 - 1))
    altered = bytearray(stored)
    altered[position // 8] ^= 1 << position % 8
    with pytest.raises((Tampered, Unreadable, KeyUnavailable)):
        sealer().open(Slot.CONTEXT, 3, bytes(altered))


def test_every_single_bit_is_looked_at() -> None:
    stored = sealer().seal(Slot.CONTEXT, 3, b"\x01{}")
    for position in range(len(stored) * 8):
        altered = bytearray(stored)
        altered[position // 8] ^= 1 << position % 8
        with pytest.raises((Tampered, Unreadable, KeyUnavailable)) as refused:
            sealer().open(Slot.CONTEXT, 3, bytes(altered))
        wanted = Unreadable if position < 8 else KeyUnavailable if position < 72 else Tampered
        assert type(refused.value) is wanted, position


@given(payloads, st.data())
def test_no_missing_byte_goes_unnoticed(payload: bytes, data: st.DataObject) -> None:
    stored = sealer().seal(Slot.CONTEXT, 3, payload)
    with pytest.raises((Tampered, Unreadable)):
        sealer().open(Slot.CONTEXT, 3, stored[: data.draw(st.integers(0, len(stored) - 1))])


@given(slots, numbers, slots, numbers)
def test_a_payload_opens_at_no_other_place(slot: Slot, seq: int, other_slot: Slot, other_seq: int) -> None:
    stored = sealer().seal(slot, seq, b"\x01{}")
    if (slot, seq) == (other_slot, other_seq):
        assert sealer().open(other_slot, other_seq, stored) == b"\x01{}"
    else:
        with pytest.raises(Tampered):
            sealer().open(other_slot, other_seq, stored)


def test_a_payload_of_another_run_does_not_open() -> None:
    stored = sealer(run_id="a").seal(Slot.INPUT, 0, b"\x01{}")
    with pytest.raises(Tampered, match="run b, input does not authenticate"):
        sealer(run_id="b").open(Slot.INPUT, 0, stored)


def test_a_key_of_another_tenant_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="is of tenant 'hanar'"):
        RunSealer("hanar", RUN, NEW)


@given(st.binary(max_size=80).filter(lambda stored: stored[:1] != b"\x02"))
def test_with_a_keyring_only_what_is_sealed_is_accepted(stored: bytes) -> None:
    with pytest.raises(Unreadable):
        sealer().open(Slot.INPUT, 0, stored)


def test_plaintext_is_refused_with_the_reason_and_without_itself() -> None:
    with pytest.raises(Unreadable, match=r"run .*, input: is not sealed") as refused:
        sealer().open(Slot.INPUT, 0, b'\x01{"card":"4111"}')
    assert "4111" not in str(refused.value)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_new_payloads_use_the_newest_key_and_old_ones_still_open() -> None:
    old = sealer(current=OLD, older=()).seal(Slot.INPUT, 0, b"\x01old")
    new = sealer().seal(Slot.CONTEXT, 1, b"\x01new")
    assert keys_needed([old, new, None, b"\x01plain", b"", b"\x02short"]) == {OLD.key_id, NEW.key_id}
    assert sealer().open(Slot.INPUT, 0, old) == b"\x01old"
    assert sealer().key_id == NEW.key_id
    assert sealer().open(Slot.CONTEXT, 1, new) == b"\x01new"


def test_a_key_that_was_not_fetched_is_asked_for_not_given_up() -> None:
    stored = sealer().seal(Slot.CONTEXT, 1, b"\x01{}")
    with pytest.raises(KeyUnavailable, match="entry 1 needs this key") as missing:
        RunOpener("vinet", RUN, [OLD]).open(Slot.CONTEXT, 1, stored)
    assert (missing.value.tenant, missing.value.key_id) == ("vinet", NEW.key_id)


@pytest.mark.parametrize("kind", [DataKey, LookupKey])
def test_a_key_shows_its_id_only(kind: type[DataKey | LookupKey]) -> None:
    key = kind("vinet", "0123456789abcdef", b"canary, 32 bytes of a secret key")
    assert repr(key) == f"{kind.__name__}(0123456789abcdef)"
    assert not hasattr(key, "__dict__")
    for leave in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="keys stay in their process"):
            leave(key)


@pytest.mark.parametrize(("key_id", "secret"), [("00" * 8, bytes(31)), ("00" * 7, bytes(32)), ("00" * 8, b"")])
def test_a_key_of_another_size_is_refused(key_id: str, secret: bytes) -> None:
    with pytest.raises(ValueError, match="a key is 32 bytes"):
        DataKey("vinet", key_id, secret)


origins = st.tuples(tenants, st.text(max_size=20), st.text(max_size=20))


@given(origins, origins)
def test_run_ids_meet_only_for_the_same_tenant_saga_and_key(
    one: tuple[str | None, str, str], other: tuple[str | None, str, str]
) -> None:
    ids = [LookupKey(tenant, "00" * 8, bytes(32)).run_id(saga, key) for tenant, saga, key in (one, other)]
    assert (ids[0] == ids[1]) is (one == other)


def test_a_run_id_is_not_to_be_had_without_the_lookup_key() -> None:
    ids = {LookupKey("vinet", "00" * 8, bytes([n]) * 32).run_id("fulfil-order", "order-10248") for n in range(2)}
    assert len(ids) == 2
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in ids)


# --- without a keyring ------------------------------------------------------------------------------------------------


@given(st.binary(max_size=80).filter(lambda payload: payload[:1] != b"\x02"), slots, numbers)
def test_without_a_keyring_payloads_are_stored_as_they_are(payload: bytes, slot: Slot, seq: int) -> None:
    twin = Unsealed("vinet", RUN)
    assert twin.seal(slot, seq, payload) == payload
    assert twin.open(slot, seq, payload) == payload


def test_without_a_keyring_what_is_sealed_is_refused_and_its_key_named() -> None:
    stored = sealer().seal(Slot.CONTEXT, 2, b"\x01{}")
    with pytest.raises(NoKeyring, match="context of entry 2 is sealed, and this process has no keyring") as refused:
        Unsealed("vinet", RUN).open(Slot.CONTEXT, 2, stored)
    assert refused.value.key_id == NEW.key_id
    with pytest.raises(SagaError):
        Unsealed("vinet", RUN).open(Slot.CONTEXT, 2, b"\x02")
