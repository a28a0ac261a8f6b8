"""Steps that return or raise what no step should: each has its defined end, none is repeated for ever, no worker dies.

Every case runs beside a well-behaved run on the same worker, which must be none the worse.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any
from urllib.error import URLError

import pytest
from pydantic import BaseModel, field_serializer, model_validator

from sagas import Client, NonRetryable, Retryable, RetryPolicy, RunInfo, Saga, Start, Step, StoreUnavailable, Worker
from sagas_store import MongoStore
from sagas_store.entries import Kind
from sagas_store.states import HELD, SETTLED, State
from tests.support.crashing import Gate, working
from tests.support.waiting import eventually

TWICE = RetryPolicy(max_attempts=2, initial_wait=timedelta(milliseconds=1), jitter=False)
SOON_S = 5.0


class Parcel(BaseModel):
    """A context with room for mischief."""

    text: str = ""
    anything: Any = None
    bad_serializer: bool = False
    bad_validator: bool = False

    @field_serializer("bad_serializer")
    def fail_to_write(self, value: bool) -> bool:
        if value:
            raise KeyError("not a serialisation error")
        return value

    @model_validator(mode="after")
    def fail_to_read(self) -> Parcel:
        if self.bad_validator:
            raise RuntimeError("not a validation error")
        return self


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words for it")


class Unprepared(Retryable):
    def __init__(self) -> None: ...


class NotAnException(BaseException):
    """As some libraries have for their own signals."""


class Neighbour:
    """A harmless saga on the same worker."""

    def __init__(self) -> None:
        self.saga = Saga("neighbour", Parcel)

        @self.saga.step(no_compensation=True)
        async def nod(parcel: Parcel, step: Step[None]) -> Parcel:
            return parcel


async def at_rest(client: Client, run_id: str) -> RunInfo:
    async def look() -> RunInfo | None:
        info = await client.get(run_id)
        return info if info.state in HELD | SETTLED else None

    info = await eventually(look, what=f"run {run_id} comes to rest", within_s=SOON_S)
    assert info is not None
    return info


async def settle_beside_a_neighbour(store: MongoStore, saga: Saga[Parcel], **options: Any) -> RunInfo:
    """The end of a run of `saga`, after a neighbour ran on the same worker before and after it."""
    neighbour = Neighbour().saga
    async with Client(store) as client, working(store, saga, neighbour, **options) as (_, task):
        await (await client.start(neighbour, Parcel())).result(20)
        run = await client.start(saga, Parcel())
        info = await at_rest(client, run.run_id)
        await (await client.start(neighbour, Parcel())).result(20)
        assert not task.done()
    return info


def circular() -> Parcel:
    things: list[Any] = []
    things.append(things)
    return Parcel(anything=things)


def deep() -> Parcel:
    things: Any = None
    for _ in range(100_000):
        things = [things]
    return Parcel(anything=things)


def poisoned() -> Parcel:
    parcel = Parcel()
    parcel.bad_validator = True
    return parcel


RETURNS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "another type": lambda: {"text": "a dict"},
    "the class itself": lambda: Parcel,
    "what cannot be written": lambda: Parcel(anything=object()),
    "a circle": circular,
    "17 MB": lambda: Parcel(text="x" * 17_000_000),
    "what does not validate when read back": lambda: Parcel.model_construct(text=["no text"]),  # type: ignore[arg-type]
    "half a character": lambda: Parcel(text="\ud800"),
    "what its own serializer cannot write": lambda: Parcel(bad_serializer=True),
    "what its own validator cannot read": poisoned,
    "what is nested too deep": deep,
}


def saga_with(do: Callable[[], Any], *, tries: RetryPolicy = TWICE, calls: list[int]) -> Saga[Parcel]:
    """Reserve does it; compensated before the pivot."""
    saga = Saga("hostile", Parcel)

    @saga.step(retry=tries)
    async def reserve(parcel: Parcel, step: Step[None]) -> Parcel:
        calls.append(step.try_number)
        result: Parcel = do()
        return result

    @reserve.compensation
    async def release(parcel: Parcel, step: Step[None]) -> None: ...

    @saga.pivot
    async def charge(parcel: Parcel, step: Step[None]) -> Parcel:
        return parcel

    return saga


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("what", RETURNS)
async def test_a_step_that_returns_what_cannot_be_journaled_has_failed_and_is_undone(
    store: MongoStore, what: str
) -> None:
    calls: list[int] = []
    info = await settle_beside_a_neighbour(store, saga_with(RETURNS[what], calls=calls))
    assert info.state is State.COMPENSATED
    assert calls == [1], "it is pointless to try that again"
    (failed,) = [entry for entry in await store.journal.load(info.run_id) if entry.kind is Kind.STEP_FAILED]
    assert failed.in_doubt, "it returned, so its effect has probably happened"


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("what", ["another type", "17 MB", "what its own serializer cannot write"])
async def test_a_pivot_that_returns_what_cannot_be_journaled_is_held_in_doubt(store: MongoStore, what: str) -> None:
    saga = Saga("hostile", Parcel)

    @saga.pivot(retry=TWICE)
    async def charge(parcel: Parcel, step: Step[None]) -> Parcel:
        result: Parcel = RETURNS[what]()
        return result

    info = await settle_beside_a_neighbour(store, saga)
    assert info.state is State.IN_DOUBT
    assert info.held_reason is not None
    assert "charge" in info.held_reason


def throw(make: Callable[[], BaseException]) -> Callable[[], Any]:
    def do() -> Any:
        raise make()

    return do


def nested(depth: int) -> Exception:
    error: Exception = TimeoutError()
    for _ in range(depth):
        error = ExceptionGroup("one", [error])
    return error


RAISES: dict[str, tuple[Callable[[], BaseException], int]] = {
    # What is raised, and how often the step is then called: once for a definite no, twice for what may pass.
    "SystemExit": (lambda: SystemExit(3), 1),
    "CancelledError": (asyncio.CancelledError, 2),
    "StopIteration": (StopIteration, 1),
    "what cannot be printed": (Unprintable, 1),
    "50 MB of text": (lambda: ValueError("x" * 50_000_000), 1),
    "a group": (lambda: ExceptionGroup("two", [ValueError("a"), TimeoutError("b")]), 1),
    "groups in groups": (lambda: nested(10_000), 2),
    "what cannot be formatted": (lambda: SyntaxError("odd", ("file", 1, 1, 5)), 1),  # type: ignore[arg-type]
    "Retryable in 5, a number": (lambda: Retryable("later", retry_after=0.001), 2),
    "Retryable in 0.001, a text": (lambda: Retryable("later", retry_after="0.001"), 2),
    "Retryable at a date": (lambda: Retryable("later", retry_after="Wed, 21 Oct 2015 07:28:00 GMT"), 2),
    "Retryable in NaN": (lambda: Retryable("later", retry_after=float("nan")), 2),
    "Retryable without its __init__": (Unprepared, 2),
    "Retryable in the past": (lambda: Retryable("later", retry_after=timedelta(days=-1)), 2),
}


@pytest.mark.parametrize("what", RAISES)
async def test_a_step_that_raises_what_no_step_should_has_failed_and_is_undone(store: MongoStore, what: str) -> None:
    make, tries = RAISES[what]
    calls: list[int] = []
    info = await settle_beside_a_neighbour(store, saga_with(throw(make), calls=calls))
    assert info.state is State.COMPENSATED
    assert calls == list(range(1, tries + 1))


@pytest.mark.parametrize("retry_after", [timedelta.max, 1e15, float("inf")])
async def test_a_retry_at_the_end_of_time_is_parked_or_refused_but_never_repeated_at_once(
    store: MongoStore, retry_after: Any
) -> None:
    calls: list[int] = []
    saga = saga_with(throw(lambda: Retryable("never", retry_after=retry_after)), calls=calls)
    async with Client(store) as client, working(store, saga):
        run = await client.start(saga, Parcel())

        async def decided() -> bool:
            return bool(await store.journal.load(run.run_id))

        await eventually(decided, what="what came of it is journaled", within_s=SOON_S)
    assert calls == [1]


@pytest.mark.parametrize("what", ["SystemExit", "StopIteration", "CancelledError"])
async def test_a_plain_function_that_raises_it_in_its_thread_has_failed_too(store: MongoStore, what: str) -> None:
    saga = Saga("hostile", Parcel)
    make, tries = RAISES[what]
    calls: list[int] = []

    @saga.step(retry=TWICE, timeout=20)
    def reserve(parcel: Parcel, step: Step[None]) -> Parcel:
        calls.append(step.try_number)
        raise make()

    @reserve.compensation
    def release(parcel: Parcel, step: Step[None]) -> None: ...

    info = await settle_beside_a_neighbour(store, saga)
    assert info.state is State.COMPENSATED
    assert calls == list(range(1, tries + 1))


@pytest.mark.parametrize(
    "error",
    [
        asyncio.IncompleteReadError(b"HTTP/1.1 2", None),
        URLError(OSError(errno.ENETUNREACH, "Network is unreachable")),
        ExceptionGroup("of a TaskGroup", [TimeoutError()]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_pivot_whose_reply_was_cut_is_not_called_undone(store: MongoStore, error: Exception) -> None:
    saga = Saga("hostile", Parcel)

    @saga.pivot(retry=TWICE)
    async def charge(parcel: Parcel, step: Step[None]) -> Parcel:
        raise error

    info = await settle_beside_a_neighbour(store, saga)
    assert info.state is State.IN_DOUBT


async def test_a_step_that_cancels_its_own_task_is_in_doubt_and_the_worker_goes_on(store: MongoStore) -> None:
    saga = Saga("hostile", Parcel)
    calls: list[int] = []

    @saga.step(retry=TWICE)
    async def reserve(parcel: Parcel, step: Step[None]) -> Parcel:
        calls.append(step.try_number)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()
        return parcel

    @reserve.compensation
    async def release(parcel: Parcel, step: Step[None]) -> None: ...

    info = await settle_beside_a_neighbour(store, saga)
    assert info.state is State.COMPENSATED
    assert len(calls) == 2


async def test_a_step_that_cancels_its_own_task_and_returns_has_returned(store: MongoStore) -> None:
    # The cancellation is still on its way then, and would strike the next await: the write of the step's outcome.
    saga = Saga("hostile", Parcel)
    calls: list[int] = []

    @saga.step(no_compensation=True)
    async def reserve(parcel: Parcel, step: Step[None]) -> Parcel:
        calls.append(step.attempt)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return parcel

    info = await settle_beside_a_neighbour(store, saga)
    assert info.state is State.COMPLETED
    assert (calls, info.attempts) == ([1], 1)


async def test_a_step_may_be_told_to_break_off_while_its_own_cancellation_is_shaken_off(store: MongoStore) -> None:
    """Whoever tells it, the watch over leases for one, must not be struck by what became of the step."""
    saga = Saga("hostile", Parcel)
    faults: list[Exception] = []

    @saga.step(no_compensation=True)
    async def reserve(parcel: Parcel, step: Step[list[Worker]]) -> Parcel:
        (attempt,) = step.resources[0]._attempts.values()

        def tell() -> None:
            try:
                attempt.interrupt()
            except Exception as fault:
                faults.append(fault)

        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        asyncio.get_running_loop().call_soon(tell)
        return parcel

    workers: list[Worker] = []
    async with Client(store) as client, working(store, saga, resources=workers) as (worker, _):
        workers.append(worker)
        await (await client.start(saga, Parcel())).result(20)
    assert not faults


@pytest.mark.parametrize("hostile", ["step", "compensation"])
async def test_what_cancels_its_own_task_and_raises_has_raised_and_tears_nothing_after_it(
    store: MongoStore, hostile: str
) -> None:
    saga = Saga("hostile", Parcel)
    counts: list[int] = []

    def cancel_itself(part: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        counts.append(task.cancelling())
        if part == hostile:
            task.cancel()
            raise ValueError(part)

    @saga.step(no_compensation=True)
    async def first(parcel: Parcel, step: Step[None]) -> Parcel:
        return parcel

    @saga.step(retry=RetryPolicy(max_attempts=1))
    async def reserve(parcel: Parcel, step: Step[None]) -> Parcel:
        cancel_itself("step")
        return parcel

    @reserve.compensation(retry=RetryPolicy(max_attempts=1))
    async def release(parcel: Parcel, step: Step[None]) -> None:
        cancel_itself("compensation")

    @saga.pivot
    async def charge(parcel: Parcel, step: Step[None]) -> Parcel:
        raise NonRetryable("no")

    info = await settle_beside_a_neighbour(store, saga)
    # A ValueError is definite, so a step that raised one has nothing to undo.
    assert info.state is (State.COMPENSATED if hostile == "step" else State.COMPENSATION_FAILED)
    assert info.attempts == 1, "no attempt was torn"
    assert set(counts) == {0}, "whatever starts, starts with a clean cancel counter"


async def test_a_step_that_raises_a_signal_of_some_library_takes_no_other_run_with_it(store: MongoStore) -> None:
    """Neither at work nor, which is where the worker waits for all of them together, while it drains."""
    hostile, waiting = Saga("hostile", Parcel), Saga("waiting", Parcel)
    gate, patient = Gate(), Gate()

    @hostile.step(no_compensation=True, retry=TWICE)
    async def reserve(parcel: Parcel, step: Step[None]) -> Parcel:
        await gate.wait()
        raise NotAnException

    @waiting.step(no_compensation=True)
    async def wait(parcel: Parcel, step: Step[None]) -> Parcel:
        await patient.wait()
        return parcel

    async with Client(store) as client, working(store, hostile, waiting) as (worker, task):
        await client.start(hostile, Parcel())
        run = await client.start(waiting, Parcel())
        await gate.entered.wait()
        await patient.entered.wait()
        worker.stop()

        async def draining() -> bool:
            return all(attempt._draining for attempt in worker._attempts.values())

        await eventually(draining, what="the worker drains")
        gate.opened.set()
        with pytest.raises(TimeoutError):  # it still waits for the other one: there is no event for not ending
            await asyncio.wait_for(asyncio.shield(task), 0.3)
        patient.opened.set()
        await asyncio.wait_for(task, 20)
        assert (await client.get(run.run_id)).state is State.COMPLETED


async def test_a_step_that_starts_another_run_and_does_not_reach_the_database_is_tried_again(store: MongoStore) -> None:
    """It asked for the engine's own client, and got the engine's own word for a lost connection."""
    saga = Saga("parent", Parcel)

    @saga.step(no_compensation=True, retry=TWICE)
    async def start_child(parcel: Parcel, step: Step[None]) -> Parcel:
        if step.try_number == 1:
            raise StoreUnavailable("start", "the database is away")
        return parcel

    info = await settle_beside_a_neighbour(store, saga)
    assert info.state is State.COMPLETED


async def test_a_step_that_turns_its_timeout_into_a_result_has_that_result(store: MongoStore) -> None:
    saga = Saga("hostile", Parcel)

    @saga.step(no_compensation=True, timeout=0.05)
    async def stubborn(parcel: Parcel, step: Step[None]) -> Parcel:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return Parcel(text="after all")

    info = await settle_beside_a_neighbour(store, saga)
    assert info.state is State.COMPLETED


async def test_a_thread_that_outlives_its_timeout_is_left_behind_and_the_run_goes_on(store: MongoStore) -> None:
    saga = Saga("hostile", Parcel)
    let_go = threading.Event()

    @saga.step(retry=TWICE, timeout=0.05)
    def deaf(parcel: Parcel, step: Step[None]) -> Parcel:
        let_go.wait(20)
        return parcel

    @deaf.compensation
    async def release(parcel: Parcel, step: Step[None]) -> None: ...

    try:
        info = await settle_beside_a_neighbour(store, saga)
    finally:
        let_go.set()
    assert info.state is State.COMPENSATED


@pytest.mark.parametrize(
    "what", ["SystemExit", "CancelledError", "what cannot be printed", "50 MB of text", "groups in groups"]
)
async def test_a_compensation_that_raises_it_is_held_for_an_operator(store: MongoStore, what: str) -> None:
    saga = Saga("hostile", Parcel)

    @saga.step
    async def reserve(parcel: Parcel, step: Step[None]) -> Parcel:
        return parcel

    @reserve.compensation(retry=TWICE)
    async def release(parcel: Parcel, step: Step[None]) -> None:
        throw(RAISES[what][0])()

    @saga.pivot
    async def charge(parcel: Parcel, step: Step[None]) -> Parcel:
        raise ValueError("no")

    info = await settle_beside_a_neighbour(store, saga)
    assert info.state is State.COMPENSATION_FAILED


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("what", ["another type", "17 MB", "what its own validator cannot read"])
async def test_a_probe_that_returns_what_cannot_be_journaled_has_failed(store: MongoStore, what: str) -> None:
    saga = Saga("hostile", Parcel)

    @saga.pivot(retry=TWICE)
    async def charge(parcel: Parcel, step: Step[None]) -> Parcel:
        raise TimeoutError

    @charge.probe
    async def find(parcel: Parcel, step: Step[None]) -> Parcel | None:
        result: Parcel = RETURNS[what]()
        return result

    info = await settle_beside_a_neighbour(store, saga)
    assert info.state is State.IN_DOUBT


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """As tracers and loggers are often written: nothing about it says that what it wraps is async."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


