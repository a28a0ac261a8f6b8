"""Texts that come from outside and are stored, tenants' names among them."""

from __future__ import annotations

from typing import Final

from sagas.errors import InvalidInput
from sagas_store.inputs import kind_of

__all__ = ["check_tenant", "check_utf8"]

_TENANT_MAX: Final = 128


def check_utf8(field: str, text: str) -> str:
    """The text. Raises InvalidInput where it holds half of a character, which no database takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(field, "must be a text that UTF-8 can write: no lone surrogates") from None
    return text


def check_tenant(tenant: object) -> None:
    """Raise InvalidInput unless it is None or a name that can be stored and bound into a key."""
    if tenant is None:
        return
    if not isinstance(tenant, str) or not 0 < len(tenant) <= _TENANT_MAX:
        given = f"{len(tenant)} characters" if isinstance(tenant, str) else kind_of(tenant)
        raise InvalidInput("tenant", f"must be a text of 1 to {_TENANT_MAX} characters, or None, not {given}")
    check_utf8("tenant", tenant)
