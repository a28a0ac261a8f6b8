"""Group commit: writes that are wanted at the same time go to the server together.

One durable write by itself costs a round trip and a share of a disk flush; in a batch it costs a fraction of both. So a
`CommitLoop` sends what is waiting whenever it has a commit to spare. An idle one sends a lone write at once: batches
form only while a commit is in flight, and there is no timer. Durability is what it was: what `submit` returns is done
when the majority has acknowledged the caller's own write.

One write's fate is its own. Whoever flushes a batch gives each item its result or its error, and a submitter that is
cancelled leaves the batch untouched. An item that is not settled when its batch is over goes on by itself (`Alone`), so
that it keeps neither its neighbours waiting nor the place of a batch.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from sagas_store.numbers import check_count

__all__ = ["ONE_BY_ONE", "Alone", "Batching", "CommitLoop"]

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Alone(Generic[Result]):
    """In the place of a result: what this one item comes to is not known yet, and its batch is over."""

    go_on: Callable[[], Awaitable[Result]]


Flush = Callable[[Sequence[Item]], Awaitable[Sequence[Result | BaseException | Alone[Result]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How far writes are collected. The defaults were chosen by measurement; docs/performance.md says how."""

    in_flight_max: int = 2
    """Batches of one kind under way at once. The next one leaves when one of them returns."""
    count_max: int = 128
    """Writes in one batch. More of them wait longer for each other and gain nothing."""
    bytes_max: int = 8 * 1024 * 1024
    """Payload in one batch, about; a single write may be larger."""

    def __post_init__(self) -> None:
        for name in ("in_flight_max", "count_max", "bytes_max"):
            check_count(f"Batching.{name}", getattr(self, name), most=sys.maxsize)


ONE_BY_ONE: Final = Batching(in_flight_max=sys.maxsize, count_max=1)
"""Group commit switched off: every write goes by itself, at once. What the benchmark compares with."""


class CommitLoop(Generic[Item, Result]):
    """Collects items and flushes them in batches."""

    def __init__(
        self,
        flush: Flush[Item, Result],
        batching: Batching,
        *,
        size_of: Callable[[Item], int] = lambda _: 0,
    ) -> None:
        """`flush` writes a batch and returns one result or error per item, in order; what it raises itself, all get.

        Each gets an object of its own. `Alone` stands for what goes on by itself.
        """
        self._flush = flush
        self._in_flight_max = batching.in_flight_max
        self._count_max = batching.count_max
        self._bytes_max = batching.bytes_max
        self._size_of = size_of
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._under_way: set[asyncio.Task[None]] = set()
        self._alone: set[asyncio.Task[None]] = set()
        self._scheduled = False

    def submit(self, item: Item) -> asyncio.Future[Result]:
        """Have `item` written with whatever else is waiting; await its own result, or its own error."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((item, future))
        if not self._scheduled and len(self._under_way) < self._in_flight_max:
            # At the end of this turn of the event loop, so that what is submitted in the same turn goes along.
            self._scheduled = True
            loop.call_soon(self._start)
        return future

    def _start(self) -> None:
        self._scheduled = False
        while self._waiting and len(self._under_way) < self._in_flight_max:
            # In a context of its own: a submitter's deadline is not its neighbours'.
            task = asyncio.create_task(self._commit(self._take()), context=contextvars.Context())
            self._under_way.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._start()

    def _take(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        batch: list[tuple[Item, asyncio.Future[Result]]] = []
        size = 0
        while self._waiting and len(batch) < self._count_max:
            size += self._size_of(self._waiting[0][0])
            if batch and size > self._bytes_max:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _commit(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        results: Sequence[Result | BaseException | Alone[Result]]
        try:
            results = await self._flush([item for item, _ in batch])
        except (KeyboardInterrupt, SystemExit, asyncio.CancelledError):
            for _, future in batch:
                future.cancel()
            raise
        except BaseException as error:  # each submitter gets it, so nobody needs it here
            results = [_twin(error) for _ in batch]
        self._settle(batch, results)

    def _settle(
        self,
        batch: list[tuple[Item, asyncio.Future[Result]]],
        results: Sequence[Result | BaseException | Alone[Result]],
    ) -> None:
        for (_, future), result in zip(batch, results, strict=True):
            if isinstance(result, Alone):  # also where its submitter was cancelled
                task = asyncio.create_task(self._go_on(future, result), context=contextvars.Context())
                self._alone.add(task)
                task.add_done_callback(self._alone.discard)
            elif future.done():
                continue  # whoever submitted it was cancelled; the write stands all the same
            elif isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

    async def _go_on(self, future: asyncio.Future[Result], alone: Alone[Result]) -> None:
        try:
            result = await alone.go_on()
        except (KeyboardInterrupt, SystemExit, asyncio.CancelledError):
            future.cancel()
            raise
        except BaseException as error:  # its submitter gets it
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)


def _twin(error: BaseException) -> BaseException:
    """The same error as another object. Whoever raises one writes his frames into it, and they are nobody else's."""
    kind = type(error)
    try:
        twin = kind.__new__(kind, *error.args)  # not by its `__init__`, which may want other arguments
        twin.__dict__.update(error.__dict__)
    except Exception:  # of some strange kind: better a shared one than none
        return error
    twin.__cause__, twin.__context__ = error.__cause__, error.__context__
    twin.__suppress_context__ = error.__suppress_context__
    return twin.with_traceback(error.__traceback__)  # up to here; what is added goes on top of it, not into it
