"""Random sagas in a random world, and what must hold whatever happens.

A world drives one run as an executor does: it asks for the next action, performs it with the outcome that its script
says next, and journals that. Workers die before, inside and after whatever they do; they are drained; stops and
deadlines come; time passes. Beside the journal the world knows the truth: which effects really are in place. The
oracle is in `World.check` and `World.check_end`, and it never asks `sagas.decide`.

What is taken for granted of the outside: a probe tells the truth, and a participant honours the idempotency key, so
that the pivot tried again after it happened does not answer "no". Steps before the pivot get no such favour.

A script is repeated for ever, so that a short one describes an endless failure. SAGAS_HYPOTHESIS_EXAMPLES=20000 digs
deeper than the default.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sagas.decide import (
    Action,
    Activity,
    BeginRollback,
    Hold,
    PassGate,
    Perform,
    Progress,
    Refuse,
    Settle,
    Wait,
    intent,
    next_action,
)
from sagas.definition import Fate, Saga, StepKind
from sagas.errors import JournalMisfit
from sagas_store.entries import Cause, Entry, Kind
from sagas_store.states import State
from tests.support.changing import replace
from tests.support.journals import DEFINITE, LOST, NOT_NOW, START, Context, History, saga_of, told, words

EXAMPLES: Final = int(os.environ.get("SAGAS_HYPOTHESIS_EXAMPLES", "300"))
thorough = settings(max_examples=EXAMPLES, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
most_thorough = settings(thorough, max_examples=4 * EXAMPLES)

ACTIONS_MAX: Final = 1_000
"""More than any run of these sagas may take: eight steps, two tries, ten attempts to each, two questions to each."""
DRAINS_MAX: Final = 20
"""Drains are no crashes and may go on for ever; here they end."""

UNDONE: Final = {State.COMPENSATED, State.CANCELLED, State.TIMED_OUT, State.FAILED}


# -------------------------------------------------------------------- what may happen


class Outcome(Enum):
    """What comes of a try."""

    SUCCEEDS = auto()
    FAILS = auto()
    TURNED_AWAY = auto()
    LOST = auto()
    DIES = auto()
    BROKEN_OFF = auto()
    BROKEN_OFF_AND_DIES = auto()


class Before(Enum):
    """What happens to the worker between its decision and its deed."""

    NOTHING = auto()
    DIES = auto()
    DRAINED = auto()


@dataclass(frozen=True)
class Event:
    """What happens at one action."""

    outcome: Outcome = Outcome.SUCCEEDS
    effect: bool = False
    """Whether a try without a clear outcome had its effect."""
    before: Before = Before.NOTHING
    dies_after: bool = False
    """The worker dies right after it journaled."""
    traceless: int = 0
    """How many attempts end without an entry before the next one that is told of, where a worker dies."""
    given_back: bool = False
    """The last of those was given back, so that the run is found pending."""
    seconds: int = 0


# How a worker's end looks to the next one: attempts without a trace may lie between, the last of them given back.
ENDS: Final[list[dict[str, Any]]] = [{}, {"traceless": 1}, {"traceless": 2}, {"traceless": 1, "given_back": True}]
QUIET: Final = [
    Event(outcome=outcome, effect=effect, seconds=seconds)
    for seconds in (0, 1, 15)
    for outcome in (Outcome.SUCCEEDS, Outcome.FAILS, Outcome.TURNED_AWAY, Outcome.LOST)
    for effect in (False, True)
]
LOUD: Final = [
    *(Event(dies_after=True, outcome=outcome) for outcome in (Outcome.SUCCEEDS, Outcome.FAILS, Outcome.LOST)),
    *(Event(before=Before.DIES, **end) for end in ENDS),
    *(Event(before=Before.DRAINED),) * 3,
    *(Event(outcome=Outcome.DIES, effect=effect, **end) for end in ENDS for effect in (False, True)),
    *(Event(outcome=Outcome.BROKEN_OFF, effect=effect) for effect in (False, True) * 2),
    *(Event(outcome=Outcome.BROKEN_OFF_AND_DIES, effect=effect, **end) for end in ENDS for effect in (False, True)),
]


def scripts(of: list[Event]) -> st.SearchStrategy[list[Event]]:
    # Half of it good news, or no run gets far. One choice for each event keeps generating it cheap.
    return st.lists(st.sampled_from([Event()] * len(of) + of), min_size=1, max_size=40)


quiet_scripts = scripts(QUIET)
any_scripts = scripts(QUIET + LOUD)


@dataclass(frozen=True)
class Definition:
    """A saga as `saga_of` is told of it."""

    steps: str
    tries: int

    @property
    def saga(self) -> Saga[Context]:
        return saga_of(self.steps, self.tries)


@st.composite
def definitions(draw: st.DrawFn) -> Definition:
    """0 to 4 steps before the pivot, perhaps a pivot, then 0 to 3 steps; never none at all."""
    flags = st.sampled_from(["", "", "?", "?", "t", "t?"])
    before = draw(st.lists(st.sampled_from("cccn"), max_size=4) | st.lists(st.just("n"), max_size=4))
    pivot = draw(st.booleans()) or not before
    after = draw(st.integers(0, 3)) if pivot else 0
    kinds = [*before, *("p" if pivot else ""), *("r" * after)]
    steps = " ".join(f"s{n}:{kind}{draw(flags)}" for n, kind in enumerate(kinds, 1))
    return Definition(steps, draw(st.sampled_from([1, 2])))


@dataclass(frozen=True)
class Press:
    """Somebody asks for a stop at this action; the worker hears of it so many actions later, or when it has to."""

    at: int
    heard_after: int


presses = st.none() | st.builds(Press, st.integers(0, 30), st.integers(0, 10))
deadlines = st.none() | st.integers(0, 120)


# -------------------------------------------------------------------- the world


@dataclass(frozen=True)
class Decided:
    """A decision as it was made."""

    entries: int
    action: Action
    at: Any
    facts: Any


class World:
    """One run, the truth about it, and the oracle."""

    def __init__(
        self, definition: Definition, script: list[Event], press: Press | None = None, deadline_s: int | None = None
    ) -> None:
        self.saga = definition.saga
        self.run = History(self.saga)
        if deadline_s is not None:
            self.run.has_a_deadline(deadline_s)
        self.end: State | None = None
        self.stop_accepted = False
        self.decided: list[Decided] = []
        self._script = script
        self._press = press
        self._drains = 0
        self._judged = True
        # The truth.
        self._in_place = dict.fromkeys(self._names(), False)
        self._maybe = dict.fromkeys(self._names(), False)
        """A try of it has started, and no outcome since says that it did nothing."""
        self._tried: Counter[tuple[Activity, str]] = Counter()
        self._numbers: dict[tuple[Activity, str], list[int]] = {}
        self._taken_back: set[tuple[Activity, str]] = set()

    def live(self, *, judged: bool = True) -> World:
        """Drive the run until it comes to rest, `judged` by the oracle; or, for its journal's sake, for a while."""
        self._judged = judged
        while self.end is None and (judged or len(self.decided) < 100):
            assert len(self.decided) < ACTIONS_MAX, f"it does not come to rest: {words(self.decided[-1].action, START)}"
            event = self._script[len(self.decided) % len(self._script)]
            self._stop()
            self.run.later(event.seconds)
            action = self.run.action()
            if judged:
                self.check(action)
            self.decided.append(Decided(len(self.run.entries), action, self.run.now, self.run.facts))
            if isinstance(action, Settle | Hold):
                self._rest(action)
            elif event.before is Before.DIES:
                self._die(event)
            elif (
                event.before is Before.DRAINED and not isinstance(action, BeginRollback | Refuse) and self._may_drain()
            ):
                self.run.is_handed_back()
            else:
                self._do(action, event)
        if judged:
            self.check_end()
        return self

    def _stop(self) -> None:
        if self._press is None:
            return
        turn = len(self.decided)
        if turn == self._press.at and not self.run.facts.gate_passed:
            self.stop_accepted = True
        if self.stop_accepted and turn >= self._press.at + self._press.heard_after:
            self.run.is_stopped()

    def _rest(self, action: Settle | Hold) -> None:
        if action == Settle(State.COMPLETED) and self._passes_guard():
            return
        self.end = action.state

    def _passes_guard(self) -> bool:
        """Gate and settling are guarded writes; a stop makes them fail, and so the worker hears of it. True: it did."""
        if self.stop_accepted and not self.run.facts.gate_passed:
            self.run.is_stopped()
            return True
        return False

    def _do(self, action: Action, event: Event) -> None:
        match action:
            case Wait(until):
                self.run.now = until
                return
            case PassGate():
                if self._passes_guard():
                    return
                self.run.passes_gate()
            case BeginRollback():
                self.run.turns_back()
            case Refuse():
                self.run.refuses(action.step.name)
            case Perform():
                if not self._perform(action, event):
                    return
        if event.dies_after:
            self._die(event)

    def _die(self, event: Event) -> None:
        if self.run.entries or event.traceless:
            for _ in range(event.traceless):
                self.run.has_an_attempt_without_a_trace()
        self.run.take_over(State.PENDING if event.given_back and event.traceless else State.RUNNING)
        self._stop_is_seen()

    def _hand_back(self) -> None:
        self.run.is_handed_back()
        self._stop_is_seen()

    def _stop_is_seen(self) -> None:
        """A claim reads the run, and the stop on it."""
        if self.stop_accepted and not self.run.facts.gate_passed:
            self.run.is_stopped()

    def _may_drain(self) -> bool:
        self._drains += 1
        return self._drains <= DRAINS_MAX

    # ---------------------------------------------------------------- performing

    def _perform(self, action: Perform, event: Event) -> bool:
        """Perform it and journal what came of it; False when the worker did not live to go on."""
        name, activity = action.step.name, action.activity
        if self._judged:
            self._check_number(action)
        self._numbers.setdefault((activity, name), []).append(action.try_number)
        outcome = event.outcome
        if outcome in (Outcome.BROKEN_OFF, Outcome.BROKEN_OFF_AND_DIES) and not self._may_drain():
            outcome = Outcome.SUCCEEDS
        perform = {
            Activity.STEP: self._step,
            Activity.PROBE: self._probe,
            Activity.COMPENSATION: self._compensation,
        }[activity]
        return perform(action, outcome, event)

    def _step(self, action: Perform, outcome: Outcome, event: Event) -> bool:
        name, transactional = action.step.name, action.step.transactional
        if outcome is Outcome.FAILS and action.step.kind is StepKind.PIVOT and self._in_place[name]:
            outcome = Outcome.SUCCEEDS  # its participant honours the key
        if outcome is Outcome.SUCCEEDS:
            self._in_place[name] = True
            self.run.succeeds(name)
        elif outcome in (Outcome.FAILS, Outcome.TURNED_AWAY):
            self.run.raises(name, DEFINITE if outcome is Outcome.FAILS else NOT_NOW)
        elif transactional and outcome is Outcome.LOST:  # rolled back, so it had no effect
            self.run.raises(name, NOT_NOW)
        elif transactional:  # nor has a transaction that ended with its worker
            if outcome is not Outcome.DIES:
                self._taken_back.add((action.activity, name))
            return self._gone(outcome, event)
        else:
            self._in_place[name] |= event.effect
            self._maybe[name] = True
            if outcome is Outcome.LOST:
                self.run.raises(name, LOST)
                return True
            if outcome is not Outcome.DIES:
                self.run.is_broken_off(name)
            return self._gone(outcome, event)
        return True

    def _gone(self, outcome: Outcome, event: Event) -> bool:
        """The attempt is over, and another begins."""
        if outcome is Outcome.BROKEN_OFF:
            self._hand_back()
        else:
            self._die(event)
        return False

    def _probe(self, action: Perform, outcome: Outcome, event: Event) -> bool:
        name = action.step.name
        match outcome:
            case Outcome.SUCCEEDS if self._in_place[name]:
                self.run.finds(name)
            case Outcome.SUCCEEDS:
                self.run.finds_nothing(name)
            case Outcome.FAILS:
                self.run.cannot_ask(name, DEFINITE)
            case Outcome.TURNED_AWAY | Outcome.LOST:
                self.run.cannot_ask(name, LOST)
            case _:
                if outcome is Outcome.BROKEN_OFF:
                    self._taken_back.add((action.activity, name))
                return self._gone(outcome, event)
        return True

    def _compensation(self, action: Perform, outcome: Outcome, event: Event) -> bool:
        name = action.step.name
        if outcome in (Outcome.SUCCEEDS, Outcome.BROKEN_OFF, Outcome.BROKEN_OFF_AND_DIES):  # a drain lets it finish
            self._in_place[name] = False
            self.run.undoes(name)
            return True
        if outcome in (Outcome.LOST, Outcome.DIES):
            self._in_place[name] &= not event.effect
        if outcome is Outcome.DIES:
            self._die(event)
            return False
        self.run.cannot_undo(name, DEFINITE if outcome is Outcome.FAILS else LOST)
        return True

    # ---------------------------------------------------------------- the oracle

    def check(self, action: Action) -> None:
        """What must hold of every action, given what is really so."""
        rolling_back = any(entry.kind is Kind.ROLLBACK_BEGUN for entry in self.run.entries)
        if rolling_back:
            assert not isinstance(action, PassGate | Refuse | BeginRollback), "nothing leads forward from a rollback"
        match action:
            case Perform(Activity.COMPENSATION) | Wait(_, Perform(Activity.COMPENSATION)):
                assert rolling_back, "a rollback is journaled before its first compensation"
            case Perform() | Wait():
                assert not rolling_back, "nothing runs forward while rolling back"
            case PassGate() | BeginRollback(Cause.STOP | Cause.DEADLINE):
                assert not self.run.facts.gate_passed, "the gate is passed once, and nothing turns back behind it"
        if isinstance(action, Wait):
            assert self.run.now < action.until, "no wait is over before it begins"
        if isinstance(action, PassGate):
            self._check_gate()
        if isinstance(action, Perform):
            self._check_perform(action)
        assert action == self.run.action(), "the same question has the same answer"

    def _check_gate(self) -> None:
        facts = self.run.facts
        assert not facts.stop_asked, "no gate is passed after a stop"
        assert facts.deadline is None or self.run.now < facts.deadline, "no gate is passed after the deadline"

    def _check_perform(self, action: Perform) -> None:
        name, activity, facts = action.step.name, action.activity, self.run.facts
        done = self._journaled(Kind.STEP_SUCCEEDED) | self._journaled(Kind.PROBE_SUCCEEDED, payload=True)
        names = list(self._names())
        before = names[: names.index(name)]
        begun = self.run.entries[-1].next if self.run.entries else f"step:{names[0]}"
        latest = self.decided[-1] if self.decided else None
        if (
            latest
            and isinstance(latest.action, PassGate)
            and facts.gate_passed
            and latest.entries == len(self.run.entries)
        ):
            assert action.step.kind is StepKind.PIVOT, "what the gate lets through is the pivot"
            assert activity is Activity.STEP, "a pivot that was not let through is not asked about"
        else:
            assert begun == intent(action), "nothing begins that no entry announced: a crash would not know of it"
        told_of = [entry for entry in self.run.entries if entry.step == name and entry.kind is not Kind.ROLLBACK_BEGUN]
        if activity is Activity.COMPENSATION:
            self._check_due([entry for entry in told_of if entry.kind.startswith("compensation")])
            self._check_compensation(action, done)
            return
        self._check_due(told_of)
        if activity is Activity.STEP and self._maybe[name] and action.step.question is not None:
            assert told_of[-1].kind in (Kind.PROBE_SUCCEEDED, Kind.PROBE_FAILED), (
                "what is in doubt is asked about first"
            )
        assert name not in done, "what succeeded never runs again"
        assert done >= set(before), "no step begins before the ones before it are done"
        if action.step.kind in (StepKind.PIVOT, StepKind.FORWARD):
            assert facts.gate_passed, "no pivot begins before its gate"
        else:
            assert not facts.stop_asked, "no step begins after a stop"
            assert facts.deadline is None or self.run.now < facts.deadline, "no step begins after the deadline"
        if activity is Activity.PROBE:
            assert self._maybe[name] or self._may_have_died_in(name), "nobody asks about what never began"

    def _check_compensation(self, action: Perform, done: set[str]) -> None:
        name = action.step.name
        assert name not in self._journaled(Kind.COMPENSATION_SUCCEEDED), "what was undone is not undone again"
        assert name in done or self._maybe[name] or self._may_have_died_in(name), (
            "only what may have happened is undone"
        )
        assert (action.fate is Fate.KNOWN) == (name in done), "a compensation is told what is known"
        settled = self._journaled(Kind.COMPENSATION_SUCCEEDED) | self._journaled(Kind.COMPENSATION_FAILED)
        for step in reversed(self.saga.steps):
            if step.name == name:
                break
            assert not (step.kind is StepKind.PIVOT and self._in_place[step.name]), "the pivot happened"
            if step.undo is not None and (step.name in done or self._maybe[step.name]):
                assert step.name in settled, f"{step.name} is newer and comes first"

    def _check_due(self, told_of: list[Entry]) -> None:
        due = [entry.due_at for entry in told_of if entry.due_at is not None]
        assert not due or due[-1] <= self.run.now, "no try comes before it is due"

    def _check_number(self, action: Perform) -> None:
        key = (action.activity, action.step.name)
        numbers = self._numbers.get(key, [])
        if not numbers:
            assert action.try_number >= 1
        elif key in self._taken_back:  # handed back without an entry: as if it had not begun
            assert action.try_number >= numbers[-1]
            self._taken_back.discard(key)
        else:
            assert action.try_number > numbers[-1], "every try has a number of its own"

    def check_end(self) -> None:
        """What must hold of every run that has come to rest."""
        done = self._journaled(Kind.STEP_SUCCEEDED) | self._journaled(Kind.PROBE_SUCCEEDED, payload=True)
        pivot_happened = any(self._in_place[step.name] for step in self.saga.steps if step.kind is StepKind.PIVOT)
        if self.end is State.COMPLETED:
            assert done == set(self._names())
            assert all(self._in_place.values())
            assert not self.stop_accepted, "a stop accepted before the gate is honoured"
        if self.end in UNDONE:
            left = [step.name for step in self.saga.steps if step.undo is not None and self._in_place[step.name]]
            assert left == [], "nothing claims to be undone that is not"
            assert not pivot_happened, "the pivot is never compensated around"
        if self.run.facts.gate_passed:
            assert self.end not in (State.CANCELLED, State.TIMED_OUT)
        else:
            assert self.end not in (State.IN_DOUBT, State.FORWARD_INCOMPLETE)
        if self.end is State.CANCELLED:
            assert self.stop_accepted
        if self.end is State.TIMED_OUT:
            assert self.run.facts.deadline is not None
        if self.end is State.FAILED:
            assert all(step.kind is StepKind.UNCOMPENSATED for step in self.saga.steps)
        if self.end is State.COMPENSATION_FAILED:
            failed = self._journaled(Kind.COMPENSATION_FAILED)
            assert failed
            tried = failed | self._journaled(Kind.COMPENSATION_SUCCEEDED)
            owed = {step.name for step in self.saga.steps if step.undo is not None and self._in_place[step.name]}
            assert owed <= tried, "one failed compensation does not stop the others"
        if self.end is State.IN_DOUBT:
            pivot = next(step for step in self.saga.steps if step.kind is StepKind.PIVOT)
            assert not pivot.transactional
            assert pivot.question is None or self._journaled(Kind.PROBE_FAILED), "a pivot in doubt is asked about"
        assert self.end not in (State.PENDING, State.RUNNING, State.QUARANTINED)

    def _journaled(self, kind: Kind, *, payload: bool | None = None) -> set[str]:
        return {
            entry.step or ""
            for entry in self.run.entries
            if entry.kind is kind and (payload is None or payload == (entry.payload is not None))
        }

    def _may_have_died_in(self, name: str) -> bool:
        """Whether a worker was lost when this step was what came next: nobody knows that it had not begun."""
        entries = self.run.entries
        for before, entry in zip([None, *entries], entries, strict=False):
            announced = before.next or "" if before is not None else f"step:{next(iter(self._names()))}"
            traceless = entry.attempt - (before.attempt if before is not None else 1) > 1
            lost = entry.kind is Kind.TAKEN_OVER and (entry.taken_from is State.RUNNING or traceless)
            if lost and announced.endswith(f":{name}"):
                return True
        return False

    def _names(self) -> dict[str, None]:
        return {step.name: None for step in self.saga.steps}


