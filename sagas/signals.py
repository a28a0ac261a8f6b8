"""SIGTERM and SIGINT for the workers of a process: one handler tells all of them, and leaves as it came.

Python's own handlers, not the event loop's: those cannot be asked what was there before, so they could not put it back.
A handler that the application gave to its loop is heard beside this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

__all__ = ["draining_on_signals"]

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

_draining: Final[list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]]] = []
"""Who is to be told, and on which loop."""
_before: Final[dict[int, Any]] = {}
"""The handlers that stood there when the first of them came."""


@contextlib.contextmanager
def draining_on_signals(stop: Callable[[], None], *, enabled: bool) -> Iterator[None]:
    """Call `stop` at each SIGTERM and SIGINT, as everybody else's who has asked for it."""
    if not enabled or threading.current_thread() is not threading.main_thread():  # only there can handlers be set
        yield
        return
    entry = (asyncio.get_running_loop(), stop)
    _draining.append(entry)  # before the handlers are there, and until they are gone: no signal is told to nobody
    if len(_draining) == 1:
        for number in _SIGNALS:
            _before[number] = signal.signal(number, _tell)
    try:
        yield
    finally:
        if len(_draining) == 1:
            for number in _SIGNALS:
                before = _before.pop(number)
                if signal.getsignal(number) is _tell:  # else the application has set another meanwhile
                    signal.signal(number, before if before is not None else signal.SIG_DFL)
        _draining.remove(entry)


def _tell(*_: object) -> None:
    for loop, stop in _draining:
        with contextlib.suppress(RuntimeError):  # a loop that was closed around its worker
            loop.call_soon_threadsafe(stop)
