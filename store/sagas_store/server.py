"""Whether a server can keep what the store promises; refused by name where it cannot."""

from __future__ import annotations

from typing import Final

from pymongo.errors import OperationFailure

from sagas_store.drivers import Document, Driver
from sagas_store.errors import UnsafeServer
from sagas_store.faults import Patience

__all__ = ["refuse_unsafe"]

_UNAUTHORIZED: Final = 13
_WIRE_6_0: Final = 17
"""MongoDB 6.0: `$$NOW` in an indexed `$expr`, and majority reads that cannot be switched off."""


async def refuse_unsafe(driver: Driver, patience: Patience) -> None:
    """Raise UnsafeServer, naming the reason and the fix, unless runs are safe on this server."""

    async def hello() -> Document:
        return await driver.admin("hello")

    answer = await patience.call("read the server's state", hello)
    if answer.get("maxWireVersion", 0) < _WIRE_6_0:
        raise UnsafeServer(
            f"the server is older than MongoDB 6.0 (wire version {answer.get('maxWireVersion')}); upgrade it"
        )
    sharded = answer.get("msg") == "isdbgrid"
    if not sharded and "setName" not in answer:
        raise UnsafeServer(
            "the server is a standalone: an acknowledged write can be lost and there are no transactions or change "
            "streams; start it as a replica set, one node is enough (mongod --replSet rs0, then rs.initiate())"
        )
    if "logicalSessionTimeoutMinutes" not in answer:
        raise UnsafeServer("the server has no sessions, so a lost reply cannot be told from a lost write; upgrade it")
    if not sharded:
        await _refuse_volatile(driver, patience)


async def _refuse_volatile(driver: Driver, patience: Patience) -> None:
    async def status() -> Document:
        try:
            return await driver.admin("serverStatus", repl=0, metrics=0, wiredTiger=0, tcmalloc=0)
        except OperationFailure as error:
            if error.code != _UNAUTHORIZED:
                raise
            return {}  # `readWrite` is all that a store needs, and does not cover this question

    engine = (await patience.call("read the server's storage engine", status)).get("storageEngine", {})
    if not engine.get("persistent", True):
        raise UnsafeServer(
            f"the storage engine {engine.get('name')} keeps nothing on disk, so a restart would forget acknowledged "
            "runs; use WiredTiger"
        )
