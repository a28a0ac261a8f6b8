"""A lease as its holder sees it: by this process's monotonic clock, ended a margin before the server ends it."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from sagas.clock import Monotonic
from sagas_store.errors import SagaError

__all__ = ["Lease", "LeaseLapsed"]

_MARGIN: Final = 0.1
"""The part of a lease that the holder does not use: what a write in flight and two clocks' drift may need."""


class LeaseLapsed(SagaError):
    """The lease may be over, and no renewal got through in time. Whoever held it stops and writes nothing more."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"run {run_id}: its lease may be over; another worker may drive it")
        self.run_id = run_id


class Lease:
    """The time for which a run may be driven. One object per run, renewed by the worker, checked by the executor."""

    __slots__ = ("_length_s", "_lost", "_monotonic", "_until", "length", "run_id", "token")

    def __init__(self, run_id: str, token: str, length: timedelta, *, asked_at: float, monotonic: Monotonic) -> None:
        """`asked_at` is when the claim was sent: the server's lease began after that."""
        self.run_id = run_id
        self.token = token
        self.length: Final = length
        """As the server was asked for."""
        self._length_s = length.total_seconds() * (1 - _MARGIN)
        self._monotonic = monotonic
        self._until = asked_at + self._length_s
        self._lost = False

    def renewed(self, asked_at: float) -> None:
        """A renewal that was sent at `asked_at` got through. It does not bring back a lease that was lost since."""
        if not self._lost:
            self._until = max(self._until, asked_at + self._length_s)

    def lose(self) -> None:
        """The server says that it is over."""
        self._lost = True
        self._until = float("-inf")

    @property
    def holds(self) -> bool:
        """Whether the run is still ours for certain."""
        return self._monotonic() < self._until

    def check(self) -> None:
        """Raise LeaseLapsed unless the run is still ours for certain."""
        if not self.holds:
            raise LeaseLapsed(self.run_id)
