"""The invariants of a run, in one place: every test that kills something asks this module whether the outcome is right.

    check(saga, run, journal, ledger, answers)        raises InvariantBroken with every broken promise, in words

It is given the definition, the run document, its journal and the *ledger*: what the participants saw. A ledger has one
`Call` for each time that a step, a compensation or a probe was called, with the idempotency key it was given, and says
of each whether that call had its effect. `answers` is what people who pressed Stop were told. The oracle never asks the
library what it thinks: it folds nothing and decides nothing, it compares what was promised with what stands in the
database and with what happened outside.

Participants are as the documentation asks them to be: a repeated key has the effect once, a compensation tolerates that
there is nothing to undo, and a request that arrives after its own compensation has no effect any more.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from sagas.decide import Activity
from sagas.definition import Saga, StepDefinition, StepKind
from sagas.stopping import StopAnswer, StopOutcome
from sagas_store.entries import Cause, Entry, Kind
from sagas_store.records import RunRecord, Stop
from sagas_store.states import HELD, OPEN, SETTLED, Decision, Phase, State

__all__ = ["Call", "InvariantBroken", "Oracle", "check", "faults"]

UNDONE: Final = frozenset({State.COMPENSATED, State.CANCELLED, State.TIMED_OUT})
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_OUTCOMES: Final = {
    Activity.STEP: {Kind.STEP_SUCCEEDED, Kind.STEP_RETRY_SCHEDULED, Kind.STEP_FAILED, Kind.INTERRUPTED},
    Activity.PROBE: {Kind.PROBE_SUCCEEDED, Kind.PROBE_RETRY_SCHEDULED, Kind.PROBE_FAILED},
    Activity.COMPENSATION: {
        Kind.COMPENSATION_SUCCEEDED,
        Kind.COMPENSATION_RETRY_SCHEDULED,
        Kind.COMPENSATION_FAILED,
    },
}
_COUNTED: Final = {  # failed tries, which the policy bounds
    Activity.STEP: {Kind.STEP_RETRY_SCHEDULED, Kind.STEP_FAILED},
    Activity.PROBE: {Kind.PROBE_RETRY_SCHEDULED, Kind.PROBE_FAILED},
    Activity.COMPENSATION: {Kind.COMPENSATION_RETRY_SCHEDULED, Kind.COMPENSATION_FAILED},
}


_ENDS_AS: Final = {
    Cause.STEP_FAILED: State.COMPENSATED,
    Cause.STOP: State.CANCELLED,
    Cause.DEADLINE: State.TIMED_OUT,
    None: None,
}
_BY_PERSONS: Final = {Kind.RESUMED, Kind.VERDICT, Kind.RETRIED_NOW}
_SPENT: Final = {Kind.STEP_FAILED, Kind.COMPENSATION_FAILED}
_FINAL: Final = {*_SPENT, Kind.COMPENSATION_SUCCEEDED}


class InvariantBroken(AssertionError):
    """What was promised is not so; each line is one broken promise."""


@dataclass(slots=True, kw_only=True)
class Call:
    """Application code was called once."""

    order: int
    """Calls of one run in the order in which they began."""
    activity: Activity
    step: str
    key: str
    attempt: int
    try_number: int
    applied: bool = False
    """This very call had its effect: not refused, not a repeat, not broken off before it."""
    seen_seq: int | None = None
    """The newest entry of the journal when it began, where the test can tell."""

    def __str__(self) -> str:
        return f"{self.activity} {self.step} (call {self.order}, attempt {self.attempt}, try {self.try_number})"


def check(
    saga: Saga[Any],
    run: RunRecord,
    journal: Sequence[Entry],
    ledger: Sequence[Call],
    answers: Sequence[StopAnswer] = (),
    *,
    at_rest: bool = True,
    suspended: bool = False,
) -> None:
    """Raise InvariantBroken unless everything promised of this run is so.

    `at_rest`: everybody who could drive it has had the time to: it must be held or settled. `suspended`: a worker may
    have been frozen and thawed, so that a call it was about to make came after it had lost the run; it must then have
    had no effect of its own, and no entry.
    """
    if broken := faults(saga, run, journal, ledger, answers, at_rest=at_rest, suspended=suspended):
        story = "\n".join(_story(run, journal, ledger))
        raise InvariantBroken(f"run {run.run_id} ({saga.name}):\n- " + "\n- ".join(broken) + f"\n{story}")


def faults(
    saga: Saga[Any],
    run: RunRecord,
    journal: Sequence[Entry],
    ledger: Sequence[Call],
    answers: Sequence[StopAnswer] = (),
    *,
    at_rest: bool = True,
    suspended: bool = False,
) -> list[str]:
    """Every broken promise, one sentence each; empty when all is well."""
    calls = sorted(ledger, key=lambda call: call.order)
    oracle = Oracle(saga, run, list(journal), calls, suspended)
    return [*oracle.faults(at_rest), *itertools.chain.from_iterable(map(oracle.answered, answers))]


class Oracle:
    """One run under examination."""

    def __init__(
        self, saga: Saga[Any], run: RunRecord, journal: list[Entry], ledger: list[Call], suspended: bool
    ) -> None:
        self.run = run
        self.journal = journal
        self.written = [entry for entry in journal if entry.kind not in _BY_PERSONS]
        """What workers wrote. An operator's entries are of no attempt of theirs."""
        self.ledger = ledger
        self.suspended = suspended
        self.steps: dict[str, StepDefinition[Any]] = {step.name: step for step in saga.steps}
        self.place = {name: place for place, name in enumerate(self.steps)}
        self.pivot = next((step.name for step in saga.steps if step.kind is StepKind.PIVOT), None)
        self.plain = all(step.kind is StepKind.UNCOMPENSATED for step in saga.steps)
        self.successes = {entry.step: entry for entry in journal if _is_success(entry)}
        self.undone = {entry.step: entry for entry in journal if entry.kind is Kind.COMPENSATION_SUCCEEDED}
        self.rollback = next((entry for entry in journal if entry.kind is Kind.ROLLBACK_BEGUN), None)

    def faults(self, at_rest: bool) -> list[str]:
        broken = list(self.unknown_names())
        if broken:
            return broken  # the other questions make no sense then
        parts = [
            self.run_document(at_rest),
            self.numbering(),
            self.takeovers(),
            self.owners(),
            self.successes_in_order(),
            self.ends(),
            self.tries(),
            self.keys(),
            self.effects(),
            self.forward_order(),
            self.announcements(),
            self.no_way_forward(),
            self.compensations(),
            self.undone_ends(),
            self.failed_end(),
            self.completed_end(),
            self.held_ends(),
            self.deadlines(),
            self.stops(),
        ]
        return list(itertools.chain.from_iterable(parts))

    # ---------------------------------------------------------------- the documents

    def unknown_names(self) -> Iterator[str]:
        for entry in self.journal:
            if entry.step is not None and entry.step not in self.steps:
                yield f"Entry {entry.seq} names step {entry.step}, which the definition does not have."
        for call in self.ledger:
            if call.step not in self.steps:
                yield f"{call.step} was called and is not in the definition."

    def run_document(self, at_rest: bool) -> Iterator[str]:
        run = self.run
        if at_rest and run.state not in HELD | SETTLED:
            yield f"Nobody drives the run any more and it is {run.state}, neither held nor settled."
        if (run.due_at is not None) != (run.state in OPEN):
            yield f"The run is {run.state} and {'has no' if run.due_at is None else 'has a'} due_at."
        if (run.settled_at is not None) != (run.state in SETTLED):
            yield f"The run is {run.state} and its settled_at is {run.settled_at}."
        if run.state in HELD and not (run.held and run.held.reason):
            yield f"The run is held ({run.state}) without a reason."
        if run.state in HELD:
            phase = Phase.ROLLING_BACK if self.rollback else Phase.PAST_GATE if run.gate_passed_at else Phase.FORWARD
            if run.phase is not phase:
                yield f"The run is held ({run.state}), lists show it as {run.phase}, and it is {phase}."
        if run.state in OPEN and (run.due_at or _EPOCH) < run.created_at and run.attempts == 0:
            yield "A fresh run was due before it was created."

    def numbering(self) -> Iterator[str]:
        found = [entry.seq for entry in self.journal]
        if found != list(range(1, len(found) + 1)):
            yield f"The journal's numbers have gaps or repeats: {found}."
        for before, after in itertools.pairwise(self.written):
            if after.attempt < before.attempt:
                yield f"Entry {after.seq} is of attempt {after.attempt}, the one before it of {before.attempt}."

    def takeovers(self) -> Iterator[str]:
        """Every attempt but the first announces itself before it writes anything else, once."""
        previous = 0
        for entry in self.written:
            begins, previous = entry.attempt != previous, entry.attempt
            if begins and entry.attempt > 1 and entry.kind is not Kind.TAKEN_OVER:
                yield f"Attempt {entry.attempt} began with {entry.kind} (entry {entry.seq}), not with its takeover."
            if entry.kind is Kind.TAKEN_OVER and not begins:
                yield f"Attempt {entry.attempt} announced its takeover in its middle (entry {entry.seq})."
            if entry.kind is Kind.TAKEN_OVER and entry.attempt == 1:
                yield f"The first attempt took something over (entry {entry.seq})."

    def owners(self) -> Iterator[str]:
        """One claim per attempt, and nobody the run does not know."""
        owner: dict[int, tuple[str, str]] = {}
        for entry in self.written:
            if owner.setdefault(entry.attempt, (entry.token, entry.worker)) != (entry.token, entry.worker):
                yield f"Attempt {entry.attempt} was written by two claims (entry {entry.seq})."
        tokens = [token for token, _ in owner.values()]
        if len(set(tokens)) != len(tokens):
            yield "Two attempts wrote under one claim token."
        latest = max(owner, default=0)
        if latest > self.run.attempts:
            yield f"The journal knows attempt {latest}, the run only {self.run.attempts}."
        claim = self.run.claim
        if claim is not None and latest == self.run.attempts and owner[latest][0] != claim.token:
            yield f"The last entries were not written under the claim that the run is held under (attempt {latest})."
        for call in self.ledger:
            if not 1 <= call.attempt <= self.run.attempts:
                yield f"{call} was made by an attempt that the run does not know ({self.run.attempts} so far)."

    # ---------------------------------------------------------------- outcomes

    def successes_in_order(self) -> Iterator[str]:
        """One success per step, in the order of the definition, and one per compensation."""
        succeeded = [entry.step for entry in self.journal if _is_success(entry)]
        expected = list(self.steps)[: len(succeeded)]
        if succeeded != expected:
            yield f"Steps succeeded as {succeeded}, the definition says {expected}."
        undone = [entry.step for entry in self.journal if entry.kind is Kind.COMPENSATION_SUCCEEDED]
        if len(set(undone)) != len(undone):
            yield f"A compensation succeeded twice: {undone}."

    def ends(self) -> Iterator[str]:
        """No outcome after a final one, and no call after a journaled success."""
        ended: dict[tuple[Activity, str | None], Entry] = {}
        for entry in self.journal:
            if entry.kind is Kind.RESUMED:  # what was spent begins anew
                ended = {what: end for what, end in ended.items() if end.kind not in _SPENT}
            activity = next((activity for activity, kinds in _OUTCOMES.items() if entry.kind in kinds), None)
            if activity is None:
                continue
            if (end := ended.get((activity, entry.step))) is not None:
                yield f"Entry {entry.seq} ({entry.kind} {entry.step}) comes after {end.kind} at {end.seq}."
            if entry.kind in _FINAL or _is_success(entry):
                ended[activity, entry.step] = entry
        for call in self.ledger:
            done = self.undone if call.activity is Activity.COMPENSATION else self.successes
            if (success := done.get(call.step)) is not None and self._is_after(call, success):
                yield f"{call} was made after entry {success.seq} had journaled its success."

    def tries(self) -> Iterator[str]:
        for activity, kinds in _OUTCOMES.items():
            for name, step in self.steps.items():
                entries = [entry for entry in self.journal if entry.kind in kinds and entry.step == name]
                numbers = [entry.try_number for entry in entries if entry.try_number is not None]
                if any(after <= before for before, after in itertools.pairwise(numbers)):
                    yield f"The tries of {activity} {name} are journaled as {numbers}."
                part = {
                    Activity.STEP: step.forward,
                    Activity.PROBE: step.question,
                    Activity.COMPENSATION: step.undo,
                }[activity]
                failed = sum(entry.kind in _COUNTED[activity] for entry in entries)
                bound = part.retry.max_attempts if part is not None else 0
                resumed = sum(entry.kind is Kind.RESUMED for entry in self.journal)
                if activity is not Activity.PROBE and bound is not None and failed > bound * (1 + resumed):
                    yield f"{activity} {name} failed {failed} times, its policy allows {bound}."
                calls = [call for call in self.ledger if call.activity is activity and call.step == name]
                if self.suspended:
                    continue
                told = [(call.attempt, call.try_number) for call in calls]
                if any(after[0] < before[0] or after[1] < before[1] for before, after in itertools.pairwise(told)):
                    yield f"Calls of {activity} {name} were told these attempts and tries: {told}."

    # ---------------------------------------------------------------- effects

    def keys(self) -> Iterator[str]:
        """One key per step, another per compensation, the same at every call; a probe asks about its step's."""
        keys: dict[tuple[str, bool], set[str]] = defaultdict(set)
        users: dict[str, set[tuple[str, bool]]] = defaultdict(set)
        for call in self.ledger:
            what = call.step, call.activity is Activity.COMPENSATION
            keys[what].add(call.key)
            users[call.key].add(what)
        for (step, compensation), used in keys.items():
            if len(used) > 1:
                yield f"{'The compensation of ' if compensation else ''}{step} was given {len(used)} different keys."
        for key, by in users.items():
            if len(by) > 1:
                yield f"Key {key} was given to several: {sorted(by)}."

    def effects(self) -> Iterator[str]:
        """Each effect happened once per key, and what is journaled as done happened."""
        effects: dict[str, int] = defaultdict(int)
        for call in self.ledger:
            effects[call.key] += call.applied
        for key, times in effects.items():
            if times > 1:
                yield f"The effect under {key} happened {times} times."
        for name, entry in self.successes.items():
            if not self._applied(Activity.STEP, str(name)):
                yield f"{name} is journaled as succeeded (entry {entry.seq}) and had no effect."
        for name, entry in self.undone.items():
            if not self._applied(Activity.COMPENSATION, str(name)):
                yield f"The compensation of {name} is journaled (entry {entry.seq}) and never happened."

    # ---------------------------------------------------------------- the two ways

    def forward_order(self) -> Iterator[str]:
        """Steps begin in order, after what comes before them is journaled, and the pivot after its gate."""
        for call in self.ledger:
            if call.activity is Activity.COMPENSATION:
                continue
            for name in list(self.steps)[: self.place[call.step]]:
                success = self.successes.get(name)
                if success is None or self._is_before(call, success):
                    yield f"{call} was made before the success of {name} was journaled."
            if call.step == self.pivot and self.run.gate_passed_at is None:
                yield f"{call} was made and the gate was never passed."

    def announcements(self) -> Iterator[str]:
        """What began was announced by the entry before it: a crash would find it in doubt."""
        for call in self.ledger:
            announced = self._announced(call)
            if call.activity is Activity.STEP and announced not in (None, f"step:{call.step}"):
                yield f"{call} was made and the journal had announced {announced!r}: a crash would not put it in doubt."
            turned = (announced or "compensation:").startswith("compensation:")
            if call.activity is Activity.COMPENSATION and not turned:
                yield f"{call} was made and the journal had announced {announced!r}."

    def no_way_forward(self) -> Iterator[str]:
        """Nothing goes forward once the rollback has begun; and it never begins once the pivot had its effect."""
        if self.rollback is None:
            return
        for call in self.ledger:
            if call.activity is not Activity.COMPENSATION and self._is_after(call, self.rollback):
                yield f"{call} was made after entry {self.rollback.seq} had begun the rollback."
        for entry in self.journal:
            forward = entry.kind in _OUTCOMES[Activity.STEP] | _OUTCOMES[Activity.PROBE]
            if forward and entry.seq > self.rollback.seq:
                yield f"Entry {entry.seq} ({entry.kind}) goes forward after the rollback began ({self.rollback.seq})."
        if self.pivot is not None and self._applied(Activity.STEP, self.pivot):
            yield f"The pivot {self.pivot} had its effect and the run turned back all the same."

    def compensations(self) -> Iterator[str]:
        calls = [call for call in self.ledger if call.activity is Activity.COMPENSATION]
        entries = [entry for entry in self.journal if entry.kind in _OUTCOMES[Activity.COMPENSATION]]
        if self.rollback is None:
            yield from (f"{call} was made and no rollback was ever journaled." for call in calls)
        else:
            for call in calls:
                if self._is_before(call, self.rollback):
                    yield f"{call} was made before the rollback was journaled."
        for what, order in (
            ("called", [(self._round(call.attempt), call.step) for call in calls]),
            ("journaled", [(self._round(entry.attempt), str(entry.step)) for entry in entries]),
        ):
            places = [(turn, -self.place[name]) for (turn, name), _ in itertools.groupby(order)]
            if any(after <= before for before, after in itertools.pairwise(places)) and not self.suspended:
                yield f"Compensations were {what} as {[name for _, name in order]}, not newest first."
        for call in calls:
            if self.steps[call.step].undo is None:
                yield f"{call} was made, and the definition has no such compensation."

    # ---------------------------------------------------------------- where it ended

    def undone_ends(self) -> Iterator[str]:
        """Undone is claimed only where every effect is: by the journal and by the participants."""
        state = self.run.state
        if state not in UNDONE:
            return
        if self.rollback is None and self.journal:  # a stop may find that nothing has run
            yield f"The run is {state} and no rollback was journaled."
        yield from (f"The run is {state} and the effect of {name} stands." for name in self._owed())
        for name, step in self.steps.items():
            if step.undo is not None and name in self.successes and name not in self.undone:
                yield f"The run is {state}, {name} succeeded and its compensation is not journaled."
        if self.rollback is not None and state is not _ENDS_AS[self.rollback.cause]:
            yield f"The run is {state} and turned back because of {self.rollback.cause}."

    def failed_end(self) -> Iterator[str]:
        """Failed is a plain durable function that raised for good: nothing turned back, as nothing can be undone."""
        if self.run.state is not State.FAILED:
            return
        if not self.plain:
            yield "The run is failed, which only a plain durable function may be."
        if not any(entry.kind is Kind.STEP_FAILED for entry in self.journal):
            yield "The run is failed and no step is journaled as failed."

    def completed_end(self) -> Iterator[str]:
        if self.run.state is not State.COMPLETED:
            return
        if missing := [name for name in self.steps if name not in self.successes]:
            yield f"The run is completed and never journaled the success of {', '.join(missing)}."
        if self.rollback is not None:
            yield "The run is completed and had turned back."

    def held_ends(self) -> Iterator[str]:
        state = self.run.state
        past_gate = self.run.gate_passed_at is not None and self.rollback is None
        if state in (State.IN_DOUBT, State.FORWARD_INCOMPLETE) and not past_gate:
            yield f"The run is held as {state} and had not passed its gate, or had turned back."
        if state is State.IN_DOUBT and self.pivot in self.successes:
            yield "The run is held in doubt and its pivot is journaled as succeeded."
        if state is State.FORWARD_INCOMPLETE and self.pivot not in self.successes:
            yield "The run is held as forward_incomplete and its pivot has not succeeded."
        if state is not State.COMPENSATION_FAILED:
            return
        failed = {entry.step for entry in self.journal if entry.kind is Kind.COMPENSATION_FAILED}
        if self.rollback is None or not failed:
            yield "The run is held as compensation_failed and no compensation failed."
        if left := [name for name in self._owed() if name not in failed]:
            yield f"A failed compensation kept {', '.join(left)} from being undone."

    def deadlines(self) -> Iterator[str]:
        """Time turns a run back before its gate, never after it."""
        if self.rollback is not None and self.rollback.cause is Cause.DEADLINE:
            if self.run.deadline is None:
                yield "The run turned back because of a deadline that it does not have."
            if self.run.gate_passed_at is not None:
                yield "The run had passed its gate and turned back because of its deadline."

    def answered(self, told: StopAnswer) -> Iterator[str]:
        """What one person was told when pressing Stop."""
        stop, state = self.run.stop, self.run.state
        if told.outcome is StopOutcome.ALREADY_SETTLED:
            if stop is not None or told.state is not state or state not in SETTLED:
                yield f"The answer was that it had ended as {told.state}; it is {state}, its stop {stop}."
        elif stop is None or (told.outcome, told.by, told.asked_at) != (str(stop.decision), stop.by, stop.asked_at):
            yield f"The answer was {told.outcome}, asked at {told.asked_at}; the run has {stop}."

    def stops(self) -> Iterator[str]:
        """What was answered at the moment of pressing Stop is what happens."""
        noted = [entry for entry in self.journal if entry.kind is Kind.STOP_REFUSED]
        stop, state = self.run.stop, self.run.state
        if len(noted) > 1 or (noted and (stop is None or stop.decision is not Decision.REFUSED)):
            yield f"The journal says {len(noted)} times that a stop was refused, the run has {stop}."
        if stop is None:
            if state is State.CANCELLED:
                yield "The run is cancelled and nobody asked for it."
            return
        if stop.decision is Decision.REFUSED:
            yield from self.refused(stop, noted=bool(noted))
            return
        if state in (State.COMPLETED, State.FORWARD_INCOMPLETE, State.IN_DOUBT, State.FAILED):
            yield f"The stop was answered with {stop.decision} and the run is {state}."
        if stop.decision is Decision.CANCELLED and (self.ledger or self.journal):
            yield "The stop was answered with cancelled, nothing had run, and something ran."
        if self.pivot is not None and self._applied(Activity.STEP, self.pivot):
            yield f"The stop was answered with {stop.decision} and the pivot {self.pivot} had its effect."

    def refused(self, stop: Stop, *, noted: bool) -> Iterator[str]:
        state = self.run.state
        if state is State.CANCELLED:
            yield "The stop was refused and the run is cancelled."
        if self.rollback is not None and self.rollback.step != self.pivot:
            yield f"The stop was refused and the run turned back, not because its pivot failed: {self.rollback}."
        # A held run has no holder who could note it: whoever drives it next does.
        while_held = self.run.held is not None and state in HELD and self.run.held.since <= stop.asked_at
        if not noted and state in HELD | SETTLED and not while_held:
            yield "The stop was refused, the run is at rest, and its journal does not say so."

    # ---------------------------------------------------------------- small questions

    def _round(self, attempt: int) -> int:
        """How often the run had been resumed before that attempt: what is left then begins from the newest again."""
        return sum(entry.kind is Kind.RESUMED and entry.attempt < attempt for entry in self.journal)

    def _applied(self, activity: Activity, step: str) -> Call | None:
        return next(
            (call for call in self.ledger if call.activity is activity and call.step == step and call.applied), None
        )

    def _owed(self) -> list[str]:
        """Steps whose effect stands though they have a compensation."""
        return [
            name
            for name, step in self.steps.items()
            if step.undo is not None and self._applied(Activity.STEP, name) and not self._is_undone(name)
        ]

    def _is_undone(self, step: str) -> bool:
        done, undone = self._applied(Activity.STEP, step), self._applied(Activity.COMPENSATION, step)
        return step in self.undone and done is not None and undone is not None and undone.order > done.order

    def _is_after(self, call: Call, entry: Entry) -> bool:
        """Whether the call began once the entry stood, and its caller could have known."""
        if call.seen_seq is None:
            return call.attempt > entry.attempt
        if self.suspended and call.attempt < entry.attempt:
            return False
        return call.seen_seq >= entry.seq

    def _is_before(self, call: Call, entry: Entry) -> bool:
        if call.seen_seq is None:
            return call.attempt < entry.attempt
        return call.seen_seq < entry.seq

    def _announced(self, call: Call) -> str | None:
        """What the newest entry said begins next when the call began; None where that cannot be told."""
        if call.seen_seq is None:
            return None
        if call.seen_seq == 0:
            return f"{Activity.STEP}:{next(iter(self.steps))}"
        if call.seen_seq > len(self.journal):
            return None
        newest = self.journal[call.seen_seq - 1]
        return None if self.suspended and newest.attempt > call.attempt else newest.next


def _is_success(entry: Entry) -> bool:
    said_so = entry.kind in (Kind.PROBE_SUCCEEDED, Kind.VERDICT) and entry.payload is not None
    return entry.kind is Kind.STEP_SUCCEEDED or said_so


def _story(run: RunRecord, journal: Sequence[Entry], ledger: Sequence[Call]) -> Iterator[str]:
    """What the database and the participants know, for whoever has to find out why."""
    yield f"  run: {run.state}, phase {run.phase}, {run.attempts} attempts, gate {run.gate_passed_at}, held {run.held}"
    for entry in journal:
        what = entry.step or entry.cause or entry.taken_from or ""
        more = ", in doubt" if entry.in_doubt else ""
        told = f"{entry.kind} {what} try {entry.try_number} next {entry.next}{more}"
        yield f"  {entry.seq:3} attempt {entry.attempt} {told}"
    for call in sorted(ledger, key=lambda call: call.order):
        yield f"  {call} key ...{call.key[-24:]} saw entry {call.seen_seq}{', effect' if call.applied else ''}"
