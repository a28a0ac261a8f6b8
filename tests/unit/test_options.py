"""Options and names that come from outside: what is wrong is refused where it is given, under one class of error."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from sagas import InvalidInput, Keyring, Limits, RetryPolicy, Saga, SagaError, StartRefused, Step, Worker, WorkerOptions
from sagas.tenant_worker import TenantWorker
from sagas.wrapping import LocalKeyWrapper
from sagas_store import MongoStore
from sagas_store.commit import Batching
from sagas_store.embedded import EmbeddedMongo
from sagas_store.faults import Patience
from sagas_store.numbers import COUNT_MAX, DURATION_MAX
from sagas_store.tenants import TENANT_MAX, TenantDatabases

SECOND = timedelta(seconds=1)
NOBODY = MongoStore.__new__(MongoStore)  # nothing is asked of it
NOBODIES = TenantDatabases.__new__(TenantDatabases)
WRAPPER = LocalKeyWrapper({"m": bytes(32)})


class Order(BaseModel):
    pass


SAGA = Saga("options", Order)


@SAGA.step(no_compensation=True)
async def look(order: Order, step: Step[None]) -> Order:
    return order


def worker(**options: Any) -> Worker:
    return Worker(NOBODY, [SAGA], **options)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (WorkerOptions, {"concurrency": 0}, "WorkerOptions.concurrency: must be at least 1"),
    (WorkerOptions, {"concurrency": None}, "WorkerOptions.concurrency: must be a whole number, not NoneType"),
    (WorkerOptions, {"concurrency": "8"}, "WorkerOptions.concurrency: must be a whole number, not str"),
    (WorkerOptions, {"concurrency": True}, "WorkerOptions.concurrency: must be a whole number, not bool"),
    (WorkerOptions, {"concurrency": 2**63}, "WorkerOptions.concurrency: must be at most 2,147,483,647"),
    (WorkerOptions, {"tenant_concurrency": 2**31}, "WorkerOptions.tenant_concurrency: must be at most 2,147,483,647"),
    (WorkerOptions, {"threads": 1.5}, "WorkerOptions.threads: must be a whole number, not float"),
    (WorkerOptions, {"lease": "300"}, "WorkerOptions.lease: must be a timedelta, or seconds, not str"),
    (WorkerOptions, {"lease": timedelta(0)}, "WorkerOptions.lease: must be at least 0.5 seconds"),
    (WorkerOptions, {"poll": timedelta(0)}, "WorkerOptions.poll: must be above zero"),
    (WorkerOptions, {"lease": timedelta.max}, "WorkerOptions.lease: must be at most 315,360,000 seconds"),
    (WorkerOptions, {"drain_grace": -SECOND}, "WorkerOptions.drain_grace: must not be negative"),
    (WorkerOptions, {"limits": 2**20}, "WorkerOptions.limits: must be Limits, not int"),
    (Limits, {"context_bytes_max": "1 MiB"}, "Limits.context_bytes_max: must be a whole number, not str"),
    (Limits, {"context_bytes_max": 2**24}, "Limits.context_bytes_max: must be at most 15,728,640"),
    (RetryPolicy, {"max_attempts": 10**5000}, "RetryPolicy.max_attempts: must be at most"),
    (RetryPolicy, {"retry_on": TimeoutError}, "RetryPolicy.retry_on: must be a tuple of exception classes"),
    (Batching, {"count_max": 0}, "Batching.count_max: must be at least 1"),
    (Batching, {"count_max": None}, "Batching.count_max: must be a whole number, not NoneType"),
    (Keyring, {"wrapper": None}, "wrapper: must be a KeyWrapper"),
    (Keyring, {"wrapper": WRAPPER, "max_age": "60"}, "Keyring.max_age: must be a timedelta, or seconds, not str"),
    (Keyring, {"wrapper": WRAPPER, "pause": -SECOND}, "Keyring.pause: must not be negative"),
    (Patience, {"total": "30", "reply": SECOND}, "patience: must be a timedelta, or seconds, not str"),
    (Patience, {"total": SECOND, "reply": timedelta(days=25)}, "reply: must be at most 2,147,484 seconds"),
    (MongoStore, {"database": None}, "database: must be one of pymongo.AsyncMongoClient or of motor"),
    (EmbeddedMongo.start, {"nodes": 8}, "nodes: must be at most 7"),
    (EmbeddedMongo.start, {"nodes": "3"}, "nodes: must be a whole number, not str"),
    (EmbeddedMongo.start, {"ports": 27017}, "ports: must be several ports, a list for instance, not int"),
    (EmbeddedMongo.start, {"ports": ["27017"]}, "ports: must be a whole number, not str"),
    (EmbeddedMongo.start, {"ports": [65536]}, "ports: must be at most 65,535"),
    (EmbeddedMongo.start, {"ports": [15000, 15001]}, "ports: give one for each of the 1 nodes"),
    (EmbeddedMongo.start, {"keep": "no"}, "keep: must be True or False, not str"),
    (EmbeddedMongo.start, {"cache_bytes": 0.25}, "cache_bytes: must be a whole number, not float"),
    (EmbeddedMongo.start, {"cache_bytes": 2**20}, "cache_bytes: must be at least 268,435,456"),
    (EmbeddedMongo.start, {"timeout": "60"}, "timeout: must be a timedelta, or seconds, not str"),
    (EmbeddedMongo.start, {"timeout": 0}, "timeout: must be above zero"),
    (worker, {"name": "\ud800"}, "name: must be a text that UTF-8 can write"),
    (worker, {"name": "w" * 257}, "name: must be a text of 1 to 256 characters, not 257 characters"),
    (worker, {"name": ""}, "name: must be a text of 1 to 256 characters, not 0 characters"),
    (worker, {"name": 0}, "name: must be a text of 1 to 256 characters, not int"),
    (worker, {"name": False}, "name: must be a text of 1 to 256 characters, not bool"),
    (worker, {"name": []}, "name: must be a text of 1 to 256 characters, not list"),
    (worker, {"name": b"w"}, "name: must be a text of 1 to 256 characters, not bytes"),
]


@pytest.mark.parametrize(("make", "options", "says"), WRONG, ids=[says for *_, says in WRONG])
def test_what_is_wrong_is_refused_where_it_is_given_and_named(make: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        make(**options)
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize("kind", [SagaError, ValueError, TypeError])
def test_invalid_input_is_caught_by_our_name_and_by_pythons(kind: type[Exception]) -> None:
    assert issubclass(InvalidInput, kind)
    assert not issubclass(InvalidInput, StartRefused), "workers and operators raise it too"


def test_the_largest_options_are_accepted() -> None:
    WorkerOptions(concurrency=COUNT_MAX, threads=COUNT_MAX, lease=DURATION_MAX, poll=DURATION_MAX)
    RetryPolicy(initial_wait=timedelta.max, max_wait=timedelta.max, max_elapsed=timedelta.max)


def test_a_worker_without_a_name_gets_one_that_can_be_stored_whatever_its_host_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "k\udcfchlschrank")
    assert worker().name.startswith("k?hlschrank:")


def test_the_name_of_a_worker_of_all_tenants_leaves_room_for_theirs() -> None:
    name = "w" * (256 - 1 - TENANT_MAX)
    worker(name=f"{TenantWorker(NOBODIES, [SAGA], name=name).name}/{'t' * TENANT_MAX}")
    with pytest.raises(InvalidInput, match="name"):
        TenantWorker(NOBODIES, [SAGA], name=name + "w")