# -------------------------------------------------------------------- what must hold


@most_thorough
@given(definitions(), any_scripts, presses, deadlines)
def test_no_world_breaks_a_rule(
    definition: Definition, script: list[Event], press: Press | None, deadline_s: int | None
) -> None:
    World(definition, script, press, deadline_s).live()


@thorough
@given(definitions(), any_scripts, presses, deadlines)
def test_the_journal_alone_decides_as_was_decided(
    definition: Definition, script: list[Event], press: Press | None, deadline_s: int | None
) -> None:
    world = World(definition, script, press, deadline_s).live()
    entries = world.run.entries
    saga = definition.saga
    assert told(saga, entries) == told(saga, entries) == world.run.progress
    progress, read = Progress.of(saga), 0
    for decided in world.decided:
        for entry in entries[read : decided.entries]:
            progress = progress.after(entry)
        read = decided.entries
        assert next_action(saga, progress, decided.facts, decided.at) == decided.action


@thorough
@given(definitions(), quiet_scripts)
def test_where_nobody_dies_tries_are_numbered_from_one_on_and_never_more_than_allowed(
    definition: Definition, script: list[Event]
) -> None:
    world = World(definition, script).live()
    for (activity, _), numbers in world._numbers.items():
        assert numbers == list(range(1, len(numbers) + 1))
        if activity is not Activity.PROBE:  # each new doubt gives the question its tries again
            assert len(numbers) <= definition.tries
    assert world.end is not State.BROKEN


