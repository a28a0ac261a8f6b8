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


def _end(processes: Sequence[subprocess.Popen[bytes]], signal_number: int, seconds: float) -> None:
    """Signal all, wait for all together, kill what is left."""
    for process in processes:
        process.send_signal(signal_number)  # a no-op for one that has been reaped, so never a stranger's pid
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _perform(request: dict[str, Any], processes: dict[str, subprocess.Popen[bytes]]) -> dict[str, Any]:
    name = request["name"]
    if request["do"] == "spawn":
        with Path(request["log"]).open("ab") as log:
            processes[name] = subprocess.Popen(
                request["argv"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_the_guard(),  # noqa: PLW1509 - sound here, this process has one thread
            )
        return {"pid": processes[name].pid}
    if request["do"] == "end":
        _end([processes[name]], request["signal"], request["seconds"])
    return {"code": processes[name].poll()}


def _reply(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def _reply_error(error: OSError) -> None:
    _reply({"errno": error.errno, "strerror": error.strerror, "filename": error.filename})


def _give_up(_signal_number: int, _frame: object) -> None:
    raise SystemExit(0)


def main(parent_pid: int, *, temporary: bool, shutdown_seconds: float) -> None:
    """Serve the parent until it is gone or we are told to end; leave nothing behind."""
    endings = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for ending in endings:  # handlers, not SIG_IGN: a mongod would inherit that one
        signal.signal(ending, _give_up)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    folder: str | None = None
    try:
        if temporary:
            try:
                folder = tempfile.mkdtemp(prefix="sagas-mongodb-")
            except OSError as error:
                _reply_error(error)
                return
        _reply({"folder": folder})
        for request in _requests(parent_pid):
            try:
                answer = _perform(request, processes)
            except OSError as error:
                _reply_error(error)
            else:
                _reply(answer)
    except BrokenPipeError:
        pass  # the parent died between its question and our answer
    finally:
        for ending in endings:
            signal.signal(ending, signal.SIG_IGN)  # nothing interrupts the cleaning up; no process starts any more
        _end(list(processes.values()), signal.SIGKILL if temporary else signal.SIGTERM, shutdown_seconds)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), temporary=sys.argv[2] == "temporary", shutdown_seconds=float(sys.argv[3]))
