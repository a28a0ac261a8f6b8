"""All saga semantics, as pure functions: nothing here waits, reads a clock or touches a database.

    progress = Progress.of(saga)                  nothing has happened yet
    progress = progress.after(entry)              ... for each entry of the journal: what has happened
    action   = next_action(saga, progress, ...)   what to do now
    verdict  = after_failure(...)                 what a failed try means: another try, or failed for good

The journal decides. An action is performed by the executor, its outcome becomes an entry, and the next decision is made
from the journal with that entry: so a first execution and a replay cannot differ.

Terms. A step is *in doubt* when it may have started and has no known outcome: its try timed out, was broken off, or its
worker was lost. It is *spent* when it failed for good: definitely, or with its last try in doubt. *Rolling back* begins
with a journal entry; once that stands there is no branch below that leads forward again.

Longer than other modules: the rules refer to each other, and whoever checks them wants all of them before the eye.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final, NamedTuple

from sagas.definition import Fate, Part, Saga, StepDefinition, StepKind
from sagas.errors import JournalMisfit
from sagas.policy import Failure
from sagas_store.entries import Cause, Entry, Kind
from sagas_store.states import State

__all__ = [
    "Activity",
    "BeginRollback",
    "Facts",
    "Hold",
    "NoteRefusal",
    "PassGate",
    "Perform",
    "Progress",
    "Refuse",
    "Settle",
    "StepProgress",
    "Verdict",
    "Wait",
    "after_failure",
    "intent",
    "lost_in_doubt",
    "next_action",
    "once_announced",
]

STALLED_MAX: Final = 10
"""Attempts in a row that end by a lapsed lease without an outcome before the run is held as broken."""


class Activity(StrEnum):
    """The three kinds of application code that a run executes."""

    STEP = "step"
    PROBE = "probe"
    COMPENSATION = "compensation"


# ------------------------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True)
class Perform:
    """Execute application code; its outcome is the next entry."""

    activity: Activity
    step: StepDefinition[Any]
    try_number: int
    """From 1, once the entry that announces this start stands."""
    fate: Fate = Fate.KNOWN

    @property
    def part(self) -> Part:
        """The function to call."""
        if self.activity is Activity.STEP:
            return self.step.forward
        part = self.step.question if self.activity is Activity.PROBE else self.step.undo
        assert part is not None, (self.activity, self.step.name)
        return part


@dataclass(frozen=True, slots=True)
class PassGate:
    """Record on the run that the pivot begins; from then on no stop is accepted."""

    step: StepDefinition[Any]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Journal that a step failed before it ran, with the reason as its error."""

    step: StepDefinition[Any]
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing before `until` (the server's clock), then decide again."""

    until: datetime
    then: Perform


@dataclass(frozen=True, slots=True)
class BeginRollback:
    """Journal that the run turns back, and why."""

    cause: Cause
    step: str | None


@dataclass(frozen=True, slots=True)
class Hold:
    """Put the run aside for an operator."""

    state: State
    reason: str


@dataclass(frozen=True, slots=True)
class Settle:
    """The end; the journal proves it."""

    state: State


@dataclass(frozen=True, slots=True)
class NoteRefusal:
    """Journal that a stop came too late."""


Action = PassGate | Perform | Refuse | Wait | BeginRollback | NoteRefusal | Hold | Settle


def intent(action: Action) -> str:
    """What an entry says begins next, as `activity:step`. Read back after a crash to tell what may have started."""
    if isinstance(action, Perform):  # nearly all are
        return _named(action.activity, action.step.name)
    match action:
        case Wait(_, perform):
            return intent(perform)
        case PassGate(step) | Refuse(step):
            return _named(Activity.STEP, step.name)
        case BeginRollback(cause):
            return f"rollback:{cause}"
        case NoteRefusal():
            return "note:stop_refused"
        case Hold(state) | Settle(state):
            return f"{'settle' if isinstance(action, Settle) else 'hold'}:{state}"


def _named(activity: Activity, step: str) -> str:
    return activity + ":" + step  # a StrEnum's own formatting is slow, and this is asked at every step


# ------------------------------------------------------------------------------------ what has happened


class Tries(NamedTuple):
    """The tries of one activity of one step."""

    failed: int = 0
    since: datetime | None = None
    """When the first of them failed."""
    due_at: datetime | None = None
    spent: bool = False

    def eased(self, anew: bool) -> Tries:  # noqa: FBT001 - private to this module
        """Without a wait; with `anew`, from the start if they were spent."""
        return Tries() if anew and self.spent else self._replace(due_at=None)


class StepProgress(NamedTuple):
    """What the journal says about one step."""

    succeeded: bool = False
    in_doubt: bool = False
    absent: bool = False
    """Its probe said, since it was last in doubt, that it did not happen."""
    undone: bool = False
    step: Tries = Tries()
    probe: Tries = Tries()
    compensation: Tries = Tries()

    def eased(self, *, anew: bool) -> StepProgress:
        """Without waits; with `anew`, tries that were spent begin again."""
        return self._replace(
            step=self.step.eased(anew), probe=self.probe.eased(anew), compensation=self.compensation.eased(anew)
        )

    def with_tries(self, activity: str, tries: Tries) -> StepProgress:
        """With the tries of one activity replaced."""
        changes: dict[str, Any] = {str(activity): tries}
        return self._replace(**changes)


class Progress(NamedTuple):
    """What a journal says about a run, folded entry by entry."""

    names: dict[str, int]
    steps: tuple[StepProgress, ...]
    starts: dict[str, int]
    """How often each activity began, as far as the journal tells; by the name under which entries announce it."""
    seq: int = 0
    """The newest entry's number; the next entry takes the one after."""
    succeeded: int = 0
    """How many steps have succeeded: they are the first ones, in order."""
    context_seq: int | None = None
    """The entry that carries the newest context; None while it is still the run's input."""
    payload_bytes: int = 0
    """Contexts journaled so far, in bytes as stored."""
    rollback: Cause | None = None
    turned_at: str | None = None
    """The step whose failure began the rollback."""
    begun: str | None = None
    """What the newest entry says begins next; before the first entry the first step, which the claim itself begins."""
    stop_refused: bool = False
    """The journal says that a stop was refused."""
    stalled: int = 0
    """Attempts in a row that ended by a lapsed lease without an outcome."""
    lost_in: str | None = None
    """What the newest of them had begun."""
    last_attempt: int = 0
    """The attempt that wrote the newest entry."""
    last_outcome: int = 0
    """The attempt that wrote the newest outcome."""

    @classmethod
    def of(cls, saga: Saga[Any]) -> Progress:
        """The progress of a run of `saga` with an empty journal."""
        return cls.named(tuple(step.name for step in saga.steps))

    @classmethod
    def named(cls, names: tuple[str, ...]) -> Progress:
        """The same, from the steps' names alone."""
        first = _named(Activity.STEP, names[0])
        return cls(
            names={name: index for index, name in enumerate(names)},
            steps=(StepProgress(),) * len(names),
            starts={first: 1},
            begun=first,
        )

    def after(self, entry: Entry) -> Progress:
        """The progress with one more entry. Raises JournalMisfit, naming the difference, where it cannot belong."""
        if entry.seq != self.seq + 1:
            raise JournalMisfit(f"the journal has entry {entry.seq} where {self.seq + 1} was expected")
        if entry.kind is Kind.UNKNOWN:
            raise JournalMisfit(f"entry {entry.seq} is of a kind that this version does not know")
        if entry.kind in _BY_PERSONS:
            # No attempt's: what the attempt before may have left in doubt is still for the next takeover to say.
            return self._intervened(entry)._replace(seq=entry.seq)
        if entry.kind is Kind.TAKEN_OVER:
            changed = self._taken_over(entry)
        elif entry.kind is Kind.STOP_REFUSED:
            # Noted before what was to begin did; this entry announces it again.
            changed = self.counting(self.begun, -1)._replace(stop_refused=True)
        elif entry.kind is Kind.ROLLBACK_BEGUN:
            if self.rollback is not None:
                raise JournalMisfit(f"entry {entry.seq} begins a second rollback")
            if entry.cause is None:
                raise JournalMisfit(f"entry {entry.seq} begins a rollback without a cause")
            changed = self._replace(rollback=entry.cause, turned_at=entry.step)
        else:
            changed = self._outcome(entry)
        # A probe's "no" brings nothing forward: a step that kills its worker would be asked about for ever.
        fruitless = entry.kind in _NO_OUTCOME or (entry.kind is Kind.PROBE_SUCCEEDED and entry.payload is None)
        changed = changed._replace(
            seq=entry.seq,
            begun=None,
            last_attempt=entry.attempt,
            stalled=changed.stalled if fruitless else 0,
            last_outcome=changed.last_outcome if fruitless else entry.attempt,
        )
        return changed.announced(entry.next) if entry.next is not None else changed

    def announced(self, what: str) -> Progress:
        """With what the newest entry says begins next."""
        return self._replace(starts=self._counted(what, 1), begun=what)

    def counting(self, what: str | None, count: int) -> Progress:
        """With `count` more starts of what an entry announced."""
        return self._replace(starts=self._counted(what, count)) if what else self

    def _counted(self, what: str, count: int) -> dict[str, int]:
        return {**self.starts, what: self.starts.get(what, 0) + count}

    def _taken_over(self, entry: Entry) -> Progress:
        changed = self
        unseen = entry.attempt - max(1, self.last_attempt) - 1  # attempts that left no entry at all
        maybe_lost = entry.taken_from is State.RUNNING or unseen > 0
        if maybe_lost:
            # The attempt that wrote the newest entry (or, before the first, the first attempt) was lost, or may have
            # been, and counts unless it left an outcome. Those after it count only if the last of them was lost too.
            fruitless = int(self.last_attempt == 0 or self.last_outcome != self.last_attempt)
            lost = max(0, unseen) if entry.taken_from is State.RUNNING else 0
            changed = self._replace(stalled=self.stalled + fruitless + lost, lost_in=self.begun)
        name = (self.begun or "").partition(":")[2]
        if entry.in_doubt and name in self.names:
            return changed.doubted(self.names[name])
        # Parked or handed back: what was to begin did not. What was broken off by a drain has its own entry.
        return changed if maybe_lost else changed.counting(self.begun, -1)

    def _intervened(self, entry: Entry) -> Progress:
        """What an operator did while no worker held the run. What was to begin next still is."""
        if entry.kind is Kind.REQUEUED:
            return self
        changed = self
        for index, step in enumerate(self.steps):
            changed = changed.with_step(index, step.eased(anew=entry.kind is Kind.RESUMED))
        if entry.kind is Kind.RESUMED:
            return changed._replace(stalled=0)
        if entry.kind is Kind.VERDICT:
            return changed.judged(entry)
        return changed

    def judged(self, entry: Entry) -> Progress:
        """An operator's word on the pivot counts as its outcome."""
        if entry.step not in self.names or self.names[entry.step] != self.succeeded or self.rollback is not None:
            raise JournalMisfit(f"the verdict of entry {entry.seq} is on {entry.step!r}, whose turn it is not")
        index = self.names[entry.step]
        if entry.payload is not None:
            return self._succeeded(index, entry)
        spent = self.steps[index].step._replace(spent=True)
        return self.with_step(index, self.steps[index]._replace(in_doubt=False, absent=True, step=spent))

    def _succeeded(self, index: int, entry: Entry) -> Progress:
        assert entry.payload is not None
        step = self.steps[index]._replace(succeeded=True, in_doubt=False)
        return self._replace(
            steps=(*self.steps[:index], step, *self.steps[index + 1 :]),
            succeeded=index + 1,
            context_seq=entry.seq,
            payload_bytes=self.payload_bytes + len(entry.payload),
        )

    def _outcome(self, entry: Entry) -> Progress:
        activity, outcome = _MEANING[entry.kind]
        if entry.step not in self.names:
            raise JournalMisfit(f"the journal names step {entry.step!r}, which the definition does not have")
        index = self.names[entry.step]
        step = self.steps[index]
        if (activity is Activity.COMPENSATION) != (self.rollback is not None):
            raise JournalMisfit(f"entry {entry.seq} ({entry.kind}) is on the wrong side of the rollback's beginning")
        if activity is not Activity.COMPENSATION and index != self.succeeded:
            raise JournalMisfit(
                f"the journal has {entry.step!r} at place {self.succeeded + 1}, the definition has it at {index + 1}"
            )
        match outcome:
            case "broken off":
                return self.doubted(index)
            case "succeeded" if activity is Activity.COMPENSATION:
                return self.with_step(index, step._replace(undone=True))
            case "succeeded" if entry.payload is None and activity is Activity.STEP:
                raise JournalMisfit(f"entry {entry.seq}: {entry.step} succeeded without a context")
            case "succeeded" if entry.payload is None:  # a probe: it did not happen
                return self.with_step(index, step._replace(absent=True, probe=Tries()))
            case "succeeded":
                return self._succeeded(index, entry)
        return self._failed(index, activity, entry, spent=outcome == "failed")

    def _failed(self, index: int, activity: Activity, entry: Entry, *, spent: bool) -> Progress:
        step = self.steps[index]
        tries: Tries = getattr(step, activity)
        failed = tries._replace(
            failed=tries.failed + 1,
            since=tries.since or entry.at,
            due_at=entry.due_at,
            spent=spent,
        )
        changed = self.with_step(index, step.with_tries(activity, failed))
        if activity is not Activity.STEP:
            return changed
        if entry.in_doubt:
            return changed.doubted(index)
        return changed.with_step(index, changed.steps[index]._replace(in_doubt=False))

    def doubted(self, index: int) -> Progress:
        """The step may have had its effect; what a probe said before no longer counts."""
        step = self.steps[index]
        if step.succeeded:
            return self
        return self.with_step(index, step._replace(in_doubt=True, absent=False, probe=Tries()))

    def with_step(self, index: int, step: StepProgress) -> Progress:
        """With one step's progress replaced."""
        return self._replace(steps=(*self.steps[:index], step, *self.steps[index + 1 :]))


_NO_OUTCOME: Final = frozenset(
    {Kind.TAKEN_OVER, Kind.INTERRUPTED, Kind.STOP_REFUSED, Kind.PROBE_RETRY_SCHEDULED, Kind.PROBE_FAILED}
)

_BY_PERSONS: Final = frozenset({Kind.RESUMED, Kind.VERDICT, Kind.RETRIED_NOW, Kind.REQUEUED})

_MEANING: Final = {
    Kind.STEP_SUCCEEDED: (Activity.STEP, "succeeded"),
    Kind.STEP_RETRY_SCHEDULED: (Activity.STEP, "retry"),
    Kind.STEP_FAILED: (Activity.STEP, "failed"),
    Kind.PROBE_SUCCEEDED: (Activity.PROBE, "succeeded"),
    Kind.PROBE_RETRY_SCHEDULED: (Activity.PROBE, "retry"),
    Kind.PROBE_FAILED: (Activity.PROBE, "failed"),
    Kind.COMPENSATION_SUCCEEDED: (Activity.COMPENSATION, "succeeded"),
    Kind.COMPENSATION_RETRY_SCHEDULED: (Activity.COMPENSATION, "retry"),
    Kind.COMPENSATION_FAILED: (Activity.COMPENSATION, "failed"),
    Kind.INTERRUPTED: (Activity.STEP, "broken off"),
}


# ------------------------------------------------------------------------------------ what to do


class Facts(NamedTuple):
    """What is known of a run beside its journal."""

    gate_passed: bool = False
    """The pivot has begun, or may have: from here on no stop and no deadline turns the run back."""
    stop_asked: bool = False
    """A stop was recorded before the gate."""
    stop_refused: bool = False
    """A stop was recorded after the gate, and the journal has to say so."""
    deadline: datetime | None = None
    bytes_max: int | None = None
    """How many bytes of contexts this run may journal altogether; None for no limit."""
    bytes_each: int = 0
    """How many bytes one context may have."""


_DEADLINE_ANNOUNCED: Final = intent(BeginRollback(Cause.DEADLINE, None))


def next_action(saga: Saga[Any], progress: Progress, facts: Facts, now: datetime) -> Action:
    """What to do now. Total: every journal that fits its definition has exactly one answer."""
    if facts.stop_refused and not progress.stop_refused:
        return NoteRefusal()
    if progress.stalled >= STALLED_MAX:
        where = f" in {progress.lost_in}" if progress.lost_in else ""
        return Hold(
            State.BROKEN,
            f"{progress.stalled} attempts in a row ended without an outcome{where}: its worker dies or loses its lease",
        )
    if progress.rollback is not None:
        return _backward(saga, progress, now)
    return _forward(saga, progress, facts, now)


def once_announced(action: Action, facts: Facts) -> Action | None:
    """What follows when an entry that announces `action` stands; None where the time has a say and will tell.

    It is what `next_action` would give then, and saves asking it.
    """
    if facts.deadline is not None or isinstance(action, Wait):
        return None
    if isinstance(action, Perform):
        return Perform(action.activity, action.step, action.try_number + 1, action.fate)
    return action


def _forward(saga: Saga[Any], progress: Progress, facts: Facts, now: datetime) -> Action:
    can_turn_back = not (facts.gate_passed or (saga.pivot_at is not None and progress.succeeded > saga.pivot_at))
    if can_turn_back:
        if facts.stop_asked:
            return BeginRollback(Cause.STOP, None)
        # What an entry has announced is done, although another worker's clock may be a little behind.
        over = facts.deadline is not None and facts.deadline <= now
        if over or progress.begun == _DEADLINE_ANNOUNCED:
            return BeginRollback(Cause.DEADLINE, None)
    if progress.succeeded == len(saga.steps):
        return Settle(State.COMPLETED)

    step = saga.steps[progress.succeeded]
    did = progress.steps[progress.succeeded]
    pivot = step.kind is StepKind.PIVOT
    # Once a step before the pivot is spent the run turns back, and its compensation finds out what there is to undo.
    ask = did.in_doubt and step.question is not None and not (did.absent or did.probe.spent)
    if did.step.spent and (can_turn_back or not ask):
        return _spent(saga, step, did)
    action = _next_try(progress, Activity.PROBE if ask else Activity.STEP, step)
    if did.step.due_at is not None or did.probe.due_at is not None:
        due_at = max(did.step.due_at or now, did.probe.due_at or now)
        if due_at > now:
            return Wait(min(due_at, facts.deadline) if can_turn_back and facts.deadline is not None else due_at, action)
    if pivot and can_turn_back:
        return _gate(saga, progress, facts, step)
    return action


def _next_try(progress: Progress, activity: Activity, step: StepDefinition[Any], fate: Fate = Fate.KNOWN) -> Perform:
    return Perform(activity, step, progress.starts.get(_named(activity, step.name), 0), fate)


def _spent(saga: Saga[Any], step: StepDefinition[Any], did: StepProgress) -> Action:
    """A step's tries are over."""
    if step.kind is StepKind.FORWARD:
        tries = "1 try" if did.step.failed == 1 else f"{did.step.failed} tries"
        return Hold(State.FORWARD_INCOMPLETE, f"{step.name} failed for good after the pivot ({tries})")
    if step.kind is StepKind.PIVOT and did.in_doubt and not did.absent:
        how = "its probe failed too" if step.question is not None else "it has no probe"
        return Hold(State.IN_DOUBT, f"whether {step.name} (the pivot) happened is unknown, and {how}")
    if saga.plain:
        return Settle(State.FAILED)
    return BeginRollback(Cause.STEP_FAILED, step.name)


def _gate(saga: Saga[Any], progress: Progress, facts: Facts, pivot: StepDefinition[Any]) -> Action:
    """Before the point of no return: room for everything that has to be journaled after it."""
    remaining = len(saga.steps) - progress.succeeded
    if facts.bytes_max is None or remaining * facts.bytes_each <= (left := facts.bytes_max - progress.payload_bytes):
        return PassGate(pivot)
    return Refuse(
        pivot,
        f"{remaining} steps from the pivot on may journal {facts.bytes_each:,} bytes each, and the run has "
        f"{left:,} bytes left; nothing may run out of room after the pivot",
    )


_SETTLES_AS: Final = {
    Cause.STEP_FAILED: State.COMPENSATED,
    Cause.STOP: State.CANCELLED,
    Cause.DEADLINE: State.TIMED_OUT,
}


def _backward(saga: Saga[Any], progress: Progress, now: datetime) -> Action:
    """Undo every step that succeeded or is in doubt, newest first; one that fails for good does not stop the others."""
    failed = []
    for step, did in zip(reversed(saga.steps), reversed(progress.steps), strict=True):
        if step.undo is None or did.undone or not (did.succeeded or did.in_doubt):
            continue
        if did.compensation.spent:
            failed.append(step.name)
            continue
        fate = Fate.KNOWN if did.succeeded else Fate.IN_DOUBT
        action = _next_try(progress, Activity.COMPENSATION, step, fate)
        due_at = did.compensation.due_at
        return Wait(due_at, action) if due_at is not None and due_at > now else action
    if failed:
        return Hold(State.COMPENSATION_FAILED, f"still to be undone: {', '.join(failed)}")
    assert progress.rollback is not None
    return Settle(_SETTLES_AS[progress.rollback])


# ------------------------------------------------------------------------------------ what a lost worker means


def lost_in_doubt(saga: Saga[Any], progress: Progress, facts: Facts, *, attempt: int, taken_from: State) -> bool:
    """Whether, at the beginning of `attempt`, the step that was announced may have had its effect.

    So when the lease lapsed; and when attempts in between left no entry, since the one before those may have been lost.
    Not so for what cannot have begun: a pivot before its gate. Nor for a transactional step, whose effect commits
    together with its entry: no entry, no effect.
    """
    if taken_from is not State.RUNNING and attempt - max(1, progress.last_attempt) < 2:
        return False
    activity, _, name = (progress.begun or "").partition(":")
    if activity != Activity.STEP or name not in progress.names:
        return False
    step = saga.steps[progress.names[name]]
    return not step.transactional and (step.kind is not StepKind.PIVOT or facts.gate_passed)


# ------------------------------------------------------------------------------------ what a failed try means


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the journal will say of a failed try."""

    kind: Kind
    in_doubt: bool
    due_at: datetime | None


_FAILED: Final = {
    Activity.STEP: (Kind.STEP_RETRY_SCHEDULED, Kind.STEP_FAILED),
    Activity.PROBE: (Kind.PROBE_RETRY_SCHEDULED, Kind.PROBE_FAILED),
    Activity.COMPENSATION: (Kind.COMPENSATION_RETRY_SCHEDULED, Kind.COMPENSATION_FAILED),
}


def after_failure(
    progress: Progress, action: Perform, failure: Failure, now: datetime, wait: Callable[[int], timedelta]
) -> Verdict:
    """Whether a failed try is followed by another, and when; `wait` gives the policy's wait after so many tries.

    A pivot that says NonRetryable, tried again under the same key, settles an earlier doubt: that is why it is tried
    again. Neither being turned away nor any other exception is such an answer. A step before the pivot stays in doubt
    once it was: compensating what never happened does no harm, while leaving an effect behind would.
    """
    did = progress.steps[progress.names[action.step.name]]
    tries: Tries = getattr(did, action.activity.value)
    again, over = _FAILED[action.activity]
    in_doubt = action.activity is Activity.STEP and (
        failure.in_doubt or (did.in_doubt and not (failure.conclusive and action.step.kind is StepKind.PIVOT))
    )
    failed = tries.failed + 1
    elapsed = now - (tries.since or now)
    pause = max(wait(failed), failure.retry_after or timedelta(0))
    if not failure.retryable or not action.part.retry.allows(failed, elapsed + pause):
        return Verdict(over, in_doubt, None)
    return Verdict(again, in_doubt, now + pause)
