"""A shop whose steps do what their order says, and what the tests of this folder do with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from sagas import (
    Client,
    MongoStore,
    NonRetryable,
    Retryable,
    RetryPolicy,
    RunHeld,
    Saga,
    Step,
    Worker,
    WorkerOptions,
)

__all__ = ["ONCE", "WHY", "Order", "Shop", "fulfil", "held", "kinds", "working"]

WHY: Any = {"by": "ann@shop", "reason": "the customer changed their mind"}


class Order(BaseModel):
    number: int = 0
    does: str = "ok"


class Shop:
    """What the steps did, and the gates at which the test holds them."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.inside = asyncio.Event()
        self.go_on = asyncio.Event()
        self.mended = False

    async def wait(self) -> None:
        self.inside.set()
        await self.go_on.wait()


ONCE = RetryPolicy(max_attempts=1)
fulfil = Saga("fulfil", Order)


@fulfil.step(stop_grace=0.05)
async def reserve(order: Order, step: Step[Shop]) -> Order:
    match order.does:
        case "reserve waits":
            await step.resources.wait()
        case "reserve listens":
            step.resources.inside.set()
            await step.stop_asked.wait()
        case "reserve is turned away":
            raise Retryable("later", retry_after=timedelta(hours=1))
        case "reserve waits in place":
            step.resources.inside.set()
            raise Retryable("soon", retry_after=1.5)
    step.resources.done.append("reserve")
    return order


@reserve.compensation(retry=ONCE)
async def release(order: Order, step: Step[Shop]) -> None:
    if order.does == "release waits":
        await step.resources.wait()
    if order.does == "release fails" and not step.resources.mended:
        raise NonRetryable("no")
    step.resources.done.append(f"release {step.fate}")


@fulfil.step
async def pack(order: Order, step: Step[Shop]) -> Order:
    step.resources.done.append("pack")
    return order


@pack.compensation
async def unpack(order: Order, step: Step[Shop]) -> None:
    step.resources.done.append(f"unpack {step.fate}")


@fulfil.pivot(retry=ONCE)
async def charge(order: Order, step: Step[Shop]) -> Order:
    match order.does:
        case "charge waits":
            await step.resources.wait()
        case "charge waits and fails":
            await step.resources.wait()
            raise NonRetryable("declined")
        case "charge is declined" | "release fails" | "release waits":
            raise NonRetryable("declined")
        case "charge is unknown":
            raise TimeoutError
    step.resources.done.append("charge")
    return order


@fulfil.step(retry=ONCE)
async def ship(order: Order, step: Step[Shop]) -> Order:
    if order.does == "ship fails" and not step.resources.mended:
        raise NonRetryable("no")
    step.resources.done.append("ship")
    return order


@asynccontextmanager
async def working(store: MongoStore, shop: Shop, *sagas: Saga[Any], **options: Any) -> AsyncIterator[Worker]:
    options = {"handle_signals": False, "drain_grace": timedelta(0), **options}
    worker = Worker(store, sagas or (fulfil,), resources=shop, options=WorkerOptions(**options))
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        await asyncio.wait_for(task, 20)


async def kinds(client: Client, run_id: str) -> list[str]:
    return [str(line.kind) for line in await client.journal(run_id)]


async def held(client: Client, store: MongoStore, shop: Shop, does: str) -> str:
    async with working(store, shop):
        run = await client.start(fulfil, Order(does=does))
        with pytest.raises(RunHeld):
            await run.result(10)
    return run.run_id