@thorough
@given(definitions(), any_scripts)
def test_where_nobody_stops_it_and_no_deadline_is_set_a_run_is_neither_cancelled_nor_timed_out(
    definition: Definition, script: list[Event]
) -> None:
    assert World(definition, script).live().end not in (State.CANCELLED, State.TIMED_OUT)


@thorough
@given(definitions(), st.lists(st.just(Event()), min_size=1, max_size=1), presses)
def test_in_a_kind_world_a_run_completes_unless_it_is_stopped_in_time(
    definition: Definition, script: list[Event], press: Press | None
) -> None:
    world = World(definition, script, press).live()
    assert world.end is (State.CANCELLED if world.stop_accepted else State.COMPLETED)


@thorough
@given(definitions(), st.integers(0, 3))
def test_a_worker_that_always_dies_ends_in_a_broken_run(definition: Definition, traceless: int) -> None:
    world = World(definition, [Event(outcome=Outcome.DIES, traceless=traceless)]).live()
    assert world.end is State.BROKEN
    assert world.run.attempt <= 12 + traceless


# -------------------------------------------------------------------- journals that were tampered with

Change = Callable[[Entry], Entry]


def changed(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Change]:
    return st.fixed_dictionaries(fields).map(lambda values: lambda entry: replace(entry, **values))


