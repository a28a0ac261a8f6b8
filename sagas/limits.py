"""How large a run's payloads may be. Workers, clients and operators are given the same limits."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from sagas.definition import STEPS_MAX, Saga
from sagas.errors import InvalidInput
from sagas_store.inserts import PAYLOAD_BYTES_MAX
from sagas_store.numbers import check_count

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How large things may be, as stored."""

    context_bytes_max: int = 1024 * 1024
    """One context. MongoDB's own limit for a document is 16 MiB; a run rewrites its context at every step."""
    run_bytes_max: int = STEPS_MAX * 1024 * 1024
    """All contexts of one run together. Room for the pivot and everything after it is checked before the pivot; the
    defaults always leave it: as many steps as a saga can have, each with the largest context."""

    def __post_init__(self) -> None:
        check_count("Limits.context_bytes_max", self.context_bytes_max, most=PAYLOAD_BYTES_MAX)  # a document's room
        check_count("Limits.run_bytes_max", self.run_bytes_max, most=sys.maxsize)
        if self.run_bytes_max < self.context_bytes_max:
            raise InvalidInput("Limits.run_bytes_max", "must not be less than context_bytes_max")

    def check_room(self, saga: Saga[Any]) -> None:
        """Raise InvalidInput if no run of `saga` could ever pass its pivot's gate, however small its contexts are."""
        if saga.pivot_at is None:
            return
        steps = len(saga.steps) - saga.pivot_at
        needed = steps * self.context_bytes_max
        if needed > self.run_bytes_max:
            raise InvalidInput(
                "Limits.run_bytes_max",
                f"is {self.run_bytes_max:,}, and saga {saga.name!r} needs {needed:,}: {steps} steps from its pivot on, "
                f"each of which may journal {self.context_bytes_max:,} bytes; raise it, or lower context_bytes_max",
            )
