"""Names that must come out the same on every worker and at every try: run ids and idempotency keys."""

from __future__ import annotations

import hashlib

__all__ = ["compensation_key", "restart_id_of", "run_id_of", "step_key"]


def run_id_of(saga: str, key: str, tenant: str | None = None) -> str:
    """The id of the run of `saga` with this key, as 32 hex digits. Derived: the primary key makes starts idempotent.

    Each tenant has keys of its own. Where payloads are sealed, the id comes from `LookupKey.run_id` instead. No second
    unique index is needed, and none could hold across the shards of a collection sharded by run.
    """
    # The length keeps ("a", "b:c") and ("a:b", "c") apart.
    place = f"{len(saga)}:{saga}:{key}"
    if tenant is not None:
        place = f"tenant:{len(tenant)}:{tenant}:{place}"  # the length of a saga's name is a number, so these differ
    return hashlib.sha256(place.encode()).hexdigest()[:32]


def restart_id_of(run_id: str) -> str:
    """The id of the run that starts an undone one anew; derived, so that restarting twice gives one run."""
    return hashlib.sha256(f"restart:{run_id}".encode()).hexdigest()[:32]


def step_key(run_id: str, step: str) -> str:
    """A step's idempotency key: stable across tries, attempts, workers and versions of the saga."""
    return f"{run_id}/{step}"


def compensation_key(run_id: str, step: str) -> str:
    """A compensation's idempotency key: as stable, and another one than its step's."""
    return f"{run_id}/{step}/compensation"
