"""Two orders: the first is fulfilled, the second is undone, for the bank says no. Run it again: nothing repeats."""

import asyncio
import os

from pydantic import BaseModel
from pymongo import AsyncMongoClient

from sagas import Client, MongoStore, NonRetryable, RunRolledBack, Saga, Step, Worker


class Order(BaseModel):
    number: int
    charge: str | None = None


fulfil_order = Saga("fulfil-order", Order)


@fulfil_order.step
async def reserve_stock(order: Order, step: Step[None]) -> Order:
    print(f"order {order.number}: goods set aside")
    return order


@reserve_stock.compensation  # nothing may have been set aside; and a late request must not set it aside afterwards
async def release_stock(order: Order, step: Step[None]) -> None:
    print(f"order {order.number}: goods back on the shelf")


@fulfil_order.pivot  # the point of no return. No probe: a bank that gets the same key again does not charge again
async def charge_card(order: Order, step: Step[None]) -> Order:
    if order.number == 2:
        raise NonRetryable("the bank says no")
    return order.model_copy(update={"charge": step.idempotency_key})


@fulfil_order.step  # after the pivot: tried until it succeeds, for days if need be
async def ship(order: Order, step: Step[None]) -> Order:
    print(f"order {order.number}: paid by charge {order.charge}, shipped")
    return order


async def main() -> None:
    uri = os.getenv("SAGAS_MONGODB_URI", "mongodb://localhost:27017/?replicaSet=rs0")
    async with AsyncMongoClient[dict[str, object]](uri) as mongo:
        store = MongoStore(mongo[os.getenv("SAGAS_DATABASE", "sagas")])
        await store.schema.apply()
        async with Client(store) as sagas, asyncio.TaskGroup() as group:
            worker = group.create_task(Worker(store, [fulfil_order]).run())
            for number in (1, 2):
                run = await sagas.start(fulfil_order, Order(number=number), key=f"order-{number}")
                try:
                    print(f"completed: {await run.result(timeout=60)}")
                except RunRolledBack as undone:
                    print(f"undone: {undone}")
            worker.cancel()


asyncio.run(main())
