"""The states of a run: every pair of them, the three groups, and the words as they are stored."""

import itertools

import pytest

from sagas_store.entries import Cause, Kind
from sagas_store.errors import IllegalTransition, StoreError
from sagas_store.states import HELD, OPEN, SETTLED, TRANSITIONS, Phase, State, check_move, origins_of

MOVES = {
    ("pending", "running"),  # a claim
    ("pending", "cancelled"),  # a stop before anything ran
    ("running", "running"),  # taken over
    ("running", "pending"),  # parked or handed back
    ("running", "quarantined"),
    ("running", "in_doubt"),
    ("running", "forward_incomplete"),
    ("running", "compensation_failed"),
    ("running", "broken"),
    ("running", "completed"),
    ("running", "compensated"),
    ("running", "cancelled"),
    ("running", "timed_out"),
    ("running", "failed"),
    ("quarantined", "pending"),  # an operator, these and the following
    ("in_doubt", "pending"),
    ("forward_incomplete", "pending"),
    ("compensation_failed", "pending"),
    ("broken", "pending"),
    ("failed", "pending"),
}


@pytest.mark.parametrize(("origin", "target"), list(itertools.product(State, State)))
def test_a_run_goes_from_one_state_to_another_only_as_the_table_says(origin: State, target: State) -> None:
    if (origin, target) in MOVES:
        check_move(origin, target)
        assert origin in origins_of(target)
    else:
        with pytest.raises(IllegalTransition, match=f"no run goes from {origin} to {target}") as refused:
            check_move(origin, target)
        assert (refused.value.origin, refused.value.target) == (origin, target)
        assert origin not in origins_of(target)


def test_an_illegal_move_is_an_error_of_the_store() -> None:
    assert issubclass(IllegalTransition, StoreError)


def test_every_state_is_open_held_or_settled_and_only_one_of_them() -> None:
    assert set(State) == OPEN | HELD | SETTLED
    assert len(State) == len(OPEN) + len(HELD) + len(SETTLED)


def test_the_groups_are_those_of_the_design() -> None:
    assert {"pending", "running"} == OPEN
    assert {"quarantined", "in_doubt", "forward_incomplete", "compensation_failed", "broken"} == HELD
    assert {"completed", "compensated", "cancelled", "timed_out", "failed"} == SETTLED


def test_every_state_has_its_line_in_the_table() -> None:
    assert set(TRANSITIONS) == set(State)


def test_a_worker_claims_open_runs_and_no_others() -> None:
    assert origins_of(State.RUNNING) == OPEN


@pytest.mark.parametrize("state", sorted(HELD))
def test_a_held_run_is_moved_on_by_an_operator_into_a_workers_hands(state: State) -> None:
    assert TRANSITIONS[state] == {State.PENDING}
    assert origins_of(state) == {State.RUNNING}


@pytest.mark.parametrize("state", sorted(SETTLED - {State.FAILED}))
def test_nothing_leads_out_of_a_settled_state(state: State) -> None:
    assert TRANSITIONS[state] == set()


def test_only_a_plain_function_that_failed_may_be_requeued() -> None:
    assert TRANSITIONS[State.FAILED] == {State.PENDING}


def test_only_its_holder_settles_a_run_except_for_a_stop_before_anything_ran() -> None:
    assert {origin for state in SETTLED for origin in origins_of(state)} == {State.RUNNING, State.PENDING}
    assert origins_of(State.CANCELLED) == {State.RUNNING, State.PENDING}


def test_every_state_is_reached_from_a_fresh_run() -> None:
    reached = {State.PENDING}
    while more := {target for state in reached for target in TRANSITIONS[state]} - reached:
        reached |= more
    assert reached == set(State)


def test_from_every_state_a_run_can_come_to_an_end() -> None:
    ending = set(SETTLED)
    while more := {state for state, targets in TRANSITIONS.items() if targets & ending} - ending:
        ending |= more
    assert ending == set(State)


def test_words_are_stored_as_they_always_were() -> None:
    """A renamed word would make stored runs and journals unreadable."""
    assert sorted(set(Phase) - {Phase.UNKNOWN}) == ["forward", "past_gate", "rolling_back"]
    assert sorted(Cause) == ["deadline", "step_failed", "stop"]
    assert {
        "compensation_failed",
        "compensation_retry_scheduled",
        "compensation_succeeded",
        "interrupted",
        "probe_failed",
        "probe_retry_scheduled",
        "probe_succeeded",
        "rollback_begun",
        "step_failed",
        "step_retry_scheduled",
        "step_succeeded",
        "taken_over",
    } <= set(Kind)
