"""A process that does one kind of work until it is told to end, measured from outside."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Child", "children"]


@dataclass(slots=True)
class Child:
    """It says `ready`, works after `go`, and answers with what it has counted at `end`."""

    process: subprocess.Popen[str]

    @classmethod
    def begun(cls, work: str, uri: str, database: str, **options: Any) -> Child:
        command = [sys.executable, "-P", "-m", "scripts._bench.work", work, uri, database, json.dumps(options)]
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    @property
    def pid(self) -> int:
        return self.process.pid

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    async def end(self) -> dict[str, Any]:
        """Let it finish; what it has counted."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        answer: dict[str, Any] = json.loads(await self.line())
        await asyncio.to_thread(self.process.wait)
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None and not stream.closed:
                stream.close()


@asynccontextmanager
async def children(count: int, work: str, uri: str, database: str, **options: Any) -> AsyncIterator[list[Child]]:
    """So many of them, ready; whatever is left of them afterwards is killed."""
    started: list[Child] = []
    try:
        for _ in range(count):
            started.append(Child.begun(work, uri, database, **options))  # noqa: PERF401 - killed if one fails
        for child in started:
            assert await child.line() == "ready", "the child did not begin"
        yield started
    finally:
        for child in started:
            child.kill()
