"""A database per tenant, on one connection: the other way to keep tenants apart.

Runs of different tenants share nothing then, not even collections, so the database's own users and roles can keep them
apart too, and a tenant can be backed up, moved or dropped alone. The price is a change stream and a poll for each
tenant and worker: fit for tens of tenants. Where there are more, let them share collections and tag each run.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from pymongo import AsyncMongoClient

from sagas_store.clock import Monotonic, monotonic
from sagas_store.commit import Batching
from sagas_store.drivers import Document, Driver, check_client
from sagas_store.errors import InvalidInput, NoTenantDatabase
from sagas_store.faults import Patience
from sagas_store.inputs import given_or, kind_of
from sagas_store.store import PATIENCE, REPLY, BindsKeys, MongoStore

if TYPE_CHECKING:
    from motor.motor_asyncio import AsyncIOMotorClient

__all__ = ["TENANT_MAX", "TenantDatabases"]

# The server tells database names apart by their bytes, refuses two that differ by case alone, and many characters.
TENANT_MAX: Final = 40
_NAME: Final = re.compile(rf"[a-z0-9_-]{{1,{TENANT_MAX}}}")
_PREFIX: Final = re.compile(r"[A-Za-z0-9_-]{0,62}")
_DATABASE_MAX: Final = 63


class TenantDatabases:
    """The stores of all tenants. Databases are named by a prefix and the tenant."""

    def __init__(
        self,
        client: AsyncMongoClient[Any] | AsyncIOMotorClient[Any],
        *,
        prefix: str = "sagas_",
        keyring_of: Callable[[str], BindsKeys] | None = None,
        patience: timedelta | float = PATIENCE,
        reply: timedelta | float = REPLY,
        batching: Batching | None = None,
        turns: asyncio.Semaphore | None = None,
        monotonic: Monotonic = monotonic,
    ) -> None:
        """Nothing is asked of the server yet. The application owns the client and closes it.

        `prefix` begins the databases' names. `keyring_of(tenant)` makes the keyring of a tenant's store; the other
        options are each `MongoStore`'s. All stores together have no more operations under way than the client's pool
        has room for. Raises InvalidInput.
        """
        check_client(client)
        if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
            raise InvalidInput("prefix", "must be a text of at most 62 letters, digits, '_' and '-', 'sagas_' say")
        if keyring_of is not None and not callable(keyring_of):
            raise InvalidInput("keyring_of", f"must be a function of the tenant's name, not {kind_of(keyring_of)}")
        driver = Driver(client["admin"])
        turns = given_or("turns", turns, asyncio.Semaphore, driver.turns)
        self._client: Any = client
        self._prefix = prefix
        self._keyring_of = keyring_of
        self._options: dict[str, Any] = {
            "patience": patience,
            "reply": reply,
            "batching": given_or("batching", batching, Batching),
            "turns": turns,
            "monotonic": monotonic,
        }
        self._stores: dict[str, MongoStore] = {}
        self._patience = Patience(patience, reply, at_once=turns, unanswered=driver.unanswered)

    def of(self, tenant: str) -> MongoStore:
        """The store of one tenant. Raises NoTenantDatabase where no database can be named after it."""
        if not isinstance(tenant, str) or not _NAME.fullmatch(tenant) or len(self._prefix + tenant) > _DATABASE_MAX:
            raise NoTenantDatabase(tenant)
        if tenant not in self._stores:
            keyring = self._keyring_of(tenant) if self._keyring_of is not None else None
            self._stores[tenant] = MongoStore(self._client[self._prefix + tenant], keyring=keyring, **self._options)
        return self._stores[tenant]

    async def tenants(self) -> list[str]:
        """Those that have a database, by name."""

        async def read() -> list[str]:
            # Only names: that needs no right to look into them.
            found: Document = await self._client.admin.command(
                "listDatabases", nameOnly=True, filter={"name": {"$regex": f"^{re.escape(self._prefix)}"}}
            )
            return [database["name"].removeprefix(self._prefix) for database in found["databases"]]

        return sorted(name for name in await self._patience.call("list tenants", read) if _NAME.fullmatch(name))

    async def create(self, tenant: str) -> MongoStore:
        """Make a tenant's database, or bring it to the present schema; returns its store. Safe to repeat."""
        store = self.of(tenant)
        await store.schema.apply()
        return store