async def test_an_async_function_in_a_plain_wrapper_is_run_to_its_end(store: MongoStore) -> None:
    saga = Saga("hostile", Parcel)
    done: list[str] = []

    @saga.step
    @traced
    async def reserve(parcel: Parcel, step: Step[None]) -> Parcel:
        await asyncio.sleep(0)
        done.append("reserve")
        return parcel

    @reserve.compensation
    @traced
    async def release(parcel: Parcel, step: Step[None]) -> None:
        await asyncio.sleep(0)
        done.append("release")

    @saga.pivot(retry=TWICE)
    @traced
    async def charge(parcel: Parcel, step: Step[None]) -> Parcel:
        raise TimeoutError

    @charge.probe
    @traced
    async def find(parcel: Parcel, step: Step[None]) -> Parcel | None:
        await asyncio.sleep(0)
        done.append("find")
        return None

    info = await settle_beside_a_neighbour(store, saga)
    assert info.state is State.COMPENSATED
    assert done == ["reserve", "find", "find", "release"]


async def refund() -> None: ...


def notes() -> Iterator[None]:
    yield


async def async_notes() -> AsyncIterator[None]:
    yield


PROMISES: dict[str, Callable[[], Any]] = {
    "a coroutine": refund,
    "a task": lambda: asyncio.create_task(refund()),
    "a future": asyncio.Future,
    "a thread's future": Future,
    "a generator": notes,
    "an async generator": async_notes,
}


