"""The MongoDB that the environment names, checked; or else an embedded one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from pymongo import MongoClient, ReadPreference
from pymongo.errors import (
    ConfigurationError,
    InvalidURI,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
)

from sagas_store.embedded.errors import CredentialsRefused, InvalidAddress, NotAReplicaSet, Unreachable
from sagas_store.embedded.server import EmbeddedMongo

VARIABLE: Final = "SAGAS_MONGODB_URI"

_AUTHENTICATION_FAILED: Final = 18


@contextmanager
def mongodb(*, nodes: int = 1, timeout: float = 10.0) -> Iterator[str]:
    """Yield the URI of a MongoDB to work with: that of SAGAS_MONGODB_URI, else of an embedded one for the duration.

    A URI that is set but cannot be used is an error, never a reason to start another server. `nodes` is for the
    embedded one; `timeout`, in seconds, for a first answer from the one given.
    """
    given = os.environ.get(VARIABLE, "").strip()
    if given:
        check_address(given, timeout=timeout)
        yield given
        return
    with EmbeddedMongo.start(nodes=nodes) as mongo:
        yield mongo.uri


def check_address(uri: str, *, timeout: float = 10.0) -> None:
    """Return when a replica set or a mongos answers at `uri`; else raise the AddressError that says what is wrong."""
    hosts = _hosts(uri)
    # `from None` throughout: the driver's message, and so a printed traceback, may quote the URI.
    try:
        client = MongoClient[dict[str, Any]](uri, serverSelectionTimeoutMS=int(timeout * 1000))
    except (PyMongoError, ValueError, TypeError) as error:
        if _is_lookup(uri, error):
            raise Unreachable(hosts=hosts, timeout=timeout, reason=str(error)) from None
        raise InvalidAddress(VARIABLE) from None
    with client:
        try:
            hello = client.admin.command("hello", read_preference=ReadPreference.NEAREST)
        except ServerSelectionTimeoutError as error:
            _raise_if_not_a_replica_set(client, hosts)
            reason = str(error).partition(", Timeout:")[0].partition(" (configured timeouts")[0]
            raise Unreachable(hosts=hosts, timeout=timeout, reason=reason) from None
        except OperationFailure as error:
            if error.code == _AUTHENTICATION_FAILED:
                raise CredentialsRefused(hosts=hosts) from None
            raise Unreachable(hosts=hosts, timeout=timeout, reason=f"it answers with error {error.code}") from None
        except PyMongoError as error:
            reason = str(error) if _is_lookup(uri, error) else type(error).__name__
            raise Unreachable(hosts=hosts, timeout=timeout, reason=reason) from None
    if "setName" not in hello and hello.get("msg") != "isdbgrid":
        raise NotAReplicaSet(hosts=hosts, awaits_initiate=False)


def _is_lookup(uri: str, error: Exception) -> bool:
    """Whether this is the name service's answer to a mongodb+srv URI; it quotes the host, never the rest."""
    return (
        uri.startswith("mongodb+srv://") and isinstance(error, ConfigurationError) and not isinstance(error, InvalidURI)
    )


def _hosts(uri: str) -> list[str]:
    """The hosts that a URI names, without user and password; raise InvalidAddress where they cannot be told apart."""
    scheme, separator, rest = uri.partition("://")
    address, _, _options = rest.partition("?")
    authority, _, database = address.partition("/")
    hosts = authority.rpartition("@")[2]
    # An @ further on means that a / in the password was not encoded: what looks like a host is a piece of it.
    if scheme not in {"mongodb", "mongodb+srv"} or not separator or not hosts or "@" in database:
        raise InvalidAddress(VARIABLE)
    return hosts.split(",")


def _raise_if_not_a_replica_set(client: MongoClient[dict[str, Any]], hosts: list[str]) -> None:
    """Tell apart what the driver reports alike, as no suitable server."""
    servers = client.topology_description.server_descriptions().values()
    if any(server.server_type_name == "RSGhost" for server in servers):
        raise NotAReplicaSet(hosts=hosts, awaits_initiate=True) from None
    # With replicaSet= in the URI the driver drops a server that stands alone and forgets that it was there.
    if any(_stands_alone(host) for host in hosts):
        raise NotAReplicaSet(hosts=hosts, awaits_initiate=False) from None


def _stands_alone(host: str) -> bool:
    """Whether a MongoDB answers there, in the clear, that is neither in a replica set nor a mongos."""
    try:
        with MongoClient[dict[str, Any]](
            f"mongodb://{host}/", directConnection=True, serverSelectionTimeoutMS=1000
        ) as client:
            hello = client.admin.command("hello")
    except PyMongoError:
        return False
    return "setName" not in hello and hello.get("msg") != "isdbgrid" and not hello.get("isreplicaset")
