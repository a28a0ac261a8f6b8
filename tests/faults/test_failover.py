"""A real replica set of three whose primary steps down, and is killed, under load."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.errors import PyMongoError

from sagas import Client, MongoStore, NonRetryable, Saga, Start, State, Step, Worker, WorkerOptions
from sagas_store.embedded import EmbeddedMongo
from sagas_store.entries import Entry
from tests.faults.shop import Order, Shop
from tests.support.waiting import eventually

pytestmark = [pytest.mark.failover, pytest.mark.slow]

RUNS = 200


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[EmbeddedMongo]:
    with EmbeddedMongo.start(nodes=3) as mongo:
        yield mongo


saga = Saga("failover", Order)


@saga.step
async def reserve(order: Order, step: Step[Shop]) -> Order:
    step.resources.call(step)
    return order.with_("reserve")


@reserve.compensation
async def release(order: Order, step: Step[Shop]) -> None:
    step.resources.effects.discard(step.step_key)
    step.resources.refused.add(step.step_key)


@saga.pivot
async def charge(order: Order, step: Step[Shop]) -> Order:
    if order.number.endswith("7"):
        raise NonRetryable("declined")
    step.resources.call(step)
    return order.with_("charge")


@saga.step
async def ship(order: Order, step: Step[Shop]) -> Order:
    step.resources.call(step)
    return order.with_("ship")


async def test_acknowledged_entries_outlive_the_primary_and_every_run_comes_to_its_right_end(
    three_nodes: EmbeddedMongo,
) -> None:
    shop = Shop()
    async with AsyncMongoClient[Any](three_nodes.uri) as mongo:
        store = MongoStore(mongo.failover, reply=timedelta(seconds=3))
        await store.schema.apply()
        acknowledged: list[Entry] = []
        append = store.journal.append

        async def remembering(entry: Entry) -> None:
            await append(entry)
            acknowledged.append(entry)

        store.journal.append = remembering  # type: ignore[method-assign]
        options = WorkerOptions(handle_signals=False, lease=timedelta(seconds=5), concurrency=8)
        workers = [Worker(store, [saga], resources=shop, name=f"worker-{n}", options=options) for n in range(2)]
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        async with Client(store) as client:
            runs = await client.start_many(saga, [Start(Order(number=str(n)), key=str(n)) for n in range(RUNS)])

            async def entries(count: int) -> None:
                async def enough() -> bool:
                    return len(acknowledged) >= count

                await eventually(enough, what=f"{count} entries are acknowledged", within_s=90)

            await entries(60)
            await step_down(mongo)
            await entries(200)
            killed = await asyncio.to_thread(three_nodes.wait_for_primary)
            killed.kill()
            await entries(400)
            await asyncio.to_thread(killed.restart)
            await step_down(mongo)

            async def all_at_rest() -> bool:
                return len(await store.runs.at_rest([run.run_id for run in runs])) == RUNS

            await eventually(all_at_rest, what="every run comes to rest", within_s=90)
            for worker in workers:
                worker.stop()
            await asyncio.gather(*tasks)
            journals = await store.journal.load_many([run.run_id for run in runs])
            found = await store.runs.get_many([run.run_id for run in runs])
    written = {(entry.run_id, entry.seq): entry for journal in journals.values() for entry in journal}
    lost = [entry for entry in acknowledged if written.get((entry.run_id, entry.seq)) != entry]
    assert lost == [], "an acknowledged entry is gone, or another stands in its place"
    for number, run in enumerate(runs):
        declined = str(number).endswith("7")
        assert found[run.run_id].state is (State.COMPENSATED if declined else State.COMPLETED)
        alive = {effect for effect in shop.effects if effect.startswith(run.run_id)}
        assert len(alive) == (0 if declined else 3), "an effect is missing or stands although undone"


async def step_down(mongo: AsyncMongoClient[Any]) -> None:
    try:
        await mongo.admin.command("replSetStepDown", 5, secondaryCatchUpPeriodSecs=2, force=True)
    except PyMongoError:  # the connection closes as it steps down
        pass
