"""What is executed: a five-step saga whose steps cost nothing, and one that waits."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pydantic import BaseModel

from sagas import Saga, Step

__all__ = ["CONTEXT_BYTES", "Order", "fulfil", "order", "wait"]

CONTEXT_BYTES = 300
"""Of a context as journaled, where nothing else is said."""


class Order(BaseModel):
    """The context."""

    number: int
    first_step_at: float = 0.0
    """By the machine's monotonic clock, which its processes share."""
    filling: str = ""


def order(number: int, *, size: int = CONTEXT_BYTES) -> Order:
    """A context of about `size` bytes."""
    return Order(number=number, filling="x" * max(0, size - 60))


fulfil = Saga("bench-fulfil", Order)


@fulfil.step
async def reserve(order: Order, step: Step[Any]) -> Order:
    return order.model_copy(update={"first_step_at": time.monotonic()})


@reserve.compensation
async def release(order: Order, step: Step[Any]) -> None: ...


@fulfil.step
async def authorise(order: Order, step: Step[Any]) -> Order:
    return order


@authorise.compensation
async def revoke(order: Order, step: Step[Any]) -> None: ...


@fulfil.pivot
async def charge(order: Order, step: Step[Any]) -> Order:
    return order


@fulfil.step
async def book(order: Order, step: Step[Any]) -> Order:
    return order


@fulfil.step
async def notify(order: Order, step: Step[Any]) -> Order:
    return order


wait = Saga("bench-wait", Order)
"""Its first attempt never ends; whoever takes it over ends it at once."""


@wait.pivot
async def wait_for_ever(order: Order, step: Step[Any]) -> Order:
    if step.attempt == 1:
        await asyncio.Event().wait()
    return order
