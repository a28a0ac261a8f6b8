"""MongoDB's `failCommand` fail point: the real server answers as it would in trouble, for one client's commands only.

There is one such fail point per server, so one trouble at a time, and a test that needs it for long has a server of its
own. `with_app_name` is what keeps everybody else on the same server out of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import pymongo.common
import pytest
from pymongo import AsyncMongoClient

__all__ = ["ALWAYS", "LOOKS_AGAIN_SOON", "FailPoint", "fail_point", "look_again_at_once"]

ALWAYS: Final = "alwaysOn"

LOOKS_AGAIN_SOON: Final[dict[str, Any]] = {"serverMonitoringMode": "poll", "heartbeatFrequencyMS": 500}
"""Options of a client that is to be hit. Told that its server is gone, the usual one waits for the server's next
streamed greeting, which here nothing delays but the ten seconds between two of them."""


def look_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients made from now on look for a lost server every 20 ms; the driver's least is half a second."""
    monkeypatch.setattr(pymongo.common, "MIN_HEARTBEAT_INTERVAL", 0.02)


@dataclass(slots=True)
class FailPoint:
    """What became of a fail point; `hits` is known once it is off."""

    hits: int = 0


@asynccontextmanager
async def fail_point(
    client: AsyncMongoClient[Any],
    commands: Sequence[str],
    *,
    with_app_name: str,
    times: int | None = None,
    **trouble: Any,
) -> AsyncIterator[FailPoint]:
    """The next `times` (None: all) of these commands from clients with that appName meet `trouble`, until the end.

    `trouble` is the server's own vocabulary: closeConnection=True, errorCode=..., errorLabels=[...],
    writeConcernError={...}, blockConnection=True with blockTimeMS=... The server counts what it hit. It is switched
    off whatever happens inside; `client` must be another one than those that are hit.
    """
    data = {"failCommands": list(commands), "appName": with_app_name, **trouble}
    mode = {"times": times} if times is not None else ALWAYS
    on = await client.admin.command({"configureFailPoint": "failCommand", "mode": mode, "data": data})
    point = FailPoint()
    try:
        yield point
    finally:
        off = await client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})
        point.hits = off["count"] - on["count"]
