"""Pressing Stop, and asking first what it would do.

The answer is final when it is given: it was decided in the write that recorded the stop, against the gate that the
run's holder has to pass before the pivot. What is said here about what happens next follows from the run alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final

from sagas.decide import Progress
from sagas.definition import Fate, StepKind, is_plain, kinds_of
from sagas.errors import JournalMisfit
from sagas_store.entries import Cause, Entry
from sagas_store.records import RunRecord
from sagas_store.states import HELD, SETTLED, Decision, Phase, State

__all__ = [
    "NOTHING_TO_UNDO",
    "StopAnswer",
    "StopMany",
    "StopOutcome",
    "StopPreview",
    "Undo",
    "answer",
    "preview",
]


NOTHING_TO_UNDO: Final = "no step of it has a compensation, so what it has done stays"


class StopOutcome(StrEnum):
    """What a stop comes to."""

    CANCELLED = "cancelled"
    """Nothing had run yet: the run is settled as cancelled."""
    WILL_BE_UNDONE = "will_be_undone"
    """It came before the gate, or the run was rolling back already: everything is undone. Of a plain durable function
    nothing can be: no further step begins, and what was done stays."""
    REFUSED = "refused"
    """The pivot is under way or passed: the run completes forward."""
    ALREADY_SETTLED = "already_settled"
    """The run had ended before the stop was asked; nothing was recorded."""


@dataclass(frozen=True, slots=True)
class StopAnswer:
    """The answer to a stop. Asked again, the same one comes back, with where the run stands by then."""

    run_id: str
    outcome: StopOutcome
    asked_at: datetime | None
    """When the stop that counts was asked, by the server's clock; None where the run was settled before any."""
    by: str | None
    reason: str | None
    """None also where it could not be sealed when the stop was asked, or cannot be opened here. The stop counts."""
    why: str
    """Why it was decided so."""
    next: str
    """What happens now, or has happened."""
    first: bool
    """Whether it was this very call that recorded the stop, as far as is known."""
    state: State
    """Where the run stands."""


@dataclass(frozen=True, slots=True)
class Undo:
    """One compensation that a stop would lead to."""

    step: str
    fate: Fate
    """`known`: the step succeeded. `in_doubt`: it may have happened, or is under way."""


@dataclass(frozen=True, slots=True)
class StopPreview:
    """What a stop would do now. Nothing is promised: the run may move on before it is pressed."""

    run_id: str
    outcome: StopOutcome
    why: str
    undo: tuple[Undo, ...]
    """The compensations, in the order in which they would run."""
    in_hand: str | None
    """The step that may be under way; it would get its grace first."""
    state: State


@dataclass(slots=True)
class StopMany:
    """What a bulk stop did, or with a dry run would do."""

    dry_run: bool
    answers: dict[StopOutcome, list[str]] = field(default_factory=dict)
    """Run ids by what the stop came to (dry run: would come to)."""
    failed: dict[str, str] = field(default_factory=dict)
    """Run id -> why there is no answer. Asking again is safe and tells."""

    @property
    def count(self) -> int:
        """How many runs it was about."""
        return sum(len(ids) for ids in self.answers.values()) + len(self.failed)


def answer(run: RunRecord, *, first: bool, reason: str | None) -> StopAnswer:
    """The answer to a stop on `run`, as it stands after it was asked; `reason` is that of the stop that counts."""
    stop = run.stop
    if stop is None:
        why = f"the run is {run.state} since {_time(run.settled_at)}"
        return StopAnswer(
            run.run_id, StopOutcome.ALREADY_SETTLED, None, None, None, why, "nothing: it has ended", first, run.state
        )
    return StopAnswer(
        run_id=run.run_id,
        outcome=StopOutcome(stop.decision),
        asked_at=stop.asked_at,
        by=stop.by,
        reason=reason,
        why=_why(run, stop.decision),
        next=_next(run, stop.decision),
        first=first,
        state=run.state,
    )


def _why(run: RunRecord, decision: Decision) -> str:
    match decision:
        case Decision.CANCELLED:
            return "nothing had run yet"
        case Decision.REFUSED:
            return (
                f"the pivot's gate was passed at {_time(run.gate_passed_at)}; from there on the run completes forward"
            )
        case Decision.WILL_BE_UNDONE if run.gate_passed_at is not None:
            return "the pivot had failed, and the run was rolling back already"
        case Decision.WILL_BE_UNDONE if is_plain(run.fingerprint):
            return "it came before the run's end"
        case Decision.WILL_BE_UNDONE:
            return "it came before the pivot's gate"