@pytest.mark.parametrize("what", PROMISES)
async def test_what_is_only_promised_is_not_done(store: MongoStore, what: str) -> None:
    """As when an `await` is forgotten."""
    saga = Saga("hostile", Parcel)

    @saga.step(retry=TWICE)
    async def reserve(parcel: Parcel, step: Step[None]) -> Parcel:
        result: Parcel = PROMISES[what]()
        return result

    @reserve.compensation(retry=TWICE)
    async def release(parcel: Parcel, step: Step[None]) -> None:
        result: None = PROMISES[what]()
        return result

    info = await settle_beside_a_neighbour(store, saga)
    assert info.state is State.COMPENSATION_FAILED
    assert [entry.kind for entry in await store.journal.load(info.run_id)] == [
        Kind.STEP_FAILED,
        Kind.ROLLBACK_BEGUN,
        Kind.COMPENSATION_FAILED,
    ]


async def test_what_a_thread_promises_after_its_timeout_is_put_away(store: MongoStore) -> None:
    saga = Saga("hostile", Parcel)
    let_go = threading.Event()
    ended: list[Any] = []

    @saga.step(retry=RetryPolicy(max_attempts=1), timeout=0.05, no_compensation=True)
    def deaf(parcel: Parcel, step: Step[None]) -> Any:
        let_go.wait(20)
        ended.append(refund())
        return ended[0]

    async def put_away() -> bool:
        return bool(ended) and inspect.getcoroutinestate(ended[0]) == inspect.CORO_CLOSED

    try:
        await settle_beside_a_neighbour(store, saga)
    finally:
        let_go.set()
    await eventually(put_away, what="the coroutine is closed")


