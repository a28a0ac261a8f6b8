"""How large a run's payloads may be. Workers, clients and operators are given the same limits."""

from __future__ import annotations

from dataclasses import dataclass

from sagas.errors import InvalidInput
from sagas_store.inserts import PAYLOAD_BYTES_MAX

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How large things may be, as stored."""

    context_bytes_max: int = 1024 * 1024
    """One context. MongoDB's own limit for a document is 16 MiB; a run rewrites its context at every step."""
    run_bytes_max: int = 64 * 1024 * 1024
    """All contexts of one run together. Room for the pivot and everything after it is checked before the pivot."""

    def __post_init__(self) -> None:
        if not 1 <= self.context_bytes_max <= PAYLOAD_BYTES_MAX:
            raise InvalidInput(
                "Limits.context_bytes_max", f"must be from 1 to {PAYLOAD_BYTES_MAX:,} (a document's room)"
            )
        if self.run_bytes_max < self.context_bytes_max:
            raise InvalidInput("Limits.run_bytes_max", "must not be less than context_bytes_max")
