"""Each way in which a start can fail: its own error, with the facts as attributes and the fix in the message."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from sagas_store.embedded import (
    EmbeddedError,
    EmbeddedMongo,
    FolderInUse,
    FolderUnusable,
    MissingLibrary,
    NoMongod,
    PortInUse,
    StartFailed,
)
from sagas_store.embedded import folder as folder_module
from sagas_store.embedded.mongod import explain_exit
from sagas_store.embedded.node import free_ports

FakeMongod = Callable[[str], Path]


def descendants() -> set[psutil.Process]:
    """What this process has started and still runs; the server that other tests share may be among it."""
    return set(psutil.Process().children(recursive=True))


def sleepers() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "601"]]


# --- the program ------------------------------------------------------------------------------------------------------


def test_without_a_mongod_the_message_says_where_one_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "path", [])  # no wheel either
    with pytest.raises(NoMongod, match="none on PATH and no installed wheel") as caught:
        EmbeddedMongo.start()
    assert "SAGAS_MONGODB_URI" in str(caught.value)
    assert caught.value.platform in str(caught.value)


def test_the_mongod_on_path_comes_before_that_of_the_wheel(fake_mongod: FakeMongod, tmp_path: Path) -> None:
    fake_mongod(f'touch {tmp_path}/used; exec "$REAL" "$@"')
    with EmbeddedMongo.start():
        assert (tmp_path / "used").exists()


@pytest.mark.parametrize(
    ("said", "library", "package", "fix"),
    [
        (
            "error while loading shared libraries: libcurl.so.4: cannot open shared object file: No such file",
            "libcurl.so.4",
            "libcurl4",
            "apt-get install libcurl4",
        ),
        (
            "error while loading shared libraries: libcrypto.so.3: cannot open shared object file: No such file",
            "libcrypto.so.3",
            "libssl3",
            "apt-get install libssl3",
        ),
        (
            "error while loading shared libraries: libstrange.so.7: cannot open shared object file: No such file",
            "libstrange.so.7",
            None,
            "apt-file search libstrange.so.7",
        ),
        (
            "Error loading shared library liblzma.so.5: No such file or directory (needed by mongod)",  # musl
            "liblzma.so.5",
            "liblzma5",
            "apt-get install liblzma5",
        ),
    ],
)
def test_a_missing_system_library_is_named_with_the_package_to_install(
    fake_mongod: FakeMongod, said: str, library: str, package: str | None, fix: str
) -> None:
    binary = fake_mongod(f"echo '{said}' >&2; exit 127")
    with pytest.raises(MissingLibrary, match=fix) as caught:
        EmbeddedMongo.start()
    assert (caught.value.library, caught.value.package, caught.value.binary) == (library, package, binary)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo db version v4.4.29", "is MongoDB 4, and 5.0 is the oldest"),
        ("echo 'version GLIBC_2.38 not found' >&2; exit 1", "GLIBC_2.38 not found"),
        ("echo hello", "--version` failed: hello"),
        ("kill -ILL $$", "a processor with AVX"),
    ],
)
def test_a_mongod_that_does_not_run_here_is_refused_with_the_reason(
    fake_mongod: FakeMongod, script: str, message: str
) -> None:
    fake_mongod(script)
    with pytest.raises(NoMongod, match=message):
        EmbeddedMongo.start()


def test_a_mongod_of_another_kind_of_machine_is_refused_with_the_reason(fake_mongod: FakeMongod) -> None:
    binary = fake_mongod("")
    binary.write_bytes(b"\x7fELF" + bytes(100))
    with pytest.raises(NoMongod, match="cannot be run") as caught:
        EmbeddedMongo.start()
    assert caught.value.binary == binary


# --- the folder -------------------------------------------------------------------------------------------------------


def test_a_folder_in_use_is_refused_and_its_server_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "RELEASE_SECONDS", 0.0)
    with EmbeddedMongo.start(folder=tmp_path / "data") as mongo:
        log = (tmp_path / "data" / "mongod.log").read_bytes()
        for keep in (True, False):
            with pytest.raises(FolderInUse, match=str(tmp_path / "data")) as caught:
                EmbeddedMongo.start(folder=tmp_path / "data", keep=keep)
            assert caught.value.folder == tmp_path / "data"
        assert mongo.wait_for_primary(timeout=0).running
        assert (tmp_path / "data" / "mongod.log").read_bytes().startswith(log)
        mongo.nodes[0].kill()


def test_a_folder_taken_at_the_last_moment_is_in_use_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mongod: Callable[..., Any]
) -> None:
    """The look at the lock comes first, and mongod's own refusal when that was too early."""
    monkeypatch.setattr(folder_module, "_await_release", lambda *_, **__: None)
    mongod(folder=tmp_path / "data").wait_until_it_answers(float("inf"))
    with pytest.raises(FolderInUse):
        EmbeddedMongo.start(folder=tmp_path / "data", keep=True)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderUnusable, match="Not a directory") as caught:
        EmbeddedMongo.start(folder=tmp_path / "file" / "data")
    assert caught.value.folder == tmp_path / "file" / "data"


