"""The rules of a saga, one line each: what has happened, and what is next. Sections are those of docs/design.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from sagas.decide import (
    STALLED_MAX,
    Action,
    Activity,
    BeginRollback,
    Facts,
    Hold,
    PassGate,
    Perform,
    Progress,
    Refuse,
    Settle,
    Verdict,
    Wait,
    after_failure,
    intent,
    next_action,
)
from sagas.definition import Fate, Saga
from sagas.errors import JournalMisfit
from sagas.policy import Failure, RetryPolicy
from sagas_store.entries import Cause, Kind
from sagas_store.states import State
from tests.support.changing import replace
from tests.support.journals import DEFINITE, LOST, NOT_NOW, START, WAIT, Context, History, go_on, saga_of, told, words

ORDER = "reserve:c pack:c charge:p ship:r notify:r"
ASKING = "reserve:c? pack:c? charge:p? ship:r? notify:r?"
TRANSACTIONAL = "reserve:ct? pack:ct charge:pt? ship:rt?"
NO_PIVOT = "reserve:c pack:c"
PLAIN = "fetch:n store:n"
PIVOT_FIRST = "charge:p? ship:r"

Told = Callable[[History], History]


@dataclass(frozen=True)
class Rule:
    """When a run of `saga` has come this far, then this is next."""

    id: str
    sentence: str
    saga: str
    when: Told
    then: str
    facts: Facts = field(default_factory=Facts)


def at_pivot(run: History) -> History:
    return run.succeeds("reserve").succeeds("pack")


def in_pivot(run: History) -> History:
    return at_pivot(run).passes_gate()


def past_pivot(run: History) -> History:
    return in_pivot(run).succeeds("charge")


def rolling_back(run: History) -> History:
    """Turned back by a step that definitely did nothing, with two effects to undo."""
    return in_pivot(run).raises("charge", DEFINITE).turns_back()


FORWARD = [
    Rule("4.1", "a fresh run begins with its first step", ORDER, lambda run: run, "run reserve (try 1)"),
    Rule("4.2", "one step follows the other", ORDER, lambda run: run.succeeds("reserve"), "run pack (try 1)"),
    Rule("4.3", "after the pivot it goes on", ORDER, past_pivot, "run ship (try 1)"),
    Rule(
        "4.4",
        "with every step done it settles as completed",
        ORDER,
        lambda run: past_pivot(run).succeeds("ship").succeeds("notify"),
        "settle as completed",
    ),
    Rule(
        "4.5",
        "a plain durable function settles as completed too",
        PLAIN,
        lambda run: run.succeeds("fetch").succeeds("store"),
        "settle as completed",
    ),
    Rule(
        "13.1",
        "a worker lost before it settled: the next one settles, and no step runs",
        NO_PIVOT,
        lambda run: run.succeeds("reserve").succeeds("pack").loses_worker(),
        "settle as completed",
    ),
    Rule(
        "13.2",
        "an outcome that is journaled never runs again, whoever is lost afterwards",
        ORDER,
        lambda run: run.succeeds("reserve").loses_worker(),
        "run pack (try 2)",
    ),
]

IN_DOUBT = [
    Rule(
        "6.1",
        "a worker lost in its first step leaves it in doubt: turning back compensates it",
        ORDER,
        lambda run: run.loses_worker().is_stopped().turns_back(),
        "undo reserve (try 1, in doubt)",
    ),
    Rule(
        "6.2",
        "a worker lost in a later step leaves that in doubt, as the entry before it announced",
        ORDER,
        lambda run: run.succeeds("reserve").loses_worker().is_stopped().turns_back(),
        "undo pack (try 1, in doubt)",
    ),
    Rule(
        "6.3",
        "handed back before its first step, a run has nothing in doubt",
        ORDER,
        lambda run: run.is_handed_back().is_stopped().turns_back(),
        "settle as cancelled",
    ),
    Rule(
        "6.4",
        "handed back between two steps, the one announced has not begun",
        ORDER,
        lambda run: run.succeeds("reserve").is_handed_back().is_stopped().turns_back(),
        "undo reserve (try 1, known)",
    ),
    Rule(
        "6.5",
        "a start that was handed back is not counted",
        ORDER,
        lambda run: run.succeeds("reserve").is_handed_back().is_handed_back(),
        "run pack (try 1)",
    ),
    Rule(
        "6.6",
        "a step that a drain broke off is in doubt, though its run was handed back",
        ORDER,
        lambda run: run.is_broken_off("reserve").is_handed_back().is_stopped().turns_back(),
        "undo reserve (try 1, in doubt)",
    ),
    Rule(
        "6.7",
        "a step that a drain broke off runs again, as its second try",
        ORDER,
        lambda run: run.is_broken_off("reserve").is_handed_back(),
        "run reserve (try 2)",
    ),
    Rule(
        "6.8",
        "so does one whose worker was lost after it was broken off",
        ORDER,
        lambda run: run.is_broken_off("reserve").loses_worker(),
        "run reserve (try 2)",
    ),
    Rule(
        "6.9",
        "doubt outlives a later attempt that was handed back",
        ORDER,
        lambda run: run.loses_worker().is_handed_back().is_stopped().turns_back(),
        "undo reserve (try 1, in doubt)",
    ),
    Rule(
        "6.10",
        "a step may have begun when attempts without a trace lie between, whatever state the run was found in",
        ORDER,
        lambda run: (
            run.succeeds("reserve")
            .has_an_attempt_without_a_trace()  # took over from a lost worker, and was put aside before it could say so
            .is_handed_back()
            .is_stopped()
            .turns_back()
        ),
        "undo pack (try 1, in doubt)",
    ),
    Rule(
        "6.11",
        "the same before the first entry",
        ORDER,
        lambda run: run.has_an_attempt_without_a_trace().is_handed_back().is_stopped().turns_back(),
        "undo reserve (try 1, in doubt)",
    ),
    Rule(
        "6.12",
        "a wait that was handed back has begun nothing: the step failed for certain and is not compensated",
        ORDER,
        lambda run: run.raises("reserve", NOT_NOW).is_handed_back().is_stopped().turns_back(),
        "settle as cancelled",
    ),
    Rule(
        "6.13",
        "a step in doubt runs again under its own key when it has no probe",
        ORDER,
        lambda run: run.succeeds("reserve").loses_worker(),
        "run pack (try 2)",
    ),
    Rule(
        "6.14",
        "its success ends the doubt",
        ORDER,
        lambda run: run.loses_worker().succeeds("reserve").is_stopped().turns_back(),
        "undo reserve (try 1, known)",
    ),
    Rule(
        "6.15",
        "a worker lost after the rollback was decided, before it was journaled, leaves nothing more in doubt",
        ORDER,
        lambda run: run.raises("reserve", DEFINITE).loses_worker().turns_back(),
        "settle as compensated",
    ),
    Rule(
        "7.20",
        "a step in doubt is asked about when it has a probe",
        ASKING,
        lambda run: run.loses_worker(),
        "ask about reserve (try 1)",
    ),
    Rule(
        "7.21",
        "found: it counts as done, and the next step begins",
        ASKING,
        lambda run: run.loses_worker().finds("reserve"),
        "run pack (try 1)",
    ),
    Rule(
        "7.22",
        "found: it is known, and compensated as such",
        ASKING,
        lambda run: run.loses_worker().finds("reserve").is_stopped().turns_back(),
        "undo reserve (try 1, known)",
    ),
    Rule(
        "7.23",
        "not found: it runs again",
        ASKING,
        lambda run: run.loses_worker().finds_nothing("reserve"),
        "run reserve (try 2)",
    ),
    Rule(
        "7.24",
        "not found, and lost again: it is asked about again",
        ASKING,
        lambda run: run.loses_worker().finds_nothing("reserve").loses_worker(),
        "ask about reserve (try 2)",
    ),
    Rule(
        "7.25",
        "not found, and no answer again: it is asked about again, after the wait",
        ASKING,
        lambda run: run.loses_worker().finds_nothing("reserve").raises("reserve", LOST),
        "wait 10 s, then ask about reserve (try 2)",
    ),
    Rule(
        "7.26",
        "a question that fails in passing is asked again, after the wait",
        ASKING,
        lambda run: run.loses_worker().cannot_ask("reserve", LOST),
        "wait 10 s, then ask about reserve (try 2)",
    ),
    Rule(
        "7.27",
        "a question that fails for good leaves running it again",
        ASKING,
        lambda run: run.loses_worker().cannot_ask("reserve", DEFINITE),
        "run reserve (try 2)",
    ),
    Rule(
        "7.28",
        "so does one whose tries are spent",
        ASKING,
        lambda run: run.loses_worker().cannot_ask("reserve", LOST).cannot_ask("reserve", LOST),
        "run reserve (try 2)",
    ),
    Rule(
        "7.29",
        "a new doubt gives the question all its tries again",
        ASKING,
        lambda run: run.loses_worker().cannot_ask("reserve", DEFINITE).loses_worker().cannot_ask("reserve", LOST),
        "wait 10 s, then ask about reserve (try 3)",
    ),
    Rule(
        "7.32",
        "a question's tries are counted by the journal, across workers",
        ASKING,
        lambda run: run.loses_worker().cannot_ask("reserve", LOST).loses_worker().cannot_ask("reserve", LOST),
        "run reserve (try 2)",
    ),
    Rule(
        "7.30",
        "a worker lost while asking asks again",
        ASKING,
        lambda run: run.loses_worker().loses_worker(),
        "ask about reserve (try 2)",
    ),
    Rule(
        "7.31",
        "once a step before the pivot is spent nobody asks: its compensation finds out",
        ASKING,
        lambda run: run.raises("reserve", LOST).finds_nothing("reserve").raises("reserve", LOST),
        "turn back: reserve failed",
    ),
]

BEFORE_THE_PIVOT = [
    Rule(
        "7.1",
        "a definite failure turns the run back",
        ORDER,
        lambda run: run.succeeds("reserve").raises("pack", DEFINITE),
        "turn back: pack failed",
    ),
    Rule(
        "7.2",
        "so do tries spent while in doubt",
        ORDER,
        lambda run: run.raises("reserve", LOST).raises("reserve", LOST),
        "turn back: reserve failed",
    ),
    Rule(
        "7.3",
        "so do tries spent on being turned away",
        ORDER,
        lambda run: run.raises("reserve", NOT_NOW).raises("reserve", NOT_NOW),
        "turn back: reserve failed",
    ),
    Rule(
        "7.4",
        "one lost answer is no failure yet: it is tried again after the wait",
        ORDER,
        lambda run: run.raises("reserve", LOST),
        "wait 10 s, then run reserve (try 2)",
    ),
    Rule(
        "7.5",
        "when the wait is over it runs",
        ORDER,
        lambda run: run.raises("reserve", LOST).later(10),
        "run reserve (try 2)",
    ),
    Rule(
        "7.6",
        "the count is the journal's: a crash between two tries does not start it again",
        ORDER,
        lambda run: run.raises("reserve", LOST).loses_worker().raises("reserve", LOST),
        "turn back: reserve failed",
    ),
    Rule(
        "7.7",
        "a try that was broken off counts for nothing",
        ORDER,
        lambda run: run.is_broken_off("reserve").is_handed_back().raises("reserve", NOT_NOW),
        "wait 10 s, then run reserve (try 3)",
    ),
    Rule(
        "7.8",
        "a try whose worker was lost counts for nothing",
        ORDER,
        lambda run: run.loses_worker().raises("reserve", NOT_NOW),
        "wait 10 s, then run reserve (try 3)",
    ),
]

ROLLBACK = [
    Rule("7.40", "what succeeded is compensated, the newest first", ORDER, rolling_back, "undo pack (try 1, known)"),
    Rule(
        "7.41",
        "then the older ones",
        ORDER,
        lambda run: rolling_back(run).undoes("pack"),
        "undo reserve (try 1, known)",
    ),
    Rule(
        "7.42",
        "with everything undone it settles as compensated",
        ORDER,
        lambda run: rolling_back(run).undoes("pack").undoes("reserve"),
        "settle as compensated",
    ),
    Rule(
        "7.43",
        "a step that definitely failed has nothing to undo",
        ORDER,
        lambda run: run.succeeds("reserve").raises("pack", DEFINITE).turns_back(),
        "undo reserve (try 1, known)",
    ),
    Rule(
        "7.44",
        "a step spent in doubt is compensated, before the older ones",
        ORDER,
        lambda run: run.succeeds("reserve").raises("pack", LOST).raises("pack", LOST).turns_back(),
        "undo pack (try 1, in doubt)",
    ),
    Rule(
        "7.45",
        "a step that was in doubt once stays so: its later definite failure does not tell what the first try did",
        ORDER,
        lambda run: run.succeeds("reserve").loses_worker().raises("pack", DEFINITE).turns_back(),
        "undo pack (try 1, in doubt)",
    ),
    Rule(
        "7.46",
        "nor does being turned away later",
        ORDER,
        lambda run: run.raises("reserve", LOST).raises("reserve", NOT_NOW).turns_back(),
        "undo reserve (try 1, in doubt)",
    ),
    Rule(
        "7.47",
        "a step that was broken off is compensated although its next try failed definitely",
        ORDER,
        lambda run: run.is_broken_off("reserve").is_handed_back().raises("reserve", DEFINITE).turns_back(),
        "undo reserve (try 1, in doubt)",
    ),
    Rule(
        "7.48",
        "a step declared to need no compensation is passed over",
        "reserve:c price:n pack:c",
        lambda run: run.succeeds("reserve").succeeds("price").raises("pack", DEFINITE).turns_back(),
        "undo reserve (try 1, known)",
    ),
    Rule(
        "7.49",
        "one that needs none and is in doubt is passed over too",
        "reserve:c price:n",
        lambda run: run.succeeds("reserve").raises("price", LOST).raises("price", LOST).turns_back(),
        "undo reserve (try 1, known)",
    ),
    Rule(
        "7.50",
        "steps that were never reached are left alone",
        ORDER,
        lambda run: run.raises("reserve", DEFINITE).turns_back(),
        "settle as compensated",
    ),
    Rule(
        "7.51",
        "a failed compensation is tried again, and the older ones wait for it",
        ORDER,
        lambda run: rolling_back(run).cannot_undo("pack", NOT_NOW),
        "wait 10 s, then undo pack (try 2, known)",
    ),
    Rule(
        "7.52",
        "when its wait is over it runs",
        ORDER,
        lambda run: rolling_back(run).cannot_undo("pack", NOT_NOW).later(10),
        "undo pack (try 2, known)",
    ),
    Rule(
        "7.53",
        "one that failed for good does not stop the others",
        ORDER,
        lambda run: rolling_back(run).cannot_undo("pack", NOT_NOW).cannot_undo("pack", LOST),
        "undo reserve (try 1, known)",
    ),
    Rule(
        "7.54",
        "and then the run is held: nothing claims to be undone that is not",
        ORDER,
        lambda run: rolling_back(run).cannot_undo("pack", DEFINITE).undoes("reserve"),
        "hold as compensation_failed",
    ),
    Rule(
        "7.55",
        "so too when the oldest fails",
        ORDER,
        lambda run: rolling_back(run).undoes("pack").cannot_undo("reserve", DEFINITE),
        "hold as compensation_failed",
    ),
    Rule(
        "7.56",
        "a finished compensation does not repeat when a worker is lost",
        ORDER,
        lambda run: rolling_back(run).undoes("pack").loses_worker(),
        "undo reserve (try 2, known)",
    ),
    Rule(
        "7.57",
        "one whose worker was lost in it runs again",
        ORDER,
        lambda run: rolling_back(run).loses_worker(),
        "undo pack (try 2, known)",
    ),
    Rule(
        "7.58",
        "a compensation that was only announced, and handed back, is at its first try",
        ORDER,
        lambda run: rolling_back(run).is_handed_back(),
        "undo pack (try 1, known)",
    ),
    Rule(
        "7.59",
        "its tries are counted by the journal, across workers",
        ORDER,
        lambda run: rolling_back(run).cannot_undo("pack", NOT_NOW).loses_worker().cannot_undo("pack", NOT_NOW),
        "undo reserve (try 1, known)",
    ),
    Rule(
        "6.20",
        "once begun, nothing leads forward: not a new worker",
        ORDER,
        lambda run: run.succeeds("reserve").is_stopped().turns_back().loses_worker().is_handed_back(),
        "undo reserve (try 2, known)",
    ),
    Rule(
        "6.21",
        "not a second reason to turn back either",
        ORDER,
        lambda run: rolling_back(run).is_stopped().has_a_deadline(0),
        "undo pack (try 1, known)",
    ),
    Rule(
        "13.3",
        "a worker lost before it settled a rollback: the next one settles",
        ORDER,
        lambda run: rolling_back(run).undoes("pack").undoes("reserve").loses_worker(),
        "settle as compensated",
    ),
]

PIVOT = [
    Rule("9.1", "before the pivot the gate is passed", ORDER, at_pivot, "pass the gate to charge"),
    Rule("9.2", "then the pivot runs", ORDER, in_pivot, "run charge (try 1)"),
    Rule("9.3", "a pivot may come first", PIVOT_FIRST, lambda run: run, "pass the gate to charge"),
    Rule(
        "9.4",
        "a worker lost before the gate did not begin the pivot: the gate is still to be passed",
        ASKING,
        lambda run: at_pivot(run).loses_worker(),
        "pass the gate to charge",
    ),
    Rule(
        "9.5",
        "nor is there a doubt to be asked about once it is passed",
        ASKING,
        lambda run: at_pivot(run).loses_worker().passes_gate(),
        "run charge (try 2)",
    ),
    Rule(
        "9.6",
        "the same when the pivot comes first",
        PIVOT_FIRST,
        lambda run: run.loses_worker().passes_gate(),
        "run charge (try 2)",
    ),
    Rule(
        "9.7",
        "a run handed back between gate and pivot has not begun it",
        ASKING,
        lambda run: in_pivot(run).is_handed_back(),
        "run charge (try 1)",
    ),
    Rule(
        "9.8",
        "nor has one whose first entry says that a stop was refused",
        PIVOT_FIRST,
        lambda run: run.passes_gate().write(Kind.STOP_REFUSED),
        "run charge (try 1)",
    ),
    Rule(
        "7.60",
        "a pivot whose worker was lost is asked about",
        ASKING,
        lambda run: in_pivot(run).loses_worker(),
        "ask about charge (try 1)",
    ),
    Rule(
        "7.61",
        "without a probe it runs again under the same key",
        ORDER,
        lambda run: in_pivot(run).loses_worker(),
        "run charge (try 2)",
    ),
    Rule(
        "7.62",
        "a lost answer is asked about, after the wait",
        ASKING,
        lambda run: in_pivot(run).raises("charge", LOST),
        "wait 10 s, then ask about charge (try 1)",
    ),
    Rule(
        "7.63",
        "found: the run goes forward",
        ASKING,
        lambda run: in_pivot(run).raises("charge", LOST).finds("charge"),
        "run ship (try 1)",
    ),
    Rule(
        "7.64",
        "not found: it runs again",
        ASKING,
        lambda run: in_pivot(run).raises("charge", LOST).finds_nothing("charge"),
        "run charge (try 2)",
    ),
    Rule(
        "7.65",
        "a probe that cannot tell leaves running it again",
        ASKING,
        lambda run: in_pivot(run).loses_worker().cannot_ask("charge", DEFINITE),
        "run charge (try 2)",
    ),
    Rule(
        "7.66",
        "a definite failure turns back, though the gate is passed: only then is everything undone",
        ORDER,
        lambda run: in_pivot(run).raises("charge", DEFINITE),
        "turn back: charge failed",
    ),
    Rule(
        "7.67",
        "a definite answer under the same key settles an earlier doubt",
        ORDER,
        lambda run: in_pivot(run).raises("charge", LOST).raises("charge", DEFINITE),
        "turn back: charge failed",
    ),
    Rule(
        "7.68",
        "tries spent in doubt, and nobody to ask: an operator decides",
        ORDER,
        lambda run: in_pivot(run).raises("charge", LOST).raises("charge", LOST),
        "hold as in_doubt",
    ),
    Rule(
        "7.69",
        "with a probe it is asked about once more first",
        ASKING,
        lambda run: in_pivot(run).raises("charge", LOST).finds_nothing("charge").raises("charge", LOST),
        "ask about charge (try 2)",
    ),
    Rule(
        "7.70",
        "spent, and then not found: everything is undone",
        ASKING,
        lambda run: (
            in_pivot(run).raises("charge", LOST).finds_nothing("charge").raises("charge", LOST).finds_nothing("charge")
        ),
        "turn back: charge failed",
    ),
    Rule(
        "7.71",
        "spent, and then found: the run goes forward",
        ASKING,
        lambda run: in_pivot(run).raises("charge", LOST).finds_nothing("charge").raises("charge", LOST).finds("charge"),
        "run ship (try 1)",
    ),
    Rule(
        "7.72",
        "spent, and the probe cannot tell: an operator decides",
        ASKING,
        lambda run: (
            in_pivot(run)
            .raises("charge", LOST)
            .finds_nothing("charge")
            .raises("charge", LOST)
            .cannot_ask("charge", DEFINITE)
        ),
        "hold as in_doubt",
    ),
    Rule(
        "7.73",
        "being turned away is no answer: it settles no earlier doubt",
        ORDER,
        lambda run: in_pivot(run).raises("charge", LOST).raises("charge", NOT_NOW),
        "hold as in_doubt",
    ),
    Rule(
        "7.74",
        "nor one that a lost worker left",
        ORDER,
        lambda run: in_pivot(run).loses_worker().raises("charge", NOT_NOW).raises("charge", NOT_NOW),
        "hold as in_doubt",
    ),
    Rule(
        "7.75",
        "tries spent on being turned away, and never in doubt, turn back",
        ORDER,
        lambda run: in_pivot(run).raises("charge", NOT_NOW).raises("charge", NOT_NOW),
        "turn back: charge failed",
    ),
    Rule(
        "7.76",
        "held in doubt stays so, whoever takes over",
        ORDER,
        lambda run: in_pivot(run).raises("charge", LOST).raises("charge", LOST).loses_worker().is_handed_back(),
        "hold as in_doubt",
    ),
    Rule(
        "7.77",
        "rolling back after the pivot failed settles as compensated",
        "charge:p",
        lambda run: run.passes_gate().raises("charge", DEFINITE).turns_back(),
        "settle as compensated",
    ),
]

AFTER_THE_PIVOT = [
    Rule(
        "7.80",
        "a step is tried again",
        ORDER,
        lambda run: past_pivot(run).raises("ship", NOT_NOW),
        "wait 10 s, then run ship (try 2)",
    ),
    Rule(
        "7.81",
        "spent, it waits for an operator; nothing is compensated",
        ORDER,
        lambda run: past_pivot(run).raises("ship", NOT_NOW).raises("ship", NOT_NOW),
        "hold as forward_incomplete",
    ),
    Rule(
        "7.82",
        "a definite failure waits for an operator too",
        ORDER,
        lambda run: past_pivot(run).raises("ship", DEFINITE),
        "hold as forward_incomplete",
    ),
    Rule(
        "7.83",
        "spent in doubt without a probe: forward_incomplete, not in_doubt, for that is the pivot's",
        ORDER,
        lambda run: past_pivot(run).raises("ship", LOST).raises("ship", LOST),
        "hold as forward_incomplete",
    ),
    Rule(
        "7.84",
        "spent in doubt with a probe: it is asked about first",
        ASKING,
        lambda run: past_pivot(run).raises("ship", LOST).finds_nothing("ship").raises("ship", LOST),
        "ask about ship (try 2)",
    ),
    Rule(
        "7.85",
        "spent, and then found: it goes on",
        ASKING,
        lambda run: past_pivot(run).raises("ship", LOST).finds_nothing("ship").raises("ship", LOST).finds("ship"),
        "run notify (try 1)",
    ),
    Rule(
        "7.86",
        "spent, and then not found: an operator",
        ASKING,
        lambda run: (
            past_pivot(run).raises("ship", LOST).finds_nothing("ship").raises("ship", LOST).finds_nothing("ship")
        ),
        "hold as forward_incomplete",
    ),
    Rule(
        "7.87",
        "a step in doubt is asked about",
        ASKING,
        lambda run: past_pivot(run).loses_worker(),
        "ask about ship (try 1)",
    ),
]

TRANSACTIONS = [
    Rule(
        "7.90",
        "a worker lost in a transactional step: no entry, no effect, so it runs again and nobody asks",
        TRANSACTIONAL,
        lambda run: run.loses_worker(),
        "run reserve (try 2)",
    ),
    Rule(
        "7.91",
        "and nothing is compensated",
        TRANSACTIONAL,
        lambda run: run.loses_worker().is_stopped().turns_back(),
        "settle as cancelled",
    ),
    Rule(
        "7.92",
        "one that succeeded is",
        TRANSACTIONAL,
        lambda run: run.succeeds("reserve").loses_worker().is_stopped().turns_back(),
        "undo reserve (try 1, known)",
    ),
    Rule(
        "7.93",
        "a transactional pivot is never in doubt",
        TRANSACTIONAL,
        lambda run: in_pivot(run).loses_worker(),
        "run charge (try 2)",
    ),
    Rule(
        "7.94",
        "spent, it turns back",
        TRANSACTIONAL,
        lambda run: in_pivot(run).loses_worker().raises("charge", NOT_NOW).raises("charge", NOT_NOW),
        "turn back: charge failed",
    ),
]

STOPS_AND_DEADLINES = [
    Rule("9.10", "a stop before the first step turns back", ORDER, lambda run: run.is_stopped(), "turn back: stop"),
    Rule(
        "9.11", "a stop between two steps turns back", ORDER, lambda run: at_pivot(run).is_stopped(), "turn back: stop"
    ),
    Rule(
        "9.12",
        "honoured, it settles as cancelled",
        ORDER,
        lambda run: run.succeeds("reserve").is_stopped().turns_back().undoes("reserve"),
        "settle as cancelled",
    ),
    Rule(
        "9.13",
        "a stop after the gate is not honoured",
        ORDER,
        lambda run: in_pivot(run).is_stopped(),
        "run charge (try 1)",
    ),
    Rule("9.14", "nor one after the pivot", ORDER, lambda run: past_pivot(run).is_stopped(), "run ship (try 1)"),
    Rule(
        "9.15",
        "a stop ends the wait for a further try",
        ORDER,
        lambda run: run.raises("reserve", LOST).is_stopped(),
        "turn back: stop",
    ),
    Rule(
        "9.16",
        "a stop comes before asking about what is in doubt",
        ASKING,
        lambda run: run.loses_worker().is_stopped(),
        "turn back: stop",
    ),
    Rule(
        "9.17",
        "without a pivot the gate is passed by settling: a stop is honoured even after the last step",
        NO_PIVOT,
        lambda run: run.succeeds("reserve").succeeds("pack").is_stopped(),
        "turn back: stop",
    ),
    Rule(
        "9.18",
        "a stop does not tear a rollback: it goes on as it began",
        ORDER,
        lambda run: rolling_back(run).is_stopped().undoes("pack").undoes("reserve"),
        "settle as compensated",
    ),
    Rule(
        "9.19",
        "a failed rollback after a stop is held like any other",
        ORDER,
        lambda run: run.succeeds("reserve").is_stopped().turns_back().cannot_undo("reserve", DEFINITE),
        "hold as compensation_failed",
    ),
    Rule(
        "9.20",
        "a deadline that has passed turns back",
        ORDER,
        lambda run: run.has_a_deadline(5).succeeds("reserve").later(5),
        "turn back: deadline",
    ),
    Rule(
        "9.21",
        "one that has not passed changes nothing",
        ORDER,
        lambda run: run.has_a_deadline(5).succeeds("reserve").later(4.999),
        "run pack (try 1)",
    ),
    Rule(
        "9.22",
        "honoured, it settles as timed out",
        ORDER,
        lambda run: run.succeeds("reserve").has_a_deadline(0).turns_back().undoes("reserve"),
        "settle as timed_out",
    ),
    Rule(
        "9.23",
        "after the gate it is ignored",
        ORDER,
        lambda run: in_pivot(run).has_a_deadline(0),
        "run charge (try 1)",
    ),
    Rule(
        "9.24",
        "no wait before the gate is longer than the deadline",
        ORDER,
        lambda run: run.has_a_deadline(5).raises("reserve", LOST),
        "wait 5 s, then run reserve (try 2)",
    ),
    Rule(
        "9.25",
        "a wait that ends before the deadline is not lengthened",
        ORDER,
        lambda run: run.has_a_deadline(15).raises("reserve", LOST),
        "wait 10 s, then run reserve (try 2)",
    ),
    Rule(
        "9.26",
        "a wait after the gate is not cut short by a deadline",
        ORDER,
        lambda run: in_pivot(run).has_a_deadline(5).raises("charge", LOST),
        "wait 10 s, then run charge (try 2)",
    ),
    Rule(
        "9.27",
        "a stop is the reason where the deadline has passed too: a person asked",
        ORDER,
        lambda run: run.has_a_deadline(0).is_stopped(),
        "turn back: stop",
    ),
    Rule(
        "9.28",
        "without a pivot a deadline holds until the run is settled",
        NO_PIVOT,
        lambda run: run.succeeds("reserve").succeeds("pack").has_a_deadline(0),
        "turn back: deadline",
    ),
    Rule(
        "9.29",
        "a rollback announced for the deadline begins, though the clock goes back: no step begins unannounced",
        ORDER,
        lambda run: run.has_a_deadline(5).begins("reserve").later(6).succeeds("reserve").later(-2),
        "turn back: deadline",
    ),
    Rule(
        "9.30",
        "a result that arrives after the stop is kept, and compensated",
        ORDER,
        lambda run: run.begins("reserve").is_stopped().succeeds("reserve").turns_back(),
        "undo reserve (try 1, known)",
    ),
    Rule(
        "9.31",
        "a step that was broken off for a stop is in doubt",
        ORDER,
        lambda run: run.begins("reserve").is_stopped().is_broken_off("reserve").turns_back(),
        "undo reserve (try 1, in doubt)",
    ),
    Rule(
        "9.32",
        "a step that fails while the stop arrives is a stop all the same",
        ORDER,
        lambda run: run.begins("reserve").is_stopped().raises("reserve", DEFINITE),
        "turn back: stop",
    ),
    Rule(
        "9.33",
        "a lost worker does not forget the stop",
        ORDER,
        lambda run: run.succeeds("reserve").is_stopped().loses_worker().turns_back(),
        "undo pack (try 1, in doubt)",
    ),
]

PLAIN_FUNCTIONS = [
    Rule(
        "5.1",
        "a plain durable function that raised for good failed: there was nothing to undo",
        PLAIN,
        lambda run: run.succeeds("fetch").raises("store", DEFINITE),
        "settle as failed",
    ),
    Rule("5.2", "stopped, it is cancelled", PLAIN, lambda run: run.is_stopped().turns_back(), "settle as cancelled"),
    Rule(
        "5.3",
        "over its deadline, it is timed out",
        PLAIN,
        lambda run: run.has_a_deadline(0).turns_back(),
        "settle as timed_out",
    ),
    Rule(
        "5.4",
        "with a pivot it is no plain function",
        "price:n charge:p",
        lambda run: run.raises("price", DEFINITE).turns_back(),
        "settle as compensated",
    ),
    Rule(
        "5.5",
        "with one compensation it is none either",
        "price:n reserve:c",
        lambda run: run.raises("price", DEFINITE).turns_back(),
        "settle as compensated",
    ),
]

CRASH_LOOPS = [
    Rule(
        "7.100",
        "nine attempts in a row without an outcome are followed by a tenth",
        ORDER,
        lambda run: run.loses_worker(STALLED_MAX - 1),
        "run reserve (try 10)",
    ),
    Rule(
        "7.101",
        "ten are held as broken",
        ORDER,
        lambda run: run.loses_worker(STALLED_MAX),
        "hold as broken",
    ),
    Rule(
        "7.102",
        "attempts that left no trace at all count",
        ORDER,
        lambda run: [run.has_an_attempt_without_a_trace() for _ in range(STALLED_MAX - 1)][-1].loses_worker(),
        "hold as broken",
    ),
    Rule(
        "7.103",
        "an outcome begins the count anew",
        ORDER,
        lambda run: run.loses_worker(STALLED_MAX - 1).succeeds("reserve").loses_worker(STALLED_MAX),
        "run pack (try 11)",  # the attempt that succeeded is none of those without an outcome
    ),
    Rule(
        "7.104",
        "ten after that are held as broken too",
        ORDER,
        lambda run: run.loses_worker(STALLED_MAX - 1).succeeds("reserve").loses_worker(STALLED_MAX + 1),
        "hold as broken",
    ),
    Rule(
        "7.105",
        "an attempt that was handed back is no crash",
        ORDER,
        lambda run: [run.is_handed_back() for _ in range(3 * STALLED_MAX)][-1],
        "run reserve (try 1)",
    ),
    Rule(
        "7.106",
        "nor is one that was broken off by a drain",
        ORDER,
        lambda run: [run.is_broken_off("reserve").is_handed_back() for _ in range(3 * STALLED_MAX)][-1],
        "run reserve (try 31)",
    ),
    Rule(
        "7.107",
        "a drain in between does not hide a crash loop",
        ORDER,
        lambda run: run.loses_worker(5).is_handed_back().loses_worker(5),
        "hold as broken",
    ),
    Rule(
        "7.108",
        "a probe's answer is no outcome: a step that kills its worker each time is held, asked about or not",
        ASKING,
        lambda run: [run.loses_worker().finds_nothing("reserve") for _ in range(STALLED_MAX - 1)][-1].loses_worker(),
        "hold as broken",
    ),
    Rule(
        "7.109",
        "a rollback that kills its workers is held as well",
        ORDER,
        lambda run: rolling_back(run).loses_worker(STALLED_MAX + 1),
        "hold as broken",
    ),
    Rule(
        "7.110",
        "failures are outcomes: spent tries end the run, not a count of attempts",
        ORDER,
        lambda run: run.loses_worker(6).raises("reserve", LOST).loses_worker(6),
        "wait 10 s, then run reserve (try 14)",
    ),
    Rule(
        "7.112",
        "nor does a try that was broken off hide a crash loop",
        ORDER,
        lambda run: run.loses_worker(STALLED_MAX - 1).is_broken_off("reserve").is_handed_back().loses_worker(),
        "hold as broken",
    ),
    Rule(
        "7.111",
        "attempts that were given back without a trace (a key out of reach) are no crashes",
        ORDER,
        lambda run: [run.has_an_attempt_without_a_trace() for _ in range(3 * STALLED_MAX)][-1].is_handed_back(),
        "run reserve (try 2)",
    ),
]

SIZES = [
    Rule(
        "11.1",
        "where the run has no room for everything from the pivot on, the pivot fails before it runs",
        ORDER,
        at_pivot,
        "refuse charge",
        facts=Facts(bytes_max=4 + 299, bytes_each=100),
    ),
    Rule(
        "11.2",
        "just enough room is enough",
        ORDER,
        at_pivot,
        "pass the gate to charge",
        facts=Facts(bytes_max=4 + 300, bytes_each=100),
    ),
    Rule(
        "11.3",
        "and the run turns back",
        ORDER,
        lambda run: at_pivot(run).refuses("charge"),
        "turn back: charge failed",
        facts=Facts(bytes_max=0, bytes_each=1),
    ),
    Rule(
        "11.4",
        "once the gate is passed nothing is refused",
        ORDER,
        in_pivot,
        "run charge (try 1)",
        facts=Facts(bytes_max=None, bytes_each=100),
    ),
]

RULES = [
    *FORWARD,
    *IN_DOUBT,
    *BEFORE_THE_PIVOT,
    *ROLLBACK,
    *PIVOT,
    *AFTER_THE_PIVOT,
    *TRANSACTIONS,
    *STOPS_AND_DEADLINES,
    *PLAIN_FUNCTIONS,
    *CRASH_LOOPS,
    *SIZES,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.id} {rule.sentence}")
def test_rule(rule: Rule) -> None:
    run = rule.when(History(saga_of(rule.saga), rule.facts))
    assert words(run.action(), run.now) == rule.then


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_reads_the_same_from_the_journal_alone(rule: Rule) -> None:
    run = rule.when(History(saga_of(rule.saga), rule.facts))
    assert told(run.saga, run.entries) == run.progress


def test_every_rule_has_its_own_number() -> None:
    numbers = [rule.id for rule in RULES]
    assert sorted(numbers) == sorted(set(numbers))


def test_a_pivot_that_succeeded_is_past_the_gate_whatever_a_reader_knew_of_the_run() -> None:
    run = past_pivot(History(saga_of(ORDER))).is_stopped()
    late = replace(run.facts, gate_passed=False)
    assert words(next_action(run.saga, run.progress, late, run.now), run.now) == "run ship (try 1)"


@pytest.mark.parametrize(
    ("saga", "when", "in_doubt"),
    [
        (ORDER, lambda run: run.loses_worker(), True),
        (ORDER, lambda run: run.succeeds("reserve").loses_worker(), True),
        (ORDER, lambda run: run.succeeds("reserve").has_an_attempt_without_a_trace().is_handed_back(), True),
        (ORDER, lambda run: in_pivot(run).loses_worker(), True),
        (ORDER, lambda run: past_pivot(run).loses_worker(), True),
        (ORDER, lambda run: run.is_handed_back(), False),
        (ORDER, lambda run: run.succeeds("reserve").is_handed_back(), False),
        (ORDER, lambda run: run.is_broken_off("reserve").loses_worker(), False),  # its own entry says so
        (ORDER, lambda run: at_pivot(run).loses_worker(), False),
        (PIVOT_FIRST, lambda run: run.loses_worker(), False),
        (ASKING, lambda run: run.loses_worker().loses_worker(), False),  # lost while asking
        (ORDER, lambda run: run.raises("reserve", DEFINITE).loses_worker(), False),
        (ORDER, lambda run: rolling_back(run).loses_worker(), False),
        (NO_PIVOT, lambda run: run.succeeds("reserve").succeeds("pack").loses_worker(), False),
        (TRANSACTIONAL, lambda run: run.loses_worker(), False),
        (TRANSACTIONAL, lambda run: in_pivot(run).loses_worker(), False),
    ],
)
def test_a_takeover_says_whether_it_leaves_a_step_in_doubt(saga: str, when: Told, in_doubt: bool) -> None:
    assert when(History(saga_of(saga))).entries[-1].in_doubt is in_doubt


def test_what_succeeded_is_not_in_doubt_any_more() -> None:
    run = History(saga_of(ASKING)).loses_worker().finds("reserve")
    assert run.progress.steps[0].succeeded
    assert not run.progress.steps[0].in_doubt


# -------------------------------------------------------------------- what a failed try means


def verdict_on(run: History, failure: Failure, *, after_s: float = 0) -> Verdict:
    """What a failure of the action that is due means, `after_s` from now."""
    action = run.action()
    assert isinstance(action, Perform)
    return after_failure(run.progress, action, failure, run.later(after_s).now, lambda failed: failed * WAIT)


FRESH: dict[str, Told] = {"before": lambda run: run, "pivot": in_pivot, "after": past_pivot}
DOUBTFUL: dict[str, Told] = {
    "before": lambda run: run.loses_worker(),
    "pivot": lambda run: in_pivot(run).loses_worker(),
    "after": lambda run: past_pivot(run).loses_worker(),
}


@pytest.mark.parametrize("place", ["before", "pivot", "after"])
@pytest.mark.parametrize("failure", [DEFINITE, NOT_NOW, LOST])
def test_a_try_of_a_step_that_was_not_in_doubt_is_in_doubt_as_it_says_itself(place: str, failure: Failure) -> None:
    assert verdict_on(FRESH[place](History(saga_of(ORDER))), failure).in_doubt is failure.in_doubt


@pytest.mark.parametrize(
    ("place", "failure", "in_doubt"),
    [
        ("before", DEFINITE, True),
        ("before", NOT_NOW, True),
        ("before", LOST, True),
        ("pivot", DEFINITE, False),  # the same key was asked for again, and the answer is no
        ("pivot", NOT_NOW, True),
        ("pivot", LOST, True),
        ("after", DEFINITE, True),
        ("after", NOT_NOW, True),
        ("after", LOST, True),
    ],
)
def test_a_step_that_was_in_doubt_stays_so_except_for_a_pivot_that_answers_definitely(
    place: str, failure: Failure, in_doubt: bool
) -> None:
    assert verdict_on(DOUBTFUL[place](History(saga_of(ORDER))), failure).in_doubt is in_doubt


@pytest.mark.parametrize("failure", [DEFINITE, NOT_NOW])
def test_a_transactional_step_is_never_journaled_as_in_doubt(failure: Failure) -> None:
    assert verdict_on(History(saga_of(TRANSACTIONAL)).loses_worker(), failure).in_doubt is False


def test_neither_a_probe_nor_a_compensation_is_ever_in_doubt() -> None:
    asking = History(saga_of(ASKING)).loses_worker()
    undoing = rolling_back(History(saga_of(ORDER)))
    assert verdict_on(asking, LOST) == Verdict(Kind.PROBE_RETRY_SCHEDULED, in_doubt=False, due_at=START + WAIT)
    assert verdict_on(undoing, LOST) == Verdict(Kind.COMPENSATION_RETRY_SCHEDULED, in_doubt=False, due_at=START + WAIT)


def test_each_kind_of_work_fails_under_its_own_name() -> None:
    assert verdict_on(History(saga_of(ORDER)), DEFINITE).kind is Kind.STEP_FAILED
    assert verdict_on(History(saga_of(ASKING)).loses_worker(), DEFINITE).kind is Kind.PROBE_FAILED
    assert verdict_on(rolling_back(History(saga_of(ORDER))), DEFINITE).kind is Kind.COMPENSATION_FAILED


def test_a_failure_for_good_is_due_at_no_time() -> None:
    assert verdict_on(History(saga_of(ORDER)), DEFINITE).due_at is None


def test_the_wait_grows_with_the_tries_that_failed() -> None:
    run = History(saga_of(ORDER, tries=3)).raises("reserve", LOST).later(10)
    verdict = verdict_on(run, LOST)
    assert verdict.kind is Kind.STEP_RETRY_SCHEDULED
    assert verdict.due_at == run.now + 2 * WAIT


@pytest.mark.parametrize(("seconds", "waited"), [(3600, 3600), (1, 10), (0, 10)])
def test_retry_after_lengthens_the_wait_and_never_shortens_it(seconds: int, waited: int) -> None:
    failure = replace(NOT_NOW, retry_after=timedelta(seconds=seconds))
    assert verdict_on(History(saga_of(ORDER)), failure).due_at == START + timedelta(seconds=waited)


@pytest.mark.parametrize("tries", [1, 2, 5])
def test_there_are_as_many_tries_as_the_policy_says(tries: int) -> None:
    run = History(saga_of(ORDER, tries=tries))
    for _ in range(tries - 1):
        assert run.raises("reserve", LOST).entries[-1].kind is Kind.STEP_RETRY_SCHEDULED
    assert run.raises("reserve", LOST).entries[-1].kind is Kind.STEP_FAILED


def lasting(max_elapsed: timedelta) -> History:
    """A run of one step that is tried for so long, one failure behind it."""
    saga = Saga("lasting", Context)
    retry = RetryPolicy(max_attempts=None, max_elapsed=max_elapsed, initial_wait=WAIT, max_wait=WAIT, jitter=False)
    saga.step(name="reserve", retry=retry, no_compensation=True)(go_on)
    return History(saga).raises("reserve", LOST).later(10)


def test_a_step_is_tried_for_as_long_as_the_policy_says() -> None:
    assert verdict_on(lasting(timedelta(hours=1)), LOST, after_s=3000).kind is Kind.STEP_RETRY_SCHEDULED
    assert verdict_on(lasting(timedelta(hours=1)), LOST, after_s=3600).kind is Kind.STEP_FAILED


def test_the_time_is_counted_from_the_first_failure_not_from_the_last() -> None:
    run = lasting(timedelta(seconds=100))
    for _ in range(3):
        run.begins("reserve").later(20).raises("reserve", LOST)
    assert run.begins("reserve").later(20).raises("reserve", LOST).entries[-1].kind is Kind.STEP_FAILED


def test_no_try_begins_later_than_max_elapsed_after_the_first_failure() -> None:
    # One second is left, and the wait takes twenty.
    assert verdict_on(lasting(timedelta(hours=1)), LOST, after_s=3600 - 10 - 1).kind is Kind.STEP_FAILED


def test_a_retry_after_beyond_max_elapsed_ends_the_tries() -> None:
    failure = replace(NOT_NOW, retry_after=timedelta(days=1))
    assert verdict_on(lasting(timedelta(hours=1)), failure).kind is Kind.STEP_FAILED


# -------------------------------------------------------------------- journals that do not fit


@dataclass(frozen=True)
class Misfit:
    """One entry is changed, and the journal does not fit any more."""

    sentence: str
    when: Told
    changes: dict[str, Any]
    message: str


def renumbered(run: History) -> History:
    return run.succeeds("reserve").succeeds("pack")


MISFITS = [
    Misfit("a gap", renumbered, {"seq": 3}, "entry 3 where 2 was expected"),
    Misfit("a repeated number", renumbered, {"seq": 1}, "entry 1 where 2 was expected"),
    Misfit("an unknown step", renumbered, {"step": "wrap"}, "'wrap', which the definition does not have"),
    Misfit("an outcome without a step", renumbered, {"step": None}, "None, which the definition does not have"),
    Misfit("a step out of turn", renumbered, {"step": "charge"}, "'charge' at place 2, the definition has it at 3"),
    Misfit("a step that was done before", renumbered, {"step": "reserve"}, "'reserve' at place 2, .* at 1"),
    Misfit("a success without a context", renumbered, {"payload": None}, "pack"),
    Misfit("a compensation with no rollback", renumbered, {"kind": Kind.COMPENSATION_SUCCEEDED}, "wrong side"),
    Misfit(
        "a step while rolling back",
        lambda run: rolling_back(run).undoes("pack"),
        {"kind": Kind.STEP_SUCCEEDED},
        r"entry 5 \(step_succeeded\) is on the wrong side",
    ),
    Misfit(
        "a step broken off while rolling back",
        lambda run: rolling_back(run).undoes("pack"),
        {"kind": Kind.INTERRUPTED},
        r"entry 5 \(interrupted\) is on the wrong side",
    ),
    Misfit(
        "a second rollback",
        lambda run: rolling_back(run).undoes("pack"),
        {"kind": Kind.ROLLBACK_BEGUN, "cause": Cause.STOP},
        "entry 5 begins a second rollback",
    ),
    Misfit("a rollback without a cause", rolling_back, {"cause": None}, "cause"),
]


@pytest.mark.parametrize("misfit", MISFITS, ids=lambda misfit: misfit.sentence)
def test_a_journal_that_does_not_fit_says_where(misfit: Misfit) -> None:
    run = misfit.when(History(saga_of(ORDER)))
    *before, last = run.entries
    progress = told(run.saga, before)
    with pytest.raises(JournalMisfit, match=misfit.message):
        progress.after(replace(last, **misfit.changes))


# -------------------------------------------------------------------- what stands beside the rules


def test_the_newest_context_is_the_last_steps_or_what_a_probe_found() -> None:
    run = History(saga_of(ASKING))
    assert run.progress.context_seq is None
    assert run.succeeds("reserve", size=100).progress.context_seq == 1
    run.loses_worker().finds("pack")
    assert run.progress.context_seq == 3
    assert run.progress.payload_bytes == 102
    asked = run.passes_gate().raises("charge", LOST).finds_nothing("charge")
    assert asked.progress.context_seq == 3


def test_a_rollback_knows_what_it_began_with() -> None:
    stopped = History(saga_of(ORDER)).is_stopped().turns_back().progress
    assert (stopped.rollback, stopped.turned_at) == (Cause.STOP, None)
    failed = rolling_back(History(saga_of(ORDER))).progress
    assert (failed.rollback, failed.turned_at) == (Cause.STEP_FAILED, "charge")


STEP = saga_of(ASKING).steps[0]


@pytest.mark.parametrize(
    ("action", "announced"),
    [
        (Perform(Activity.STEP, STEP, 1), "step:reserve"),
        (Perform(Activity.PROBE, STEP, 1), "probe:reserve"),
        (Perform(Activity.COMPENSATION, STEP, 1, Fate.IN_DOUBT), "compensation:reserve"),
        (Wait(START, Perform(Activity.PROBE, STEP, 1)), "probe:reserve"),
        (Refuse(STEP, "no room"), "step:reserve"),
        (BeginRollback(Cause.STOP, None), "rollback:stop"),
        (BeginRollback(Cause.STEP_FAILED, "reserve"), "rollback:step_failed"),
        (Hold(State.IN_DOUBT, "unknown"), "hold:in_doubt"),
        (Settle(State.COMPLETED), "settle:completed"),
    ],
)
def test_an_entry_announces_what_begins_next(action: Action, announced: str) -> None:
    assert intent(action) == announced


def test_what_the_gate_lets_through_is_announced_as_something_of_that_step() -> None:
    assert intent(PassGate(STEP)).endswith(":reserve")


def test_an_action_calls_the_part_it_means() -> None:
    assert Perform(Activity.STEP, STEP, 1).part is STEP.forward
    assert Perform(Activity.PROBE, STEP, 1).part is STEP.question
    assert Perform(Activity.COMPENSATION, STEP, 1).part is STEP.undo


def hold_of(run: History) -> str:
    action = run.action()
    assert isinstance(action, Hold)
    return action.reason


def test_the_reason_of_a_hold_says_what_an_operator_has_to_know() -> None:
    unknown = in_pivot(History(saga_of(ORDER))).raises("charge", LOST).raises("charge", LOST)
    assert hold_of(unknown) == "whether charge (the pivot) happened is unknown, and it has no probe"
    asked = in_pivot(History(saga_of(ASKING, tries=1))).raises("charge", LOST).cannot_ask("charge", LOST)
    assert hold_of(asked) == "whether charge (the pivot) happened is unknown, and its probe failed too"
    spent = past_pivot(History(saga_of(ORDER))).raises("ship", NOT_NOW).raises("ship", DEFINITE)
    assert hold_of(spent) == "ship failed for good after the pivot (2 tries)"
    at_once = past_pivot(History(saga_of(ORDER))).raises("ship", DEFINITE)
    assert hold_of(at_once) == "ship failed for good after the pivot (1 try)"
    unfinished = rolling_back(History(saga_of(ORDER))).cannot_undo("pack", DEFINITE).cannot_undo("reserve", DEFINITE)
    assert hold_of(unfinished) == "still to be undone: pack, reserve"


def test_a_crash_loop_is_held_with_the_place_where_it_dies() -> None:
    reason = hold_of(History(saga_of(ORDER)).succeeds("reserve").loses_worker(STALLED_MAX + 1))
    assert reason.startswith("10 attempts in a row ended without an outcome in step:pack")


def test_a_refused_pivot_says_how_much_room_there_is_and_would_have_to_be() -> None:
    action = at_pivot(History(saga_of(ORDER), Facts(bytes_max=4 + 1_000, bytes_each=1_000))).action()
    assert isinstance(action, Refuse)
    assert "3 steps from the pivot on may journal 1,000 bytes each, and the run has 1,000 bytes left" in action.reason


def test_the_same_question_has_the_same_answer() -> None:
    run = in_pivot(History(saga_of(ASKING))).raises("charge", LOST)
    assert run.action() == run.action()
    assert run.progress == told(run.saga, run.entries) == told(run.saga, run.entries)


def test_a_journal_is_read_without_changing_what_was_read_before() -> None:
    run = History(saga_of(ORDER))
    before = run.progress
    run.succeeds("reserve").loses_worker()
    assert before == Progress.of(run.saga)


def test_a_persons_entry_hides_no_lost_worker() -> None:
    """Held as broken before it could announce its takeover, and resumed: the lost worker's step stays in doubt."""
    run = History(saga_of(ORDER)).succeeds("reserve").has_an_attempt_without_a_trace()
    assert words(run.write(Kind.RESUMED).action(), run.now) == "run pack (try 1)"
    run.is_handed_back().is_stopped().turns_back()
    assert words(run.action(), run.now) == "undo pack (try 1, in doubt)"


def test_a_persons_entry_hides_no_lost_worker_before_the_first_entry() -> None:
    run = History(saga_of(ORDER)).has_an_attempt_without_a_trace()
    run.write(Kind.RESUMED).is_handed_back().is_stopped().turns_back()
    assert words(run.action(), run.now) == "undo reserve (try 1, in doubt)"
