"""The server's clock as a client knows it: never early, late by at most a trip, and no wall clock in it."""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sagas_store.clock
from sagas.clock import new_token
from sagas_store.clock import EPOCH, ServerClock, monotonic

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
ROUNDING = timedelta(microseconds=2)
"""Times are kept to the microsecond."""


class Outside:
    """A server and the network to it: a true time that only passes, and readings that arrive late."""

    def __init__(self) -> None:
        self.passed_s = 0.0
        self.stepped = timedelta(0)
        self.clock = ServerClock(lambda: 1000.0 + self.passed_s)

    @property
    def server_time(self) -> datetime:
        return NOON + timedelta(seconds=self.passed_s) + self.stepped

    def read(self, *, asking_s: float = 0, answering_s: float = 0) -> None:
        """Ask for the time: the question and the answer take so long."""
        self.passed_s += asking_s
        answer = self.server_time
        self.passed_s += answering_s
        self.clock.observe(answer)

    @property
    def late(self) -> timedelta:
        return self.server_time - self.clock.now()


@pytest.fixture
def outside() -> Outside:
    return Outside()


def test_before_the_first_reading_no_time_is_known_and_none_is_guessed() -> None:
    clock = ServerClock(lambda: 0.0)
    assert not clock.fresh
    with pytest.raises(RuntimeError, match=r"has not been read yet: await MongoStore\.sync_clock"):
        clock.now()


def test_a_reading_without_a_trip_is_exact_and_goes_on(outside: Outside) -> None:
    outside.read()
    outside.passed_s += 12.5
    assert outside.clock.now() == NOON + timedelta(seconds=12.5)


def test_times_are_aware_and_in_utc(outside: Outside) -> None:
    outside.read()
    assert outside.clock.now().tzinfo is UTC
    assert EPOCH.tzinfo is UTC


def test_it_is_late_by_what_the_answer_took(outside: Outside) -> None:
    outside.read(asking_s=5, answering_s=0.25)
    assert outside.late == timedelta(seconds=0.25)


def test_of_recent_readings_the_one_that_travelled_fastest_counts(outside: Outside) -> None:
    outside.read(answering_s=0.5)
    outside.read(answering_s=0.1)
    assert outside.late == timedelta(seconds=0.1)
    outside.read(answering_s=3)
    assert outside.late == timedelta(seconds=0.1)


@given(
    st.lists(
        st.tuples(st.floats(0, 30), st.floats(0, 30), st.floats(0, 200)),  # asking, answering, then some time
        min_size=1,
        max_size=20,
    )
)
def test_it_is_never_early_and_late_by_no_more_than_the_last_answer_took(
    readings: list[tuple[float, float, float]],
) -> None:
    outside = Outside()
    for asking_s, answering_s, pause_s in readings:
        outside.read(asking_s=asking_s, answering_s=answering_s)
        assert -ROUNDING <= outside.late <= timedelta(seconds=answering_s) + ROUNDING
        outside.passed_s += pause_s
        assert -ROUNDING <= outside.late <= timedelta(seconds=answering_s) + ROUNDING


def test_a_reading_is_fresh_for_a_minute(outside: Outside) -> None:
    outside.read()
    outside.passed_s += 59.9
    assert outside.clock.fresh
    outside.passed_s += 0.1
    assert not outside.clock.fresh


def test_a_stale_reading_still_tells_the_time(outside: Outside) -> None:
    outside.read()
    outside.passed_s += 3600
    assert outside.late == timedelta(0)


def test_a_server_that_steps_forward_is_followed_at_once(outside: Outside) -> None:
    outside.read()
    outside.stepped = timedelta(hours=1)
    outside.read()
    assert outside.late == timedelta(0)


def test_a_server_that_steps_back_is_followed_within_a_minute(outside: Outside) -> None:
    outside.read()
    outside.stepped = -timedelta(hours=1)
    for _ in range(59):
        outside.passed_s += 1
        outside.read()
        assert outside.late == -timedelta(hours=1)
    outside.passed_s += 1
    outside.read()
    assert outside.late == timedelta(0)


def test_no_wall_clock_is_read(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    class Frozen(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            raise AssertionError("a wall clock was read")

    def wall(*_: object) -> float:
        raise AssertionError("a wall clock was read")

    monkeypatch.setattr(sagas_store.clock, "datetime", Frozen)
    for name in ("time", "time_ns", "localtime", "gmtime"):
        monkeypatch.setattr(time, name, wall)
    outside.read()
    outside.passed_s += 5
    assert outside.clock.now() == NOON + timedelta(seconds=5)


def test_the_real_monotonic_clock_never_goes_back() -> None:
    readings = [monotonic() for _ in range(100)]
    assert readings == sorted(readings)
    assert ServerClock()._monotonic is monotonic


def test_tokens_are_32_hex_digits_and_differ() -> None:
    tokens = {new_token() for _ in range(1000)}
    assert len(tokens) == 1000
    assert all(len(token) == 32 and int(token, 16) >= 0 for token in tokens)
