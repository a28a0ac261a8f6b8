"""What an embedded MongoDB promises while it runs, when it ends, and when it comes back."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from pymongo import MongoClient, WriteConcern
from pymongo.errors import OperationFailure

from sagas_store.embedded import EmbeddedMongo, GuardLost, NoPrimary, mongodb
from sagas_store.embedded.folder import Hint, remembered
from sagas_store.errors import InvalidInput

PATIENCE = 20.0
"""The longest a test waits for a process to be gone; it takes a fraction of a second, or the test fails."""

RunPython = Callable[..., "subprocess.Popen[str]"]


def client(uri: str) -> MongoClient[dict[str, Any]]:
    return MongoClient(uri, serverSelectionTimeoutMS=15_000)


def insert(uri: str, value: str) -> None:
    with client(uri) as connection:
        stamps = connection["test"].get_collection("stamps", write_concern=WriteConcern("majority"))
        stamps.insert_one({"_id": value})


def stamps(uri: str) -> list[str]:
    with client(uri) as connection:
        return [stamp["_id"] for stamp in connection["test"]["stamps"].find(sort={"_id": 1})]


class Stranger(socketserver.TCPServer):
    """Somebody else on a port, who hangs up on callers. (One who is silent costs 30 s: see `form_replica_set`.)"""

    allow_reuse_address = True


@contextmanager
def occupied(port: int) -> Iterator[None]:
    with Stranger(("127.0.0.1", port), socketserver.BaseRequestHandler) as stranger:
        thread = threading.Thread(target=stranger.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield
        stranger.shutdown()
        thread.join()


def cut_the_power(mongo: EmbeddedMongo) -> None:
    """Kill every node: what `stop` then has to do takes no time, where a shutdown in good order takes a second."""
    for node in mongo.nodes:
        node.kill()


def await_end(*pids: int) -> None:
    for pid in pids:
        try:
            psutil.Process(pid).wait(PATIENCE)
        except psutil.NoSuchProcess:
            continue


# --- while it runs ----------------------------------------------------------------------------------------------------


def test_one_node_is_a_replica_set_that_takes_transactions_and_is_gone_when_stopped() -> None:
    with EmbeddedMongo.start() as mongo:
        pid, folder = mongo.nodes[0].pid, mongo.folder
        with client(mongo.uri) as connection, connection.start_session() as session:
            session.with_transaction(
                lambda joined: connection["test"]["stamps"].insert_one({"_id": "a"}, session=joined)
            )
        assert stamps(mongo.uri) == ["a"]
        assert (folder / "mongod.log").exists()
    assert not psutil.pid_exists(pid)
    assert not folder.exists()
    mongo.stop()  # safe to repeat


def test_it_listens_on_loopback_only() -> None:
    with EmbeddedMongo.start() as mongo:
        process = psutil.Process(mongo.nodes[0].pid)
        assert {connection.laddr.ip for connection in process.net_connections("inet")} == {"127.0.0.1"}
        assert not [one for one in process.net_connections("unix") if one.laddr]


def test_parameters_reach_the_server() -> None:
    with EmbeddedMongo.start(parameters={"enableTestCommands": "1"}) as mongo, client(mongo.uri) as connection:
        fail_once = {"failCommands": ["find"], "errorCode": 2}
        connection.admin.command({"configureFailPoint": "failCommand", "mode": {"times": 1}, "data": fail_once})
        with pytest.raises(OperationFailure):
            connection.admin.command({"find": "anything"})


def test_two_servers_of_one_process_do_not_meet() -> None:
    with EmbeddedMongo.start() as one, EmbeddedMongo.start() as other:
        insert(one.uri, "one")
        assert one.replica_set != other.replica_set
        assert stamps(other.uri) == []


def test_a_killed_node_comes_back_on_its_port_with_its_data() -> None:
    with EmbeddedMongo.start() as mongo:
        insert(mongo.uri, "a")
        (node,) = mongo.nodes
        pid, port = node.pid, node.port
        node.kill()
        assert not node.running
        with pytest.raises(NoPrimary, match=f"127.0.0.1:{port} DOWN"):
            mongo.wait_for_primary(timeout=0)
        node.restart()
        assert mongo.wait_for_primary() is node
        assert node.port == port
        assert node.pid != pid
        assert stamps(mongo.uri) == ["a"]


@pytest.mark.failover
def test_three_nodes_elect_another_primary_when_theirs_is_killed(three_nodes: EmbeddedMongo) -> None:
    first = three_nodes.wait_for_primary()
    insert(three_nodes.uri, "a")
    first.kill()
    second = three_nodes.wait_for_primary(timeout=20)
    assert second is not first
    insert(three_nodes.uri, "b")  # two of three are a majority
    first.restart()
    assert stamps(three_nodes.uri) == ["a", "b"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nodes": 0}, "nodes: must be at least 1"),
        ({"nodes": 3, "ports": [20001]}, "one for each"),
        ({"nodes": 2, "ports": [20001, 20001]}, "all different"),
        ({"keep": True}, "needs a folder"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_before_anything_starts(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        EmbeddedMongo.start(**wrong)


# --- kept data --------------------------------------------------------------------------------------------------------


def test_kept_data_is_there_again_at_the_same_address(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "when missing"
    with EmbeddedMongo.start(folder=folder, keep=True) as mongo:
        first = mongo.uri
        insert(first, "a")
    with EmbeddedMongo.start(folder=folder, keep=True) as mongo:
        assert mongo.uri == first
        assert stamps(mongo.uri) == ["a"]


def test_kept_data_survives_the_kill_of_its_mongod_and_the_loss_of_its_port(tmp_path: Path) -> None:
    with EmbeddedMongo.start(folder=tmp_path / "data", keep=True) as mongo:
        insert(mongo.uri, "a")
        port = mongo.nodes[0].port
        cut_the_power(mongo)
    with occupied(port), EmbeddedMongo.start(folder=tmp_path / "data", keep=True) as mongo:
        assert mongo.nodes[0].port != port
        assert stamps(mongo.uri) == ["a"]
        insert(mongo.uri, "b")
        assert stamps(mongo.uri) == ["a", "b"]
        cut_the_power(mongo)


@pytest.mark.failover
@pytest.mark.slow
def test_three_kept_nodes_form_their_set_again_on_other_ports(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with EmbeddedMongo.start(nodes=3, folder=folder, keep=True) as mongo:
        insert(mongo.uri, "a")
        old_ports = {node.port for node in mongo.nodes}
        cut_the_power(mongo)
    with occupied(min(old_ports)), EmbeddedMongo.start(nodes=3, folder=folder, keep=True) as mongo:
        assert not old_ports & {node.port for node in mongo.nodes}
        insert(mongo.uri, "b")
        assert stamps(mongo.uri) == ["a", "b"]
        cut_the_power(mongo)
        shutil.rmtree(mongo.nodes[0].folder)  # a lost disk: the other two are still a majority
    with EmbeddedMongo.start(nodes=3, folder=folder, keep=True) as mongo:
        assert stamps(mongo.uri) == ["a", "b"]
        cut_the_power(mongo)


@pytest.mark.parametrize("hint", [None, '{"replica_set": "another", "ports": [20000]}'])
def test_a_folder_with_a_lost_or_wrong_hint_tells_its_replica_set_itself(tmp_path: Path, hint: str | None) -> None:
    folder = tmp_path / "data"
    with EmbeddedMongo.start(folder=folder, keep=True) as mongo:
        name = mongo.replica_set
        insert(mongo.uri, "a")
        cut_the_power(mongo)
    path = folder / "embedded.json"
    path.unlink() if hint is None else path.write_text(hint)
    with EmbeddedMongo.start(folder=folder, keep=True) as mongo:
        assert mongo.replica_set == name
        assert stamps(mongo.uri) == ["a"]
        cut_the_power(mongo)
    assert remembered(folder, nodes=1) == Hint(name, (mongo.nodes[0].port,))


@pytest.mark.parametrize(
    "said",
    ["", "not json", "[]", "null", '{"ports": [20000]}', '{"replica_set": "x", "ports": "y"}']
    + [f'{{"replica_set": "x", "ports": {ports}}}' for ports in ("[0]", "[65536]", "[1, 2]", '["y"]', "null")],
)
def test_a_hint_that_is_not_legible_counts_as_none(tmp_path: Path, said: str) -> None:
    (tmp_path / "embedded.json").write_text(said)
    assert remembered(tmp_path, nodes=1) is None


def test_a_folder_of_a_server_that_stood_alone_becomes_a_replica_set(
    tmp_path: Path, mongod: Callable[..., Any]
) -> None:
    alone = mongod(folder=tmp_path / "data")
    alone.wait_until_it_answers(float("inf"))
    insert(f"mongodb://{alone.host}/", "a")
    alone.shut_down()
    with EmbeddedMongo.start(folder=tmp_path / "data", keep=True) as mongo:
        assert stamps(mongo.uri) == ["a"]
        cut_the_power(mongo)


# --- how it ends ------------------------------------------------------------------------------------------------------

START_AND_WAIT = """
import os, sys
from sagas_store.embedded import EmbeddedMongo
folder = sys.argv[1] or None
mongo = EmbeddedMongo.start(folder=folder, keep=folder is not None)
if sys.argv[2] == "with a forked child":
    if os.fork() == 0:
        os.read(0, 1)           # holds a copy of the guard's pipe for as long as the test wants
        os._exit(0)
