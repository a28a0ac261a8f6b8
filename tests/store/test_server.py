"""Which servers and which clients are refused, and how safely the others are spoken to whatever they were set to."""

from __future__ import annotations

import asyncio
import gc
import secrets
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from bson import SON
from bson.raw_bson import RawBSONDocument
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import AutoReconnect, ConfigurationError, OperationFailure

from sagas_store import MongoStore
from sagas_store.embedded.guard import Guard
from sagas_store.embedded.mongod import find_mongod, mongod_command
from sagas_store.embedded.node import Node, free_ports
from sagas_store.entries import Entry
from sagas_store.errors import InvalidInput, NoConnection, StoreRefused, StoreUnavailable, UnsafeServer
from sagas_store.faults import Patience
from sagas_store.records import RunFilter, RunRecord
from sagas_store.states import State
from tests.conftest import DRIVERS
from tests.store.making import DEFINITIONS, LEASE, Commands, client_of, entry, new_run, started_and_claimed
from tests.support.failpoints import LOOKS_AGAIN_SOON, fail_point

pytestmark = pytest.mark.parametrize("driver", DRIVERS)
SECRET = "hunter2"


# --- servers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def standalone_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real mongod that is no replica set."""
    guard = Guard(temporary=True)
    try:
        folder: Path = tmp_path_factory.mktemp("standalone")
        (port,) = free_ports(1)
        command = mongod_command(
            find_mongod(), folder=folder, port=port, replica_set="", cache_bytes=2**28, parameters={}
        )
        at = command.index("--replSet")
        del command[at : at + 2]
        Node(guard, name="standalone", port=port, folder=folder, command=command).launch()
        uri = f"mongodb://127.0.0.1:{port}/"
        with MongoClient[dict[str, Any]](uri, serverSelectionTimeoutMS=30_000) as client:
            client.admin.command("ping")
        yield uri
    finally:
        guard.close()


async def test_a_standalone_is_refused_with_the_way_out(standalone_uri: str, driver: str) -> None:
    async with client_of(driver, standalone_uri) as client:
        with pytest.raises(UnsafeServer, match="--replSet") as refused:
            await MongoStore(client["refused"]).ready()
        assert "standalone" in refused.value.reason
        assert "refused" not in await client.list_database_names(), "nothing was written"


HELLO = {"setName": "rs0", "maxWireVersion": 17, "logicalSessionTimeoutMinutes": 30}
STATUS = {"storageEngine": {"name": "wiredTiger", "persistent": True}}
UNSAFE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "older than 6.0": ({**HELLO, "maxWireVersion": 13}, STATUS, r"older than MongoDB 6\.0 .*13"),
    "without a wire version": ({"setName": "rs0", "logicalSessionTimeoutMinutes": 30}, STATUS, "older"),
    "an old mongos": ({**HELLO, "msg": "isdbgrid", "maxWireVersion": 9}, STATUS, "older"),
    "without sessions": ({"setName": "rs0", "maxWireVersion": 21}, STATUS, "no sessions"),
    "in memory": (HELLO, {"storageEngine": {"name": "inMemory", "persistent": False}}, "inMemory keeps nothing"),
}


