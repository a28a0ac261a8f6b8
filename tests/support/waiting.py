"""Waiting for what gives no event of its own: look, let the loop go on, look again, and give up in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

__all__ = ["eventually"]

T = TypeVar("T")

_PAUSE_S = 0.01


async def eventually(look: Callable[[], Awaitable[T]], *, what: str, within_s: float = 20.0) -> T:
    """The first true answer of `look()`. Fails, naming `what` and the last answer, when there is none in time.

    For states of the database and of objects that nobody announces. Where there is an event, await the event.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + within_s
    while not (answer := await look()):
        if loop.time() > give_up_at:
            raise AssertionError(f"waited {within_s:g} s in vain: {what}; last seen: {answer!r}")
        await asyncio.sleep(_PAUSE_S)
    return answer
