"""A shop whose participants honour idempotency keys and remember every call, and the sagas that drive it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from pydantic import BaseModel

from sagas import NonRetryable, Retryable, Saga, Step
from sagas.decide import Activity
from tests.support.oracle import Call

__all__ = ["PARKED_FOR", "SAGAS", "Order", "Shop", "by_name"]

PARKED_FOR: Final = timedelta(hours=1)


class Order(BaseModel):
    number: str
    done: list[str] = []

    def with_(self, step: str) -> Order:
        return Order(number=self.number, done=[*self.done, step])


@dataclass
class Shop:
    """What the participants know: each key had its effect once, and a compensated one has it no more."""

    calls: dict[str, list[Call]] = field(default_factory=dict)
    effects: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    """Keys whose compensation has come: a request that arrives later is refused."""
    effects_of_database: Any = None
    """Where a transactional step writes."""
    sessions: list[Any] = field(default_factory=list)
    """The ids of the sessions that transactional steps were given."""
    heartbeat: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a renewal has got through: what a step that outlives a renewal waits for."""
    before_each: Callable[[Step[Any]], None] | None = None
    takes_s: Callable[[], float] | None = None
    """How long a step works before its effect; at once by default."""

    async def work(self) -> None:
        """Take the time that a step takes."""
        if self.takes_s is not None:
            await asyncio.sleep(self.takes_s())

    def call(self, step: Step[Any], activity: Activity = Activity.STEP) -> Call:
        """Note the call and let its effect happen, once per key."""
        if self.before_each is not None:
            self.before_each(step)
        calls = self.calls.setdefault(step.run_id, [])
        call = Call(
            order=len(calls) + 1,
            activity=activity,
            step=step.name,
            key=step.idempotency_key,
            attempt=step.attempt,
            try_number=step.try_number,
        )
        if activity is Activity.COMPENSATION:
            undone = step.idempotency_key.removesuffix("/compensation")
            call.applied = undone in self.effects
            self.effects.discard(undone)
            self.refused.add(undone)
        else:
            call.applied = step.idempotency_key not in self.effects | self.refused
            if call.applied:
                self.effects.add(step.idempotency_key)
        calls.append(call)
        return call

    def called(self, run_id: str) -> list[str]:
        """The calls of one run in order, as `step` or `step (undone)`."""
        return [
            f"{call.step} (undone)" if call.activity is Activity.COMPENSATION else call.step
            for call in self.calls.get(run_id, [])
        ]


def _saga(name: str, charge: Callable[[Order, Step[Shop]], Any]) -> Saga[Order]:
    """reserve -> charge (the pivot) -> ship, with a pivot to suit."""
    saga = Saga(name, Order)

    @saga.step
    async def reserve(order: Order, step: Step[Shop]) -> Order:
        await step.resources.work()
        step.resources.call(step)
        return order.with_("reserve")

    @reserve.compensation
    async def release(order: Order, step: Step[Shop]) -> None:
        await step.resources.work()
        step.resources.call(step, Activity.COMPENSATION)

    async def charge_(order: Order, step: Step[Shop]) -> Order:
        await charge(order, step)
        return order.with_("charge")

    saga.pivot(name="charge")(charge_)

    @saga.step
    async def ship(order: Order, step: Step[Shop]) -> Order:
        if name == "stuck":
            raise NonRetryable("no carrier goes there")
        await step.resources.work()
        step.resources.call(step)
        return order.with_("ship")

    return saga


async def _charge(order: Order, step: Step[Shop]) -> None:
    await step.resources.work()
    step.resources.call(step)


async def _decline(order: Order, step: Step[Shop]) -> None:
    raise NonRetryable("declined")


async def _charge_later(order: Order, step: Step[Shop]) -> None:
    if step.try_number == 1:
        raise Retryable("ask again later", retry_after=PARKED_FOR)
    step.resources.call(step)


async def _charge_slowly(order: Order, step: Step[Shop]) -> None:
    step.resources.call(step)
    await step.resources.heartbeat.wait()


def _transactional() -> Saga[Order]:
    saga = Saga("transactional", Order)

    @saga.step
    async def reserve(order: Order, step: Step[Shop]) -> Order:
        step.resources.call(step)
        return order.with_("reserve")

    @reserve.compensation
    async def release(order: Order, step: Step[Shop]) -> None:
        step.resources.call(step, Activity.COMPENSATION)

    @saga.pivot(transactional=True)
    async def charge(order: Order, step: Step[Shop]) -> Order:
        step.resources.sessions.append(step.session.session_id)
        made = {"key": step.idempotency_key}  # no unique key: only the transaction keeps it from happening twice
        await step.resources.effects_of_database.insert_one(made, session=step.session)
        return order.with_("charge")

    return saga


SAGAS: Final = [
    _saga("forward", _charge),
    _saga("declined", _decline),
    _saga("parked", _charge_later),
    _saga("slow", _charge_slowly),
    _saga("stuck", _charge),
    _transactional(),
]


def by_name(name: str) -> Saga[Order]:
    """One of the sagas."""
    return next(saga for saga in SAGAS if saga.name == name)