# ------------------------------------------------------------------------------------ hostile documents


async def test_an_entry_of_an_unknown_kind_holds_its_own_run_and_no_other(store: MongoStore, database: Any) -> None:
    """Written by a newer version, or by hand. The others were claimed in the same batch."""
    neighbour = Neighbour().saga
    async with Client(store) as client:
        runs = await client.start_many(neighbour, [Start(Parcel()) for _ in range(3)])
        await store.claims.take([("neighbour", 1)], token="a" * 32, worker="dead", lease=timedelta(1), limit=3)
        await (
            database["sagas.journal"]
            .with_options()
            .insert_one(
                {
                    "_id": {"run": runs[0].run_id, "seq": 1},
                    "kind": "of_another_time",
                    "at": store.clock.now(),
                    "attempt": 1,
                    "worker": "dead",
                    "token": "a" * 32,
                },
                bypass_document_validation=True,
            )
        )
        await database["sagas.runs"].update_many({}, {"$set": {"due_at": store.clock.now() - timedelta(seconds=1)}})
        async with working(store, neighbour):
            for run in runs[1:]:
                assert (await at_rest(client, run.run_id)).state is State.COMPLETED
            assert (await at_rest(client, runs[0].run_id)).state is State.BROKEN


async def test_a_run_whose_input_is_no_context_is_held_as_broken(store: MongoStore, database: Any) -> None:
    neighbour = Neighbour().saga
    async with Client(store) as client:
        run = await client.start(neighbour, Parcel())
        await database["sagas.runs"].update_one({"_id": run.run_id}, {"$set": {"input": b'\x01{"text": 3}'}})
        async with working(store, neighbour):
            info = await at_rest(client, run.run_id)
    assert info.state is State.BROKEN
    assert info.held_reason is not None
    assert "text" in info.held_reason


