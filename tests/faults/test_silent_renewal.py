"""A renewal of which nothing is heard costs no lease: it is given up in time for the next one to get through."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from sagas import Client, Saga, Step, Worker, WorkerOptions
from sagas_store import MongoStore
from sagas_store.embedded import EmbeddedMongo
from tests.faults.shop import Order
from tests.support.failpoints import fail_point
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

LEASE = timedelta(seconds=4)


async def test_a_lease_outlives_a_renewal_that_is_not_answered_for_longer_than_the_lease(
    faulty_mongo: EmbeddedMongo, healthy: Any
) -> None:
    entered, opened = asyncio.Event(), asyncio.Event()
    saga = Saga("waits", Order)

    @saga.step(no_compensation=True)
    async def wait(order: Order, step: Step[None]) -> Order:
        entered.set()
        await opened.wait()
        return order

    calm = MongoStore(healthy)
    async with AsyncMongoClient[Any](faulty_mongo.uri, appName="renewing") as client, Client(calm) as starter:
        options = WorkerOptions(lease=LEASE, handle_signals=False)
        worker = Worker(MongoStore(client[healthy.name]), [saga], options=options)
        working = asyncio.create_task(worker.run())
        try:
            run = await starter.start(saga, Order(number="1"))
            await asyncio.wait_for(entered.wait(), 20)
            silent = {"blockConnection": True, "blockTimeMS": int(2 * LEASE / timedelta(milliseconds=1))}
            async with fail_point(healthy.client, ["update"], with_app_name="renewing", times=1, **silent) as point:
                record = await calm.runs.get(run.run_id)
                assert record is not None
                assert record.due_at is not None
                # Every lease that was given before the trouble is over by then.
                over = record.due_at + LEASE

                async def renewed() -> bool:
                    found = await calm.runs.get(run.run_id)
                    return found is not None and found.due_at is not None and found.due_at > over

                await eventually(renewed, what="the lease is renewed")
            assert point.hits == 1
            opened.set()
            await run.result(20)
        finally:
            worker.stop()
            await working
    record = await calm.runs.get(run.run_id)
    assert record is not None
    assert record.attempts == 1
