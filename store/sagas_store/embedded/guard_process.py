"""The guard process: serves requests from a pipe, and ends what it started when the pipe ends. See guard.py for why.

Run as a script, by its path, in Python's isolated mode: it imports the standard library only.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any


def _requests(parent_pid: int) -> Iterator[dict[str, Any]]:
    """The parent's requests, until it is gone.

    End of file alone would miss one case: a child that the parent forked (multiprocessing) holds a copy of the pipe and
    keeps it open after the parent's death. Hence the look at our parent twice a second: an orphan gets another parent.
    """
    waiting = b""
    while True:
        while b"\n" not in waiting:
            if os.getppid() != parent_pid:
                return
            if not select.select([0], [], [], 0.5)[0]:
                continue
            chunk = os.read(0, 65536)
            if not chunk:
                return
            waiting += chunk
        line, _, waiting = waiting.partition(b"\n")
        yield json.loads(line)


def _die_with_the_guard() -> Callable[[], None] | None:
    """What a mongod does between fork and exec so that the kernel kills it when the guard dies; None where unknown."""
    if sys.platform != "linux":
        return None
    try:
        import ctypes  # noqa: PLC0415 - some builds of Python lack it, and then the pipe must do alone

        prctl = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return None
    guard_pid = os.getpid()

    def arm() -> None:
        prctl(1, int(signal.SIGKILL))  # 1 is PR_SET_PDEATHSIG, prctl(2)
        if os.getppid() != guard_pid:  # it died before we were armed
            os._exit(1)

    return arm


def _signal(process: subprocess.Popen[bytes], signal_number: int) -> None:
    """Signal it and what it may have started: the `mongod` on PATH may be a script around the real one."""
    if process.poll() is None:  # not reaped yet, so the number is still its own and no stranger's
        os.killpg(process.pid, signal_number)


def _end(processes: Sequence[subprocess.Popen[bytes]], signal_number: int, seconds: float) -> None:
    """Signal all, wait for all together, kill what is left."""
    for process in processes:
        _signal(process, signal_number)
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()


class Charge:
    """What the guard answers for: the processes, by name, and the folder it made."""

    def __init__(self, *, temporary: bool) -> None:
        self.temporary = temporary
        self.folder: str | None = None
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def perform(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked and return the answer."""
        if request["do"] == "make_folder":
            self.folder = tempfile.mkdtemp(prefix="sagas-mongodb-")
            return {"folder": self.folder}
        name = request["name"]
        if request["do"] == "spawn":
            with Path(request["log"]).open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    request["argv"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                    preexec_fn=_die_with_the_guard(),  # noqa: PLW1509 - sound here, this process has one thread
                )
            return {"pid": self.processes[name].pid}
        if request["do"] == "end":
            _end([self.processes[name]], request["signal"], request["seconds"])
        return {"code": self.processes[name].poll()}

    def leave_nothing(self, *, shutdown_seconds: float) -> None:
        """End the processes and delete the folder."""
        _end(list(self.processes.values()), signal.SIGKILL if self.temporary else signal.SIGTERM, shutdown_seconds)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _give_up(_signal_number: int, _frame: object) -> None:
    raise SystemExit(0)


def main(parent_pid: int, *, temporary: bool, shutdown_seconds: float) -> None:
    """Serve the parent until it is gone or we are told to end; leave nothing behind."""
    endings = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for ending in endings:  # handlers, not SIG_IGN: a mongod would inherit that one
        signal.signal(ending, _give_up)
    charge = Charge(temporary=temporary)
    try:
        for request in _requests(parent_pid):
            try:
                answer = charge.perform(request)
            except OSError as error:
                answer = {"errno": error.errno, "strerror": error.strerror, "filename": error.filename}
            os.write(1, json.dumps({**answer, "number": request["number"]}).encode() + b"\n")
    except BrokenPipeError:
        pass  # the parent died between its question and our answer
    finally:
        for ending in endings:
            signal.signal(ending, signal.SIG_IGN)  # nothing interrupts the cleaning up; no process starts any more
        charge.leave_nothing(shutdown_seconds=shutdown_seconds)


if __name__ == "__main__":
    main(int(sys.argv[1]), temporary=sys.argv[2] == "temporary", shutdown_seconds=float(sys.argv[3]))
