"""How long a run waits when it does not open: a table, and what must hold whatever the numbers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagas.errors import OpenFailure
from sagas.quarantine import DENIED_PATIENCE, Hold, next_hold

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
TRANSIENT, DENIED, LOST = OpenFailure.TRANSIENT, OpenFailure.DENIED, OpenFailure.LOST


def minutes(*each: int) -> list[timedelta]:
    return [timedelta(minutes=one) for one in each]


# One line per lease: how long the run waits after each claim that finds its key lost. The next one quarantines it.
WAITS: dict[timedelta, list[timedelta]] = {
    timedelta(seconds=1): [timedelta(seconds=2**n) for n in range(1, 17)],
    MINUTE: minutes(2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    5 * MINUTE: minutes(10, 20, 40, 80, 160, 320, 640, 1280),
    HOUR: minutes(120, 240, 480, 960),
    3 * HOUR: minutes(360, 720),  # the third would reach exactly a day
    6 * HOUR: minutes(720),
    timedelta(hours=11): minutes(1320),
    12 * HOUR: [DAY],  # never the first, though its hold reaches a day
    13 * HOUR: [DAY],
    3 * DAY: [DAY],
}


@pytest.mark.parametrize("lease", WAITS, ids=str)
def test_a_lost_key_holds_for_two_leases_then_doubles_and_quarantines_where_it_would_reach_a_day(
    lease: timedelta,
) -> None:
    holds: list[Hold] = []
    while not holds or not holds[-1].quarantine:
        count = holds[-1].count if holds else 0
        holds.append(next_hold(LOST, count=count, denied_since=None, now=NOW, lease=lease))
    assert [hold.wait for hold in holds[:-1]] == WAITS[lease]
    assert [hold.count for hold in holds] == list(range(1, len(WAITS[lease]) + 2))


def test_at_a_five_minute_lease_it_is_the_ninth_claim_that_quarantines() -> None:
    verdicts = [next_hold(LOST, count=n, denied_since=None, now=NOW, lease=5 * MINUTE).quarantine for n in range(12)]
    assert verdicts == [False] * 8 + [True] * 4  # also every one after it: a requeue keeps the count


# failure, count, denied for so long -> wait, count, quarantine
TABLE: list[tuple[OpenFailure, int, timedelta | None, timedelta, int, bool]] = [
    (TRANSIENT, 0, None, timedelta(seconds=15), 0, False),
    (TRANSIENT, 8, None, timedelta(seconds=15), 8, False),  # on the brink, and not counted
    (TRANSIENT, 100, None, timedelta(seconds=15), 100, False),
    (TRANSIENT, 3, 5 * HOUR, timedelta(seconds=15), 3, False),  # it says nothing about the refusals before it
    (DENIED, 0, None, timedelta(seconds=15), 0, False),  # the first refusal begins the time
    (DENIED, 0, timedelta(minutes=59, seconds=59), timedelta(seconds=15), 0, False),
    (DENIED, 0, HOUR, 10 * MINUTE, 1, False),
    (DENIED, 1, 2 * HOUR, 20 * MINUTE, 2, False),
    (DENIED, 8, 3 * DAY, DAY, 9, True),
    (DENIED, 8, None, timedelta(seconds=15), 8, False),  # requeued: the time begins anew, the count does not
    (DENIED, 0, -HOUR, timedelta(seconds=15), 0, False),  # from the future: the server's clock was set back
    (LOST, 0, None, 10 * MINUTE, 1, False),
    (LOST, 0, 3 * DAY, 10 * MINUTE, 1, False),
    (LOST, 8, None, DAY, 9, True),
]


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_the_table(row: tuple[OpenFailure, int, timedelta | None, timedelta, int, bool]) -> None:
    failure, count, denied_for, wait, counted, quarantine = row
    since = NOW - denied_for if denied_for is not None else None
    hold = next_hold(failure, count=count, denied_since=since, now=NOW, lease=5 * MINUTE)
    if failure is DENIED:
        since = min(since or NOW, NOW)
    assert hold == Hold(wait=wait, count=counted, denied_since=since, quarantine=quarantine)


def test_a_short_hold_is_no_longer_than_a_lease() -> None:
    hold = next_hold(TRANSIENT, count=0, denied_since=None, now=NOW, lease=timedelta(seconds=2))
    assert hold.wait == timedelta(seconds=2)


def test_a_denied_run_is_quarantined_in_the_end() -> None:
    now, since, count, claims = NOW, None, 0, 0
    while True:
        hold = next_hold(DENIED, count=count, denied_since=since, now=now, lease=5 * MINUTE)
        claims += 1
        if hold.quarantine:
            break
        now, since, count = now + hold.wait, hold.denied_since, hold.count
    assert count + 1 == 9
    assert claims == DENIED_PATIENCE // timedelta(seconds=15) + 9
    assert now - NOW == DENIED_PATIENCE + timedelta(minutes=10 * 255)


@given(
    st.sampled_from(OpenFailure),
    st.integers(0, 10**9),
    st.none() | st.timedeltas(timedelta(0), timedelta(days=3650)),
    st.timedeltas(timedelta(microseconds=1), timedelta(days=3650)),
)
def test_whatever_the_numbers(failure: OpenFailure, count: int, denied_for: timedelta | None, lease: timedelta) -> None:
    since = NOW - denied_for if denied_for is not None else None
    hold = next_hold(failure, count=count, denied_since=since, now=NOW, lease=lease)
    assert timedelta(0) < hold.wait <= DAY
    assert hold.count in (count, count + 1)
    assert not hold.quarantine or hold.count == count + 1 > 1
    if failure is TRANSIENT:
        assert (hold.count, hold.denied_since, hold.quarantine) == (count, since, False)
    if failure is LOST:
        assert hold.count == count + 1
        later = next_hold(failure, count=hold.count, denied_since=since, now=NOW, lease=lease)
        assert later.wait >= hold.wait
        assert later.quarantine >= hold.quarantine


def test_a_lease_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than nothing"):
        next_hold(LOST, count=0, denied_since=None, now=NOW, lease=timedelta(0))
