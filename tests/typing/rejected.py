"""Wrong uses of the public API: type-checked only, never run. mypy has to reject every marked line.

It says so through `warn_unused_ignores`: a mark that hides no error is an error itself.
"""

from datetime import timedelta
from typing import Any

from pydantic import BaseModel

from sagas import Client, Keyring, MongoStore, Retryable, RetryPolicy, Saga, Start, Step, Worker, WorkerOptions
from sagas.wrapping import LocalKeyWrapper


class Order(BaseModel):
    total: int


class Invoice(BaseModel):
    number: int


class Shop: ...


saga = Saga("fulfil-order", Order)
wrapper = LocalKeyWrapper({})


async def good(order: Order, step: Step[Shop]) -> Order:
    return order


async def returns_nothing(order: Order, step: Step[Shop]) -> None: ...
async def returns_another(order: Order, step: Step[Shop]) -> Invoice:
    return Invoice(number=1)


async def takes_another(invoice: Invoice, step: Step[Shop]) -> Invoice:
    return invoice


async def takes_no_step(order: Order) -> Order:
    return order


async def returns_perhaps(order: Order, step: Step[Shop]) -> Order | None:
    return None


# -------------------------------------------------------------------- sagas

Saga("s", dict)  # type: ignore[type-var]
Saga("s", Order(total=1))  # type: ignore[arg-type]
Saga(7, Order)  # type: ignore[arg-type]
Saga("s", Order, 2)  # type: ignore[call-arg]
Saga("s", Order, version="2")  # type: ignore[arg-type]

# -------------------------------------------------------------------- steps

saga.step(returns_nothing)  # type: ignore[arg-type]
saga.step(returns_another)  # type: ignore[arg-type]
saga.step(takes_another)  # type: ignore[arg-type]
saga.step(takes_no_step)  # type: ignore[arg-type]
saga.step(returns_perhaps)  # type: ignore[arg-type]
saga.step(no_compensation=True)(returns_nothing)  # type: ignore[arg-type]
saga.step(retry=3)  # type: ignore[call-overload]
saga.step(timeout="10")  # type: ignore[call-overload]
saga.step(tries=3)  # type: ignore[call-overload]
saga.step("reserve")  # type: ignore[call-overload]
saga.pivot(returns_nothing)  # type: ignore[arg-type]
saga.pivot(no_compensation=True)  # type: ignore[call-overload]

step = saga.step(good)
step.compensation(takes_another)  # type: ignore[arg-type]
step.compensation(good)  # type: ignore[arg-type]
step.compensation(retry=3)  # type: ignore[call-overload]
step.probe(takes_another)  # type: ignore[arg-type]
step.probe(returns_another)  # type: ignore[arg-type]


@saga.step
async def changes_what_it_is_given(order: Order, step: Step[Shop]) -> Order:
    step.attempt = 2  # type: ignore[misc]
    step.resources.no_such_thing()  # type: ignore[attr-defined]
    return order


# -------------------------------------------------------------------- policies

RetryPolicy(3)  # type: ignore[call-arg]
RetryPolicy(max_attempts="3")  # type: ignore[arg-type]
RetryPolicy(initial_wait="0.2")  # type: ignore[arg-type]
RetryPolicy(initial_wait=None)  # type: ignore[arg-type]
RetryPolicy().max_wait = timedelta(0)  # type: ignore[misc]
WorkerOptions(lease="3")  # type: ignore[arg-type]
WorkerOptions(lease=None)  # type: ignore[arg-type]
Start(Order(total=1), delay="5")  # type: ignore[arg-type]
Keyring(wrapper, max_age="5")  # type: ignore[arg-type]
RetryPolicy(retry_on=TimeoutError)  # type: ignore[arg-type]
RetryPolicy().max_attempts = 3  # type: ignore[misc]
Retryable("later", timedelta(seconds=1))  # type: ignore[call-arg]
Retryable("later", retry_after=[5])  # type: ignore[arg-type]

# -------------------------------------------------------------------- clients and workers


async def use(client: Client, store: MongoStore) -> None:
    await client.start(saga, Invoice(number=1))  # type: ignore[misc]
    await client.start(saga, Order(total=1), "order-1")  # type: ignore[call-arg]
    await client.start(saga, Order(total=1), key=7)  # type: ignore[arg-type]
    await client.start(saga, Order(total=1), delay="5")  # type: ignore[arg-type]
    await client.start_many(saga, [Start(Invoice(number=1))])  # type: ignore[misc]
    run = await client.start(saga, Order(total=1))
    invoice: Invoice = await run.result()  # type: ignore[assignment]
    await run.result("30")  # type: ignore[arg-type]
    client.start(saga, Order(total=1))  # type: ignore[unused-coroutine]
    Worker(store, saga)  # type: ignore[arg-type]
    Worker(store, [saga], Shop())  # type: ignore[call-arg]
    del invoice


def of_no_database(database: Any) -> None:
    MongoStore("mongodb://localhost")  # type: ignore[arg-type]
    MongoStore(database, "sagas.")  # type: ignore[call-arg,arg-type]
