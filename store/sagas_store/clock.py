"""The server's clock, as a client can know it; and where this side's own readings and random tokens come from.

Lease and due times are the server's (`$$NOW` inside the update that writes them). Where a time must be known on this
side (an entry's `at`, a start's `due_at`, a deadline's comparison) it is the server's last reading plus what this
process's monotonic clock has counted since. This process's wall clock is never read, so it may be wrong by hours.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

__all__ = ["EPOCH", "Monotonic", "ServerClock", "monotonic", "new_token"]

Monotonic = Callable[[], float]
"""Seconds since some fixed moment, never going back."""

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_READING_VALID_S: Final = 60.0
"""How long a reading is preferred over a later, lower one. Bounds what a server that stepped its clock can cause."""


def monotonic() -> float:
    """The real monotonic clock. The only place that reads it; everybody else takes a `Monotonic` as an argument."""
    return time.monotonic()


def new_token() -> str:
    """128 random bits, as 32 hex digits: unique without asking anybody."""
    return secrets.token_hex(16)


class ServerClock:
    """Estimates the server's clock from readings of it; late by at most one network round trip, never early.

    Never early, because a reading is dated when it arrives, and it was taken before. A run that a client says
    is due now is therefore due now by the server's clock too.
    """

    def __init__(self, monotonic: Monotonic = monotonic) -> None:
        self._monotonic = monotonic
        self._read_at: float | None = None
        self._server_at_zero = EPOCH  # the server's time when our monotonic clock stood at 0

    @property
    def fresh(self) -> bool:
        """Whether a reading younger than a minute is at hand."""
        return self._read_at is not None and self._monotonic() - self._read_at < _READING_VALID_S

    def observe(self, server_time: datetime) -> None:
        """Take a reading of the server's clock (aware UTC) that has just arrived."""
        arrived = self._monotonic()
        server_at_zero = server_time - timedelta(seconds=arrived)
        # Among recent readings the highest is the one that travelled fastest, so the best one.
        if not self.fresh or server_at_zero >= self._server_at_zero:
            self._server_at_zero = server_at_zero
            self._read_at = arrived

    def now(self) -> datetime:
        """The server's time (aware UTC). Raises RuntimeError before the first reading: a guess would be wall time."""
        if self._read_at is None:
            raise RuntimeError("the server's clock has not been read yet: await MongoStore.sync_clock() first")
        return self._server_at_zero + timedelta(seconds=self._monotonic())
