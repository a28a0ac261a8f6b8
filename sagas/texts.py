"""Texts that come from outside and are stored or searched for: names, keys, and what people say of their doings."""

from __future__ import annotations

from typing import Final

from sagas.errors import InvalidInput
from sagas_store.inputs import kind_of

__all__ = ["check_tenant", "check_text", "check_words"]

_TEXT_MAX: Final = 512
_TENANT_MAX: Final = 128
_BY_MAX: Final = 200
_REASON_MAX: Final = 4_000


def check_text(field: str, value: object, *, least: int = 0, most: int = _TEXT_MAX) -> str:
    """A text of so many characters that can be stored and searched for. Raises InvalidInput."""
    if not isinstance(value, str) or not least <= len(value) <= most:
        wanted = f"{least} to {most:,}" if least else f"at most {most:,}"
        given = f"{len(value):,} characters" if isinstance(value, str) else kind_of(value)
        raise InvalidInput(field, f"must be a text of {wanted} characters, not {given}")
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a character, which no database takes
        raise InvalidInput(field, "must be a text that UTF-8 can write: no lone surrogates") from None
    return value


def check_tenant(tenant: object) -> None:
    """Raise InvalidInput unless it is None or a name that can be stored and bound into a key."""
    if tenant is not None:
        check_text("tenant", tenant, least=1, most=_TENANT_MAX)


def check_words(by: object, reason: object) -> None:
    """Raise InvalidInput unless these say who asks and why: texts that can be stored, and not blank."""
    for field, given, most, says in (("by", by, _BY_MAX, "who asks"), ("reason", reason, _REASON_MAX, "why")):
        if not check_text(field, given, most=most).strip():
            raise InvalidInput(field, f"must be a text that says {says}")
