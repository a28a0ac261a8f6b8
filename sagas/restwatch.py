"""Tells whoever waits for runs when they come to rest: one change stream and one poll for all clients of a store."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary, WeakSet

from sagas.errors import ClientClosed
from sagas.log import engine_log
from sagas_store import MongoStore
from sagas_store.errors import StoreError

__all__ = ["RestWatch", "rest_watch_of"]

_POLL_FIRST_S: Final = 0.25
_POLL_MAX_S: Final = 5.0
_OPEN_MAX_S: Final = 1.0
_LINGER_S: Final = 60.0


@dataclass(slots=True)
class _Awaited:
    """A run that somebody waits for."""

    look_at: float
    """When the poll asks for it next, by the loop's clock."""
    pause_s: float = _POLL_FIRST_S
    waiters: dict[asyncio.Future[None], object] = field(default_factory=dict)
    """Each with the client that it waits for."""


class RestWatch:
    """A store's clients share it: a stream each would take the connections that their own questions need."""

    def __init__(self, store: MongoStore) -> None:
        """Asks nothing before somebody waits."""
        self._runs = store.runs
        self._hints = store.hints
        self._clients: WeakSet[object] = WeakSet()
        """Those that have waited, and are not closed."""
        self._awaited: dict[str, _Awaited] = {}
        self._listening = asyncio.Event()
        self._joined = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def wait(self, client: object, run_id: str, ends_at: float | None) -> None:
        """Return once the run is held or settled. Raises TimeoutError at `ends_at`, by the loop's clock; ClientClosed.

        Only the waiting itself is broken off. A question to the database ends by the store's patience: the driver does
        not pass every cancellation on, and whoever's was lost would wait for ever.
        """
        future = self._join(client, run_id)
        try:
            self._listen()
            if not self._listening.is_set():
                if await self._runs.at_rest([run_id]):
                    return  # whatever becomes of the stream
                opened_by = asyncio.get_running_loop().time() + _OPEN_MAX_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(opened_by if ends_at is None else min(opened_by, ends_at)):
                        await self._listening.wait()
            # Listening first, then looking: nothing happens unseen in between. Without a stream the poll will do.
            if not await self._runs.at_rest([run_id]):
                async with asyncio.timeout_at(ends_at):
                    await future
        finally:
            self._leave(run_id, future)

    def _join(self, client: object, run_id: str) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        self._clients.add(client)
        future: asyncio.Future[None] = loop.create_future()
        future.add_done_callback(_seen)
        look_at = loop.time() + _POLL_FIRST_S
        awaited = self._awaited.setdefault(run_id, _Awaited(look_at))
        awaited.look_at = min(awaited.look_at, look_at)
        awaited.waiters[future] = client
        self._joined.set()
        return future

    def _leave(self, run_id: str, future: asyncio.Future[None]) -> None:
        if (awaited := self._awaited.get(run_id)) is not None:
            awaited.waiters.pop(future, None)
            if not awaited.waiters:
                del self._awaited[run_id]

    def _listen(self) -> None:
        if self._tasks and not any(task.done() for task in self._tasks):
            return
        for task in self._tasks:
            task.cancel()
        self._listening.clear()
        # They are everybody's: a deadline that whoever comes first has set for himself (pymongo.timeout) is not theirs.
        self._tasks = [
            asyncio.create_task(work, context=contextvars.Context())
            for work in (self._hints.on_rest(self._notice, self._listening), self._poll())
        ]

    def _notice(self, run_id: str) -> None:
        if (awaited := self._awaited.pop(run_id, None)) is not None:
            for future in awaited.waiters:
                if not future.done():
                    future.set_result(None)

    async def _poll(self) -> None:
        """The change stream may be late or down: look for each run, ever less often.

        Ends both after a minute without a waiter.
        """
        loop = asyncio.get_running_loop()
        busy_at = loop.time()
        while loop.time() - busy_at < _LINGER_S:
            next_at = min((one.look_at for one in self._awaited.values()), default=busy_at + _LINGER_S)
            self._joined.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next_at - _POLL_FIRST_S):
                    await self._joined.wait()
            await asyncio.sleep(_POLL_FIRST_S)
            if self._awaited:
                busy_at = loop.time()
                await self._look(busy_at)
        self._tasks[0].cancel()

    async def _look(self, now: float) -> None:
        due = {run_id: one for run_id, one in self._awaited.items() if one.look_at <= now}
        if not due:
            return
        for one in due.values():
            one.pause_s = min(2 * one.pause_s, _POLL_MAX_S)
            one.look_at = now + one.pause_s
        try:
            for run_id in await self._runs.at_rest(sorted(due)):
                self._notice(run_id)
        except StoreError:
            pass  # away for the moment; whoever waits has a timeout of his own
        except Exception:  # everybody waits for this: it goes on, whatever it was
            engine_log("sagas.client").error("looking for results failed", exc_info=True)

    async def close(self, client: object) -> None:
        """Whoever waits for this client is told ClientClosed. With the last client the stream and the poll end."""
        self._clients.discard(client)
        for run_id, awaited in list(self._awaited.items()):
            for future, waits_for in list(awaited.waiters.items()):
                if waits_for is client:
                    self._leave(run_id, future)
                    if not future.done():
                        future.set_exception(ClientClosed(run_id))
        if not self._clients:
            tasks, self._tasks = self._tasks, []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


_OF_STORES: Final[WeakKeyDictionary[MongoStore, RestWatch]] = WeakKeyDictionary()


def rest_watch_of(store: MongoStore) -> RestWatch:
    """The one of this store."""
    if store not in _OF_STORES:
        _OF_STORES[store] = RestWatch(store)
    return _OF_STORES[store]


def _seen(future: asyncio.Future[None]) -> None:
    """Whoever waited may have given up, or have looked for himself: then nobody else asks what came of it."""
    if not future.cancelled():
        future.exception()
