"""The answers to stops, against what became of the runs.

An answer is final when it is given. So whatever died since, the run's own record has to say the same, the journal has
to show that it was acted on, and at the participants nothing may stand that the answer denies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from sagas import HELD, OPEN, SETTLED, JournalLine, Kind, RunInfo, State, StopAnswer, StopOutcome

__all__ = ["untrue"]

PIVOT: Final = "charge_card"

_UNDONE_LATER: Final = frozenset({State.COMPENSATION_FAILED, State.BROKEN, State.QUARANTINED})
"""Held before everything is undone: it still will be, once an operator has acted."""


def untrue(
    answer: StopAnswer | None,
    run: RunInfo,
    journal: Sequence[JournalLine],
    *,
    effects: Collection[str],
    requests: int,
) -> Iterator[str]:
    """What contradicts the answer to the stop of this run; `answer` is None where nobody pressed Stop.

    `effects` are those of its order that stand at the participants, `requests` is how many they have ever had for it.
    """
    if answer is None or answer.outcome is StopOutcome.ALREADY_SETTLED:
        yield from _not_stopped(answer, run, journal)
        return
    answered = (str(answer.outcome), answer.by, answer.asked_at)
    if (recorded := (str(run.stop), run.stop_by, run.stop_at)) != answered:
        yield f"the record of its stop is {recorded}, the answer was {answered}"
    match answer.outcome:
        case StopOutcome.CANCELLED:
            if run.state is not State.CANCELLED:
                yield "nothing had run yet, by the answer, and it is not cancelled"
            if journal or requests or effects:
                yield f"nothing had run yet, by the answer; there are {len(journal)} entries and {requests} requests"
        case StopOutcome.WILL_BE_UNDONE:
            yield from _undone(answer, run, journal, effects)
        case StopOutcome.REFUSED:
            yield from _refused(answer, run, journal)


def _not_stopped(answer: StopAnswer | None, run: RunInfo, journal: Sequence[JournalLine]) -> Iterator[str]:
    """Nobody pressed Stop, or it was too late even to refuse."""
    if run.stop is not None or _honoured(journal) or _noted(journal):
        yield "a stop is on record, and nobody was told so"
    if run.state is State.CANCELLED:
        yield "it is cancelled, and no stop was answered with that"
    if answer is not None and (answer.state not in SETTLED or answer.state is not run.state):
        yield f"it had ended as {answer.state}, by the answer"


def _undone(
    answer: StopAnswer, run: RunInfo, journal: Sequence[JournalLine], effects: Collection[str]
) -> Iterator[str]:
    """It will be undone: by the stop (cancelled), or by the failure of a step that had come first (compensated)."""
    if run.state in OPEN | _UNDONE_LATER:
        return
    if run.state not in {State.CANCELLED, State.COMPENSATED}:
        yield "everything would be undone, by the answer"
    if run.state is State.CANCELLED and _honoured(journal) != [(answer.by, answer.reason)]:
        yield "it is cancelled, and its journal does not say for whose stop"
    if run.state is State.COMPENSATED and _failed_step(journal) is None:
        yield "it is compensated, and no step had failed before the stop"
    if any(line.step == PIVOT and (line.kind is Kind.STEP_SUCCEEDED or line.happened) for line in journal):
        yield "everything would be undone, by the answer, and the pivot went through"
    if effects:
        yield f"everything would be undone, by the answer, and there is still its {', '.join(sorted(effects))}"


def _refused(answer: StopAnswer, run: RunInfo, journal: Sequence[JournalLine]) -> Iterator[str]:
    """It is refused: the run goes forward; it is undone only if the pivot itself fails, and never cancelled."""
    if run.gate_passed_at is None:
        yield "the stop was refused, and the gate was never passed"
    if run.state not in OPEN | HELD | {State.COMPLETED, State.COMPENSATED}:
        yield "the stop was refused"
    if run.state is State.COMPENSATED and _failed_step(journal) != PIVOT:
        yield "the stop was refused, and it was undone although the pivot did not fail"
    if _honoured(journal):
        yield "the stop was refused, and its journal says that it was honoured"
    if run.state in SETTLED and _noted(journal) != [(answer.by, answer.reason)]:
        yield "the stop was refused, and its journal does not say so"


Words = tuple[str | None, str | None]
"""Who pressed Stop, and why."""


def _honoured(journal: Sequence[JournalLine]) -> list[Words]:
    return [(line.by, line.reason) for line in journal if line.kind is Kind.ROLLBACK_BEGUN and line.by is not None]


def _noted(journal: Sequence[JournalLine]) -> list[Words]:
    return [(line.by, line.reason) for line in journal if line.kind is Kind.STOP_REFUSED]


def _failed_step(journal: Sequence[JournalLine]) -> str | None:
    """The step whose failure made the run turn back."""
    return next((line.step for line in journal if line.kind is Kind.ROLLBACK_BEGUN), None)
