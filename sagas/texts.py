"""Texts that come from outside and are stored."""

from __future__ import annotations

from sagas.errors import InvalidInput

__all__ = ["check_utf8"]


def check_utf8(field: str, text: str) -> str:
    """The text. Raises InvalidInput where it holds half of a character, which no database takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(field, "must be a text that UTF-8 can write: no lone surrogates") from None
    return text
