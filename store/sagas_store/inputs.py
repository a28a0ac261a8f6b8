"""What callers give to constructors and verbs, checked where it is given: flags, kinds of object, several things.

A wrong value that is kept fails later, in the middle of something, in words that name neither the argument nor the fix.
So InvalidInput says which argument it is, what kind of thing was given, and what to give instead. The value itself is
never repeated: it may be a password, or a payload. Numbers and durations: sagas_store.numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from sagas_store.errors import InvalidInput

__all__ = ["check_flag", "check_kind", "check_methods", "check_several", "given_or", "kind_of"]

T = TypeVar("T")


def check_flag(field: str, given: object) -> bool:
    """The flag. Raises InvalidInput: "no" is true to Python."""
    if not isinstance(given, bool):
        raise InvalidInput(field, f"must be True or False, not {kind_of(given)}")
    return given


def check_kind(field: str, given: object, kind: type[T], example: str) -> T:
    """The object, of this kind. Raises InvalidInput with an example of what to give."""
    if not isinstance(given, kind):
        raise InvalidInput(field, f"must be {kind.__name__}, not {kind_of(given)}: {example}")
    return given


def given_or(field: str, given: object, kind: type[T], default: Callable[[], T] | None = None) -> T:
    """The object, of this kind; where none was given, the default, or one made without options. Raises InvalidInput."""
    if given is None:
        return kind() if default is None else default()
    return check_kind(field, given, kind, f"{field}={kind.__name__}(...)")


def check_methods(field: str, given: Any, methods: tuple[str, ...], wanted: str) -> None:
    """Raise InvalidInput unless the object has these methods, which make it what is wanted."""
    if isinstance(given, type) or not all(callable(getattr(given, method, None)) for method in methods):
        raise InvalidInput(field, f"must be {wanted}, not {kind_of(given)}")


def check_several(field: str, given: Iterable[T], what: str, example: str) -> list[T]:
    """All of them. Raises InvalidInput: one is not several, and a text would be taken letter by letter."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InvalidInput(field, f"must be several {what}, a list for instance, not {kind_of(given)}: {example}")
    return list(given)


def kind_of(given: object) -> str:
    """What was given, without a byte of it: the name of its type; a class is named as such."""
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
