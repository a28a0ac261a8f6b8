"""An embedded MongoDB: a replica set of one or more nodes on loopback ports, for as long as this process wants it."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from pymongo.errors import PyMongoError

from sagas_store.embedded.errors import FolderUnusable, PortInUse, StartFailed
from sagas_store.embedded.folder import Hint, node_folders, open_folder, remember, remembered
from sagas_store.embedded.guard import Guard
from sagas_store.embedded.mongod import check_mongod, find_mongod, mongod_command
from sagas_store.embedded.node import Node, free_ports, is_free
from sagas_store.embedded.replica_set import (
    form_replica_set,
    stored_configuration,
    wait_for_primary,
    wait_until_in_service,
)
from sagas_store.errors import InvalidInput
from sagas_store.inputs import check_flag, check_several
from sagas_store.numbers import check_count, check_duration

NODES_MAX: Final = 7
"""A replica set has no more voting members than this."""

_PORT_TRIES: Final = 5
_PORT_MAX: Final = 65_535
_CACHE_BYTES_MIN: Final = 2**28
_CACHE_BYTES_MAX: Final = 10_000 * 2**30
"""What mongod takes for its cache: a quarter of a GiB to 10,000 of them."""


class EmbeddedMongo:
    """A running replica set. Use it as a context manager, or call `stop`; if you do neither, it ends with this process.

    It belongs to the process that started it: in a forked child, `stop` does nothing.
    """

    def __init__(self, guard: Guard, *, folder: Path, nodes: Sequence[Node], replica_set: str) -> None:
        """Not for callers: `start` makes one."""
        self.folder = folder
        self.nodes = tuple(nodes)
        self.replica_set = replica_set
        self._guard = guard

    @classmethod
    def start(
        cls,
        *,
        nodes: int = 1,
        folder: Path | str | None = None,
        keep: bool = False,
        ports: Sequence[int] = (),
        parameters: Mapping[str, str] | None = None,
        cache_bytes: int = 2**28,
        timeout: timedelta | float = 60.0,
    ) -> Self:
        """Start a server; return it once it has a primary and every node is in service (0.5 s; three nodes 2.5 s).

        folder      where the data lies: made when missing, never deleted. None: a temporary one, always deleted.
        keep        go on with the database that the folder holds. Without it the folder must hold none yet, so that a
                    server meant as a throw-away never writes into data that somebody cares for.
        ports       one for each node. Empty: those of the last start in this folder if they are free, else any.
        parameters  of the server, e.g. {"enableTestCommands": "1"}.
        cache_bytes of each node; 256 MiB is the least MongoDB accepts.
        timeout     for the whole start: a timedelta, or seconds.

        Raises InvalidInput, or EmbeddedError by its kind. Whatever was started is then ended, and a temporary folder
        deleted.
        """
        check_count("nodes", nodes, most=NODES_MAX)
        ports = [
            check_count("ports", port, most=_PORT_MAX) for port in check_several("ports", ports, "ports", "[27017]")
        ]
        check_flag("keep", keep)
        check_count("cache_bytes", cache_bytes, least=_CACHE_BYTES_MIN, most=_CACHE_BYTES_MAX)
        timeout_s = check_duration("timeout", timeout).total_seconds()
        if ports and not len(ports) == len(set(ports)) == nodes:
            raise InvalidInput("ports", f"give one for each of the {nodes} nodes, all different, or none")
        if keep and folder is None:
            raise InvalidInput("keep", "needs a folder: a temporary one is always deleted")
        deadline = time.monotonic() + timeout_s
        binary = find_mongod()
        check_mongod(binary)
        given = None if folder is None else Path(folder).absolute()
        if given is not None:
            open_folder(given, nodes=nodes, keep=keep)
        guard = _start_guard(temporary=given is None)
        try:
            root = given or guard.temporary_folder
            launch = _Launch(guard, binary, root, nodes, tuple(ports), dict(parameters or {}), cache_bytes, deadline)
            name, members = _bring_up(launch)
            form_replica_set(members, name=name, folder=root, deadline=deadline)
            wait_until_in_service(members, deadline=deadline, timeout=timeout_s)
            remember(root, Hint(name, tuple(node.port for node in members)))
        except PyMongoError as error:
            guard.close()
            raise StartFailed(f"it answers, but not as it should ({error})") from error
        except BaseException:
            guard.close()
            raise
        return cls(guard, folder=root, nodes=members, replica_set=name)

    @property
    def uri(self) -> str:
        """The address of the whole set, for a driver that should follow its primary."""
        return f"mongodb://{','.join(node.host for node in self.nodes)}/?replicaSet={self.replica_set}"

    def wait_for_primary(self, timeout: float = 30.0) -> Node:
        """Return the primary, waiting up to `timeout` seconds for an election; raise NoPrimary when there is none."""
        return wait_for_primary(self.nodes, timeout=timeout)

    def stop(self) -> None:
        """End every node and return when they are gone, with the temporary folder. Safe to repeat.

        The nodes of a given folder shut down in good order (1 s); those of a temporary one are killed.
        """
        self._guard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


@dataclass(frozen=True)
class _Launch:
    """What stays the same from one try to the next of starting the nodes."""

    guard: Guard
    binary: Path
    root: Path
    nodes: int
    asked_ports: tuple[int, ...]
    parameters: Mapping[str, str]
    cache_bytes: int
    deadline: float

    def start_nodes(self, *, replica_set: str, preferred_ports: tuple[int, ...]) -> list[Node]:
        """Start every node and return them when all answer.

        A port that we chose can be taken before mongod listens on it: then all start again on others.
        """
        if self.asked_ports:
            for port in self.asked_ports:
                if not is_free(port):
                    raise PortInUse(port)
            return self._start_on(self.asked_ports, replica_set)
        ports = preferred_ports
        for _ in range(_PORT_TRIES):
            if not ports or not all(is_free(port) for port in ports):
                ports = free_ports(self.nodes)
            with suppress(PortInUse):
                return self._start_on(ports, replica_set)
            ports = ()
        raise StartFailed(f"the ports chosen were taken by somebody else, {_PORT_TRIES} times in a row")

    def _start_on(self, ports: Sequence[int], replica_set: str) -> list[Node]:
        members = [self._node(number, port, replica_set) for number, port in enumerate(ports)]
        try:
            for node in members:  # all first: they come up side by side
                node.launch()
            for node in members:
                node.wait_until_it_answers(self.deadline)
        except PortInUse:
            for node in members:
                node.kill()
            raise
        return members

    def _node(self, number: int, port: int, replica_set: str) -> Node:
        folder = node_folders(self.root, self.nodes)[number]
        folder.mkdir(exist_ok=True)
        command = mongod_command(
            self.binary,
            folder=folder,
            port=port,
            replica_set=replica_set,
            cache_bytes=self.cache_bytes,
            parameters=self.parameters,
        )
        return Node(self.guard, name=f"node-{number}", port=port, folder=folder, command=command)


def _bring_up(launch: _Launch) -> tuple[str, list[Node]]:
    """Return the set's name and its running nodes.

    A name of its own for each set: a driver that still looks for a server that is gone must not take another one, which
    happens to have its port, for it. A folder that was made elsewhere tells its name only once a mongod has it open.
    """
    hint = remembered(launch.root, nodes=launch.nodes)
    name = hint.replica_set if hint else f"sagas-{secrets.token_hex(4)}"
    ports = hint.ports if hint else ()
    members = launch.start_nodes(replica_set=name, preferred_ports=ports)
    stored = stored_configuration(members)
    if stored is None or stored[1]["_id"] == name:
        return name, members
    for node in members:
        node.kill()
    name = stored[1]["_id"]
    return name, launch.start_nodes(replica_set=name, preferred_ports=ports)


def _start_guard(*, temporary: bool) -> Guard:
    try:
        return Guard(temporary=temporary)
    except OSError as error:  # no room, no right to write
        raise FolderUnusable(Path(tempfile.gettempdir()), error.strerror or str(error)) from error