print(mongo.nodes[0].pid, mongo._guard._process.pid, mongo.uri, mongo.folder, flush=True)
if sys.argv[2] == "returns":
    sys.exit()
os.read(0, 1)
"""


@pytest.mark.process
@pytest.mark.parametrize("parent", ["alone", "with a forked child"])
def test_it_ends_with_its_parent_even_when_that_is_killed(python: RunPython, parent: str) -> None:
    process = python(START_AND_WAIT, "", parent)
    assert process.stdout is not None
    mongod_pid, guard_pid, _uri, folder = process.stdout.readline().split()
    assert Path(folder).exists()
    process.kill()
    await_end(int(mongod_pid), int(guard_pid))
    assert not Path(folder).exists()


@pytest.mark.process
@pytest.mark.parametrize("parent", ["waits", "returns"])
def test_kept_data_can_be_taken_up_as_soon_as_the_parent_is_gone(
    python: RunPython, tmp_path: Path, parent: str
) -> None:
    process = python(START_AND_WAIT, str(tmp_path / "data"), parent)
    assert process.stdout is not None
    _mongod_pid, _guard_pid, uri, _folder = process.stdout.readline().split()
    if parent == "waits":
        insert(uri, "a")
        process.kill()
    process.wait(PATIENCE)
    with EmbeddedMongo.start(folder=tmp_path / "data", keep=True) as mongo:  # the last one may still be shutting down
        assert stamps(mongo.uri) == (["a"] if parent == "waits" else [])
        cut_the_power(mongo)


@pytest.mark.process
def test_a_forked_child_cannot_stop_the_server_of_its_parent(python: RunPython) -> None:
    process = python(
        "import os\n"
        "from sagas_store.embedded import EmbeddedMongo\n"
        "with EmbeddedMongo.start() as mongo:\n"
        "    if (child := os.fork()) == 0:\n"
        "        mongo.stop()\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "    print(mongo.wait_for_primary(timeout=0).running)\n"
    )
    assert process.communicate(timeout=PATIENCE)[0] == "True\n"


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part of it is Linux's alone")
def test_a_killed_guard_takes_its_mongods_along() -> None:
    with EmbeddedMongo.start() as mongo:
        os.kill(mongo._guard._process.pid, signal.SIGKILL)
        await_end(mongo.nodes[0].pid)
        with pytest.raises(GuardLost):
            mongo.nodes[0].restart()


@pytest.mark.process
def test_a_guard_that_is_told_to_end_leaves_nothing_behind() -> None:
    mongo = EmbeddedMongo.start()
    os.kill(mongo._guard._process.pid, signal.SIGTERM)
    await_end(mongo.nodes[0].pid)
    mongo._guard._process.wait(PATIENCE)
    assert not mongo.folder.exists()
    mongo.stop()


def test_our_environment_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGAS_MASTER_KEY", "secret")
    with EmbeddedMongo.start() as mongo:
        for pid in (mongo.nodes[0].pid, mongo._guard._process.pid):
            assert "secret" not in psutil.Process(pid).environ().values()


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="we are somebody else than root already")
def test_it_runs_for_somebody_else_than_root(python: RunPython, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = 65534
    with tempfile.TemporaryDirectory(dir="/tmp") as home:  # pytest's own folders are closed to others
        os.chown(home, nobody, nobody)
        monkeypatch.setenv("TMPDIR", home)
        source = "from sagas_store.embedded import mongodb\nwith mongodb() as uri: print(uri)"
        try:
            process = python(source, user=nobody)
        except PermissionError:
            pytest.skip("this Python may not be run by others")
        out, err = process.communicate(timeout=PATIENCE)
        if "ModuleNotFoundError" in err or "PermissionError" in err:
            pytest.skip("the code under test may not be read by others")
        assert out.startswith("mongodb://127.0.0.1:"), err
        assert list(Path(home).iterdir()) == []


# --- the environment and the command line -----------------------------------------------------------------------------


RUN_MODULE = "import runpy; runpy.run_module('sagas_store.embedded', run_name='__main__')"


def test_mongodb_starts_a_server_for_the_duration_when_none_is_given() -> None:
    with mongodb() as uri:
        insert(uri, "a")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(uri.split(":")[2].split("/")[0])))


@pytest.mark.process
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_the_uri_and_stays_until_it_is_told_to_end(
    python: RunPython, ending: signal.Signals
) -> None:
    process = python(RUN_MODULE)
    assert process.stdout is not None
    insert(process.stdout.readline().strip(), "a")
    process.send_signal(ending)
    assert process.wait(PATIENCE) == 0


def test_the_command_says_plainly_why_it_cannot_start(python: RunPython, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = python(RUN_MODULE, "--folder", str(tmp_path / "file"))
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (3, "")
    assert err.startswith(f"The folder {tmp_path / 'file'} cannot be used")
    assert "Traceback" not in err
