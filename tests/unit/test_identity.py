"""Names that come out the same everywhere and for ever: a changed one would start a second run, or charge twice."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagas.identity import compensation_key, run_id_of, step_key

NAMES = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=64)
TEXTS = st.text(string.printable + "ÄÖüß№✓\N{GRINNING FACE}")


@pytest.mark.parametrize(
    ("saga", "key", "run_id"),
    [
        ("fulfil-order", "order-10248", "ffa6eb73b7f3911a84871fc95e5e3baa"),
        ("fulfil-order", "order-10249", "cecb57ac3b924f227959d7e87f092add"),
        ("a", "b:c", "f6ef836b3dd58acb2e6c16859337d15a"),
        ("a:b", "c", "cb600fd6a0198fd3e7d5672901f57926"),
        ("s", "Bestellung № 7, Größe Ü", "3ca175ff0e7a709188867f664e93a6c1"),
        ("s", "", "14059d78969858ae5d909803c140abd6"),
    ],
)
def test_a_run_id_never_changes(saga: str, key: str, run_id: str) -> None:
    assert run_id_of(saga, key) == run_id


def test_idempotency_keys_never_change() -> None:
    assert step_key("0f00", "charge_card") == "0f00/charge_card"
    assert compensation_key("0f00", "charge_card") == "0f00/charge_card/compensation"


@given(TEXTS, TEXTS)
def test_a_run_id_is_32_hex_digits(saga: str, key: str) -> None:
    run_id = run_id_of(saga, key)
    assert len(run_id) == 32
    assert set(run_id) <= set("0123456789abcdef")


@given(st.text("ab:1", max_size=12), st.data())
def test_no_two_ways_to_split_a_text_into_saga_and_key_are_the_same_run(text: str, data: st.DataObject) -> None:
    one, other = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))
    same = run_id_of(text[:one], text[one:]) == run_id_of(text[:other], text[other:])
    assert same is (one == other)


@given(st.tuples(TEXTS, TEXTS), st.tuples(TEXTS, TEXTS))
def test_different_sagas_or_keys_are_different_runs(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (run_id_of(*one) == run_id_of(*other)) is (one == other)


@given(NAMES, NAMES)
def test_a_step_and_a_compensation_never_share_a_key_not_even_of_other_steps(one: str, other: str) -> None:
    assert step_key("run", one) != compensation_key("run", other)
    assert (step_key("run", one) == step_key("run", other)) is (one == other)
    assert (compensation_key("run", one) == compensation_key("run", other)) is (one == other)


def test_runs_never_share_a_key() -> None:
    assert step_key("run-1", "charge") != step_key("run-2", "charge")
    assert compensation_key("run-1", "charge") != compensation_key("run-2", "charge")
