"""Contexts and errors as the bytes that the store keeps, and back.

The first byte names the form, so that another one can be told apart and refused. There is one so far:

    0x01   JSON in UTF-8, not sealed

Everything that reaches a user's exception or a log names fields and kinds only, never a value.
"""

from __future__ import annotations

import functools
import json
import traceback
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from sagas.errors import ErrorDetail, Unreadable

__all__ = [
    "NotJournalable",
    "dump_context",
    "dump_error",
    "dump_text",
    "is_same_context",
    "load_context",
    "load_error",
    "load_json",
    "load_text",
    "read_context",
    "type_name",
]

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
        # No warnings: pydantic's quote the value.
        payload = _JSON + value.model_dump_json(warnings=False).encode()
    except Exception as error:  # pydantic's, or of the model's own serializers; the text may quote the value
        raise NotJournalable(f"its {model.__name__} cannot be written as JSON ({type(error).__name__})") from None
    try:
        return payload, load_context(model, payload, "the result")
    except Unreadable as error:
        raise NotJournalable(f"its {model.__name__} does not come back from its journaled form: {error}") from None


def load_context(model: type[C], payload: bytes, what: str) -> C:
    """The context from its bytes. Raises Unreadable, naming the fields that do not validate."""
    return read_context(model, _text(payload, what), what)


def read_context(model: type[C], text: bytes, what: str) -> C:
    """The context from its JSON, as a person may have written it. Raises Unreadable as `load_context` does."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        known = _field_names(model)
        fields = ", ".join(
            f"{_place(one['loc'], known)} ({one['type']})"
            for one in error.errors(include_url=False, include_context=False, include_input=False)
        )
    except Exception as error:  # of the model's own validators
        fields = f"its own code raised {type(error).__name__}"
    raise Unreadable(what, f"does not validate as {model.__name__}: {fields}")


def is_same_context(model: type[BaseModel], one: bytes, other: bytes) -> bool:
    """Whether two payloads stand for the same context, although an older version may have written one of them.

    By their bytes first: NaN is not equal to itself, and some types' `==` gives no answer or raises. Then it is no.
    """
    if one == other:
        return True
    try:
        return (load_context(model, one, "the one") == load_context(model, other, "the other")) is True
    except Exception:  # Unreadable, or of the fields' own types
        return False


def _text(payload: bytes, what: str) -> bytes:
    if payload[:1] != _JSON:
        raise Unreadable(what, f"unknown payload form {payload[:1].hex() or 'empty'}; written by a newer version?")
    return payload[1:]


def _place(loc: tuple[int | str, ...], known: frozenset[str]) -> str:
    """Where in a context, by the names of fields. A dictionary's keys are values, and no value is shown."""
    return ".".join(str(part) if isinstance(part, int) or part in known else "*" for part in loc) or "the whole"


@functools.lru_cache(maxsize=256)
def _field_names(model: type[BaseModel]) -> frozenset[str]:
    """The names and aliases of all fields of a model and of the models in it."""
    try:
        schema = model.model_json_schema()
    except Exception:  # a type without a schema
        return frozenset(model.model_fields)
    return frozenset(
        name for part in (schema, *schema.get("$defs", {}).values()) for name in part.get("properties", ())
    )


def dump_error(error: BaseException) -> bytes:
    """A step's exception, bounded in size."""
    detail = {
        "type": type_name(error),
        "message": _said(error)[:_MESSAGE_MAX],
        "traceback": _traced(error)[-_TRACEBACK_MAX:],
    }
    return _JSON + json.dumps(detail).encode()


def load_json(payload: bytes, what: str) -> Any:
    """What a context's JSON says, whatever its model is. Raises Unreadable."""
    try:
        return json.loads(_text(payload, what))
    except (ValueError, RecursionError):
        raise Unreadable(what, "is not JSON") from None


def load_error(payload: bytes, what: str) -> ErrorDetail:
    """The details of a step's exception. Raises Unreadable."""
    text = _text(payload, what)
    try:
        detail = json.loads(text)
    except (ValueError, RecursionError):
        detail = None
    named = isinstance(detail, dict) and detail.keys() == {"type", "message", "traceback"}
    if not named or not all(isinstance(part, str) for part in detail.values()):
        raise Unreadable(what, "is not the record of an exception")  # no part of it is shown
    return ErrorDetail(**detail)


def dump_text(text: str) -> bytes:
    """A person's words, or an idempotency key."""
    return _JSON + json.dumps(text).encode()


def load_text(payload: bytes, what: str) -> str:
    """The words back. Raises Unreadable."""
    try:
        text = json.loads(_text(payload, what))
    except (ValueError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise Unreadable(what, "is not a text")
    return text


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:
        return f"(its text cannot be had: {type(failed).__name__})"


def _traced(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error, limit=-12))
    except Exception as failed:  # groups nested too deep, a SyntaxError of odd parts
        return f"(its traceback cannot be had: {type(failed).__name__})"


def type_name(error: BaseException) -> str:
    """What kind of exception it is, as journals and logs name it."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