names = st.sampled_from([None, "s1", "s2", "s3", "elsewhere", ""])
changes = st.one_of(
    changed(step=names),
    changed(kind=st.sampled_from(Kind)),
    changed(next=st.sampled_from([None, "", "step:s1", "step:elsewhere", "gate:s1", "settle:completed", "::", "step"])),
    changed(cause=st.none() | st.sampled_from(Cause)),
    changed(taken_from=st.none() | st.sampled_from(State)),
    changed(payload=st.sampled_from([None, b"", b"x"])),
    changed(attempt=st.integers(-1, 30)),
    changed(in_doubt=st.booleans()),
    changed(due_at=st.none() | st.just(START)),
    changed(at=st.just(START - timedelta(days=1))),
)


def folds_or_says_why(saga: Saga[Context], entries: list[Entry]) -> bool:
    """A journal is read, and has a next action, or is refused as a misfit; True when it was read."""
    try:
        progress = told(saga, entries)
    except JournalMisfit:
        return False
    for facts in (History(saga).facts, replace(History(saga).facts, gate_passed=True)):
        assert isinstance(intent(next_action(saga, progress, facts, START)), str)
    return True


def journal_of(world: World) -> list[Entry]:
    assume(world.run.entries)
    return list(world.run.entries)


@thorough
@given(definitions(), any_scripts, st.data())
def test_a_tampered_journal_is_read_or_refused_and_nothing_else(
    definition: Definition, script: list[Event], data: st.DataObject
) -> None:
    entries = journal_of(World(definition, script).live(judged=False))
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(0, len(entries) - 1))
        entries[index] = data.draw(changes)(entries[index])
    folds_or_says_why(definition.saga, entries)


