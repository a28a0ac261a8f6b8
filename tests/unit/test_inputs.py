"""What is given to constructors is checked there: refused by field, with what was given by its type, or kept.

No test here asks a server anything: what is wrong is told before that.
"""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pydantic import BaseModel
from pymongo import AsyncMongoClient

from sagas import (
    Client,
    InvalidInput,
    KeyKeeper,
    Keyring,
    Limits,
    LocalKeyWrapper,
    MongoStore,
    Operator,
    RetryPolicy,
    Saga,
    SagaError,
    Start,
    StartRefused,
    Step,
    StoreError,
    TenantDatabases,
    TenantWorker,
    Worker,
    WorkerOptions,
)
from sagas.worker import WORKER_NAME_MAX
from sagas.wrapping import AwsKmsWrapper, VaultTransitWrapper, add_master_key
from sagas_store.commit import Batching
from sagas_store.embedded import EmbeddedMongo
from sagas_store.numbers import COUNT_MAX, DURATION_MAX
from sagas_store.tenants import TENANT_MAX

SECRET = "hunter2"
SECOND = timedelta(seconds=1)
WRAPPER = LocalKeyWrapper({"m": bytes(32)})
TENANTS_NAME = "w" * (WORKER_NAME_MAX - 1 - TENANT_MAX)
"""The longest name of a worker of all tenants."""


class Order(BaseModel):
    number: str = "a"


cafe = Saga("cafe", Order)


@cafe.step(no_compensation=True)
async def serve(order: Order, step: Step[Any]) -> Order:
    return order


class Here:
    """What the constructors are given where they are given the right thing."""

    def __init__(self, mongo: Any) -> None:
        self.mongo = mongo
        self.database = mongo["db"]
        self.store = MongoStore(self.database)
        self.databases = TenantDatabases(mongo)


@pytest.fixture(params=["pymongo", "motor"])
async def here(request: pytest.FixtureRequest) -> AsyncIterator[Here]:
    uri = "mongodb://127.0.0.1:1/"
    # Motor connects at the first question, and none is asked; PyMongo has to be told so.
    client: Any = AsyncMongoClient(uri, connect=False) if request.param == "pymongo" else AsyncIOMotorClient(uri)
    yield Here(client)
    closing = client.close()
    if closing is not None:
        await closing


Make = Callable[[Here], object]

