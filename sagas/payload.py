"""Contexts and errors as the bytes that the store keeps, and back.

The first byte names the form, so that another one can be told apart and refused. There is one so far:

    0x01   JSON in UTF-8, not sealed

Everything that reaches a user's exception or a log names fields and kinds only, never a value.
"""

from __future__ import annotations

import json
import traceback
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from sagas.errors import ErrorDetail, Unreadable

__all__ = ["NotJournalable", "dump_context", "dump_error", "load_context", "load_error"]

C = TypeVar("C", bound=BaseModel)

_JSON: Final = b"\x01"
_MESSAGE_MAX: Final = 4_000
_TRACEBACK_MAX: Final = 16_000
"""Characters. An error's details are for reading; a run with a thousand tries must stay small."""


class NotJournalable(Exception):
    """A value cannot be stored as the context and read back; the message says why, without the value."""


def dump_context(model: type[C], value: object) -> tuple[bytes, C]:
    """The bytes to journal and the context as read back from them, which is what the next step is given.

    Raises NotJournalable when `value` is not the context, cannot be serialised, or does not validate when read back.
    """
    if not isinstance(value, model):
        forgot = "; was a return forgotten?" if value is None else ""
        raise NotJournalable(f"it returned {type(value).__name__}, not the context ({model.__name__}){forgot}")
    try:
        payload = _JSON + value.model_dump_json().encode()
    except PydanticSerializationError as error:
        raise NotJournalable(f"its {model.__name__} cannot be written as JSON ({error})") from None
    except UnicodeError:
        raise NotJournalable(f"its {model.__name__} holds text that is not valid Unicode") from None
    try:
        return payload, load_context(model, payload, "the result")
    except Unreadable as error:
        raise NotJournalable(f"its {model.__name__} does not come back from its journaled form: {error}") from None


def load_context(model: type[C], payload: bytes, what: str) -> C:
    """The context from its bytes. Raises Unreadable, naming the fields that do not validate."""
    if payload[:1] != _JSON:
        raise Unreadable(what, f"unknown payload form {payload[:1].hex() or 'empty'}; written by a newer version?")
    try:
        return model.model_validate_json(payload[1:])
    except ValidationError as error:
        fields = ", ".join(
            f"{'.'.join(map(str, one['loc'])) or 'the whole'} ({one['type']})"
            for one in error.errors(include_url=False, include_context=False, include_input=False)
        )
        raise Unreadable(what, f"does not validate as {model.__name__}: {fields}") from None


def dump_error(error: BaseException) -> bytes:
    """A step's exception, bounded in size."""
    detail = {
        "type": _type_name(error),
        "message": str(error)[:_MESSAGE_MAX],
        "traceback": "".join(traceback.format_exception(error, limit=-12))[-_TRACEBACK_MAX:],
    }
    return _JSON + json.dumps(detail).encode()


def load_error(payload: bytes, what: str) -> ErrorDetail:
    """The details of a step's exception. Raises Unreadable."""
    if payload[:1] != _JSON:
        raise Unreadable(what, f"unknown payload form {payload[:1].hex() or 'empty'}; written by a newer version?")
    return ErrorDetail(**json.loads(payload[1:]))


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
