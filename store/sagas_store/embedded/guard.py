"""The guard: a small process between this one and its mongods, so that none outlives us.

    our process ──pipe──> guard ──parent of──> mongod, mongod, mongod

The guard owns what must not be left behind: the mongods and a temporary folder. It ends them when its standard input
reports end of file, which the kernel does however we die: return, exception, os._exit, SIGKILL. An ordinary stop takes
the same road, so it is the road that is always tested. It:

- kills the mongods of a temporary folder and deletes the folder;
- asks the mongods of a given folder to shut down, kills them after `SHUTDOWN_SECONDS`, and deletes nothing.

Rejected: PR_SET_PDEATHSIG set by us in each mongod. It fires when the *thread* that forked ends (a pool thread that
runs a fixture), wants a preexec_fn (unsafe beside threads), does not exist on macOS, and deletes no folder. The guard
has one thread, so there it is sound and is the second line: a killed guard takes its mongods along (Linux only).
What stays behind when both are killed in the same instant (a whole container) is a temporary folder, never a process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

from sagas_store.embedded.errors import GuardLost

SHUTDOWN_SECONDS: Final = 10.0
"""How long a mongod of a given folder may take to shut down cleanly (it needs about 1 s) before it is killed."""

# What a mongod and Python need to run, and no more: our environment may hold keys and passwords, and that of a
# process can be read in /proc for as long as it lives.
ENVIRONMENT: Final = ("PATH", "HOME", "TMPDIR", "TEMP", "TMP", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "GLIBC_TUNABLES")


def small_environment() -> dict[str, str]:
    """The environment of the guard and its mongods; LC_ALL=C because mongod does not start under an unknown locale."""
    return {name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | {"LC_ALL": "C"}


class Guard:
    """Our end of the pipe. Every call is one request and one answer; safe from several threads.

    Raises GuardLost when the guard itself is gone, OSError when it could not do what was asked.
    """

    def __init__(self, *, temporary: bool) -> None:
        """Start the guard; with `temporary` it makes a folder of its own, and deletes it when it ends."""
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()
        # By its path and isolated: it needs no package, no site-packages and none of our settings, and is up in 30 ms.
        script = Path(__file__).with_name("guard_process.py")
        arguments = [str(os.getpid()), "temporary" if temporary else "given", str(SHUTDOWN_SECONDS)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd="/",
            env=small_environment(),
            start_new_session=True,  # else Ctrl-C in our terminal would reach the mongods before we are done with them
        )
        self._folder: Path | None = None
        self._asked = 0
        try:
            made = self._request(do="make_folder")["folder"] if temporary else None
        except BaseException:
            self.close()
            raise
        self._folder = Path(made) if made else None

    @property
    def temporary_folder(self) -> Path:
        """The folder it made and will delete."""
        assert self._folder is not None, "the guard of a given folder makes none"
        return self._folder

    def spawn(self, name: str, argv: Sequence[str], *, log: Path) -> int:
        """Start a process under `name`, its output appended to `log`; return its pid."""
        return int(self._request(do="spawn", name=name, argv=list(argv), log=str(log))["pid"])

    def exit_code(self, name: str) -> int | None:
        """How the process ended (negative: by that signal), or None while it runs."""
        code: int | None = self._request(do="poll", name=name)["code"]
        return code

    def end(self, name: str, *, signal_number: int, seconds: float = SHUTDOWN_SECONDS) -> None:
        """Send a signal and return when the process is gone, killing it after `seconds`. Safe to repeat."""
        self._request(do="end", name=name, signal=int(signal_number), seconds=seconds)

    def close(self) -> None:
        """End everything, by closing the pipe, and return when it is done. Safe to repeat.

        Does nothing in a forked child: it has a copy of the pipe, but the mongods are its parent's.
        """
        if os.getpid() != self._owner_pid:
            return
        streams: tuple[IO[bytes] | None, ...] = (self._process.stdin, self._process.stdout)
        for stream in streams:
            if stream is not None:
                stream.close()
        try:
            self._process.wait(SHUTDOWN_SECONDS + 5)
        except subprocess.TimeoutExpired:  # it is frozen; killed, the kernel ends its mongods (see above)
            self._process.kill()
            self._process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # still there only when the guard was killed

    def _request(self, **request: Any) -> dict[str, Any]:
        stdin = self._process.stdin
        assert stdin is not None
        with self._lock:
            self._asked += 1
            try:
                stdin.write(json.dumps({**request, "number": self._asked}).encode() + b"\n")
            except (OSError, ValueError):  # ValueError: closed by us
                raise GuardLost(self._process.poll()) from None
            while True:
                answer = self._answer()
                if answer["number"] == self._asked:  # else to a question that Ctrl-C kept us from hearing out
                    break
        if "errno" in answer:
            raise OSError(answer["errno"], answer["strerror"], answer["filename"])
        return answer

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line.endswith(b"\n"):
            raise GuardLost(self._process.poll())
        answer: dict[str, Any] = json.loads(line)
        return answer
