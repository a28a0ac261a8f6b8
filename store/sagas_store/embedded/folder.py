"""The folder of an embedded server: what lies where, whether it may be used, and the ports it had last.

    given/               nodes=1: the data of the only node             nodes=3: given/node-0/, node-1/, node-2/
    given/mongod.log     what it said (beside its data)
    given/embedded.json  the replica set's name and ports, to come back at the same address when they are free

embedded.json is a hint. What the folder really holds is said by the replica set's own configuration, in the data.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sagas_store.embedded.errors import FolderInUse, FolderUnusable

RELEASE_SECONDS: Final = 3.0
"""How long a start waits for a folder in use: the server of a process that was just killed needs 1 s to shut down."""

_HINT: Final = "embedded.json"


@dataclass(frozen=True)
class Hint:
    """The address a folder had last: the name of its replica set and the ports of its nodes, in order."""

    replica_set: str
    ports: tuple[int, ...]


def node_folders(folder: Path, nodes: int) -> list[Path]:
    """Where each node keeps its data."""
    return [folder] if nodes == 1 else [folder / f"node-{number}" for number in range(nodes)]


def open_folder(folder: Path, *, nodes: int, keep: bool) -> None:
    """Make the folder if it is not there, and return when `nodes` nodes may work in it.

    Raises FolderInUse when a mongod still holds it after `RELEASE_SECONDS`, and FolderUnusable when it cannot be
    written, holds a database although `keep` is false, or holds that of another number of nodes. Deletes nothing.
    """
    mine = node_folders(folder, nodes)
    try:
        held = [path for path in (folder, *sorted(folder.glob("node-*"))) if (path / "WiredTiger").exists()]
        for path in held:
            _await_release(path, given=folder)
        if held and not keep:
            raise FolderUnusable(folder, "it holds a database already, and only keep=True goes on with one")
        if not set(held) <= set(mine):
            before = 1 if folder in held else len(held)
            raise FolderUnusable(folder, f"its database was made with nodes={before}, and nodes={nodes} was asked for")
        for path in mine:
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                raise FolderUnusable(folder, "this user may not write in it")
    except OSError as error:
        raise FolderUnusable(folder, error.strerror or str(error)) from error


def _await_release(folder: Path, *, given: Path) -> None:
    """Return when no mongod holds the lock of a node's folder, which it takes with flock on mongod.lock.

    Looking first keeps a second mongod from writing its complaint into the log of the one that works there.
    """
    try:
        lock = (folder / "mongod.lock").open("rb+")
    except FileNotFoundError:
        return
    deadline = time.monotonic() + RELEASE_SECONDS
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise FolderInUse(given) from None
                time.sleep(0.02)
            else:
                return  # closing lets go of it


def remember(folder: Path, hint: Hint) -> None:
    """Write the hint; on the next start `remembered` finds it, whole or not at all."""
    draft = folder / f"{_HINT}.new"
    draft.write_text(json.dumps({"replica_set": hint.replica_set, "ports": hint.ports}) + "\n", encoding="utf-8")
    draft.replace(folder / _HINT)


def remembered(folder: Path, *, nodes: int) -> Hint | None:
    """The address of the last start, or None when there was none, for another number of nodes, or it is not legible."""
    try:
        said = json.loads((folder / _HINT).read_text(encoding="utf-8"))
        hint = Hint(replica_set=str(said["replica_set"]), ports=tuple(int(port) for port in said["ports"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return hint if len(hint.ports) == nodes and all(0 < port < 2**16 for port in hint.ports) else None
