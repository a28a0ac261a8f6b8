"""How long a run is put on hold when its payloads do not open, and when it is quarantined.

Pure, and the whole of it: the worker writes down what comes out of here and decides nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sagas.errors import OpenFailure

__all__ = ["DENIED_PATIENCE", "Hold", "next_hold"]

_SHORT_HOLD: Final = timedelta(seconds=15)
_LONGEST_HOLD: Final = timedelta(days=1)
_MICROSECOND: Final = timedelta(microseconds=1)

DENIED_PATIENCE: Final = timedelta(hours=1)
"""How long a key service's refusal is taken for a passing one: a policy that was edited wrongly is noticed by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """What becomes of a run after a claim that could not open it. All of it is written to the run in one go."""

    wait: timedelta
    """How long no worker tries again; of no use where it is quarantined."""
    count: int
    """Claims of this run that found its key lost, this one included. An operator's requeue keeps it."""
    denied_since: datetime | None
    """Since when the key service has refused us, without a claim that opened the run in between."""
    quarantine: bool
    """Whether the run is quarantined now, and waits for an operator."""


def next_hold(
    failure: OpenFailure,
    *,
    count: int,
    denied_since: datetime | None,
    now: datetime,
    lease: timedelta,
    denied_patience: timedelta = DENIED_PATIENCE,
) -> Hold:
    """What to do with a run whose claim ended in `failure`, after `count` claims that found its key lost.

    Transient: given back for a moment, at most a lease; nothing is counted. Denied: the same until it has lasted for
    `denied_patience`, then lost. Lost: on hold for two leases, twice as long each time, up to a day; quarantined on the
    claim whose hold would reach a day (the ninth at a five-minute lease), but never on the first. `now` and
    `denied_since` are the server's time. Crashes are not counted here, only claims that failed to open.
    """
    if lease <= timedelta(0):
        raise ValueError(f"a lease is longer than nothing, not {lease}")
    if failure is OpenFailure.DENIED:
        denied_since = min(denied_since or now, now)
        if now - denied_since < denied_patience:
            failure = OpenFailure.TRANSIENT
    if failure is OpenFailure.TRANSIENT:
        return Hold(wait=min(_SHORT_HOLD, lease), count=count, denied_since=denied_since, quarantine=False)
    claims = count + 1
    # In whole microseconds, which do not overflow as a timedelta would; sixty doublings of a single one outlast a day.
    doubled = (lease // _MICROSECOND) << min(claims, 60)
    reached = doubled >= _LONGEST_HOLD // _MICROSECOND
    return Hold(
        wait=_LONGEST_HOLD if reached else timedelta(microseconds=doubled),
        count=claims,
        denied_since=denied_since,
        quarantine=reached and claims > 1,
    )
