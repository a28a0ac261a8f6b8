"""Runs in the clear are there when sealing is turned on: what goes wrong when they are mixed, and how it goes right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from sagas import Client, InvalidInput, MongoStore, Start, State, Unreadable, Worker, WorkerOptions
from sagas.clock import monotonic
from tests.sealing.deployment import Deployment, Order, Shop, fulfil

OPTIONS = WorkerOptions(poll=timedelta(milliseconds=20), handle_signals=False)


@pytest.fixture
async def shop(database: Any) -> AsyncIterator[Deployment]:
    deployment = Deployment(database)
    await deployment.store.schema.apply()
    await deployment.store.ready()
    yield deployment
    await deployment.client.close()


async def test_in_collections_of_their_own_sealed_runs_begin_beside_those_in_the_clear(shop: Deployment) -> None:
    before = MongoStore(shop.database, prefix="before.")
    await before.schema.apply()
    async with Client(before) as client, shop.working():
        sealed = await shop.client.start(fulfil, Order(number=2), key="order-2", tenant="vinet")
        await sealed.result(20)
        run = await client.start(fulfil, Order(number=1), key="order-1", tenant="vinet")
        worker = Worker(before, [fulfil], resources=Shop(), options=OPTIONS)  # no keyring, and none needed
        running = asyncio.create_task(worker.run())
        assert (await run.result(20)).number == 1
        worker.stop()
        await asyncio.wait_for(running, 20)
        assert (await client.find(fulfil, key="order-1", tenant="vinet")).run_id == run.run_id


async def test_mixed_in_one_database_a_settled_result_does_not_open_and_a_start_is_not_recognised(
    shop: Deployment,
) -> None:
    before = MongoStore(shop.database)
    async with Client(before) as client:
        worker = Worker(before, [fulfil], resources=Shop(), options=OPTIONS)
        running = asyncio.create_task(worker.run())
        run = await client.start(fulfil, Order(number=1), key="order-1", tenant="vinet")
        await run.result(20)
        worker.stop()
        await asyncio.wait_for(running, 20)
    with pytest.raises(Unreadable, match="not sealed"):
        await shop.client.run(fulfil, run_id=run.run_id).result(5)
    again = await shop.client.start(fulfil, Order(number=1), key="order-1", tenant="vinet")
    assert (again.created, again.run_id != run.run_id) == (True, True)


async def test_a_client_without_the_keyring_starts_nothing_where_payloads_are_sealed(shop: Deployment) -> None:
    sealed = await shop.client.start(fulfil, Order(), tenant="vinet", delay=timedelta(hours=1))
    async with Client(MongoStore(shop.database)) as keyless:
        for starting in (
            keyless.start(fulfil, Order(), tenant="hanar"),
            keyless.start_many(fulfil, [Start(Order()), Start(Order())]),
        ):
            with pytest.raises(InvalidInput, match="keyring"):
                await starting
        assert [run.run_id for run in (await keyless.runs()).runs] == [sealed.run_id]
        assert (await keyless.get(sealed.run_id)).state is State.PENDING


async def test_a_worker_does_not_start_where_a_client_of_its_store_was_there_before_the_first_key(
    database: Any,
) -> None:
    keyless = MongoStore(database)
    await keyless.schema.apply()
    async with Client(keyless) as client:
        await client.start(fulfil, Order(), delay=timedelta(hours=1))
        shop = Deployment(database)
        await shop.client.start(fulfil, Order(), tenant="vinet", delay=timedelta(hours=1))  # makes the first key
        await shop.client.close()
        with pytest.raises(InvalidInput, match="keyring"):
            await asyncio.wait_for(Worker(keyless, [fulfil], resources=Shop(), options=OPTIONS).run(), 20)


async def test_a_client_that_was_there_before_the_first_key_notices_it_within_a_minute(database: Any) -> None:
    ahead = 0.0
    keyless = MongoStore(database, monotonic=lambda: monotonic() + ahead)
    await keyless.schema.apply()
    async with Client(keyless) as client:
        await client.start(fulfil, Order(), delay=timedelta(hours=1))
        shop = Deployment(database)
        await shop.client.start(fulfil, Order(), tenant="vinet", delay=timedelta(hours=1))
        await shop.client.close()
        ahead = 61
        keyless.clock.observe(shop.store.clock.now())  # a worker's claims keep the clock fresh: that is not what counts
        with pytest.raises(InvalidInput, match="keyring"):
            await client.start(fulfil, Order())