# ------------------------------------------------------------------------------------ changed definitions


def definition(*names: str, version: int = 1, calls: list[str] | None = None) -> Saga[Parcel]:
    saga = Saga("changing", Parcel, version=version)
    for name in names:

        async def do(parcel: Parcel, step: Step[None]) -> Parcel:
            if calls is not None:
                calls.append(f"{version}:{step.name}")
            return parcel

        saga.step(no_compensation=True, name=name)(do)
    return saga


async def test_a_changed_definition_with_the_same_version_is_held_with_the_difference_named(store: MongoStore) -> None:
    calls: list[str] = []
    async with Client(store) as client:
        run = await client.start(definition("reserve", "charge"), Parcel())
        async with working(store, definition("reserve", "pack", "charge", calls=calls)):
            info = await at_rest(client, run.run_id)
    assert info.state is State.BROKEN
    assert info.held_reason is not None
    assert "reserve:n charge:n" in info.held_reason
    assert "reserve:n pack:n charge:n" in info.held_reason
    assert calls == []


async def test_a_worker_leaves_runs_untouched_that_it_does_not_know(store: MongoStore) -> None:
    neighbour = Neighbour().saga
    async with Client(store) as client:
        unknown = [
            await client.start(definition("reserve", version=2), Parcel()),
            await client.start(Saga("changing", Parcel).step(no_compensation=True)(_nod).saga, Parcel()),
        ]
        before = [await store.runs.get(run.run_id) for run in unknown]
        async with working(store, neighbour, definition("reserve", version=3)):
            await (await client.start(neighbour, Parcel())).result(20)
        assert [await store.runs.get(run.run_id) for run in unknown] == before


async def _nod(parcel: Parcel, step: Step[None]) -> Parcel:
    return parcel


async def test_two_versions_side_by_side_each_take_their_own_runs(store: MongoStore) -> None:
    calls: list[str] = []
    old = definition("reserve", "charge", calls=calls)
    new = definition("reserve", "pack", "charge", version=2, calls=calls)
    async with (
        Client(store) as client,
        working(store, old, name="old"),
        working(store, new, name="new"),
    ):
        runs = [await client.start(saga, Parcel()) for saga in (old, new, old, new)]
        for run in runs:
            await run.result(20)
        workers = [(await run.info()).worker for run in runs]
    assert workers == ["old", "new", "old", "new"]
    assert sorted(calls) == sorted(["1:reserve", "1:charge"] * 2 + ["2:reserve", "2:pack", "2:charge"] * 2)
