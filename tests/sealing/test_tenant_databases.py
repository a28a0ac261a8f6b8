"""A database per tenant: the same verbs, and nothing shared."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
import structlog
from motor.motor_asyncio import AsyncIOMotorClient
from pydantic import BaseModel
from pymongo import AsyncMongoClient

from sagas import (
    Client,
    InvalidInput,
    Keyring,
    LocalKeyWrapper,
    Operator,
    RunNotFound,
    Saga,
    State,
    Step,
    TenantDatabases,
    TenantWorker,
    WorkerOptions,
)
from sagas_store.errors import NoTenantDatabase
from sagas_store.store import BindsKeys
from tests.conftest import DRIVERS
from tests.support.waiting import eventually

pytestmark = pytest.mark.parametrize("driver", DRIVERS)


class Order(BaseModel):
    number: int = 0


saga = Saga("order", Order)


@saga.step(no_compensation=True)
async def pay(order: Order, step: Step[dict[str, int]]) -> Order:
    step.resources[step.tenant or ""] = order.number
    return order


@pytest.fixture
async def databases(mongo_uri: str, driver: str) -> AsyncIterator[TenantDatabases]:
    client: Any = AsyncMongoClient(mongo_uri) if driver == "pymongo" else AsyncIOMotorClient(mongo_uri)
    prefix = f"test_{secrets.token_hex(4)}_"
    wrapper = LocalKeyWrapper({"test": bytes(32)})
    databases = TenantDatabases(client, prefix=prefix, keyring_of=lambda _: Keyring(wrapper))
    yield databases
    for tenant in await databases.tenants():
        await client.drop_database(prefix + tenant)
    if (closing := client.close()) is not None:
        await closing


async def test_each_tenant_is_served_from_its_own_database_and_one_that_comes_later_too(
    databases: TenantDatabases,
) -> None:
    paid: dict[str, int] = {}
    options = WorkerOptions(handle_signals=False, poll=timedelta(milliseconds=20))
    worker = TenantWorker(databases, [saga], resources=paid, options=options, look=timedelta(milliseconds=20))
    running = asyncio.create_task(worker.run())
    runs = {}
    for number, tenant in enumerate(("vinet", "hanar", "toms")):
        await databases.create(tenant)
        async with Client(databases, tenant=tenant) as client:
            runs[tenant] = await client.start(saga, Order(number=number), key="the-same")
            assert await runs[tenant].result(20) == Order(number=number)
    worker.stop()
    await asyncio.wait_for(running, 20)
    assert paid == {"vinet": 0, "hanar": 1, "toms": 2}
    assert await databases.tenants() == ["hanar", "toms", "vinet"]


async def test_nothing_of_another_tenant_is_reached(databases: TenantDatabases) -> None:
    for tenant in ("vinet", "hanar"):
        await databases.create(tenant)
    theirs = await Client(databases, tenant="hanar").start(saga, Order(), delay=timedelta(hours=1))
    ours = Client(databases, tenant="vinet")
    with pytest.raises(RunNotFound):
        await ours.stop(theirs.run_id, by="ann", reason="why")
    with pytest.raises(RunNotFound):
        await Operator(databases, tenant="vinet").retry_now(theirs.run_id, by="ann", reason="why")
    assert (await ours.runs()).runs == []
    assert (await theirs.info()).state is State.PENDING
    with pytest.raises(InvalidInput, match="bind to one"):
        Client(databases)
    with pytest.raises(InvalidInput, match="another"):
        await ours.start(saga, Order(), tenant="hanar")


@pytest.mark.parametrize("tenant", ["", "Vinet", "a b", "a.b", "a/b", "x" * 41, None, 7, "ä"])
async def test_a_tenant_that_no_database_can_be_named_after_is_refused(databases: TenantDatabases, tenant: Any) -> None:
    with pytest.raises(NoTenantDatabase):
        databases.of(tenant)


async def test_a_step_in_hand_has_its_grace_when_the_worker_of_all_tenants_is_told_to_drain(
    databases: TenantDatabases,
) -> None:
    await databases.create("vinet")
    inside, go_on = asyncio.Event(), asyncio.Event()
    slow = Saga("slow", Order)

    @slow.step(no_compensation=True)
    async def wait(order: Order, step: Step[None]) -> Order:
        inside.set()
        await go_on.wait()
        return Order(number=order.number + 1)

    options = WorkerOptions(handle_signals=False, poll=timedelta(milliseconds=20))
    worker = TenantWorker(databases, [slow], options=options, look=timedelta(milliseconds=20))
    running = asyncio.create_task(worker.run())
    async with Client(databases, tenant="vinet") as client:
        run = await client.start(slow, Order())
        await asyncio.wait_for(inside.wait(), 20)
        worker.stop()
        await asyncio.sleep(0.1)  # for whatever it does at once
        go_on.set()
        await asyncio.wait_for(running, 20)
        assert await run.result(20) == Order(number=1)
        assert [line.kind for line in await run.journal()] == ["step_succeeded"], "it was not broken off"


async def test_a_tenant_whose_database_is_not_ready_keeps_none_waiting(databases: TenantDatabases) -> None:
    # There, but without the schema.
    await databases.of("aaa").database["something"].insert_one({})
    await databases.create("zzz")
    options = WorkerOptions(handle_signals=False, poll=timedelta(milliseconds=20))
    worker = TenantWorker(databases, [saga], resources={}, options=options, look=timedelta(milliseconds=20))
    running = asyncio.create_task(worker.run())
    async with Client(databases, tenant="zzz") as client:
        run = await client.start(saga, Order(number=7))
        assert await run.result(20) == Order(number=7)
    await databases.create("aaa")
    async with Client(databases, tenant="aaa") as client:
        run = await client.start(saga, Order(number=8))

        async def served() -> bool:
            return (await run.info()).state is State.COMPLETED

        await eventually(served, what="it is served once it is ready", within_s=20)
    worker.stop()
    await asyncio.wait_for(running, 20)


async def test_a_tenant_whose_keyring_cannot_be_made_keeps_none_waiting_and_is_logged(
    databases: TenantDatabases, monkeypatch: pytest.MonkeyPatch
) -> None:
    await databases.create("aaa")
    await databases.create("zzz")
    keyring_of, broken = databases._keyring_of, True
    assert keyring_of is not None

    def cannot_be_made(tenant: str) -> BindsKeys:
        if tenant == "aaa" and broken:
            raise FileNotFoundError("no such master key")
        return keyring_of(tenant)

    databases._stores.clear()
    monkeypatch.setattr(databases, "_keyring_of", cannot_be_made)
    options = WorkerOptions(handle_signals=False, poll=timedelta(milliseconds=20))
    with structlog.testing.capture_logs() as lines:
        worker = TenantWorker(databases, [saga], resources={}, options=options, look=timedelta(milliseconds=20))
        running = asyncio.create_task(worker.run())
        async with Client(databases, tenant="zzz") as client:
            run = await client.start(saga, Order(number=7))
            assert await run.result(20) == Order(number=7)
    refused = [line for line in lines if line.get("tenant") == "aaa"]
    assert {(line["log_level"], line["error"]) for line in refused} == {("error", "FileNotFoundError")}
    broken = False
    async with Client(databases, tenant="aaa") as client:
        run = await client.start(saga, Order(number=8))
        assert await run.result(20) == Order(number=8), "it is served once its keyring is there"
    worker.stop()
    await asyncio.wait_for(running, 20)


async def test_who_cancels_the_worker_of_all_tenants_gets_every_run_handed_back_without_the_grace(
    databases: TenantDatabases,
) -> None:
    await databases.create("vinet")
    inside = asyncio.Event()
    slow = Saga("slow", Order)

    @slow.step(no_compensation=True, timeout=None)
    async def wait(order: Order, step: Step[None]) -> Order:
        inside.set()
        await asyncio.Event().wait()
        return order

    options = WorkerOptions(handle_signals=False, poll=timedelta(milliseconds=20), drain_grace=timedelta(hours=1))
    worker = TenantWorker(databases, [slow], options=options, look=timedelta(milliseconds=20))
    running = asyncio.create_task(worker.run())
    async with Client(databases, tenant="vinet") as client:
        run = await client.start(slow, Order())
        await asyncio.wait_for(inside.wait(), 20)
        running.cancel()
        await asyncio.wait({running}, timeout=20)
        assert running.cancelled()
        assert (await run.info()).state is State.PENDING
        assert [line.kind for line in await run.journal()] == ["interrupted"]


async def test_all_tenants_together_have_no_more_under_way_than_there_are_connections(
    databases: TenantDatabases,
) -> None:
    free = asyncio.Event()
    under_way, most = 0, 0

    async def work() -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await free.wait()
        under_way -= 1

    stores = [databases.of(tenant) for tenant in ("vinet", "hanar", "toms")]
    patiences = [*(store._patience for store in stores), databases._patience]
    asked = [asyncio.create_task(patience.call("work", work)) for patience in patiences for _ in range(60)]
    while sum(task.done() for task in asked) + under_way < 96:
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    free.set()
    await asyncio.gather(*asked)
    assert most == 96, "of a pool of a hundred, four of which are kept free"