def test_a_missing_place_for_temporary_folders_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere")
    for fallback in ("TEMP", "TMP"):
        monkeypatch.delenv(fallback, raising=False)
    with EmbeddedMongo.start() as mongo:  # Python falls back to /tmp: as good
        assert mongo.folder.exists()


def test_a_database_is_not_touched_without_keep(tmp_path: Path) -> None:
    with EmbeddedMongo.start(folder=tmp_path / "data") as mongo:
        mongo.nodes[0].kill()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FolderUnusable, match="keep=True"):
        EmbeddedMongo.start(folder=tmp_path / "data")
    with pytest.raises(FolderUnusable, match="made with nodes=1, and nodes=3"):
        EmbeddedMongo.start(folder=tmp_path / "data", nodes=3, keep=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.failover
def test_a_folder_of_three_nodes_or_a_part_of_it_is_not_taken_for_that_of_one(tmp_path: Path) -> None:
    with EmbeddedMongo.start(folder=tmp_path / "data", nodes=3) as mongo:
        for node in mongo.nodes:
            node.kill()
    with pytest.raises(FolderUnusable, match="made with nodes=3, and nodes=1"):
        EmbeddedMongo.start(folder=tmp_path / "data", keep=True)
    with pytest.raises(FolderUnusable, match="which has 3 members"):
        EmbeddedMongo.start(folder=tmp_path / "data" / "node-1", keep=True)


# --- ports and everything else ----------------------------------------------------------------------------------------


def test_a_port_asked_for_that_is_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)) as caught:
            EmbeddedMongo.start(ports=[port])
        assert caught.value.port == port


def test_a_port_asked_for_is_the_one_that_is_used() -> None:
    ports = free_ports(1)
    with EmbeddedMongo.start(ports=ports) as mongo:
        assert (mongo.nodes[0].port,) == ports


def test_a_port_we_chose_and_lost_is_replaced_by_another(fake_mongod: FakeMongod, tmp_path: Path) -> None:
    lose_the_first = f'case "$1" in --version) ;; *) mkdir {tmp_path}/lost 2>/dev/null && exit 48;; esac'
    fake_mongod(f'{lose_the_first}; exec "$REAL" "$@"')
    with EmbeddedMongo.start() as mongo:
        assert (tmp_path / "lost").exists()
        assert mongo.wait_for_primary(timeout=0) is mongo.nodes[0]


def test_a_start_that_loses_every_port_gives_up(fake_mongod: FakeMongod) -> None:
    fake_mongod('case "$1" in --version) exec "$REAL" "$@";; *) exit 48;; esac')
    with pytest.raises(StartFailed, match="taken by somebody else, 5 times"):
        EmbeddedMongo.start()


def test_an_unknown_reason_is_told_in_mongods_own_words_and_nothing_is_left() -> None:
    before = descendants()
    with pytest.raises(StartFailed, match="Unknown --setParameter 'noSuchParameter'") as caught:
        EmbeddedMongo.start(parameters={"noSuchParameter": "1"})
    assert caught.value.exit_code == 1
    assert descendants() == before


def test_a_mongod_that_never_answers_is_given_up_and_nothing_is_left(fake_mongod: FakeMongod) -> None:
    fake_mongod('case "$1" in --version) exec "$REAL" "$@";; *) echo thinking; sleep 601; echo no;; esac')
    before = descendants()
    with pytest.raises(StartFailed, match=r"did not answer in time(.|\n)*thinking"):
        EmbeddedMongo.start(timeout=0.5)
    assert descendants() == before
    assert sleepers() == []


@pytest.mark.parametrize(
    ("exit_code", "log_tail", "kind", "message"),
    [
        (48, "", PortInUse, "Port 4711"),
        (62, "Wrong mongod version", FolderUnusable, "version of MongoDB"),
        (100, '"error":"DBPathInUse: Unable to lock"', FolderInUse, "/data"),
        (100, "NonExistentPath", StartFailed, "exit code 100(.|\n)*NonExistentPath"),
        (-9, "", StartFailed, "killed by signal 9"),
        (14, "no space left", StartFailed, "exit code 14(.|\n)*no space left"),
    ],
)
def test_the_way_mongod_ended_is_put_in_plain_words(
    exit_code: int, log_tail: str, kind: type[EmbeddedError], message: str
) -> None:
    folder = Path("/data")
    error = explain_exit(exit_code, folder=folder, port=4711, log=folder / "mongod.log", log_tail=log_tail)
    assert type(error) is kind
    with pytest.raises(kind, match=message):
        raise error
