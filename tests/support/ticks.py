"""Group commit with its ticks stretched: every batch waits for others to join it, and one alone is under way.

In use a lone write leaves at once and batches form only while another is under way. Stretched, what one run does and
what its neighbours do falls into the same batches as often as it ever can. For one test: `stretched(monkeypatch)`. For
a whole suite: SAGAS_TEST_TICK_MS=30 scripts/test tests/crash tests/faults tests/process.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from sagas_store.commit import CommitLoop

__all__ = ["TICK_S", "stretch_as_asked", "stretched"]

TICK_S = 0.03


def stretched(patch: pytest.MonkeyPatch, tick_s: float = TICK_S) -> None:
    """Let every commit loop wait so long before it sends a batch."""
    start = CommitLoop._start

    def later(loop: CommitLoop[Any, Any]) -> None:
        loop._in_flight_max = 1
        asyncio.get_running_loop().call_later(tick_s, start, loop)

    patch.setattr(CommitLoop, "_start", later)


def stretch_as_asked() -> None:
    """For the rest of this process, where the environment asks for it."""
    if tick_ms := float(os.environ.get("SAGAS_TEST_TICK_MS", "0")):
        stretched(pytest.MonkeyPatch(), tick_ms / 1e3)
