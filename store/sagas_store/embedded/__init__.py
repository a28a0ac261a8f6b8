"""A MongoDB to work with: the one SAGAS_MONGODB_URI names, else one started here and ended with us.

    with mongodb() as uri:                              # the one that is set, checked; else an embedded one
        ...
    with EmbeddedMongo.start(nodes=3) as mongo:         # always an embedded one
        mongo.wait_for_primary().kill()

The mongod is that on PATH, else that of an installed wheel; nothing is ever downloaded. For development, tests and
demonstrations: no access control, small caches, loopback only.

    address.py      SAGAS_MONGODB_URI, checked              node.py           one mongod, its port and its folder
    server.py       EmbeddedMongo: starting and stopping    mongod.py         finding it, its options, its exit codes
    replica_set.py  making one set of the nodes             guard.py          why nothing outlives us, whatever kills us
    folder.py       what lies in the folder                 guard_process.py  the process that sees to it
    errors.py       each way to fail
"""

from __future__ import annotations

from sagas_store.embedded.address import check_address, mongodb
from sagas_store.embedded.errors import (
    AddressError,
    CredentialsRefused,
    EmbeddedError,
    FolderInUse,
    FolderUnusable,
    GuardLost,
    InvalidAddress,
    MissingLibrary,
    NoMongod,
    NoPrimary,
    NotAReplicaSet,
    PortInUse,
    StartFailed,
    Unreachable,
)
from sagas_store.embedded.node import Node
from sagas_store.embedded.server import EmbeddedMongo

__all__ = [
    "AddressError",
    "CredentialsRefused",
    "EmbeddedError",
    "EmbeddedMongo",
    "FolderInUse",
    "FolderUnusable",
    "GuardLost",
    "InvalidAddress",
    "MissingLibrary",
    "NoMongod",
    "NoPrimary",
    "Node",
    "NotAReplicaSet",
    "PortInUse",
    "StartFailed",
    "Unreachable",
    "check_address",
    "mongodb",
]
