"""Worker processes for the demo: started, killed in the middle of a step, replaced, and all gone at the end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

__all__ = ["Fleet", "WorkerDied", "WorkerProcess"]

_EXAMPLES: Final = Path(__file__).resolve().parents[1]
_TARGET: Final = "order_fulfilment.worker:make_worker"
_STOP_S: Final = 5.0


class WorkerDied(Exception):
    """A worker process ended, and it was not us."""


@dataclass(frozen=True)
class WorkerProcess:
    """One worker process."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


class Fleet:
    """So many workers side by side. Use as a context manager: none of them outlives it."""

    def __init__(self, size: int, *, folder: Path, environment: Mapping[str, str]) -> None:
        """`folder` takes their logs, `environment` is added to ours."""
        self._folder = folder
        self._environment = {
            **os.environ,
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_EXAMPLES), os.environ.get("PYTHONPATH")))),
        }
        self._size = size
        self._started = 0
        self.workers: list[WorkerProcess] = []

    def __enter__(self) -> Self:
        try:
            for _ in range(self._size):
                self.workers.append(self._start())
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def kill(self, worker: WorkerProcess) -> WorkerProcess:
        """SIGKILL, so that it says goodbye to nobody; then start another one in its place and return it."""
        worker.process.kill()
        worker.process.wait()
        fresh = self._start()
        self.workers[self.workers.index(worker)] = fresh
        return fresh

    def check(self) -> None:
        """Raise WorkerDied, with the end of its log, when one has ended by itself."""
        for worker in self.workers:
            if (code := worker.process.poll()) is not None:
                said = "\n".join(worker.log.read_text(errors="replace").splitlines()[-20:])
                raise WorkerDied(f"{worker.name} ended by itself with exit code {code}; its last words:\n{said}")

    def stop(self) -> None:
        """End them all: they drain, and are killed if they take longer than five seconds. Safe to repeat."""
        for worker in self.workers:
            worker.process.terminate()
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(_STOP_S)
            worker.process.kill()
            worker.process.wait()

    def _start(self) -> WorkerProcess:
        self._started += 1
        name = f"worker {self._started}"
        log = self._folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "sagas", "worker", "--log-level", "warning", _TARGET],
                env={**self._environment, "ORDER_WORKER_NAME": name},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the demo, which then ends its workers
            )
        return WorkerProcess(name, process, log)
