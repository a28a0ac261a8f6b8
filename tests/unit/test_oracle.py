"""The oracle itself: it must see what it is there to see. Each run here is doctored in one way."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from sagas import Saga, Step
from sagas.decide import Activity
from sagas.identity import compensation_key, step_key
from sagas.stopping import StopAnswer, StopOutcome
from sagas_store.entries import Cause, Entry, Kind
from sagas_store.records import Claim, RunRecord, Stop
from sagas_store.states import Decision, Phase, State
from tests.support.changing import replace
from tests.support.oracle import Call, faults

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Order(BaseModel):
    pass


saga = Saga("examined", Order)


@saga.step
async def reserve(order: Order, step: Step[Any]) -> Order:
    return order


@reserve.compensation
async def release(order: Order, step: Step[Any]) -> None:
    pass


@saga.pivot
async def charge(order: Order, step: Step[Any]) -> Order:
    return order


def entry(seq: int, kind: Kind, **more: Any) -> Entry:
    return Entry(run_id="r", seq=seq, kind=kind, at=NOW, attempt=1, worker="w", token="t", **more)


def call(order: int, activity: Activity, step: str, **more: Any) -> Call:
    key = compensation_key("r", step) if activity is Activity.COMPENSATION else step_key("r", step)
    return Call(order=order, activity=activity, step=step, key=key, attempt=1, try_number=1, **more)


RUN = RunRecord(
    run_id="r",
    saga=saga.name,
    version=1,
    fingerprint=saga.fingerprint,
    key=None,
    state=State.CANCELLED,
    phase=Phase.ROLLING_BACK,
    attempts=1,
    created_at=NOW,
    due_at=None,
    settled_at=NOW,
    gate_passed_at=None,
    claim=Claim("t", "w", 1, State.PENDING, NOW),
    held=None,
    input_read=b"",
    stop=Stop(Decision.WILL_BE_UNDONE, "ann", b"", NOW),
)
JOURNAL = [
    entry(1, Kind.STEP_SUCCEEDED, step="reserve", try_number=1, payload=b"", next="rollback:stop"),
    entry(2, Kind.ROLLBACK_BEGUN, cause=Cause.STOP, next="compensation:reserve"),
    entry(3, Kind.COMPENSATION_SUCCEEDED, step="reserve", try_number=1, next="settle:cancelled"),
]
LEDGER = [
    call(1, Activity.STEP, "reserve", applied=True, seen_seq=0),
    call(2, Activity.COMPENSATION, "reserve", applied=True, seen_seq=2),
]
ANSWER = StopAnswer("r", StopOutcome.WILL_BE_UNDONE, NOW, "ann", "why", "", "", True, State.RUNNING)


def test_a_run_that_was_stopped_and_undone_is_as_promised() -> None:
    assert faults(saga, RUN, JOURNAL, LEDGER, [ANSWER]) == []


def test_a_run_that_has_turned_back_may_never_be_completed() -> None:
    told = faults(saga, replace(RUN, state=State.COMPLETED, stop=None), JOURNAL, LEDGER)
    assert "The run is completed and had turned back." in told


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ({"state": State.COMPENSATED}, "turned back because of stop"),
        ({"state": State.TIMED_OUT}, "turned back because of stop"),
        ({"stop": None}, "nobody asked for it"),
        ({"stop": Stop(Decision.REFUSED, "ann", b"", NOW)}, "refused and the run is cancelled"),
        ({"stop": Stop(Decision.CANCELLED, "ann", b"", NOW)}, "nothing had run, and something ran"),
    ],
)
def test_where_it_ended_must_follow_from_why_it_turned_back_and_what_was_decided(
    run: dict[str, Any], says: str
) -> None:
    assert any(says in one for one in faults(saga, replace(RUN, **run), JOURNAL, LEDGER))


@pytest.mark.parametrize(
    "told",
    [
        {"outcome": StopOutcome.REFUSED},
        {"outcome": StopOutcome.CANCELLED},
        {"outcome": StopOutcome.ALREADY_SETTLED, "by": None, "asked_at": None},
        {"by": "bob"},
        {"asked_at": NOW + timedelta(seconds=1)},
    ],
)
def test_what_a_person_was_told_must_be_what_the_run_has(told: dict[str, Any]) -> None:
    (fault,) = faults(saga, RUN, JOURNAL, LEDGER, [replace(ANSWER, **told)])
    assert fault.startswith("The answer was")


def test_a_deadline_turns_back_only_runs_that_have_one_and_only_before_their_gate() -> None:
    journal = [JOURNAL[0], replace(JOURNAL[1], cause=Cause.DEADLINE), JOURNAL[2]]
    timed_out = replace(RUN, state=State.TIMED_OUT, stop=None, deadline=NOW)
    assert faults(saga, timed_out, journal, LEDGER) == []
    (fault,) = faults(saga, replace(timed_out, deadline=None), journal, LEDGER)
    assert "does not have" in fault
    (fault,) = faults(saga, replace(timed_out, gate_passed_at=NOW), journal, LEDGER)
    assert "had passed its gate" in fault


def test_a_compensation_may_neither_be_skipped_nor_journaled_twice() -> None:
    assert any("not journaled" in one for one in faults(saga, RUN, JOURNAL[:2], LEDGER))
    twice = [*JOURNAL, replace(JOURNAL[2], seq=4)]
    assert any("succeeded twice" in one for one in faults(saga, RUN, twice, LEDGER))
