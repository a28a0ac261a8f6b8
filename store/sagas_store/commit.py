"""Group commit: writes that are wanted at the same time go to the server together.

One durable write by itself costs a round trip and a share of a disk flush; in a batch it costs a fraction of both. So a
`CommitLoop` sends what is waiting whenever it has a commit to spare. An idle one sends a lone write at once: batches
form only while a commit is in flight, and there is no timer. Durability is what it was: `submit` returns when the
majority has acknowledged the caller's own write.

One write's fate is its own. Whoever flushes a batch gives each item its result or its error, and a submitter that is
cancelled leaves the batch untouched.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["CommitLoop"]

Item = TypeVar("Item")
Result = TypeVar("Result")

Flush = Callable[[Sequence[Item]], Awaitable[Sequence[Result | BaseException]]]


class CommitLoop(Generic[Item, Result]):
    """Collects items and flushes them in batches."""

    def __init__(
        self,
        flush: Flush[Item, Result],
        *,
        in_flight_max: int = 2,
        count_max: int = 128,
        size_of: Callable[[Item], int] = lambda _: 0,
        bytes_max: int = 8 * 1024 * 1024,
    ) -> None:
        """`flush` writes a batch and returns one result or error per item, in order; what it raises itself, all get.

        At most `in_flight_max` batches are under way at once, each of at most `count_max` items and about `bytes_max`.
        """
        self._flush = flush
        self._in_flight_max = in_flight_max
        self._count_max = count_max
        self._size_of = size_of
        self._bytes_max = bytes_max
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._under_way: set[asyncio.Task[None]] = set()
        self._scheduled = False

    async def submit(self, item: Item) -> Result:
        """Have `item` written with whatever else is waiting; returns its own result or raises its own error."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((item, future))
        if not self._scheduled and len(self._under_way) < self._in_flight_max:
            # At the end of this turn of the event loop, so that what is submitted in the same turn goes along.
            self._scheduled = True
            loop.call_soon(self._start)
        return await future

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
        results: Sequence[Result | BaseException]
        try:
            results = await self._flush([item for item, _ in batch])
        except (KeyboardInterrupt, SystemExit, asyncio.CancelledError):
            for _, future in batch:
                future.cancel()
            raise
        except BaseException as error:  # each submitter gets it, so nobody needs it here
            results = [error] * len(batch)
        self._settle(batch, results)

    @staticmethod
    def _settle(batch: list[tuple[Item, asyncio.Future[Result]]], results: Sequence[Result | BaseException]) -> None:
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue  # whoever submitted it was cancelled; the write stands all the same
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)
