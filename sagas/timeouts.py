"""The timeouts of all tries of a worker, on one timer per length of timeout.

The event loop's own timers cost several microseconds each to set and to cancel, more than anything else the engine does
for a step that is quick, and nearly none of them ever rings. Timeouts of one length end in the order in which they
began, so the first is the only one that has to be looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import itertools
from collections.abc import Callable

__all__ = ["Timeouts"]


class Timeouts:
    """Ends scopes (`asyncio.timeout(None)`) that are open for too long."""

    def __init__(self) -> None:
        self._lines: dict[float, dict[asyncio.Timeout, float]] = {}
        """Length in seconds -> the scopes that are open, oldest first -> when each ends by the loop's clock."""

    def begin(self, scope: asyncio.Timeout, seconds: float) -> Callable[[], object]:
        """Let `scope` end in `seconds`. Call what this returns when it is left."""
        loop = asyncio.get_running_loop()
        line = self._lines.get(seconds)
        ends_at = loop.time() + seconds
        if line is None:
            line = self._lines[seconds] = {}
            self._look_at(ends_at, seconds)
        line[scope] = ends_at
        return functools.partial(line.pop, scope, None)

    def _look(self, seconds: float) -> None:
        """End what is over, and come again when the first that is left may be."""
        loop = asyncio.get_running_loop()
        line, now = self._lines[seconds], loop.time()
        over = list(itertools.takewhile(lambda scope: line[scope] <= now, line))
        for scope in over:
            del line[scope]
            with contextlib.suppress(RuntimeError):  # it is being ended, or was left, already
                scope.reschedule(now)
        if line:
            self._look_at(next(iter(line.values())), seconds)
        else:
            del self._lines[seconds]

    def _look_at(self, at: float, seconds: float) -> None:
        # In a context of its own: the timer outlives the try that happened to be the first.
        asyncio.get_running_loop().call_at(at, self._look, seconds, context=contextvars.Context())