def _next(run: RunRecord, decision: Decision) -> str:
    if run.state in SETTLED:
        if decision is Decision.REFUSED and run.state is not State.COMPLETED:
            return f"the pivot itself failed afterwards, and everything was undone: the run is {run.state}"
        return f"the run is {run.state} since {_time(run.settled_at)}"
    if decision is Decision.REFUSED:
        forward = "the run goes forward to its end; only if the pivot itself fails is everything undone"
        return f"{forward}. It is held ({run.state}) and waits for an operator" if run.state in HELD else forward
    plain = is_plain(run.fingerprint)
    ends = f"it ends ({NOTHING_TO_UNDO})" if plain else "it is undone"
    match run.state:
        case State.COMPENSATION_FAILED:
            return "the rollback has begun already and is unfinished; it is held and waits for an operator's resume"
        case State.QUARANTINED | State.BROKEN:
            return f"{ends} as soon as it can be executed again; it is held ({run.state}) until an operator acts"
        case State.PENDING if run.blocked is not None:
            return f"{ends} as soon as its payload opens again, which it does not now: {run.blocked.failure}"
        case _ if plain:
            return f"no further step begins, and the step in hand gets its grace; {NOTHING_TO_UNDO}"
        case _ if run.phase is Phase.ROLLING_BACK:
            return "the rollback has begun; the remaining compensations run"
        case _:
            return "no further step begins; the step in hand gets its grace, then everything is undone, newest first"


def preview(run: RunRecord, journal: list[Entry]) -> StopPreview:
    """What a stop would do, from the run and its journal. The fingerprint tells which steps have a compensation."""
    kinds = kinds_of(run.fingerprint)
    try:
        progress = Progress.named(tuple(kinds))
        for entry in journal:
            progress = progress.after(entry)
    except JournalMisfit:
        progress = None
    outcome, why = _would(run, progress)
    if outcome is not StopOutcome.WILL_BE_UNDONE or progress is None:
        return StopPreview(run.run_id, outcome, why, (), None, run.state)
    begun = progress.begun or ""
    in_hand = begun.removeprefix("step:") if begun.startswith("step:") and run.state is State.RUNNING else None
    undo = (
        []
        if run.state in SETTLED
        else [
            Undo(name, Fate.KNOWN if did.succeeded else Fate.IN_DOUBT)
            for name, did in reversed(list(zip(kinds, progress.steps, strict=True)))
            if kinds[name] == StepKind.COMPENSATED.value
            and not did.undone
            and (did.succeeded or did.in_doubt or name == in_hand)
        ]
    )
    return StopPreview(run.run_id, outcome, why, tuple(undo), in_hand, run.state)


def _would(run: RunRecord, progress: Progress | None) -> tuple[StopOutcome, str]:
    if run.stop is not None:  # whoever asks again is told the same
        return StopOutcome(run.stop.decision), f"a stop was asked before, and {_why(run, run.stop.decision)}"
    if run.state in SETTLED:
        return StopOutcome.ALREADY_SETTLED, f"the run is {run.state} since {_time(run.settled_at)}"
    # A stop goes by what the run's document shows. Past the gate a rollback that only the journal knows of, because
    # its worker died before it showed it, does not count yet.
    shown = run.gate_passed_at is None or run.phase is Phase.ROLLING_BACK
    if shown and progress is not None and progress.rollback is not None:
        cause = {
            Cause.STEP_FAILED: f"step {progress.turned_at} failed",
            Cause.STOP: "a stop was asked",
            Cause.DEADLINE: "its deadline passed",
        }[progress.rollback]
        return StopOutcome.WILL_BE_UNDONE, f"the run is rolling back already, since {cause}"
    if run.gate_passed_at is not None:
        return StopOutcome.REFUSED, _why(run, Decision.REFUSED)
    if run.state is State.PENDING and run.attempts == 0:
        return StopOutcome.CANCELLED, "nothing has run yet"
    if is_plain(run.fingerprint):
        return StopOutcome.WILL_BE_UNDONE, f"it has not ended; {NOTHING_TO_UNDO}"
    return StopOutcome.WILL_BE_UNDONE, "the pivot's gate is not passed"


def _time(at: datetime | None) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC" if at is not None else "an unknown time"