@thorough
@given(definitions(), any_scripts, st.data())
def test_a_journal_with_an_entry_lost_repeated_or_moved_is_refused(
    definition: Definition, script: list[Event], data: st.DataObject
) -> None:
    entries = journal_of(World(definition, script).live(judged=False))
    assume(len(entries) >= 2)
    index = data.draw(st.integers(0, len(entries) - 2))
    tampered = data.draw(
        st.sampled_from(
            [
                entries[:index] + entries[index + 1 :],
                [*entries[: index + 1], entries[index], *entries[index + 1 :]],
                [*entries[:index], entries[index + 1], entries[index], *entries[index + 2 :]],
            ]
        )
    )
    assert not folds_or_says_why(definition.saga, tampered)
    renumbered = [replace(entry, seq=seq) for seq, entry in enumerate(tampered, 1)]
    folds_or_says_why(definition.saga, renumbered)


@thorough
@given(definitions(), definitions(), any_scripts)
def test_the_journal_of_another_saga_is_read_or_refused_and_nothing_else(
    definition: Definition, other: Definition, script: list[Event]
) -> None:
    folds_or_says_why(other.saga, journal_of(World(definition, script).live(judged=False)))


@thorough
@given(definitions(), any_scripts)
def test_a_journal_does_not_fit_a_saga_that_renamed_a_step_it_tells_of(
    definition: Definition, script: list[Event]
) -> None:
    entries = journal_of(World(definition, script).live(judged=False))
    spec = " ".join(f"other{n}:{step.kind.value}" for n, step in enumerate(definition.saga.steps))
    if any(entry.step is not None and entry.kind is not Kind.ROLLBACK_BEGUN for entry in entries):
        with pytest.raises(JournalMisfit):
            told(saga_of(spec), entries)


