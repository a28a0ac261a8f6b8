"""Change streams as hints: something may be worth looking at. Never the truth, and never needed for progress.

Whoever listens also polls. A stream that fails is opened again, with growing pauses; while it is down, hints are
missing and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pymongo.errors import PyMongoError

from sagas_store.drivers import Collection, Document, Driver
from sagas_store.faults import cancellations
from sagas_store.states import HELD, SETTLED, State

__all__ = ["Hints"]

_REST_S: Final = 0.01
"""After each batch of events. The first event after a quiet time is told at once; those of a few milliseconds come
together, else each of a thousand a second would cost a round trip of its own."""
_PAUSE_S: Final = 0.1
_PAUSE_MAX_S: Final = 30.0


def _nothing() -> None:
    """What is done where nothing is asked for."""


class Hints:
    """The hints that the runs collection gives."""

    def __init__(self, driver: Driver, runs: Collection) -> None:
        self._driver = driver
        self._runs = runs

    async def on_due(
        self,
        sagas: Sequence[str],
        notice: Callable[[], None],
        ready: asyncio.Event | None = None,
        *,
        stopped: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Call `notice()` whenever a run of these sagas may have become claimable. Runs until cancelled.

        Calls `stopped(run_id)` whenever a stop is recorded on any run. Both in one stream: the server reads its whole
        log for each of them.
        """
        becomes_pending = {"operationType": "update", "updateDescription.updatedFields.state": State.PENDING}
        is_stopped = {"operationType": "update", "updateDescription.updatedFields.stop": {"$exists": True}}
        started = {"operationType": "insert", "fullDocument.saga": {"$in": list(sagas)}}
        pipeline: list[Document] = [
            {"$match": {"$or": [started, becomes_pending, is_stopped]}},
            {"$project": {"documentKey": 1, "stop": {"$type": "$updateDescription.updatedFields.stop"}}},
        ]

        def tell(event: Document) -> None:
            if event["stop"] != "missing":
                stopped(event["documentKey"]["_id"])
            notice()  # a stop may have made its run due, too

        # Once when it opens, too: what was started while nobody listened yet has to be looked for.
        await self._listen(pipeline, tell, ready, opened=notice)

    async def on_rest(self, notice: Callable[[str], None], ready: asyncio.Event | None = None) -> None:
        """Call `notice(run_id)` whenever a run becomes held or settled. Runs until cancelled."""
        rest = {"$in": sorted(HELD | SETTLED)}
        pipeline: list[Document] = [
            {"$match": {"operationType": "update", "updateDescription.updatedFields.state": rest}},
            {"$project": {"_id": 1, "documentKey": 1}},
        ]
        await self._listen(pipeline, lambda event: notice(event["documentKey"]["_id"]), ready)

    async def _listen(
        self,
        pipeline: Sequence[Mapping[str, Any]],
        notice: Callable[[Document], None],
        ready: asyncio.Event | None,
        opened: Callable[[], None] = _nothing,
    ) -> None:
        pause = _PAUSE_S
        asked = cancellations()
        while True:
            try:
                async with self._driver.watch(self._runs, pipeline) as stream:
                    if ready is not None:
                        ready.set()
                    opened()
                    once_more = opened
                    while True:
                        event = await stream.try_next()
                        if cancellations() > asked:
                            raise asyncio.CancelledError  # the driver lost it
                        if event is not None:
                            notice(event)
                        elif not stream.alive:
                            break  # ended for good, its collection dropped or renamed: it would answer None at once
                        else:
                            # Nobody tells of what was written before it opened, and on a majority after that look.
                            once_more()
                            once_more = _nothing
                        await self._rest(event, stream)
                        pause = _PAUSE_S
            except PyMongoError:
                # The server fails over, the stream's place has left the oplog, or the user may not open one: polling
                # goes on in each case, so there is nothing to tell anybody.
                if cancellations() > asked:
                    raise asyncio.CancelledError from None  # the driver took it for a lost connection
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSE_MAX_S)

    async def _rest(self, event: Document | None, stream: Any) -> None:
        """Ask no further for a while, unless more events are at hand, or may be.

        Within a batch the token is the event's own. After its last event it is as far as the server has read, which may
        be that very event: then the next question is asked at once, and has to be.
        """
        if event is None:
            await asyncio.sleep(self._driver.rest_s)
        elif stream.resume_token != event["_id"]:
            await asyncio.sleep(_REST_S)
