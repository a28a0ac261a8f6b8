"""Seconds, CPU and percentiles."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Sequence

import psutil

__all__ = ["Meter", "fsync_ms", "percentile"]


class Meter:
    """Wall time and CPU of some processes since it was made."""

    def __init__(self, **processes: Iterable[int]) -> None:
        """`processes`: process ids by a name."""
        self._processes = {name: [psutil.Process(pid) for pid in pids] for name, pids in processes.items()}
        self._cpu = self._read()
        self._begun = time.monotonic()

    def _read(self) -> dict[str, float]:
        times = {name: [one.cpu_times() for one in group] for name, group in self._processes.items()}
        return {name: sum(one.user + one.system for one in group) for name, group in times.items()}

    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def cpu_us_per(self, count: int) -> dict[str, float]:
        """Microseconds of CPU per one of `count`, by name."""
        now = self._read()
        return {name: (now[name] - before) / count * 1e6 for name, before in self._cpu.items()}


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def fsync_ms() -> float:
    """What one small durable write costs on this machine's temporary folder, without any database: a median."""
    taken = []
    with tempfile.TemporaryFile() as file:
        for _ in range(50):
            begun = time.perf_counter()
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            taken.append((time.perf_counter() - begun) * 1e3)
    return percentile(taken, 0.5)
