"""SAGAS_MONGODB_URI: taken when it is good, refused plainly when it is not, its password never repeated."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest
from pymongo import MongoClient

from sagas_store.embedded import (
    AddressError,
    CredentialsRefused,
    EmbeddedMongo,
    InvalidAddress,
    Node,
    NotAReplicaSet,
    Unreachable,
    check_address,
    mongodb,
)
from sagas_store.embedded.node import free_ports

StartMongod = Callable[..., Node]


def refusal(uri: str, *, timeout: float = 0.3) -> AddressError:
    with pytest.raises(AddressError) as caught:
        check_address(uri, timeout=timeout)
    assert "secret" not in "".join(traceback.format_exception(caught.value)).replace(repr(uri), "")
    assert "secret" not in repr(vars(caught.value))
    return caught.value


def test_a_replica_set_that_is_given_is_used_and_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedMongo.start() as mongo:
        for uri in (mongo.uri, f"mongodb://{mongo.nodes[0].host}/", f"{mongo.uri}&directConnection=true"):
            monkeypatch.setenv("SAGAS_MONGODB_URI", f" {uri}\n")
            with mongodb() as given:
                assert given == uri
        assert mongo.wait_for_primary(timeout=0).running


def test_a_bad_address_is_an_error_and_never_a_reason_to_start_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGAS_MONGODB_URI", "mongodb://127.0.0.1:1/")
    with pytest.raises(Unreachable), mongodb(timeout=0.1):
        pytest.fail("nothing may run")


def test_a_server_that_stands_alone_is_refused_with_the_fix(mongod: StartMongod) -> None:
    alone = mongod()
    alone.wait_until_it_answers(float("inf"))
    for uri in (f"mongodb://{alone.host}/", f"mongodb://{alone.host}/?replicaSet=rs0"):
        error = refusal(uri)
        assert isinstance(error, NotAReplicaSet)
        assert error.hosts == (alone.host,)
        assert "--replSet rs0" in str(error)


def test_a_replica_set_that_was_never_initiated_is_refused_with_the_fix(mongod: StartMongod) -> None:
    blank = mongod(replica_set="rs0")
    blank.wait_until_it_answers(float("inf"))
    error = refusal(f"mongodb://{blank.host}/")
    assert isinstance(error, NotAReplicaSet)
    assert error.awaits_initiate
    assert "rs.initiate()" in str(error)


def test_nobody_there_is_unreachable() -> None:
    (port,) = free_ports(1)
    error = refusal(f"mongodb://user:secret@127.0.0.1:{port}/")
    assert isinstance(error, Unreachable)
    assert error.hosts == (f"127.0.0.1:{port}",)
    assert "refused" in error.reason


def test_a_wrong_password_is_told_apart_from_silence(mongod: StartMongod) -> None:
    closed = mongod(extra=("--auth",))
    with MongoClient[dict[str, object]](f"mongodb://{closed.host}/", directConnection=True) as client:
        client.admin.command("ping")
    error = refusal(f"mongodb://user:secret@{closed.host}/", timeout=5)
    assert isinstance(error, CredentialsRefused)
    assert error.hosts == (closed.host,)


@pytest.mark.parametrize(
    "uri",
    [
        "secret",
        "http://user:secret@host/",
        "mongodb://",
        "mongodb://user:secret@/",
        "mongodb://user:sec/ret@host/",
        "mongodb://user:12/secret@host/",  # the driver takes user:12 for the host
        "mongodb://user:secret@secret@host/",
        "mongodb://user:secret%zz@host/",
        "mongodb://user:secret@host:99999/",
        "mongodb+srv://user:secret@host:27017/",
    ],
)
def test_what_is_no_uri_is_refused_without_repeating_it(uri: str) -> None:
    assert isinstance(refusal(uri), InvalidAddress)
