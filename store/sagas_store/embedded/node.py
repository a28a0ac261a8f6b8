"""One node of an embedded server: a mongod that keeps its port and its folder from one life to the next."""

from __future__ import annotations

import errno
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from sagas_store.embedded.errors import StartFailed
from sagas_store.embedded.guard import Guard
from sagas_store.embedded.mongod import explain_exit

POLL_SECONDS: Final = 0.01
LOG_TAIL_BYTES: Final = 4000

# Below the ports that Linux and macOS give to outgoing connections. One from among those could be taken by any client
# while its node is down (even by a client that dials the node and, by TCP's simultaneous open, reaches itself).
_PORTS: Final = range(15000, 32768)


class Node:
    """A mongod of an embedded server. `port` and `folder` stay; `pid` is that of its latest process."""

    def __init__(self, guard: Guard, *, name: str, port: int, folder: Path, command: Sequence[str]) -> None:
        """Describe a node; `launch` starts it."""
        self.name = name
        self.port = port
        self.folder = folder
        self.log = folder / "mongod.log"
        self.pid = 0
        self._guard = guard
        self._command = list(command)
        self._log_start = 0

    def __repr__(self) -> str:
        return f"<Node {self.name} 127.0.0.1:{self.port} pid {self.pid}>"

    @property
    def host(self) -> str:
        """As the replica set knows it, `127.0.0.1:port`."""
        return f"127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self._guard.exit_code(self.name) is None

    def kill(self) -> None:
        """SIGKILL the process and return when it is gone, as if the machine had lost power. Safe to repeat."""
        self._guard.end(self.name, signal_number=signal.SIGKILL)

    def shut_down(self) -> None:
        """Ask the process to end in good order (SIGTERM) and return when it is gone. Safe to repeat."""
        self._guard.end(self.name, signal_number=signal.SIGTERM)

    def restart(self, *, timeout: float = 30.0) -> None:
        """Start again on the same port and folder, ending a process that still runs; return when it answers.

        It then recovers and finds its set again in its own time: `EmbeddedMongo.wait_for_primary` waits for the set.
        """
        self.kill()
        self.launch()
        self.wait_until_it_answers(time.monotonic() + timeout)

    def launch(self) -> None:
        """Start the process and return at once."""
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        try:
            self.pid = self._guard.spawn(self.name, self._command, log=self.log)
        except OSError as error:
            raise StartFailed(error.strerror or str(error)) from error

    def wait_until_it_answers(self, deadline: float) -> None:
        """Return when this process, and no other that took the port, answers commands. `deadline` is monotonic.

        Raises what `explain_exit` makes of a process that ended, and StartFailed after the deadline.
        """
        while True:
            self.raise_if_ended()
            if _somebody_listens(self.port) and self._is_the_one_who_answers():
                return
            if time.monotonic() > deadline:
                raise StartFailed("it did not answer in time", log=self.log, log_tail=self._log_tail())
            time.sleep(POLL_SECONDS)

    def raise_if_ended(self) -> None:
        """Raise, when the process has ended, the error that says why."""
        exit_code = self._guard.exit_code(self.name)
        if exit_code is not None:
            raise explain_exit(exit_code, folder=self.folder, port=self.port, log=self.log, log_tail=self._log_tail())

    def ask(self, command: str | dict[str, Any], *, database: str = "admin", timeout: float = 30.0) -> dict[str, Any]:
        """Run a command on this very node, whatever its state; raise PyMongoError when it does not answer.

        A client for each question: a lasting one has threads, which a fork would lose, and after a failure it waits
        half a second before it dials again. This one costs 5 ms.
        """
        milliseconds = int(timeout * 1000)
        with MongoClient[dict[str, Any]](
            "127.0.0.1",
            self.port,
            directConnection=True,
            serverSelectionTimeoutMS=milliseconds,
            connectTimeoutMS=milliseconds,
            socketTimeoutMS=milliseconds,
        ) as client:
            return client[database].command(command)

    def state(self) -> str:
        """What it says of itself now: PRIMARY, SECONDARY, OTHER, or DOWN when it does not answer within a second."""
        if not self.running or not _somebody_listens(self.port):
            return "DOWN"
        try:
            hello = self.ask("hello", timeout=1.0)
        except PyMongoError:
            return "DOWN"
        return "PRIMARY" if hello["isWritablePrimary"] else "SECONDARY" if hello.get("secondary") else "OTHER"

    def _is_the_one_who_answers(self) -> bool:
        try:
            pid: int = self.ask("serverStatus", timeout=2.0)["pid"]
        except PyMongoError:
            return False
        return pid == self.pid

    def _log_tail(self) -> str:
        """The end of what this process, not an earlier one, has logged."""
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, 2)
                log.seek(max(self._log_start, size - LOG_TAIL_BYTES))
                return log.read().decode(errors="replace").strip()
        except FileNotFoundError:
            return ""


def free_ports(count: int, *, pick: Callable[[Sequence[int]], int] = secrets.choice) -> tuple[int, ...]:
    """Return `count` different ports on 127.0.0.1 that were free a moment ago; the caller copes with a lost race."""
    chosen: list[int] = []
    for _ in range(len(_PORTS)):
        port = pick(_PORTS)
        if port not in chosen and is_free(port):
            chosen.append(port)
        if len(chosen) == count:
            return tuple(chosen)
    raise StartFailed(f"no {count} free ports between {_PORTS.start} and {_PORTS.stop - 1}")


def is_free(port: int) -> bool:
    """Whether a server could listen on the port now."""
    with socket.socket() as probe:
        # As mongod does it: connections of a server that is gone (TIME_WAIT) do not count as somebody listening.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise StartFailed(f"127.0.0.1:{port} cannot be listened on ({error.strerror})") from error
    return True


def _somebody_listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True
