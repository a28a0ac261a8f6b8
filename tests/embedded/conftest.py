"""Real servers for the tests of the embedded MongoDB, and proof that they leave nothing behind."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

import sagas_store.embedded
from sagas_store.embedded import EmbeddedMongo, MissingLibrary, Node, NoMongod
from sagas_store.embedded.guard import Guard
from sagas_store.embedded.mongod import check_mongod, find_mongod, mongod_command
from sagas_store.embedded.node import free_ports

STORE_ROOT = Path(sagas_store.embedded.__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def _a_mongod_is_here() -> None:
    try:
        check_mongod(find_mongod())
    except (NoMongod, MissingLibrary) as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def temporary_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary folders are made during this test; none may be left at its end."""
    root = tmp_path / "temporary"
    root.mkdir()
    monkeypatch.setenv("TMPDIR", str(root))
    monkeypatch.delenv("SAGAS_MONGODB_URI", raising=False)
    yield root
    assert list(root.iterdir()) == []


@pytest.fixture
def fake_mongod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put a shell script called `mongod` on PATH; `$REAL` in it is the real one."""

    def install(script: str) -> Path:
        real = find_mongod()
        folder = tmp_path / "bin"
        folder.mkdir()
        binary = folder / "mongod"
        binary.write_text(f"#!/bin/sh\nREAL={real}\n{script}\n")
        binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return binary

    return install


@pytest.fixture
def mongod(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Start a mongod that is nobody's replica set, unless `replica_set` names one; it is never initiated."""
    guard = Guard(temporary=True)

    def start(*, folder: Path | None = None, replica_set: str = "", extra: tuple[str, ...] = ()) -> Node:
        folder = folder or tmp_path / "plain"
        folder.mkdir(exist_ok=True)
        (port,) = free_ports(1)
        command = mongod_command(
            find_mongod(), folder=folder, port=port, replica_set=replica_set, cache_bytes=2**28, parameters={}
        )
        if not replica_set:
            at = command.index("--replSet")
            del command[at : at + 2]
        node = Node(guard, name=str(port), port=port, folder=folder, command=[*command, *extra])
        node.launch()
        return node

    yield start
    guard.close()


@pytest.fixture
def python(temporary_root: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Run a piece of Python that may be killed, its standard output and error piped to us."""
    started: list[subprocess.Popen[str]] = []

    def run(source: str, *arguments: str, user: int | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", source, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(STORE_ROOT)},
            user=user,
            group=user,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        pipes: tuple[IO[str] | None, ...] = (process.stdin, process.stdout, process.stderr)
        for pipe in pipes:
            if pipe is not None:
                pipe.close()


@pytest.fixture
def three_nodes() -> Iterator[EmbeddedMongo]:
    with EmbeddedMongo.start(nodes=3) as mongo:
        yield mongo
