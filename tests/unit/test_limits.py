"""Limits: what they let through, and that a saga which they would never let through is told so before it runs."""

from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel

from sagas import InvalidInput, Limits, MongoStore, Saga, Step, TenantDatabases, Worker, WorkerOptions
from sagas.decide import Facts, PassGate, Progress, next_action
from sagas.definition import STEPS_MAX
from sagas.tenant_worker import TenantWorker

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Order(BaseModel):
    pass


async def nothing(order: Order, step: Step[None]) -> Order:
    return order


def saga_of(steps: int, pivot_at: int | None) -> Saga[Order]:
    saga = Saga("long", Order)
    for place in range(steps):
        if place == pivot_at:
            saga.pivot(name="pivot")(nothing)
        else:
            before = pivot_at is None or place < pivot_at
            saga.step(name=f"step-{place}", no_compensation=before)(nothing)
    return saga


@pytest.mark.parametrize("pivot_at", [0, 1, STEPS_MAX // 2, STEPS_MAX - 1])
def test_with_the_defaults_the_longest_saga_with_the_largest_contexts_passes_its_gate(pivot_at: int) -> None:
    saga, limits = saga_of(STEPS_MAX, pivot_at), Limits()
    limits.check_room(saga)
    progress = Progress.of(saga)._replace(succeeded=pivot_at, payload_bytes=pivot_at * limits.context_bytes_max)
    facts = Facts(bytes_max=limits.run_bytes_max, bytes_each=limits.context_bytes_max)
    assert isinstance(next_action(saga, progress, facts, NOW), PassGate)


def test_a_saga_that_could_never_pass_its_gate_is_refused_with_what_to_change() -> None:
    limits = Limits(context_bytes_max=1000, run_bytes_max=2999)
    limits.check_room(saga_of(3, 1))
    limits.check_room(saga_of(3, None))
    with pytest.raises(InvalidInput) as refused:
        limits.check_room(saga_of(3, 0))
    assert refused.value.field == "Limits.run_bytes_max"
    assert str(refused.value) == (
        "Limits.run_bytes_max: is 2,999, and saga 'long' needs 3,000: 3 steps from its pivot on, each of which may "
        "journal 1,000 bytes; raise it, or lower context_bytes_max"
    )


@pytest.mark.parametrize(("kind", "served_from"), [(Worker, MongoStore), (TenantWorker, TenantDatabases)])
def test_a_worker_that_could_never_finish_its_saga_is_refused_when_it_is_made(kind: Any, served_from: Any) -> None:
    nobody = served_from.__new__(served_from)  # nothing is asked of it
    options = WorkerOptions(limits=Limits(context_bytes_max=1000, run_bytes_max=2999))
    kind(nobody, [saga_of(3, 1)], options=options)
    with pytest.raises(InvalidInput, match="run_bytes_max"):
        kind(nobody, [saga_of(3, 0)], options=options)
