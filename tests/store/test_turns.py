"""The store's operations take turns for the driver's connections: nobody starves, and nobody waits for himself."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from sagas_store import MongoStore
from sagas_store.drivers import Driver
from sagas_store.errors import StoreUnavailable
from sagas_store.faults import Patience
from tests.conftest import DRIVERS
from tests.store.making import client_of
from tests.store.test_server import everything

SECONDS = timedelta(seconds=30)


class UnfairPool:
    """Whoever came last gets the connection that becomes free, as a driver's pool may well do it."""

    def __init__(self, size: int) -> None:
        self.free = size
        self.waiting: list[asyncio.Future[None]] = []
        self.served: Counter[int] = Counter()
        self.gap = 0
        """How far the one served least was ever behind the one served most."""

    async def use(self, who: int, of: int) -> None:
        if self.free:
            self.free -= 1
        else:
            self.waiting.append(asyncio.get_running_loop().create_future())
            await self.waiting[-1]
        await asyncio.sleep(0)  # the answer of the server
        self.served[who] += 1
        self.gap = max(self.gap, max(self.served.values()) - min(self.served[one] for one in range(of)))
        if self.waiting:
            self.waiting.pop().set_result(None)
        else:
            self.free += 1


async def crowd(pool: UnfairPool, patience: Patience, *, size: int = 256, questions: int = 20) -> None:
    async def one(who: int) -> None:
        for _ in range(questions):
            await patience.call("read", lambda: pool.use(who, size))

    await asyncio.gather(*map(one, range(size)))


async def test_of_256_at_once_none_is_served_twice_more_than_another() -> None:
    pool = UnfairPool(8)
    await crowd(pool, Patience(SECONDS, SECONDS, at_once=8))
    assert pool.gap <= 2


async def test_without_the_bound_some_would_get_nothing_while_others_get_everything() -> None:
    # The same crowd on the same pool: what the bound is there for.
    pool = UnfairPool(8)
    await crowd(pool, Patience(SECONDS, SECONDS))
    assert pool.gap == 20


@pytest.mark.parametrize("driver", DRIVERS)
async def test_256_questions_at_once_through_a_small_pool_are_answered_in_turn(
    store: MongoStore, database: Any, driver: str, mongo_uri: str
) -> None:
    answered: Counter[int] = Counter()
    gap = 0
    async with client_of(driver, mongo_uri, maxPoolSize=8) as client:
        crowded = MongoStore(client[database.name])

        async def ask(who: int) -> None:
            nonlocal gap
            for _ in range(4):
                assert await crowded.runs.get("nobody") is None
                answered[who] += 1
                gap = max(gap, max(answered.values()) - min(answered[one] for one in range(256)))

        await asyncio.gather(*map(ask, range(256)))
    assert gap <= 2


@pytest.mark.parametrize("driver", DRIVERS)
async def test_where_there_is_one_turn_only_nothing_waits_for_itself(
    store: MongoStore, database: Any, driver: str, mongo_uri: str
) -> None:
    async with client_of(driver, mongo_uri, maxPoolSize=4) as client:
        assert Driver(client[database.name]).operations_max == 1
        narrow = MongoStore(client[database.name])
        await narrow.ready()
        ready = [asyncio.Event(), asyncio.Event()]
        streams = [
            asyncio.create_task(narrow.hints.on_due(["order"], lambda: None, ready[0])),
            asyncio.create_task(narrow.hints.on_rest(lambda _: None, ready[1])),
        ]
        try:
            async with asyncio.timeout(30):
                await asyncio.gather(*(one.wait() for one in ready))
                await everything(narrow)
                await asyncio.gather(*(narrow.runs.get("nobody") for _ in range(20)))
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(("pool", "turns"), [(None, 96), (0, 96), (1, 1), (5, 1), (20, 16), (1000, 96)])
async def test_turns_leave_connections_for_change_streams_and_the_application(
    driver: str, mongo_uri: str, pool: int | None, turns: int
) -> None:
    options = {} if pool is None else {"maxPoolSize": pool}
    async with client_of(driver, mongo_uri, **options) as client:
        assert Driver(client.turns).operations_max == turns


async def test_whose_turn_does_not_come_in_time_is_told_so_and_one_who_leaves_gives_his_turn_on() -> None:
    patience = Patience(timedelta(milliseconds=200), SECONDS, at_once=1)
    let_go = asyncio.Event()
    first = asyncio.create_task(patience.call("first", let_go.wait))
    await asyncio.sleep(0)
    with pytest.raises(StoreUnavailable, match=r"late: .*WaitQueueTimeoutError"):
        await patience.call("late", let_go.wait)
    leaving = asyncio.create_task(patience.call("leaving", let_go.wait))
    staying = asyncio.create_task(patience.call("staying", let_go.wait))
    await asyncio.sleep(0)
    leaving.cancel()
    let_go.set()
    assert await first is True
    assert await staying is True
    assert leaving.cancelled()