WRONG: list[tuple[str, Make, str, str]] = [
    # what takes a store
    ("a database to a client", lambda at: Client(at.database), "store", "Client(MongoStore(database))"),
    ("a client to a client", lambda at: Client(at.mongo), "store", "must be a MongoStore or TenantDatabases, not "),
    ("no store", lambda at: Client(None), "store", "not NoneType"),  # type: ignore[arg-type]
    ("a class to a client", lambda at: Client(MongoStore), "store", "the class MongoStore"),  # type: ignore[arg-type]
    ("a database to an operator", lambda at: Operator(at.database), "store", "Operator(MongoStore(database))"),
    ("a database to a keeper", lambda at: KeyKeeper(at.database), "store", "KeyKeeper(MongoStore(database))"),
    ("a tenant that is a number", lambda at: Client(at.store, tenant=5), "tenant", "not int"),  # type: ignore[arg-type]
    ("no tenant where each has a database", lambda at: Client(at.databases), "tenant", "bind to one"),
    ("a tenant that names no database", lambda at: Client(at.databases, tenant="A b"), "tenant", "no database"),
    ("a dict of limits", lambda at: Client(at.store, limits={}), "limits", "must be Limits, not dict"),  # type: ignore[arg-type]
    ("a number of limits", lambda at: Operator(at.store, limits=5), "limits", "not int"),  # type: ignore[arg-type]
    # workers
    ("a database to a worker", lambda at: Worker(at.database, [cafe]), "store", "Worker(MongoStore(database), sagas)"),
    ("databases to a worker", lambda at: Worker(at.databases, [cafe]), "store", "TenantWorker("),  # type: ignore[arg-type]
    ("one saga", lambda at: Worker(at.store, cafe), "sagas", "not Saga: [saga]"),  # type: ignore[arg-type]
    ("a text of sagas", lambda at: Worker(at.store, "cafe"), "sagas", "several Saga objects, a list for"),  # type: ignore[arg-type]
    ("the name of a saga", lambda at: Worker(at.store, ["cafe"]), "sagas", "not str"),  # type: ignore[list-item]
    ("no sagas", lambda at: Worker(at.store, iter(())), "sagas", "at least one"),  # type: ignore[arg-type]
    ("options in a dict", lambda at: Worker(at.store, [cafe], options={"lease": 3}), "options", "not dict"),  # type: ignore[arg-type]
    ("the class of the options", lambda at: Worker(at.store, [cafe], options=WorkerOptions), "options", "the class"),  # type: ignore[arg-type]
    ("a name that is a number", lambda at: Worker(at.store, [cafe], name=7), "name", "1 to 256 characters, not int"),  # type: ignore[arg-type]
    ("a name of bytes", lambda at: Worker(at.store, [cafe], name=b"w"), "name", "not bytes"),  # type: ignore[arg-type]
    ("a name of nothing", lambda at: Worker(at.store, [cafe], name=""), "name", "not 0 characters"),
    ("a name that is zero", lambda at: Worker(at.store, [cafe], name=0), "name", "not int"),  # type: ignore[arg-type]
    ("a name that is False", lambda at: Worker(at.store, [cafe], name=False), "name", "not bool"),  # type: ignore[arg-type]
    ("a list for a name", lambda at: Worker(at.store, [cafe], name=[]), "name", "not list"),  # type: ignore[arg-type]
    ("half a character", lambda at: Worker(at.store, [cafe], name="\ud800"), "name", "UTF-8 can write"),
    ("a long name", lambda at: Worker(at.store, [cafe], name="w" * 257), "name", "not 257 characters"),
    ("a name without room", lambda at: TenantWorker(at.databases, [cafe], name=TENANTS_NAME + "w"), "name", "1 to 215"),
    ("a store to a tenant worker", lambda at: TenantWorker(at.store, [cafe]), "databases", "Worker(store, sagas)"),  # type: ignore[arg-type]
    ("a client to a tenant worker", lambda at: TenantWorker(at.mongo, [cafe]), "databases", "not "),
    ("one saga for tenants", lambda at: TenantWorker(at.databases, cafe), "sagas", "not Saga"),  # type: ignore[arg-type]
    ("a look that is a text", lambda at: TenantWorker(at.databases, [cafe], look="10"), "look", "not str"),  # type: ignore[arg-type]
    ("a look of nothing", lambda at: TenantWorker(at.databases, [cafe], look=0), "look", "above zero"),
    ("tenants' options", lambda at: TenantWorker(at.databases, [cafe], options=[]), "options", "not list"),  # type: ignore[arg-type]
    # stores
    ("no database", lambda _: MongoStore(None), "database", "must be one of pymongo.AsyncMongoClient or of motor"),  # type: ignore[arg-type]
    ("a keyring that is a text", lambda at: MongoStore(at.database, keyring=SECRET), "keyring", "not str"),  # type: ignore[arg-type]
    ("the class of a keyring", lambda at: MongoStore(at.database, keyring=Keyring), "keyring", "the class"),  # type: ignore[arg-type]
    ("a prefix that is a number", lambda at: MongoStore(at.database, prefix=5), "prefix", "not int"),  # type: ignore[arg-type]
    ("a prefix of dots", lambda at: MongoStore(at.database, prefix=".."), "prefix", "no collection"),
    ("a patience that is a text", lambda at: MongoStore(at.database, patience="5"), "patience", "not str"),  # type: ignore[arg-type]
    ("no patience", lambda at: MongoStore(at.database, patience=0), "patience", "above zero"),
    ("a negative reply", lambda at: MongoStore(at.database, reply=-SECOND), "reply", "above zero"),
    ("a reply after weeks", lambda at: MongoStore(at.database, reply=timedelta(days=30)), "reply", "at most"),
    ("a batching in a dict", lambda at: MongoStore(at.database, batching={}), "batching", "not dict"),  # type: ignore[arg-type]
    ("turns that are a number", lambda at: MongoStore(at.database, turns=5), "turns", "not int"),  # type: ignore[arg-type]
    ("a name for databases", lambda at: TenantDatabases("x"), "client", "not str"),  # type: ignore[arg-type]
    ("a database for databases", lambda at: TenantDatabases(at.database), "client", "AsyncMongoClient, or Motor's"),
    ("a prefix of a database", lambda at: TenantDatabases(at.mongo, prefix="a.b"), "prefix", "letters"),
    ("databases' patience", lambda at: TenantDatabases(at.mongo, patience="5"), "patience", "not str"),  # type: ignore[arg-type]
    ("one keyring for all", lambda at: TenantDatabases(at.mongo, keyring_of=Keyring(WRAPPER)), "keyring_of", "Keyring"),  # type: ignore[arg-type]
    ("no writes together", lambda _: Batching(count_max=0), "Batching.count_max", "must be at least 1"),
    ("None together", lambda _: Batching(count_max=None), "Batching.count_max", "a whole number, not NoneType"),  # type: ignore[arg-type]
    # options, policies, limits
    ("None for a concurrency", lambda _: WorkerOptions(concurrency=None), "WorkerOptions.concurrency", "not NoneType"),  # type: ignore[arg-type]
    ("a concurrency of True", lambda _: WorkerOptions(concurrency=True), "WorkerOptions.concurrency", "not bool"),
    ("no end of concurrency", lambda _: WorkerOptions(concurrency=2**63), "WorkerOptions.concurrency", "2,147,483,647"),
    ("a share too big", lambda _: WorkerOptions(tenant_concurrency=2**31), "WorkerOptions.tenant_concurrency", "most"),
    ("an endless lease", lambda _: WorkerOptions(lease=timedelta.max), "WorkerOptions.lease", "at most 315,360,000 s"),
    ("more than a document", lambda _: Limits(context_bytes_max=2**24), "Limits.context_bytes_max", "most 15,728,640"),
    ("tries without end", lambda _: RetryPolicy(max_attempts=10**5000), "RetryPolicy.max_attempts", "must be at most"),
    ("one exception", lambda _: RetryPolicy(retry_on=TimeoutError), "RetryPolicy.retry_on", "of exception classes"),  # type: ignore[arg-type]
    ("a concurrency that is a text", lambda _: WorkerOptions(concurrency="3"), "WorkerOptions.concurrency", "not str"),  # type: ignore[arg-type]
    ("no concurrency", lambda _: WorkerOptions(concurrency=0), "WorkerOptions.concurrency", "at least 1"),
    ("a broken concurrency", lambda _: WorkerOptions(concurrency=2.5), "WorkerOptions.concurrency", "not float"),  # type: ignore[arg-type]
    ("no threads", lambda _: WorkerOptions(threads=0), "WorkerOptions.threads", "at least 1"),
    ("a tenant's share", lambda _: WorkerOptions(tenant_concurrency=True), "WorkerOptions.tenant_concurrency", "bool"),
    ("a lease that is a text", lambda _: WorkerOptions(lease="3"), "WorkerOptions.lease", "a timedelta, or seconds"),  # type: ignore[arg-type]
    ("a lease too short", lambda _: WorkerOptions(lease=SECOND / 1000), "WorkerOptions.lease", "at least 0.5 seconds"),
    ("no poll", lambda _: WorkerOptions(poll=0), "WorkerOptions.poll", "above zero"),
    ("a negative grace", lambda _: WorkerOptions(drain_grace=-1), "WorkerOptions.drain_grace", "not be negative"),
    ("a lease of True", lambda _: WorkerOptions(lease=True), "WorkerOptions.lease", "not bool"),
    ("signals", lambda _: WorkerOptions(handle_signals="no"), "WorkerOptions.handle_signals", "True or False"),  # type: ignore[arg-type]
    ("limits in a dict", lambda _: WorkerOptions(limits={}), "WorkerOptions.limits", "not dict"),  # type: ignore[arg-type]
    ("a limit that is a text", lambda _: Limits(context_bytes_max="1"), "Limits.context_bytes_max", "not str"),  # type: ignore[arg-type]
    ("a run's limit", lambda _: Limits(run_bytes_max=1.5), "Limits.run_bytes_max", "not float"),  # type: ignore[arg-type]
    ("an endless wait", lambda _: RetryPolicy(max_wait=float("inf")), "RetryPolicy.max_wait", "can hold"),
    ("a wait that is no number", lambda _: RetryPolicy(max_wait=float("nan")), "RetryPolicy.max_wait", "can hold"),
    ("a wait beyond all time", lambda _: RetryPolicy(max_wait=10**30), "RetryPolicy.max_wait", "can hold"),
    ("a jitter of seconds", lambda _: RetryPolicy(jitter=0.5), "RetryPolicy.jitter", "True or False, not float"),  # type: ignore[arg-type]
    # keys
    ("no wrapper", lambda _: Keyring(None), "wrapper", "must be a KeyWrapper"),  # type: ignore[arg-type]
    ("a wrapper that is a text", lambda _: Keyring(SECRET), "wrapper", "a KeyWrapper, "),  # type: ignore[arg-type]
    ("the class of a wrapper", lambda _: Keyring(LocalKeyWrapper), "wrapper", "the class"),  # type: ignore[arg-type]
    ("an age that is a text", lambda _: Keyring(WRAPPER, max_age="5"), "Keyring.max_age", "not str"),  # type: ignore[arg-type]
    ("no age", lambda _: Keyring(WRAPPER, max_age=0), "Keyring.max_age", "above zero"),
    ("a negative pause", lambda _: Keyring(WRAPPER, pause=-1), "Keyring.pause", "not be negative"),
    ("keys by themselves", lambda _: Keyring(WRAPPER, create_on_first_use="no"), "Keyring.create_on_first_use", ""),  # type: ignore[arg-type]
    ("a keyring bound to a store", lambda at: Keyring(WRAPPER).bind(at.store), "keys", "store.keys"),  # type: ignore[arg-type]
    ("master keys in a text", lambda _: LocalKeyWrapper(SECRET), "masters", "not str"),  # type: ignore[arg-type]
    ("a master key that is a text", lambda _: LocalKeyWrapper({"m": SECRET}), "masters", "must be bytes, not str"),  # type: ignore[dict-item]
    ("a path that is a number", lambda _: LocalKeyWrapper.from_file(5), "path", "not int"),  # type: ignore[arg-type]
    ("a variable that is a number", lambda _: LocalKeyWrapper.from_env(5), "variable", "not int"),  # type: ignore[arg-type]
    ("a name of a new key", lambda _: add_master_key("x", 5), "name", "letters"),  # type: ignore[arg-type]
    ("an ARN that is a number", lambda _: AwsKmsWrapper(None, 5), "key", "not int"),  # type: ignore[arg-type]
    ("one older key", lambda _: VaultTransitWrapper(None, "k", older="old"), "older", "[name]"),
    # embedded servers
    ("nodes in words", lambda _: EmbeddedMongo.start(nodes="3"), "nodes", "must be a whole number, not str"),  # type: ignore[arg-type]
    ("too many nodes", lambda _: EmbeddedMongo.start(nodes=8), "nodes", "must be at most 7"),
    ("one port", lambda _: EmbeddedMongo.start(ports=27017), "ports", "must be several ports, a list"),  # type: ignore[arg-type]
    ("a port in words", lambda _: EmbeddedMongo.start(ports=["27017"]), "ports", "a whole number, not str"),  # type: ignore[list-item]
    ("no such port", lambda _: EmbeddedMongo.start(ports=[65536]), "ports", "must be at most 65,535"),
    ("to keep, in words", lambda _: EmbeddedMongo.start(keep="no"), "keep", "True or False, not str"),  # type: ignore[arg-type]
    ("a cache in GiB", lambda _: EmbeddedMongo.start(cache_bytes=0.25), "cache_bytes", "a whole number, not float"),  # type: ignore[arg-type]
    ("a small cache", lambda _: EmbeddedMongo.start(cache_bytes=2**20), "cache_bytes", "must be at least 268,435,456"),
    ("time in words", lambda _: EmbeddedMongo.start(timeout="60"), "timeout", "a timedelta, or seconds, not str"),  # type: ignore[arg-type]
    ("no time", lambda _: EmbeddedMongo.start(timeout=0), "timeout", "must be above zero"),
    # starts
    ("a delay that is a text", lambda _: Start(Order(), delay="5"), "delay", "not str"),  # type: ignore[arg-type]
    ("a negative delay", lambda _: Start(Order(), delay=-1), "delay", "not be negative"),
    ("a deadline that is a text", lambda _: Start(Order(), deadline="1"), "deadline", "datetime, or a timedelta"),  # type: ignore[arg-type]
    ("a deadline of nothing", lambda _: Start(Order(), deadline=0), "deadline", "above zero"),
    ("a deadline of no zone", lambda _: Start(Order(), deadline=datetime(2030, 1, 1)), "deadline", "without a zone"),
    ("a time without a zone", lambda _: Start(Order(), due_at=datetime(2030, 1, 1)), "due_at", "without a zone"),
    ("a key that is a number", lambda _: Start(Order(), key=5), "key", "not int"),  # type: ignore[arg-type]
    ("a tenant of a start", lambda _: Start(Order(), tenant=""), "tenant", "not 0 characters"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "field", "says"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
async def test_what_is_wrong_is_refused_where_it_is_given(here: Here, make: Make, field: str, says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        make(here)
    assert refused.value.field == field
    assert says in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("kind", [SagaError, ValueError, TypeError])
def test_a_wrong_argument_is_caught_by_our_name_and_by_pythons(kind: type[Exception]) -> None:
    assert issubclass(InvalidInput, kind)


def test_an_argument_that_is_wrong_is_neither_a_refused_start_nor_the_databases_fault() -> None:
    assert InvalidInput.__base__ is SagaError
    assert not issubclass(InvalidInput, StartRefused | StoreError)


# --- durations --------------------------------------------------------------------------------------------------------


async def test_a_duration_is_a_timedelta_or_seconds_everywhere(here: Here) -> None:
    for given in (3, 3.0, timedelta(seconds=3)):
        options = WorkerOptions(lease=given, poll=given, park_after=given, drain_grace=given)
        assert {options.lease, options.poll, options.park_after, options.drain_grace} == {timedelta(seconds=3)}
        policy = RetryPolicy(initial_wait=given, max_wait=given, max_elapsed=given, jitter=False)
        assert {policy.initial_wait, policy.max_wait, policy.max_elapsed, policy.wait(1)} == {timedelta(seconds=3)}
        keyring = Keyring(WRAPPER, max_age=given, pause=given, call_timeout=given)
        assert keyring.max_age == timedelta(seconds=3)
        assert Start(Order(), delay=given, deadline=given).delay == timedelta(seconds=3)
        MongoStore(here.database, patience=given, reply=given)
        assert TenantDatabases(here.mongo, patience=given, reply=given).of("vinet") is not None
        TenantWorker(here.databases, [cafe], look=given)
        timely = Saga("timely", Order, deadline=given)
        assert timely.deadline == timedelta(seconds=3)
        step = timely.step(timeout=given, stop_grace=given)(serve.forward.function)
        assert (step.forward.timeout, step.stop_grace) == (timedelta(seconds=3), timedelta(seconds=3))


def test_options_are_values_whose_durations_read_as_timedeltas() -> None:
    options = WorkerOptions(lease=3)
    assert options == WorkerOptions(lease=timedelta(seconds=3)) != WorkerOptions()
    assert hash(options) == hash(WorkerOptions(lease=3.0))
    assert replace(options, poll=2).lease == timedelta(seconds=3)
    assert asdict(options)["lease"] == timedelta(seconds=3)
    assert "lease=datetime.timedelta(seconds=3)" in repr(options)
    assert pickle.loads(pickle.dumps(options)) == copy.deepcopy(options) == options
    assert WorkerOptions().lease == timedelta(minutes=5)
    assert RetryPolicy(max_elapsed=None).max_elapsed is None
    with pytest.raises(InvalidInput, match="not NoneType"):
        WorkerOptions(lease=None)  # type: ignore[arg-type]


async def test_what_may_be_nothing_and_what_is_least_is_taken(here: Here) -> None:
    WorkerOptions(lease=0.5, park_after=0, drain_grace=0, tenant_concurrency=None, concurrency=1, threads=1)
    RetryPolicy(initial_wait=0, max_wait=0, max_elapsed=0)
    Keyring(WRAPPER, pause=0)
    Start(Order(), delay=0, deadline=datetime(2030, 1, 1, tzinfo=UTC))
    assert Worker(here.store, (saga for saga in [cafe])).name != ""  # type: ignore[arg-type]
    TenantDatabases(here.mongo, prefix="", turns=asyncio.Semaphore(3))


def test_what_is_most_is_taken() -> None:
    WorkerOptions(concurrency=COUNT_MAX, threads=COUNT_MAX, lease=DURATION_MAX, poll=DURATION_MAX)
    RetryPolicy(initial_wait=timedelta.max, max_wait=timedelta.max, max_elapsed=timedelta.max)


# --- names of workers -------------------------------------------------------------------------------------------------


async def test_a_worker_without_a_name_gets_one_that_can_be_stored_whatever_its_host_is_called(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "k\udcfchlschrank")
    assert Worker(here.store, [cafe]).name.startswith("k?hlschrank:")


async def test_the_name_of_a_worker_of_all_tenants_leaves_room_for_theirs(here: Here) -> None:
    name = TenantWorker(here.databases, [cafe], name=TENANTS_NAME).name
    assert Worker(here.store, [cafe], name=f"{name}/{'t' * TENANT_MAX}").name.startswith(name)
