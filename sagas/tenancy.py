"""Whom a client or an operator reaches: one tenant, or all of them."""

from __future__ import annotations

from typing import Final

from sagas.errors import InvalidInput
from sagas.texts import check_utf8
from sagas_store import MongoStore
from sagas_store.records import RunRecord
from sagas_store.tenants import TenantDatabases

__all__ = ["Reach", "check_tenant", "store_of"]

_TENANT_MAX: Final = 128


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


def store_of(store: MongoStore | TenantDatabases, tenant: str | None) -> MongoStore:
    """Where a client or operator that is bound to this tenant, or to none, finds its runs. Raises InvalidInput."""
    if isinstance(store, MongoStore):
        return store
    if tenant is None:
        raise InvalidInput("tenant", "each tenant has a database of its own here: bind to one, tenant=...")
    check_tenant(tenant)
    return store.of(tenant)


def check_tenant(tenant: object) -> None:
    """Raise InvalidInput unless it is None or a name that can be stored and bound into a key."""
    if tenant is None:
        return
    if not isinstance(tenant, str) or not 0 < len(tenant) <= _TENANT_MAX:
        raise InvalidInput("tenant", f"must be a text of 1 to {_TENANT_MAX} characters, or None")
    check_utf8("tenant", tenant)
