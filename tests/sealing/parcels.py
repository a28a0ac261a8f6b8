"""A saga that is put off midway, and a warehouse full of its runs, at every stage that they can be at."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from pydantic import BaseModel

from sagas import (
    HELD,
    Client,
    Kind,
    NonRetryable,
    Retryable,
    RetryPolicy,
    Saga,
    Start,
    State,
    Step,
)
from tests.sealing.deployment import WHY, Deployment, nothing_is_due
from tests.support.crashing import working

__all__ = ["TENANTS", "WAYS", "Depot", "Parcel", "Warehouse", "parcels"]


class Parcel(BaseModel):
    number: int
    way: str
    done: tuple[str, ...] = ()

    def after(self, step: Step[Any]) -> Parcel:
        return self.model_copy(update={"done": (*self.done, step.name)})


@dataclass
class Depot:
    """How often each run's functions were called. Once in each run, one of them puts it off for an hour."""

    calls: Counter[str] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)

    def called(self, step: Step[Depot], *, put_off: bool = False) -> None:
        self.calls[step.run_id] += 1
        if put_off and step.run_id not in self.seen:
            self.seen.add(step.run_id)
            raise Retryable("later", retry_after=3600)


parcels = Saga("parcels", Parcel)
ONCE: Final = RetryPolicy(max_attempts=1)


@parcels.step
async def pack(parcel: Parcel, step: Step[Depot]) -> Parcel:
    step.resources.called(step)
    return parcel.after(step)


@pack.compensation
async def unpack(parcel: Parcel, step: Step[Depot]) -> None:
    step.resources.called(step, put_off=True)


@parcels.step(no_compensation=True, transactional=True)
async def label(parcel: Parcel, step: Step[Depot]) -> Parcel:
    step.resources.called(step, put_off=parcel.way in ("midway", "stopped"))
    return parcel.after(step)


@parcels.pivot(retry=ONCE)
async def ship(parcel: Parcel, step: Step[Depot]) -> Parcel:
    step.resources.called(step)
    if parcel.way == "undone":
        raise NonRetryable("no van")
    if parcel.way in ("probed", "judged"):
        raise TimeoutError
    return parcel.after(step)


@ship.probe
async def shipped(parcel: Parcel, step: Step[Depot]) -> Parcel | None:
    step.resources.called(step)
    if parcel.way == "judged":
        raise NonRetryable("no answer")
    return parcel.after(step)


@parcels.step
async def bill(parcel: Parcel, step: Step[Depot]) -> Parcel:
    step.resources.called(step, put_off=parcel.way in ("late", "probed", "judged"))
    return parcel.after(step)


WAYS: Final = {
    "fresh": (None, State.COMPLETED),
    "midway": (Kind.STEP_SUCCEEDED, State.COMPLETED),
    "stopped": (Kind.STEP_SUCCEEDED, State.CANCELLED),
    "late": (Kind.STEP_SUCCEEDED, State.COMPLETED),
    "probed": (Kind.PROBE_SUCCEEDED, State.COMPLETED),
    "judged": (Kind.VERDICT, State.COMPLETED),
    "undone": (Kind.STEP_SUCCEEDED, State.COMPENSATED),
}
"""How a parcel goes: what kind of entry has its newest context when it is put off, and how it ends."""

TENANTS: Final = ("vinet", "hanar")


class Warehouse:
    """Parcels under way, of two tenants, each put off for an hour, and with it the worker that drives them."""

    def __init__(self, shop: Deployment, *, each: int) -> None:
        """`each`: how many parcels go each way."""
        self.shop = shop
        self.each = each
        self.client: Client = shop.client
        self.depot = Depot()
        self.ways: dict[str, str] = {}
        """Run id -> how it goes."""

    async def prepare(self) -> None:
        starts = {
            way: [
                Start(
                    Parcel(number=n, way=way),
                    key=f"{way} {n}",
                    tenant=TENANTS[n % 2],
                    delay=timedelta(hours=1) if way == "fresh" else None,
                )
                for n in range(self.each)
            ]
            for way in WAYS
        }
        async with working(self.shop.store, parcels, resources=self.depot):
            for way, some in starts.items():
                self.ways |= {run.run_id: way for run in await self.client.start_many(parcels, some)}
            held = await self.until_at_rest()
            assert {self.ways[run["_id"]] for run in held} == {"judged"}
            for run in held:
                context = Parcel(number=0, way="judged")
                await self.shop.operator.verdict(parcels, run["_id"], happened=True, context=context, **WHY)
            assert not await self.until_at_rest()
        for run_id, way in self.ways.items():
            if way == "stopped":
                await self.client.stop(run_id, **WHY)
        put_off = await self.shop.operator.retry_now_many(**WHY)
        # All but the fresh ones, which have not begun, and those stopped, which are due already.
        assert len(put_off.done) == self.each * (len(WAYS) - 2), put_off.refused
        await self.make_due()

    async def make_due(self) -> None:
        await self.shop.database["sagas.runs"].update_many({"state": "pending"}, [{"$set": {"due_at": "$$NOW"}}])

    async def until_at_rest(self) -> list[Any]:
        """Wait until no run is under way or due; those that are held."""
        await nothing_is_due(self.shop.database)
        runs = self.shop.database["sagas.runs"]
        found: list[Any] = await runs.find({"state": {"$in": sorted(HELD)}}).to_list(None)
        return found

    async def work(self) -> None:
        """Let a worker do whatever can be done."""
        async with working(self.shop.anew().store, parcels, resources=self.depot):
            await self.until_at_rest()

    async def assert_all_ended(self, *, but: set[str]) -> None:
        for run_id in self.ways.keys() - but:
            way = self.ways[run_id]
            assert (await self.client.get(run_id)).state is WAYS[way][1], (way, run_id)
