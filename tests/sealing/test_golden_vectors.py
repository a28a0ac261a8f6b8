"""What was ever sealed opens for ever, and what must not open does not: the vectors of tests/golden/sealed-v2.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sagas import errors
from sagas.sealing import SEALED_OVERHEAD_BYTES, DataKey, LookupKey, RunOpener, RunSealer, Slot, keys_needed
from tests.sealing.vectors import GOLDEN, rendered

VECTORS: dict[str, Any] = json.loads(GOLDEN.read_text())


def keys_at_hand(tenant: str | None) -> Iterator[DataKey]:
    """All data keys of the vectors, as if they were this tenant's: nothing but what is authenticated keeps it out."""
    for key_id, secret in VECTORS["data_keys"].items():
        yield DataKey(tenant, key_id, bytes.fromhex(secret))


def opened(vector: dict[str, Any]) -> bytes:
    opener = RunOpener(vector["tenant"], vector["run_id"], keys_at_hand(vector["tenant"]))
    return opener.open(Slot(vector["slot"]), vector["seq"], bytes.fromhex(vector["stored"]))


def each(group: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", [pytest.param(one, id=name) for name, one in VECTORS[group].items()])


def test_the_committed_vectors_are_what_the_written_format_says() -> None:
    assert rendered() == GOLDEN.read_text()


def test_every_slot_has_a_vector() -> None:
    assert {vector["slot"] for vector in VECTORS["valid"].values()} == set(Slot)


@each("valid")
def test_a_valid_vector_opens(vector: dict[str, Any]) -> None:
    assert opened(vector) == bytes.fromhex(vector["payload"])


@each("valid")
def test_sealing_with_the_vectors_nonce_gives_the_vectors_bytes(vector: dict[str, Any]) -> None:
    keys = {key.key_id: key for key in keys_at_hand(vector["tenant"])}
    nonces = iter([bytes.fromhex(vector["nonce"])])
    sealer = RunSealer(vector["tenant"], vector["run_id"], keys[vector["key_id"]], random_bytes=lambda _: next(nonces))
    stored = sealer.seal(Slot(vector["slot"]), vector["seq"], bytes.fromhex(vector["payload"]))
    assert stored.hex() == vector["stored"]
    assert keys_needed([stored]) == {vector["key_id"]}
    assert len(stored) - len(bytes.fromhex(vector["payload"])) == SEALED_OVERHEAD_BYTES


@each("invalid")
def test_an_invalid_vector_is_refused_by_name(vector: dict[str, Any]) -> None:
    with pytest.raises(errors.SagaError) as refused:
        opened(vector)
    assert type(refused.value) is getattr(errors, vector["error"])


@pytest.mark.parametrize("lookup", VECTORS["lookups"])
def test_an_idempotency_key_gives_the_run_id_it_always_gave(lookup: dict[str, Any]) -> None:
    key = LookupKey(lookup["tenant"], "00" * 8, bytes.fromhex(VECTORS["lookup_key"]))
    assert key.run_id(lookup["saga"], lookup["key"]) == lookup["run_id"]


def test_no_two_of_the_lookups_give_the_same_run() -> None:
    ids = [lookup["run_id"] for lookup in VECTORS["lookups"]]
    assert len(set(ids)) == len(ids)
