"""The server's clock as the store knows it, and change streams: hints that help, and are never needed."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final

import pytest
from pydantic import BaseModel
from pymongo import AsyncMongoClient
from pymongo.errors import AutoReconnect

from sagas import Client, Saga, Step, Worker, WorkerOptions
from sagas_store import MongoStore
from sagas_store.clock import ServerClock
from sagas_store.embedded import EmbeddedMongo
from sagas_store.states import State
from tests.conftest import DRIVERS
from tests.store.making import Commands, client_of, new_run, started_and_claimed, transaction
from tests.support.failpoints import fail_point
from tests.support.waiting import eventually

pytestmark = pytest.mark.parametrize("driver", DRIVERS)

SOON_S = 15.0
OPENING: Final = 2
"""Hints without an event: one when a stream opens, one when it has been quiet for the first time."""
"""The longest wait for a hint. It comes within milliseconds, or the test fails."""


# --- the clock --------------------------------------------------------------------------------------------------------


class Stopwatch:
    """A monotonic clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_the_clock_is_the_servers_and_goes_on_with_our_monotonic_one(database: Any, driver: str) -> None:
    stopwatch = Stopwatch()
    store = MongoStore(database, monotonic=stopwatch)
    with pytest.raises(RuntimeError, match="sync_clock"):
        store.clock.now()
    before = (await database.client.admin.command("hello"))["localTime"].replace(tzinfo=UTC)
    await store.sync_clock()
    after = (await database.client.admin.command("hello"))["localTime"].replace(tzinfo=UTC)
    reading = store.clock.now()
    assert before <= reading <= after
    stopwatch.now += 3600
    assert store.clock.now() - reading == timedelta(hours=1)


async def test_a_reading_is_used_for_a_minute(database: Any, driver: str, mongo_uri: str, store: MongoStore) -> None:
    stopwatch, commands = Stopwatch(), Commands()
    async with client_of(driver, mongo_uri, event_listeners=[commands]) as client:
        watched = MongoStore(client[database.name], monotonic=stopwatch)
        for moved, asked in ((0, 1), (59, 1), (2, 2), (30, 2), (31, 3)):
            stopwatch.now += moved
            await watched.sync_clock()
            assert len(commands.of("hello")) == asked


async def test_the_best_of_recent_readings_counts_and_an_old_one_does_not_outlive_a_stepped_clock(driver: str) -> None:
    stopwatch = Stopwatch()
    clock = ServerClock(stopwatch)
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    clock.observe(noon)
    clock.observe(noon - timedelta(seconds=3))  # it travelled for longer
    assert clock.now() == noon
    clock.observe(noon + timedelta(seconds=1))
    assert clock.now() == noon + timedelta(seconds=1)
    stopwatch.now += 61
    clock.observe(noon - timedelta(hours=1))
    assert clock.now() == noon - timedelta(hours=1)


async def test_what_a_client_calls_due_now_is_due_by_the_servers_clock(store: MongoStore) -> None:
    for _ in range(20):
        await started_and_claimed(store)  # it asserts that the run was claimed at once


# --- hints ------------------------------------------------------------------------------------------------------------


@dataclass
class Ear:
    """What was heard."""

    count: int = 0
    heard: list[str] = field(default_factory=list)
    event: asyncio.Event = field(default_factory=asyncio.Event)

    def due(self) -> None:
        self.count += 1
        self.event.set()

    def rest(self, run_id: str) -> None:
        self.heard.append(run_id)
        self.event.set()

    async def hears(self) -> None:
        async with asyncio.timeout(SOON_S):
            await self.event.wait()
        self.event.clear()

    async def hears_in_all(self, count: int) -> None:
        async def so_many() -> bool:
            return self.count >= count

        await eventually(so_many, what=f"{count} hints", within_s=SOON_S)

    async def hears_the_opening(self) -> None:
        """What was started before has to be looked for, and once more what no majority had at that look."""
        await self.hears_in_all(OPENING)
        assert self.count == OPENING
        self.count = 0
        self.event.clear()


@asynccontextmanager
async def listening(listen: Callable[[asyncio.Event], Any]) -> AsyncIterator[None]:
    ready = asyncio.Event()
    task = asyncio.create_task(listen(ready))
    try:
        async with asyncio.timeout(SOON_S):
            await ready.wait()
        yield
        assert not task.done(), "whoever listens goes on listening"
    finally:
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=SOON_S)
        assert done, "whoever is told to stop listening stops"


