"""Journals as an executor writes them, told in sentences; for tests of `sagas.decide`.

    run = History(saga_of("reserve:c charge:p? ship:r"))
    run.succeeds("reserve").passes_gate().loses_worker()
    words(run.action(), run.now)                         -> "ask about charge (try 1)"

What the telling methods write is what `sagas.executor` would have written: each entry announces what begins next, a
failed try gets the verdict of `after_failure`, a takeover says in which state it found the run. A story that could not
happen (a step out of turn, a pivot before its gate) is refused, so that no test rests on one.
"""

from __future__ import annotations

import functools
import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self

from pydantic import BaseModel

from sagas.decide import (
    Action,
    Activity,
    BeginRollback,
    Facts,
    Hold,
    NoteRefusal,
    PassGate,
    Perform,
    Progress,
    Refuse,
    Settle,
    Wait,
    after_failure,
    intent,
    lost_in_doubt,
    next_action,
    once_announced,
)
from sagas.definition import Saga, Step
from sagas.policy import Failure, RetryPolicy
from sagas_store.entries import Cause, Entry, Kind
from sagas_store.states import State
from tests.support.changing import replace

__all__ = ["DEFINITE", "LOST", "NOT_NOW", "START", "WAIT", "Context", "History", "go_on", "saga_of", "told", "words"]

START: Final = datetime(2026, 1, 1, tzinfo=UTC)
WAIT: Final = timedelta(seconds=10)
"""The wait before each further try in a saga of `saga_of`."""

DEFINITE: Final = Failure(retryable=False, in_doubt=False, conclusive=True)
"""It did not happen, and trying again is pointless."""
NOT_NOW: Final = Failure(retryable=True, in_doubt=False)
"""This try was turned away; another may get through."""
LOST: Final = Failure(retryable=True, in_doubt=True)
"""No answer: it may have happened."""


class Context(BaseModel):
    """What is handed from step to step; `sagas.decide` never looks into it."""


async def go_on(context: Context, step: Step[Any]) -> Context:
    """A step that does nothing."""
    return context


async def _undo(context: Context, step: Step[Any]) -> None:
    return None


@functools.cache
def saga_of(steps: str, tries: int = 2, wait: timedelta = WAIT) -> Saga[Context]:
    """A saga by its fingerprint (`reserve:c label:n charge:p ship:r`); `?` adds a probe, `t` makes it transactional.

    Every function of it is tried `tries` times, `wait` apart.
    """
    saga = Saga("told", Context)
    retry = RetryPolicy(max_attempts=tries, initial_wait=wait, max_wait=wait, jitter=False)
    for declared in steps.split():
        name, _, flags = declared.partition(":")
        transactional = "t" in flags
        if "p" in flags:
            step = saga.pivot(name=name, retry=retry, transactional=transactional)(go_on)
        else:
            step = saga.step(name=name, retry=retry, transactional=transactional, no_compensation="n" in flags)(go_on)
        if "c" in flags:
            step.compensation(retry=retry)(_undo)
        if "?" in flags:
            step.probe(go_on)
    assert saga.fingerprint == re.sub(r":(.)\S*", r":\1", steps), saga.fingerprint
    return saga


_OPERATORS: Final = frozenset({Kind.RESUMED, Kind.VERDICT, Kind.RETRIED_NOW, Kind.REQUEUED})
"""No worker goes on after an operator's entry: the run is claimed anew."""


