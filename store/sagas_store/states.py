"""The states of a run, as data.

`TRANSITIONS` is the whole life of a run on one screen. Everything else here is derived from it, every write
of a state is checked against it, and the picture in the docs is generated from it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from sagas_store.errors import IllegalTransition

__all__ = ["HELD", "OPEN", "SETTLED", "TRANSITIONS", "Decision", "Phase", "State", "check_move", "origins_of"]


class State(StrEnum):
    """Where a run stands. Stored as written here."""

    PENDING = "pending"
    """Claimable from `due_at` on: fresh, delayed, waiting for a retry, handed back, requeued. A worker moves it on."""

    RUNNING = "running"
    """Leased until `due_at`. Its worker moves it on; once the lease has lapsed, any worker."""

    QUARANTINED = "quarantined"
    """Held: its payload cannot be opened, the tenant's key is lost. An operator moves it on, once the key is back."""

    IN_DOUBT = "in_doubt"
    """Held: the pivot's outcome is unknown and cannot be found out. An operator's verdict moves it on."""

    FORWARD_INCOMPLETE = "forward_incomplete"
    """Held: past the pivot, and a step's retries are spent. An operator's resume moves it on."""

    COMPENSATION_FAILED = "compensation_failed"
    """Held: a rollback is unfinished. An operator's resume moves it on."""

    BROKEN = "broken"
    """Held: cannot be executed as it stands (the journal does not fit, crash loop). An operator moves it on."""

    COMPLETED = "completed"
    """Settled: every step done."""

    COMPENSATED = "compensated"
    """Settled: a step failed before the pivot, and every effect is undone."""

    CANCELLED = "cancelled"
    """Settled: a stop was honoured before the pivot, and every effect is undone; or nothing could be undone, because no
    step has a compensation, and what was done stays. So for `timed_out`."""

    TIMED_OUT = "timed_out"
    """Settled: the deadline passed before the pivot, and every effect is undone."""

    FAILED = "failed"
    """Settled: a plain durable function (no step of it has a compensation) raised for good."""


class Phase(StrEnum):
    """How far an open or held run has come. The journal is the authority; this is what a list shows."""

    FORWARD = "forward"
    PAST_GATE = "past_gate"
    ROLLING_BACK = "rolling_back"
    UNKNOWN = "unknown"
    """Never stored: a phase that this version does not know, by a newer one."""


class Decision(StrEnum):
    """What became of a stop, decided once, in the write that recorded it."""

    CANCELLED = "cancelled"
    """Nothing had run yet; the run is settled as cancelled."""

    WILL_BE_UNDONE = "will_be_undone"
    """Recorded before the gate: no further step begins, and everything is undone."""

    REFUSED = "refused"
    """The gate had been passed: the run completes forward. Only if the pivot itself fails is everything undone."""


_HELD = (State.QUARANTINED, State.IN_DOUBT, State.FORWARD_INCOMPLETE, State.COMPENSATION_FAILED, State.BROKEN)
_SETTLED = (State.COMPLETED, State.COMPENSATED, State.CANCELLED, State.TIMED_OUT, State.FAILED)

TRANSITIONS: Final[dict[State, frozenset[State]]] = {
    State.PENDING: frozenset({State.RUNNING, State.CANCELLED}),  # a worker's claim; a stop before anything ran
    State.RUNNING: frozenset({State.RUNNING, State.PENDING, *_HELD, *_SETTLED}),  # taken over; parked, held or settled
    State.QUARANTINED: frozenset({State.PENDING}),  # an operator, once the key is back
    State.IN_DOUBT: frozenset({State.PENDING}),  # an operator's verdict
    State.FORWARD_INCOMPLETE: frozenset({State.PENDING}),  # an operator's resume
    State.COMPENSATION_FAILED: frozenset({State.PENDING}),  # an operator's resume
    State.BROKEN: frozenset({State.PENDING}),  # an operator, after a fix
    State.COMPLETED: frozenset(),
    State.COMPENSATED: frozenset(),
    State.CANCELLED: frozenset(),
    State.TIMED_OUT: frozenset(),
    State.FAILED: frozenset({State.PENDING}),  # an operator may requeue: nothing was undone
}

OPEN: Final = frozenset(state for state, targets in TRANSITIONS.items() if State.RUNNING in targets)
SETTLED: Final = frozenset(_SETTLED)
HELD: Final = frozenset(TRANSITIONS) - OPEN - SETTLED


def check_move(origin: State, target: State) -> None:
    """Raise IllegalTransition unless a run may go from `origin` to `target`."""
    if target not in TRANSITIONS[origin]:
        raise IllegalTransition(origin, target)


def origins_of(target: State) -> frozenset[State]:
    """The states from which a run may come to `target`; used as a clause of every guarded write."""
    return frozenset(origin for origin, targets in TRANSITIONS.items() if target in targets)
