"""Whom a client or an operator reaches: one tenant, or all of them."""

from __future__ import annotations

from typing import Final

from sagas.errors import InvalidInput
from sagas.texts import check_tenant
from sagas_store import MongoStore
from sagas_store.inputs import kind_of
from sagas_store.records import RunRecord
from sagas_store.tenants import TenantDatabases

__all__ = ["Reach", "store_of"]


class Reach:
    """Bound to a tenant, it reaches that tenant's runs alone, and tells nobody that there are others."""

    def __init__(self, tenant: str | None) -> None:
        """None for all tenants, and runs without one."""
        check_tenant(tenant)
        self.tenant: Final = tenant

    def choose(self, tenant: str | None) -> str | None:
        """The tenant that a verb is about, when `tenant` was named. Raises InvalidInput where that is out of reach."""
        check_tenant(tenant)
        if self.tenant is None:
            return tenant
        if tenant not in (None, self.tenant):
            raise InvalidInput("tenant", "is another than the one that this is bound to")
        return self.tenant

    def covers(self, run: RunRecord) -> bool:
        """Whether the run may be seen and changed."""
        return self.tenant is None or run.tenant == self.tenant


def store_of(store: MongoStore | TenantDatabases, tenant: str | None, user: str) -> MongoStore:
    """Where a client or operator that is bound to this tenant, or to none, finds its runs. Raises InvalidInput.

    `user` is the class that needs it.
    """
    if isinstance(store, MongoStore):
        return store
    if not isinstance(store, TenantDatabases):
        raise InvalidInput(
            "store", f"must be a MongoStore or TenantDatabases, not {kind_of(store)}: {user}(MongoStore(database))"
        )
    if tenant is None:
        raise InvalidInput("tenant", "each tenant has a database of its own here: bind to one, tenant=...")
    check_tenant(tenant)
    return store.of(tenant)
