# mypy: ignore-errors
# It runs where forze is installed, which is not here.
"""The five-step saga on forze; run with the Python of an environment that has it, and nothing of ours.

`python peer_forze.py MONGODB_URL COUNT IN_FLIGHT` prints how many seconds the runs took, starts not included.

forze has a saga executor that keeps nothing (`InProcessSagaExecutor`) and one that is durable after every step
(`DurableSagaExecutor`), which is this one. A saga's writes on it, each waited for:

- one insert into `durable_run`, the start (before the clock runs, as with ours);
- one update of many of them, the claim of a batch;
- per step one `findAndModify` that upserts the step's result, the context, into `durable_step`, after a find by the
  same `_id`;
- one update of the run, its end, after a find of its tenant.

That is how its background recovery drives what was enqueued. `run_now`, its other way, starts, claims and reads back
each run by itself, three operations more, and is slower.
"""

import asyncio
import json
import sys
import time

from forze.application.contracts.saga import SagaDefinition, SagaStep, SagaStepKind
from forze.application.execution import SagaDepsModule, build_runtime
from forze_kits.integrations.durable import (
    DurableFunctionRegistry,
    DurableFunctionRunner,
    DurableSagaExecutor,
    durable_saga_handler,
)
from forze_mongo import MongoClient, MongoConfig, MongoDepsModule, mongo_lifecycle_step
from forze_mongo.execution.deps.configs import MongoDurableRunConfig, MongoDurableStepConfig
from pydantic import BaseModel
from pymongo import AsyncMongoClient

_, URL, COUNT, IN_FLIGHT = sys.argv
DATABASE = "bench_forze"


class Order(BaseModel):
    number: int = 1
    filling: str = "x" * 240


async def act(ctx, order):
    return order


async def undo(ctx, order): ...


FULFIL = SagaDefinition(
    name="fulfil",
    steps=(
        SagaStep(name="reserve", action=act, compensation=undo),
        SagaStep(name="authorise", action=act, compensation=undo),
        SagaStep(name="charge", action=act, kind=SagaStepKind.PIVOT),
        SagaStep(name="book", action=act, kind=SagaStepKind.RETRYABLE, idempotent=True),
        SagaStep(name="notify", action=act, kind=SagaStepKind.RETRYABLE, idempotent=True),
    ),
)


async def drive(runner, ctx, count, in_flight):
    order = Order().model_dump(mode="json")
    await asyncio.gather(*(runner.enqueue(ctx, FULFIL.name, order) for _ in range(count)))
    begun = time.monotonic()
    while await runner.recover(ctx, limit=in_flight, max_concurrency=in_flight):
        pass
    return time.monotonic() - begun


async def indexes(database):
    """The one that its run store requires, and those it recommends for the claim."""
    runs = database["durable_run"]
    await runs.create_index(
        {"idempotency_key": 1},
        unique=True,
        partialFilterExpression={"idempotency_key": {"$type": "string"}},
    )
    await runs.create_index({"status": 1, "created_at": 1})
    await runs.create_index({"claim_token": 1}, sparse=True)


async def main():
    count, in_flight = int(COUNT), int(IN_FLIGHT)
    warming_up = max(5, count // 20)
    registry = DurableFunctionRegistry()
    registry.register(FULFIL.name, durable_saga_handler(FULFIL, Order))
    runner = DurableFunctionRunner(registry=registry)
    runtime = build_runtime(
        [
            MongoDepsModule(
                client=MongoClient(),
                durable_step=MongoDurableStepConfig(collection=(DATABASE, "durable_step")),
                durable_run=MongoDurableRunConfig(collection=(DATABASE, "durable_run")),
            ),
            SagaDepsModule(executor=DurableSagaExecutor()),
        ],
        lifecycle_steps=mongo_lifecycle_step(
            # It says nothing of write concerns itself, so the address does.
            uri=f"{URL}{'&' if '?' in URL else '/?'}w=majority&journal=true",
            db_name=DATABASE,
            config=MongoConfig(max_pool_size=max(100, in_flight)),
        ),
    )
    async with AsyncMongoClient(URL) as client:
        await client.drop_database(DATABASE)
        try:
            await indexes(client[DATABASE])
            async with runtime.scope():
                ctx = runtime.get_context()
                await drive(runner, ctx, warming_up, in_flight)  # opens its connections; not counted
                seconds = await drive(runner, ctx, count, in_flight)
            # A run that fails is a quick one, and says so nowhere but here.
            failed = await client[DATABASE]["durable_run"].find_one({"status": {"$ne": "completed"}})
            assert failed is None, f"not completed: {failed}"
            journaled = await client[DATABASE]["durable_step"].count_documents({})
            assert journaled == 5 * (warming_up + count), (
                f"{journaled} steps of {warming_up + count} runs are journaled"
            )
        finally:
            await client.drop_database(DATABASE)
    print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