@pytest.mark.parametrize("which", UNSAFE)
async def test_a_server_that_cannot_keep_the_promises_is_refused_by_name(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    hello, status, reason = UNSAFE[which]
    unsafe = answering(store, monkeypatch, hello=hello, serverStatus=status)
    with pytest.raises(UnsafeServer, match=reason):
        await unsafe.ready()


async def test_a_mongos_is_taken_without_asking_for_its_storage(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = {"msg": "isdbgrid", "maxWireVersion": 17, "logicalSessionTimeoutMinutes": 30}
    await answering(store, monkeypatch, hello=hello).ready()


def answering(store: MongoStore, monkeypatch: pytest.MonkeyPatch, **answers: dict[str, Any]) -> MongoStore:
    """A store whose server gives these answers to admin commands."""

    async def admin(name: str, value: Any = 1, **more: Any) -> dict[str, Any]:
        return answers[name]

    other = MongoStore(store._driver.database)
    monkeypatch.setattr(other._driver, "admin", admin)
    return other


async def test_a_user_who_may_only_read_and_write_the_database_may_use_the_store(
    store: MongoStore, database: Any, driver: str, mongo_uri: str
) -> None:
    # The built-in role readWrite covers all that a store does. It does not cover serverStatus.
    name = f"victim-{secrets.token_hex(4)}"
    async with client_of(driver, mongo_uri, appName=name) as client, AsyncMongoClient[Any](mongo_uri) as admin:
        async with fail_point(admin, ["serverStatus"], with_app_name=name, errorCode=13):
            await MongoStore(client[database.name]).ready()


@pytest.mark.parametrize(
    ("patience", "reply"),
    [
        pytest.param(timedelta(milliseconds=300), timedelta(seconds=10), id="little patience"),
        pytest.param(timedelta(seconds=1), timedelta(milliseconds=300), id="short replies"),
    ],
)
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")
async def test_a_server_that_does_not_answer_is_unavailable_once_patience_is_spent(
    driver: str, patience: timedelta, reply: timedelta
) -> None:
    (port,) = free_ports(1)
    loop = asyncio.get_running_loop()
    async with client_of(driver, f"mongodb://user:{SECRET}@127.0.0.1:{port}/", **LOOKS_AGAIN_SOON) as client:
        store = MongoStore(client["nowhere"], patience=patience, reply=reply)
        begun = loop.time()
        async with asyncio.timeout(6):
            with pytest.raises(StoreUnavailable) as away:
                await store.ready()
        assert loop.time() - begun < 3.0, "patience bounds all tries together"
        assert f"nobody answers at 127.0.0.1:{port}" in str(away.value)
        assert SECRET not in str(away.value), "an address, and nothing else of the connection string"
    gc.collect()  # the driver leaves a socket behind that it was just connecting; its warning belongs here


@pytest.mark.parametrize("direct", ["", "&directConnection=true"])
async def test_a_replica_set_that_is_not_there_is_told_by_its_name(mongo_uri: str, driver: str, direct: str) -> None:
    host = urlsplit(mongo_uri).netloc.partition(",")[0]
    async with client_of(driver, f"mongodb://{host}/?replicaSet=misspelt{direct}", **LOOKS_AGAIN_SOON) as client:
        store = MongoStore(client["nowhere"], patience=0.5, reply=0.3)
        with pytest.raises(StoreUnavailable) as away:
            await store.ready()
        assert f"no member of replica set 'misspelt' is at {host}" in str(away.value)
        assert "replicaSet" in str(away.value)
        assert str(away.value).startswith("read the server's state: ")


async def test_a_password_that_is_wrong_is_told_as_such(mongo_uri: str, driver: str) -> None:
    async with client_of(driver, mongo_uri.replace("mongodb://", f"mongodb://user:{SECRET}@", 1)) as client:
        with pytest.raises(StoreRefused, match="code 18: authentication failed: user, password or authSource") as told:
            await MongoStore(client["nowhere"]).ready()
        assert SECRET not in str(told.value)


async def test_a_right_that_the_user_lacks_is_told_as_such(store: MongoStore, driver: str) -> None:
    async def lacks_it() -> None:
        raise OperationFailure("not authorized", code=13)

    with pytest.raises(StoreRefused, match=r"code 13: not authorized: .*readWrite"):
        await store._patience.call("list runs", lacks_it)


async def test_what_the_driver_finds_wrong_in_a_connection_string_later_is_no_refusal(
    store: MongoStore, driver: str
) -> None:
    async def no_such_name() -> None:  # a mongodb+srv:// name is first looked up when the first question is asked
        raise ConfigurationError(f"The DNS query name does not exist: {SECRET}")

    with pytest.raises(NoConnection, match="connection string does not lead to a server") as told:
        await store._patience.call("read the server's state", no_such_name)
    assert SECRET not in str(told.value)


@pytest.mark.parametrize("comes_out_as", ["an answer", "a lost connection"])
async def test_a_cancellation_that_the_driver_swallows_is_a_cancellation_all_the_same(
    driver: str, comes_out_as: str
) -> None:
    # PyMongo sends with asyncio.wait_for, and that of Python 3.11 forgets a cancellation that arrives as it finishes:
    # three in a hundred are lost where a task does nothing but ask. Whoever asks in a loop would go on for ever.
    tries = 0

    async def swallows() -> str:
        nonlocal tries
        tries += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if tries > 1:
                raise
            if comes_out_as == "a lost connection":
                raise AutoReconnect("operation cancelled") from None
        return "an answer"

    task = asyncio.create_task(Patience(timedelta(seconds=9), timedelta(seconds=9)).call("swallow", swallows))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=2)
    task.cancel()
    await asyncio.wait([task], timeout=2)
    assert done
    assert task.cancelled()
    assert tries == 1


# --- clients ----------------------------------------------------------------------------------------------------------


async def test_a_blocking_client_is_refused_before_it_can_stop_the_loop(mongo_uri: str, driver: str) -> None:
    with MongoClient[dict[str, Any]](mongo_uri) as blocking, pytest.raises(InvalidInput, match="blocking MongoClient"):
        MongoStore(blocking["test"])  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, "mongodb://localhost", object()], ids=repr)
async def test_what_is_no_database_is_refused(driver: str, wrong: Any) -> None:
    with pytest.raises(InvalidInput):
        MongoStore(wrong)


async def test_a_client_in_place_of_a_database_is_refused(database: Any, driver: str) -> None:
    with pytest.raises(InvalidInput):
        MongoStore(database.client)