async def test_a_cancellation_that_the_driver_swallows_stops_the_listener_all_the_same(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python 3.11's asyncio.wait_for, which PyMongo waits with while it looks for a server, loses a cancellation that
    # arrives together with what it waits for. A worker that drains during a failover would then never end.
    swallowed = asyncio.Event()

    class Swallows:
        alive = True

        async def try_next(self) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if swallowed.is_set():
                    raise
                swallowed.set()

    @asynccontextmanager
    async def watch(*_: Any, **__: Any) -> AsyncIterator[Swallows]:
        yield Swallows()

    monkeypatch.setattr(store._driver, "watch", watch)
    ready = asyncio.Event()
    task = asyncio.create_task(store.hints.on_due(["order"], lambda: None, ready))
    await ready.wait()
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=2)
    task.cancel()
    await asyncio.wait([task], timeout=2)
    assert swallowed.is_set()
    assert done


async def test_events_that_come_together_are_told_together_and_then_there_is_a_rest(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As the driver says it: after the last event of a batch the stream stands at the place that the server has read to.
    told: list[str | float] = []
    rested = asyncio.Event()

    class Gives:
        alive = True
        resume_token = ""
        batch: ClassVar = ["first", "second", "third"]

        async def try_next(self) -> dict[str, Any] | None:
            if not self.batch:
                await asyncio.Event().wait()
            event = self.batch.pop(0)
            self.resume_token = event if self.batch else "further"
            return {"_id": event, "documentKey": {"_id": event}}

    @asynccontextmanager
    async def watch(*_: Any, **__: Any) -> AsyncIterator[Gives]:
        yield Gives()

    async def sleep(seconds: float) -> None:
        told.append(seconds)
        rested.set()

    monkeypatch.setattr(store._driver, "watch", watch)
    monkeypatch.setattr("sagas_store.watch.asyncio.sleep", sleep)
    async with listening(lambda ready: store.hints.on_rest(told.append, ready)):
        await rested.wait()
    assert told == ["first", "second", "third", pytest.approx(0.01)]


async def test_many_events_at_once_are_told_with_few_rests(store: MongoStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ear, rests, many = Ear(), 0, 200
    rest, told = store.hints._rest, asyncio.Event()

    async def counted(event: dict[str, Any] | None, stream: Any) -> None:
        nonlocal rests
        rests += event is not None and stream.resume_token != event["_id"]
        await rest(event, stream)

    def due() -> None:
        ear.due()
        if ear.count >= many + OPENING:
            told.set()

    monkeypatch.setattr(store.hints, "_rest", counted)
    async with listening(lambda ready: store.hints.on_due(["order"], due, ready)):
        await store.runs.insert_many([new_run(store) for _ in range(many)])
        await asyncio.wait_for(told.wait(), SOON_S)
    assert rests <= many // 10, "within a batch there is none, whichever driver reads it"


async def test_a_run_that_is_started_is_heard_of(store: MongoStore, database: Any, driver: str) -> None:
    ear = Ear()
    async with listening(lambda ready: store.hints.on_due(["order", "refund"], ear.due, ready)):
        await ear.hears_the_opening()
        await store.runs.insert(new_run(store, saga="another"))
        await store.runs.insert(new_run(store))
        await ear.hears()
        assert ear.count == 1, "of other sagas nothing is heard"
        await store.runs.insert_many([new_run(store, saga="refund")])
        await ear.hears()
        async with transaction(database, driver, commit=True) as session:
            await store.runs.insert_in(session, new_run(store))
        await ear.hears()
        assert ear.count == 3


async def test_a_run_that_becomes_pending_again_is_heard_of(store: MongoStore) -> None:
    ear = Ear()
    runs = [await started_and_claimed(store) for _ in range(3)]
    async with listening(lambda ready: store.hints.on_due(["order"], ear.due, ready)):
        await ear.hears_the_opening()
        await store.runs.pass_gate(runs[0])
        await store.runs.settle(runs[0], State.COMPLETED)
        await store.runs.hold(runs[1], State.BROKEN, "unfit")
        await store.runs.park(runs[2], wait=timedelta(hours=1))
        await ear.hears()
        assert ear.count == 1


async def test_a_stop_is_heard_of_by_its_runs_id_in_the_same_stream(store: MongoStore) -> None:
    ear, stopped = Ear(), Ear()
    running, parked = [await started_and_claimed(store) for _ in range(2)]
    await store.runs.park(parked, wait=timedelta(hours=1))
    async with listening(lambda ready: store.hints.on_due(["order"], ear.due, ready, stopped=stopped.rest)):
        for run in (running, parked):
            assert await store.interventions.ask_stop(run.run_id, by="shop", reason=b"why")
            await stopped.hears()
    assert stopped.heard == [running.run_id, parked.run_id]


async def test_a_run_that_comes_to_rest_is_heard_of_by_its_id(store: MongoStore) -> None:
    ear = Ear()
    parked, settled, held = [await started_and_claimed(store) for _ in range(3)]
    async with listening(lambda ready: store.hints.on_rest(ear.rest, ready)):
        await store.runs.insert(new_run(store))
        await store.runs.pass_gate(parked)
        await store.runs.park(parked, wait=timedelta(hours=1))
        await store.runs.settle(settled, State.FAILED)
        await ear.hears()
        assert ear.heard == [settled.run_id]
        await store.runs.hold(held, State.QUARANTINED, "no key")
        await ear.hears()
        assert ear.heard == [settled.run_id, held.run_id]


async def test_hints_go_on_after_their_cursor_was_killed(
    store: MongoStore, database: Any, driver: str, mongo_uri: str
) -> None:
    ear, commands = Ear(), Commands()
    async with client_of(driver, mongo_uri, event_listeners=[commands]) as client:
        watched = MongoStore(client[database.name])
        async with listening(lambda ready: watched.hints.on_due(["order"], ear.due, ready)):
            (cursor,) = commands.cursors
            killed = await database.command({"killCursors": "sagas.runs", "cursors": [cursor]})
            assert killed["cursorsKilled"] == [cursor]
            await opened_again(commands)
            await store.runs.insert_many([new_run(store) for _ in range(9)])
            await ear.hears_in_all(2 * OPENING + 5)  # so at least five of them, whether driver or store opened it again


async def opened_again(commands: Commands) -> None:
    """The stream has been opened a second time. What happened in between is not heard of: hints may be missing."""

    async def second_cursor() -> bool:
        return len(commands.cursors) == 2

    await eventually(second_cursor, what="the stream is opened again")


@pytest.mark.parametrize("code", [280, 286, 13], ids=["fatal", "history lost", "no longer permitted"])
async def test_hints_go_on_after_a_fault_that_the_driver_gives_up_on(
    store: MongoStore, database: Any, driver: str, mongo_uri: str, code: int
) -> None:
    ear, name, commands = Ear(), f"victim-{secrets.token_hex(4)}", Commands()
    async with (
        AsyncMongoClient[Any](mongo_uri) as admin,
        client_of(driver, mongo_uri, appName=name, event_listeners=[commands]) as client,
    ):
        watched = MongoStore(client[database.name])
        async with listening(lambda ready: watched.hints.on_due(["order"], ear.due, ready)):
            async with fail_point(admin, ["getMore"], with_app_name=name, times=1, errorCode=code) as point:
                await opened_again(commands)
            assert point.hits == 1
            await store.runs.insert_many([new_run(store) for _ in range(9)])
            await ear.hears_in_all(2 * OPENING + 5)  # so at least five of them, whether driver or store opened it again


FREEZE = """
import asyncio, contextlib, os, sys, threading
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient
from sagas_store import MongoStore

driver, uri, name, how = sys.argv[1:]
threading.Timer(8, os._exit, [9]).start()  # a loop that stands still cannot end itself

asked = 0

class Counted:
    # Counts what is asked of a stream.

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        global asked
        asked += 1
        return getattr(self.stream, name)

async def main():
    client = (AsyncMongoClient if driver == "pymongo" else AsyncIOMotorClient)(uri)
    store = MongoStore(client[name])
    watch = store._driver.watch

    @contextlib.asynccontextmanager
    async def counted(*arguments, **more):
        async with watch(*arguments, **more) as stream:
            yield Counted(stream)

    store._driver.watch = counted
    await store.schema.apply()
    await store.sync_clock()
    ready = asyncio.Event()
    listener = asyncio.create_task(store.hints.on_due(["order"], lambda: None, ready))
    await ready.wait()
    if how == "drop":
        await client[name].drop_collection("sagas.runs")
    elif how == "rename":
        await client[name]["sagas.runs"].rename("elsewhere")
    else:
        await client.drop_database(name)
    await asyncio.sleep(0.5)
    assert not listener.done()
    print(asked, flush=True)
    os._exit(0)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["drop", "rename", "drop the database"])
async def test_a_stream_that_the_server_ends_for_good_does_not_make_the_loop_stand_still(
    driver: str, mongo_uri: str, how: str
) -> None:
    # An invalidated stream answers `None` at once and for ever: whoever asks again without a pause never lets go.
    name = f"test_{secrets.token_hex(6)}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", FREEZE, driver, mongo_uri, name, how],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        async with AsyncMongoClient[Any](mongo_uri) as client:
            await client.drop_database(name)
    assert done.returncode != 9, "the loop stood still for seconds"
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100, "in half a second"


CROWDED = """
import asyncio, os, sys, time
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient
from sagas_store import MongoStore

driver, uri, name = sys.argv[1:]

async def main():
    client = (AsyncMongoClient if driver == "pymongo" else AsyncIOMotorClient)(uri)
    store = MongoStore(client[name])
    await store.schema.apply()
    listeners = []
    for _ in range(5):
        ready = asyncio.Event()
        listeners.append(asyncio.create_task(store.hints.on_due(["order"], lambda: None, ready)))
        await ready.wait()
    took = []
    for _ in range(3):
        await asyncio.sleep(0.1)
        begun = time.monotonic()
        await store.runs.get("nobody")
        took.append(time.monotonic() - begun)
    print(max(took), flush=True)
    os._exit(0)

asyncio.run(main())
"""


async def test_listening_leaves_the_driver_room_for_everything_else(driver: str, mongo_uri: str) -> None:
    # Motor works in threads, five of them on a machine with one processor. Two workers and a client in one process
    # listen five times: did each listener sit in a thread, every question would wait for one of them to come back.
    name = f"test_{secrets.token_hex(6)}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", CROWDED, driver, mongo_uri, name],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "MOTOR_MAX_WORKERS": "5"},
        )
    finally:
        async with AsyncMongoClient[Any](mongo_uri) as client:
            await client.drop_database(name)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.5


@pytest.fixture
def own_mongo() -> Iterator[EmbeddedMongo]:
    """A server of the test's own, to be stepped down."""
    with EmbeddedMongo.start() as mongo:
        yield mongo


@pytest.mark.failover
async def test_hints_go_on_after_the_primary_has_stepped_down(own_mongo: EmbeddedMongo, driver: str) -> None:
    ear = Ear()
    async with client_of(driver, own_mongo.uri) as client:
        store = MongoStore(client["stepdown"])
        await store.schema.apply()
        await store.ready()
        async with listening(lambda ready: store.hints.on_due(["order"], ear.due, ready)):
            await ear.hears_the_opening()
            await store.runs.insert(new_run(store))
            await ear.hears()
            with suppress(AutoReconnect):  # it may close our connection while it steps down
                await client.admin.command({"replSetStepDown": 60, "force": True})
            own_mongo.nodes[0].ask({"replSetFreeze": 0})  # it may stand again at once
            await asyncio.to_thread(own_mongo.wait_for_primary)
            await store.runs.insert_many([new_run(store) for _ in range(9)])
            await ear.hears_in_all(1 + OPENING + 5)  # so at least five of them, whether driver or store opened it again


# --- without hints ----------------------------------------------------------------------------------------------------


class Order(BaseModel):
    paid: bool = False


def pay_order() -> Saga[Order]:
    saga = Saga("order", Order)

    @saga.pivot
    async def pay(order: Order, step: Step[None]) -> Order:
        return Order(paid=True)

    return saga


async def test_where_change_streams_are_not_permitted_polling_does_all_the_work(
    store: MongoStore, database: Any, driver: str, mongo_uri: str
) -> None:
    saga, name, commands = pay_order(), f"victim-{secrets.token_hex(4)}", Commands()
    options = WorkerOptions(poll=timedelta(milliseconds=50), handle_signals=False)
    async with (
        AsyncMongoClient[Any](mongo_uri) as admin,
        fail_point(admin, ["aggregate"], with_app_name=name, errorCode=13) as point,
        client_of(driver, mongo_uri, appName=name, event_listeners=[commands]) as connection,
    ):
        deaf = MongoStore(connection[database.name])
        worker = Worker(deaf, [saga], options=options)
        running = asyncio.create_task(worker.run())
        async with Client(deaf) as client:
            run = await client.start(saga, Order())
            assert await run.result(SOON_S) == Order(paid=True)
        worker.stop()
        await running
        assert len(commands.of("aggregate")) < 40, "what is refused is not asked for all the time"
    assert point.hits >= 2, "the worker's hints and the client's"
