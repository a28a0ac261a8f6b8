"""Run a command and leave nothing of it running, however it ends.

    python scripts/_swept.py pytest tests/process

Whatever the command starts inherits a mark in its environment and is found by that mark afterwards, also when it went
into a session of its own or lost its parent. Ctrl-C reaches the command from the terminal, as always; SIGTERM and
SIGHUP are handed on as Ctrl-C, so that the command can clean up; what is still there after the grace is killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil

MARK = "SAGAS_SWEPT_BY"
STOP_GRACE = 20  # seconds the command has to end after a signal
LEFT_GRACE = 3  # seconds its leftovers have to end by themselves


def main(command: list[str]) -> int:
    token = f"{os.getpid()}.{time.time_ns()}"
    outer = os.environ.get(MARK, "")
    environment = {**os.environ, MARK: f"{outer}:{token}" if outer else token}
    child: subprocess.Popen[bytes] | None = None

    def hand_on(_signal: int, _frame: object) -> None:
        if child is not None:
            child.send_signal(signal.SIGINT)
            signal.alarm(STOP_GRACE)

    def give_up(_signal: int, _frame: object) -> None:
        if child is not None:
            child.kill()

    # A handler, not SIG_IGN: the command would inherit that and never hear of Ctrl-C.
    signal.signal(signal.SIGINT, lambda _signal, _frame: None)
    signal.signal(signal.SIGTERM, hand_on)
    signal.signal(signal.SIGHUP, hand_on)
    signal.signal(signal.SIGALRM, give_up)
    try:
        child = subprocess.Popen(command, env=environment)
        status = child.wait()
    except FileNotFoundError:
        print(f"{command[0]}: no such command", file=sys.stderr)
        return 127
    finally:
        signal.alarm(0)
        sweep(token)
    return status if status >= 0 else 128 - status


def sweep(token: str) -> None:
    """End what still carries the mark, and say what it was: something forgot to stop it."""
    deadline = time.monotonic() + LEFT_GRACE
    while (left := marked(token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            print(f"Left running, now killed: {process.name()} (process {process.pid})", file=sys.stderr)
            process.kill()
    psutil.wait_procs(left, timeout=LEFT_GRACE)


def marked(token: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if token in process.environ().get(MARK, "").split(":") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