@pytest.fixture
async def weak(
    store: MongoStore, database: Any, driver: str, mongo_uri: str
) -> AsyncIterator[tuple[MongoStore, Commands]]:
    """A store on a client that was set to promise nothing."""
    commands = Commands()
    options: dict[str, Any] = {
        "w": 0,
        "readConcernLevel": "local",
        "readPreference": "secondaryPreferred",
        "retryWrites": False,
        "retryReads": False,
        "tz_aware": False,
        "document_class": SON,
    }
    async with client_of(driver, mongo_uri, event_listeners=[commands], **options) as client:
        yield MongoStore(client[database.name]), commands


DURABLE = {"w": "majority", "j": True}


async def test_every_write_is_durable_and_every_read_proven_whatever_the_client_was_set_to(
    weak: tuple[MongoStore, Commands],
) -> None:
    store, commands = weak
    await store.ready()
    await everything(store)
    writes = [*commands.of("insert"), *commands.of("update")]
    alone = [write for write in writes if "txnNumber" not in write or write.get("autocommit") is None]
    assert {kind for kind, _ in commands.sent} >= {"insert", "update", "find", "commitTransaction", "abortTransaction"}
    assert len(alone) >= 12
    for write in alone:
        assert {key: write["writeConcern"].get(key) for key in DURABLE} == DURABLE, write
    for commit in [*commands.of("commitTransaction"), *commands.of("abortTransaction")]:
        assert {key: commit["writeConcern"].get(key) for key in DURABLE} == DURABLE, commit
    begun = [command for _, command in commands.sent if command.get("startTransaction")]
    assert begun
    assert all(command["readConcern"]["level"] == "snapshot" for command in begun)
    reads = [read for read in commands.of("find") if "autocommit" not in read]
    assert len(reads) >= 8
    assert all(read["readConcern"]["level"] == "majority" for read in reads)
    preferences = [command.get("$readPreference", {"mode": "primary"})["mode"] for _, command in commands.sent]
    assert set(preferences) <= {"primary", "primaryPreferred"}, preferences


async def everything(store: MongoStore) -> None:
    """Ask the store to do everything it can."""
    run = new_run(store)
    await store.runs.insert(run)
    await store.runs.insert_many([new_run(store), new_run(store), run])
    claimed = await store.claims.take(DEFINITIONS, token="token-1", worker="w", lease=LEASE, limit=10)
    first, second, third = claimed
    await store.claims.next_due_at(DEFINITIONS)
    await store.runs.renew({"gone": "token-1"}, lease=LEASE)
    await store.runs.pass_gate(first)
    await store.runs.show_rolling_back(first)
    for _ in range(2):
        await store.runs.settle(first, State.COMPLETED)
        await store.runs.hold(second, State.BROKEN, "unfit")
        await store.runs.park(third, wait=timedelta(hours=1))
        await store.journal.append(entry(run.run_id, 1))
    await store.runs.get(run.run_id)
    await store.runs.at_rest([run.run_id])
    await store.runs.page(RunFilter(states=frozenset(State)), after=None, limit=5)
    await store.journal.load(run.run_id)
    await store.journal.last_context(run.run_id)
    await store.journal.find_own(entry(run.run_id, 1))
    await commit_and_abort(store, run.run_id)


async def commit_and_abort(store: MongoStore, run_id: str) -> None:
    other = new_run(store)

    async def commits(session: Any) -> Entry | None:
        await store.runs.insert_in(session, other)
        return entry(run_id, 2)

    async def aborts(session: Any) -> Entry | None:
        await store.runs.insert_in(session, new_run(store))
        return None

    await store.commit_together(commits)
    await store.commit_together(aborts)


@pytest.mark.parametrize("document_class", [SON, RawBSONDocument])
async def test_how_the_application_reads_its_documents_is_its_own_affair(
    database: Any, store: MongoStore, driver: str, mongo_uri: str, document_class: Any
) -> None:
    async with client_of(driver, mongo_uri, document_class=document_class, tz_aware=False) as client:
        odd = MongoStore(client[database.name])
        await odd.schema.apply()
        await odd.ready()
        run = await started_and_claimed(odd)
        assert isinstance(run, RunRecord)
        assert run.created_at.tzinfo is not None
        await odd.journal.append(entry(run.run_id, 1))
        assert await odd.journal.load(run.run_id) == [entry(run.run_id, 1)]


async def test_what_was_checked_once_is_not_asked_again(
    database: Any, store: MongoStore, driver: str, mongo_uri: str
) -> None:
    commands = Commands()
    async with client_of(driver, mongo_uri, event_listeners=[commands]) as client:
        watched = MongoStore(client[database.name])
        await watched.ready()
        asked = len(commands.sent)
        await watched.ready()
        assert len(commands.sent) == asked