GOOD, BAD, UNKNOWN = Event(), Event(outcome=Outcome.FAILS), Event(outcome=Outcome.LOST)


@pytest.mark.parametrize(
    ("steps", "script", "press", "deadline_s", "end"),
    [
        ("s1:c s2:p s3:r", [GOOD], None, None, State.COMPLETED),
        ("s1:c s2:c", [GOOD, BAD, GOOD, GOOD], None, None, State.COMPENSATED),
        ("s1:c s2:p", [GOOD], Press(1, 0), None, State.CANCELLED),
        ("s1:c s2:p", [GOOD], None, 0, State.TIMED_OUT),
        ("s1:n", [BAD], None, None, State.FAILED),
        ("s1:p", [UNKNOWN], None, None, State.IN_DOUBT),
        ("s1:p?", [BAD, UNKNOWN], None, None, State.IN_DOUBT),
        ("s1:p s2:r", [GOOD, GOOD, BAD], None, None, State.FORWARD_INCOMPLETE),
        ("s1:c s2:c", [GOOD, BAD, GOOD, BAD], None, None, State.COMPENSATION_FAILED),
        ("s1:c", [Event(outcome=Outcome.DIES)], None, None, State.BROKEN),
    ],
)
def test_worlds_end_in_every_way_a_run_can(
    steps: str, script: list[Event], press: Press | None, deadline_s: int | None, end: State
) -> None:
    """The oracle is worth as much as the worlds are varied."""
    assert World(Definition(steps, tries=1), script, press, deadline_s).live().end is end
