"""A database per tenant, on one connection: the other way to keep tenants apart.

Runs of different tenants share nothing then, not even collections, so the database's own users and roles can keep them
apart too, and a tenant can be backed up, moved or dropped alone. The price is a change stream and a poll for each
tenant and worker: fit for tens of tenants. Where there are more, let them share collections and tag each run.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from pymongo import AsyncMongoClient

from sagas_store.drivers import Document, Driver
from sagas_store.errors import NoTenantDatabase
from sagas_store.faults import Patience
from sagas_store.store import PATIENCE, REPLY, BindsKeys, MongoStore

if TYPE_CHECKING:
    from motor.motor_asyncio import AsyncIOMotorClient

__all__ = ["TENANT_MAX", "TenantDatabases"]

# The server tells database names apart by their bytes, refuses two that differ by case alone, and many characters.
TENANT_MAX: Final = 40
_NAME: Final = re.compile(rf"[a-z0-9_-]{{1,{TENANT_MAX}}}")


class TenantDatabases:
    """The stores of all tenants. Databases are named by a prefix and the tenant."""

    def __init__(
        self,
        client: AsyncMongoClient[Any] | AsyncIOMotorClient[Any],
        *,
        prefix: str = "sagas_",
        keyring_of: Callable[[str], BindsKeys] | None = None,
        **options: Any,
    ) -> None:
        """Nothing is asked of the server yet. The application owns the client and closes it.

        `keyring_of(tenant)` makes the keyring of a tenant's store; `options` go to each `MongoStore`. All stores
        together have no more operations under way than the client's pool has room for.
        """
        self._client: Any = client
        self._prefix = prefix
        self._keyring_of = keyring_of
        turns = asyncio.Semaphore(Driver(client["admin"]).operations_max)
        self._options: dict[str, Any] = {"turns": turns, **options}
        self._stores: dict[str, MongoStore] = {}
        self._patience = Patience(
            options.get("patience", PATIENCE), options.get("reply", REPLY), at_once=self._options["turns"]
        )

    def of(self, tenant: str) -> MongoStore:
        """The store of one tenant. Raises NoTenantDatabase where no database can be named after it."""
        if not isinstance(tenant, str) or not _NAME.fullmatch(tenant):
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
