"""Correct uses of the public API: type-checked only, never run. mypy has to accept every line."""

from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

from motor.motor_asyncio import AsyncIOMotorClient
from pydantic import BaseModel
from pymongo import AsyncMongoClient

from sagas import (
    HELD,
    Client,
    ErrorDetail,
    Fate,
    JournalLine,
    Keyring,
    Limits,
    LocalKeyWrapper,
    MongoStore,
    NonRetryable,
    Retryable,
    RetryPolicy,
    Run,
    RunHeld,
    RunInfo,
    RunPage,
    RunRolledBack,
    Saga,
    Start,
    State,
    Step,
    StepDefinition,
    TenantDatabases,
    TenantWorker,
    Worker,
    WorkerOptions,
)


class Order(BaseModel):
    total: int
    reserved: bool = False


class Shop:
    async def reserve(self, key: str) -> None: ...
    def price(self) -> int:
        return 1


fulfil_order = Saga("fulfil-order", Order, version=2)
assert_type(fulfil_order, Saga[Order])


# -------------------------------------------------------------------- steps, with and without parentheses


@fulfil_order.step
async def reserve_stock(order: Order, step: Step[Shop]) -> Order:
    await step.resources.reserve(step.idempotency_key)
    assert_type(step.resources, Shop)
    assert_type(step.attempt, int)
    step.log.info("reserved")
    return order.model_copy(update={"reserved": True})


@reserve_stock.compensation
async def release_stock(order: Order, step: Step[Shop]) -> None:
    if step.fate is Fate.IN_DOUBT:
        raise Retryable("not yet", retry_after=timedelta(seconds=5))


@reserve_stock.probe
async def find_reservation(order: Order, step: Step[Shop]) -> Order | None:
    return order if order.reserved else None


@fulfil_order.step(retry=RetryPolicy(max_attempts=3), timeout=5, transactional=True)
async def note_order(order: Order, step: Step[Shop]) -> Order:
    return order


@note_order.compensation(retry=RetryPolicy(max_attempts=20), timeout=timedelta(minutes=1))
def forget_order(order: Order, step: Step[Shop]) -> None:
    """A plain function is as good; it runs in a thread."""


@fulfil_order.step(no_compensation=True, name="price", timeout=None)
def price_order(order: Order, step: Step[Shop]) -> Order:
    return order.model_copy(update={"total": step.resources.price()})


@fulfil_order.pivot(timeout=30)
async def charge_card(order: Order, step: Step[Shop]) -> Order:
    raise NonRetryable("card declined")


@charge_card.probe
def find_charge(order: Order, step: Step[Shop]) -> Order | None:
    return None


@fulfil_order.step()
async def book_shipment(order: Order, step: Step[Shop]) -> Order:
    return order


assert_type(reserve_stock, StepDefinition[Order])
assert_type(charge_card, StepDefinition[Order])
assert_type(book_shipment, StepDefinition[Order])


class Packing:
    """A callable object is a step too."""

    async def __call__(self, order: Order, step: Step[Any]) -> Order:
        return order


fulfil_order.step(name="pack")(Packing())


# -------------------------------------------------------------------- starting and observing


async def start(store: MongoStore, session: Any) -> Order:
    async with Client(store, limits=Limits(context_bytes_max=64 * 1024)) as client:
        run = await client.start(fulfil_order, Order(total=1), key="order-10248")
        assert_type(run, Run[Order])
        assert_type(run.run_id, str)
        assert_type(run.created, bool)
        await client.start(fulfil_order, Order(total=1), delay=timedelta(minutes=5), session=session)
        await client.start(fulfil_order, Order(total=1), delay=5, deadline=60)
        await client.start(fulfil_order, Order(total=1), due_at=datetime(2026, 1, 1, tzinfo=UTC))
        many = await client.start_many(fulfil_order, [Start(Order(total=1), key="a"), Start(Order(total=2))])
        assert_type(many, list[Run[Order]])
        page = await client.runs(state=HELD, saga="fulfil-order", limit=10)
        assert_type(page, RunPage)
        assert_type(page.runs, list[RunInfo])
        await client.runs(state="held", after=page.next)
        await client.runs(state=State.IN_DOUBT)
        assert_type(await client.get(run.run_id), RunInfo)
        assert_type(await client.journal(run.run_id), list[JournalLine])
        again = await client.find(fulfil_order, key="order-10248")
        assert_type(await again.info(), RunInfo)
        assert_type(await again.journal(), list[JournalLine])
        assert_type(Start(Order(total=1), delay=0.5, deadline=60).delay, timedelta | None)
        await run.result(timeout=timedelta(seconds=30))
        try:
            return await run.result(timeout=30)
        except RunRolledBack as rolled_back:
            assert_type(rolled_back.error, ErrorDetail | None)
            assert_type(rolled_back.step, str | None)
            raise
        except RunHeld as held:
            assert_type(held.state, State)
            assert_type(held.since, datetime)
            raise


async def work(store: MongoStore) -> None:
    worker = Worker(store, [fulfil_order], resources=Shop(), options=WorkerOptions())
    await worker.run()
    worker.stop()


# -------------------------------------------------------------------- a timedelta or seconds, read as a timedelta


def durations(store: MongoStore, databases: TenantDatabases, wrapper: LocalKeyWrapper) -> None:
    assert_type(WorkerOptions(lease=30, poll=0.5, park_after=timedelta(seconds=5), drain_grace=0).lease, timedelta)
    policy = RetryPolicy(initial_wait=0.2, max_wait=timedelta(minutes=1), max_elapsed=None)
    assert_type(policy.initial_wait, timedelta)
    assert_type(policy.max_elapsed, timedelta | None)
    assert_type(Keyring(wrapper, max_age=60, pause=timedelta(0), call_timeout=2.5).max_age, timedelta)
    TenantWorker(databases, [fulfil_order], look=10)
    Saga("timely", Order, deadline=timedelta(hours=1))


def stores(pymongo: AsyncMongoClient[Any], motor: AsyncIOMotorClient[Any]) -> list[MongoStore]:
    return [
        MongoStore(pymongo["shop"]),
        MongoStore(motor["shop"], prefix="orders.", patience=timedelta(seconds=5), reply=2),
    ]


# -------------------------------------------------------------------- in a unit test of the application


async def test_step() -> None:
    step = Step(
        run_id="r", saga="s", name="n", attempt=1, try_number=1, idempotency_key="k", resources=Shop(), session=None
    )
    assert_type(step, Step[Shop])
    returned = reserve_stock(Order(total=1), step)
    if not isinstance(returned, Order):
        assert_type(await returned, Order)
    assert_type(await release_or_none(step), None)


async def release_or_none(step: Step[Shop]) -> None:
    returned = release_stock(Order(total=1), step)
    if returned is not None:
        await returned
