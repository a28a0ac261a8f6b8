"""One application with sealed payloads: its saga, what its steps did, and a key service that does as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from pydantic import BaseModel

from sagas import (
    CannotOpen,
    Client,
    KeyLost,
    Keyring,
    MongoStore,
    NonRetryable,
    Operator,
    RetryPolicy,
    Run,
    RunInfo,
    Saga,
    Step,
    Worker,
    WorkerOptions,
)
from sagas.clock import Monotonic, monotonic
from sagas.wrapping import KeyName
from tests.sealing.wrapping import CountingWrapper
from tests.support.waiting import eventually

__all__ = ["POLL", "WHY", "Deployment", "Order", "Shop", "flip", "fulfil", "nothing_is_due"]

WHY: Any = {"by": "ann@shop", "reason": "the customer changed their mind"}
POLL = timedelta(milliseconds=20)


class Order(BaseModel):
    number: int = 0
    note: str = ""
    done: tuple[str, ...] = ()


@dataclass
class Shop:
    done: list[str] = field(default_factory=list)
    inside: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    tenants: set[str | None] = field(default_factory=set)

    def note(self, step: Step[Shop]) -> None:
        self.done.append(step.idempotency_key)
        self.tenants.add(step.tenant)


fulfil = Saga("fulfil", Order)


@fulfil.step
async def reserve(order: Order, step: Step[Shop]) -> Order:
    step.resources.note(step)
    if order.note == "wait":
        step.resources.inside.set()
        await step.resources.go_on.wait()
    return order.model_copy(update={"done": (*order.done, "reserve")})


@reserve.compensation
async def release(order: Order, step: Step[Shop]) -> None:
    step.resources.note(step)


@fulfil.pivot(retry=RetryPolicy(max_attempts=1))
async def charge(order: Order, step: Step[Shop]) -> Order:
    if order.note == "decline":
        raise NonRetryable("canary: the card was declined")
    if order.note == "doubt":
        raise TimeoutError("no answer")
    step.resources.note(step)
    return order.model_copy(update={"done": (*order.done, "charge")})


class Deployment:
    """One application: a store with its keyring, and what its key service does."""

    def __init__(
        self, database: Any, wrapper: CountingWrapper | None = None, *, monotonic: Monotonic = monotonic
    ) -> None:
        """`monotonic` is what the age of keys is told by."""
        self.database = database
        self.wrapper = wrapper or CountingWrapper()
        self.keyring = Keyring(self.wrapper, pause=timedelta(0), monotonic=monotonic)
        self.store = MongoStore(database, keyring=self.keyring)
        self.client = Client(self.store)
        self.operator = Operator(self.store)
        self.shop = Shop()

    def anew(self) -> Deployment:
        """Another process of the same application, with the same key service: it remembers no key."""
        other = Deployment(self.database, self.wrapper)
        other.shop = self.shop
        return other

    def lose(self, *tenants: str | None, failure: type[CannotOpen] = KeyLost) -> None:
        """From now on the key service does not unwrap these tenants' keys."""

        def fails(name: KeyName) -> Exception | None:
            return failure(name.tenant, name.key_id, "gone") if name.tenant in tenants else None

        self.wrapper.failing = fails

    def restore(self) -> None:
        self.wrapper.failing = None

    @asynccontextmanager
    async def working(self, *sagas: Saga[Any], **options: Any) -> AsyncIterator[Worker]:
        options = {"poll": POLL, "handle_signals": False, **options}
        worker = Worker(self.store, sagas or [fulfil], resources=self.shop, options=WorkerOptions(**options))
        running = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            self.shop.go_on.set()
            worker.stop()
            await asyncio.wait_for(running, 20)

    async def info(self, run: Run[Any]) -> RunInfo:
        return await self.client.get(run.run_id)

    async def make_due(self, run: Run[Any]) -> None:
        """Let the time pass for which the run is on hold."""
        await self.database["sagas.runs"].update_one(
            {"_id": run.run_id, "state": "pending"}, [{"$set": {"due_at": "$$NOW"}}]
        )

    async def until(self, run: Run[Any], holds: Callable[[RunInfo], bool], what: str) -> RunInfo:
        async def there() -> bool:
            return holds(await self.info(run))

        await eventually(there, what=what, within_s=20)
        return await self.info(run)


async def nothing_is_due(database: Any) -> None:
    """Wait until workers have tried whatever is due, and have let go of it."""
    runs = database["sagas.runs"]
    left = {"$or": [{"state": "running"}, {"due_at": {"$exists": True}, "$expr": {"$lte": ["$due_at", "$$NOW"]}}]}

    async def none_left() -> bool:
        # By a scan, which looks at each run once: between two indexes one may slip through that is being claimed.
        return bool(await runs.count_documents(left, hint=[("$natural", 1)]) == 0)

    await eventually(none_left, what="nothing is due", within_s=60)


def flip(stored: bytes, at: int, bit: int = 0) -> bytes:
    """The bytes with one bit of one of them flipped."""
    altered = bytearray(stored)
    altered[at] ^= 1 << bit
    return bytes(altered)