class History:
    """A run as far as it has come: its journal, what is known beside it, and the server's time."""

    def __init__(self, saga: Saga[Context], facts: Facts | None = None) -> None:
        self.saga = saga
        self.facts = facts or Facts()
        self.entries: list[Entry] = []
        self.progress = Progress.of(saga)
        self.now = START
        self.attempt = 1
        self._in_hand: Perform | None = None

    def action(self) -> Action:
        """What is to be done now."""
        return next_action(self.saga, self.progress, self.facts, self.now)

    # ---------------------------------------------------------------- what comes of a try

    def begins(self, step: str) -> Self:
        """The step is in hand; what is told before its outcome happens meanwhile."""
        self._in_hand = self._turn(Activity.STEP, step)
        return self

    def succeeds(self, step: str, *, size: int = 2) -> Self:
        """The step returns a context of so many bytes."""
        return self.write(Kind.STEP_SUCCEEDED, self._turn(Activity.STEP, step), payload=bytes(size))

    def raises(self, step: str, failure: Failure) -> Self:
        """The step raises."""
        return self._raises(Activity.STEP, step, failure)

    def is_broken_off(self, step: str) -> Self:
        """A drain breaks the step off and journals so; the run is handed back in a sentence of its own."""
        return self.write(Kind.INTERRUPTED, self._turn(Activity.STEP, step))

    def finds(self, step: str) -> Self:
        """The probe says that the effect happened."""
        return self.write(Kind.PROBE_SUCCEEDED, self._turn(Activity.PROBE, step), payload=bytes(2))

    def finds_nothing(self, step: str) -> Self:
        """The probe says that the effect did not happen."""
        return self.write(Kind.PROBE_SUCCEEDED, self._turn(Activity.PROBE, step))

    def cannot_ask(self, step: str, failure: Failure) -> Self:
        """The probe raises."""
        return self._raises(Activity.PROBE, step, failure)

    def undoes(self, step: str) -> Self:
        """The compensation returns."""
        return self.write(Kind.COMPENSATION_SUCCEEDED, self._turn(Activity.COMPENSATION, step))

    def cannot_undo(self, step: str, failure: Failure) -> Self:
        """The compensation raises."""
        return self._raises(Activity.COMPENSATION, step, failure)

    def _raises(self, activity: Activity, step: str, failure: Failure) -> Self:
        return self.write_failure(self._turn(activity, step), failure)

    # ---------------------------------------------------------------- what is done without application code

    def turns_back(self) -> Self:
        """The rollback is journaled as begun."""
        action = self._due()
        assert isinstance(action, BeginRollback), f"no rollback begins here, but: {words(action, self.now)}"
        return self.write(Kind.ROLLBACK_BEGUN, cause=action.cause, step=action.step)

    def refuses(self, step: str) -> Self:
        """The step is journaled as failed before it ran."""
        action = self._due()
        assert isinstance(action, Refuse), f"nothing is refused here, but: {words(action, self.now)}"
        assert action.step.name == step
        return self.write(Kind.STEP_FAILED, step=step)

    def passes_gate(self) -> Self:
        """It stands on the run that the pivot begins."""
        action = self._due()
        assert isinstance(action, PassGate), f"no gate is passed here, but: {words(action, self.now)}"
        self.facts = replace(self.facts, gate_passed=True)
        return self

    # ---------------------------------------------------------------- attempts

    def loses_worker(self, times: int = 1) -> Self:
        """The worker is gone, the lease lapses, and the next attempt takes over."""
        for _ in range(times):
            self.take_over(State.RUNNING)
        return self

    def is_handed_back(self) -> Self:
        """The worker parks the run or drains, and the next attempt takes over."""
        return self.take_over(State.PENDING)

    def has_an_attempt_without_a_trace(self) -> Self:
        """An attempt ends before its first entry."""
        self.attempt += 1
        return self

    def take_over(self, taken_from: State) -> Self:
        """A later attempt announces itself."""
        self.attempt += 1
        self._in_hand = None
        in_doubt = lost_in_doubt(self.saga, self.progress, self.facts, attempt=self.attempt, taken_from=taken_from)
        return self.write(Kind.TAKEN_OVER, taken_from=taken_from, in_doubt=in_doubt)

    # ---------------------------------------------------------------- facts

    def is_stopped(self) -> Self:
        """The worker learns of a stop."""
        self.facts = replace(self.facts, stop_asked=True)
        return self

    def has_a_deadline(self, seconds: float) -> Self:
        """Its deadline is so many seconds from now."""
        self.facts = replace(self.facts, deadline=self.now + timedelta(seconds=seconds))
        return self

    def later(self, seconds: float) -> Self:
        """Time passes."""
        self.now += timedelta(seconds=seconds)
        return self

    # ---------------------------------------------------------------- writing

    def write(self, kind: Kind, action: Perform | None = None, **more: Any) -> Self:
        """Append an entry that announces what begins next; nothing is announced when a step was broken off."""
        if action is not None:
            more |= {"step": action.step.name, "try_number": action.try_number}
        entry = Entry(
            run_id="r",
            seq=self.progress.seq + 1,
            kind=kind,
            at=self.now,
            attempt=self.attempt,
            worker=f"w{self.attempt}",
            token=f"t{self.attempt}",
            **more,
        )
        planned = None
        if kind is not Kind.INTERRUPTED:
            then = next_action(self.saga, self.progress.after(entry), self.facts, entry.at)
            entry = replace(entry, next=intent(then))
            planned = once_announced(then, self.facts) if kind not in _OPERATORS else None
        self.entries.append(entry)
        self.progress = self.progress.after(entry)
        for now in (self.now, self.now + timedelta(days=10_000)):
            decided = next_action(self.saga, self.progress, self.facts, now)
            assert planned is None or planned == decided, (
                "what an entry announces is what is done next, whenever that is"
            )
        return self

    def write_failure(self, action: Perform, failure: Failure) -> Self:
        """Append what a failed try means."""
        verdict = after_failure(self.progress, action, failure, self.now, action.part.retry.wait)
        return self.write(verdict.kind, action, payload=b"?", due_at=verdict.due_at, in_doubt=verdict.in_doubt)

    def _turn(self, activity: Activity, step: str) -> Perform:
        """The action in hand or due, which has to be this one; a wait for it is waited for."""
        action, self._in_hand = self._in_hand or self._due(), None
        assert isinstance(action, Perform), f"nothing is performed here, but: {words(action, self.now)}"
        assert (action.activity, action.step.name) == (activity, step), f"it is due to {words(action, self.now)}"
        return action

    def _due(self) -> Action:
        action = self.action()
        if isinstance(action, Wait):
            self.now = action.until
            action = self.action()
        return action


def told(saga: Saga[Context], entries: list[Entry]) -> Progress:
    """What a journal says when it is read from its beginning."""
    progress = Progress.of(saga)
    for entry in entries:
        progress = progress.after(entry)
    return progress


_VERBS: Final = {Activity.STEP: "run", Activity.PROBE: "ask about", Activity.COMPENSATION: "undo"}


def words(action: Action, now: datetime) -> str:
    """An action as a table of rules says it."""
    match action:
        case Perform(activity, step, try_number, fate):
            known = f", {fate.replace('_', ' ')}" if activity is Activity.COMPENSATION else ""
            return f"{_VERBS[activity]} {step.name} (try {try_number}{known})"
        case Wait(until, then):
            return f"wait {(until - now).total_seconds():g} s, then {words(then, now)}"
        case PassGate(step):
            return f"pass the gate to {step.name}"
        case Refuse(step):
            return f"refuse {step.name}"
        case NoteRefusal():
            return "note that a stop was refused"
        case BeginRollback(Cause.STEP_FAILED, step_name):
            return f"turn back: {step_name} failed"
        case BeginRollback(cause, step_name):
            assert step_name is None
            return f"turn back: {cause}"
        case Hold(state):
            return f"hold as {state}"
        case Settle(state):
            return f"settle as {state}"
