"""Numbers and durations that come from outside, checked where they are given.

What is no number, or more than the database takes, would otherwise be found out later: at every claim, or in the middle
of a run. A duration is a timedelta, or seconds, wherever one is given; it is kept, and read, as a timedelta.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final, Generic, TypeVar

from sagas_store.errors import InvalidInput
from sagas_store.inputs import kind_of

__all__ = ["COUNT_MAX", "DURATION_MAX", "NONE", "DurationField", "as_duration", "check_count", "check_duration"]

D = TypeVar("D", bound="timedelta | None")

COUNT_MAX: Final = 2**31 - 1
"""What the server takes as a count, a limit or a number of milliseconds in each of its commands."""
DURATION_MAX: Final = timedelta(days=3650)
"""Ten years: added to the present it is still a date that everybody can store."""
NONE: Final = timedelta(0)
"""As the least of a duration: it may be nothing at all, but not negative."""


def check_count(field: str, value: object, *, least: int = 1, most: int = COUNT_MAX) -> int:
    """The whole number. Raises InvalidInput, which names the field and the bound."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInput(field, f"must be a whole number, not {kind_of(value)}")
    if value < least:
        raise InvalidInput(field, f"must be at least {least:,}")
    if value > most:
        raise InvalidInput(field, f"must be at most {most:,}")
    return value


def as_duration(given: object) -> timedelta | None:
    """A timedelta, or seconds, as a timedelta; None for anything else."""
    if isinstance(given, int | float) and not isinstance(given, bool):
        try:
            return timedelta(seconds=given)
        except (OverflowError, ValueError):  # endless, or not a number
            return None
    return given if isinstance(given, timedelta) else None


def check_duration(
    field: str, value: object, *, least: timedelta | None = None, most: timedelta = DURATION_MAX
) -> timedelta:
    """The duration, a timedelta or seconds, above zero unless `least` is given.

    Raises InvalidInput, which names the field and the bound.
    """
    duration = as_duration(value)
    if duration is None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        given = "more than a timedelta can hold" if number else kind_of(value)
        raise InvalidInput(field, f"must be a timedelta, or seconds, not {given}")
    if least is None and duration <= NONE:
        raise InvalidInput(field, "must be above zero")
    if least is not None and duration < least:
        raise InvalidInput(
            field, "must not be negative" if not least else f"must be at least {least.total_seconds():g} seconds"
        )
    if duration > most:
        raise InvalidInput(field, f"must be at most {most.total_seconds():,.0f} seconds")
    return duration


class DurationField(Generic[D]):
    """A duration as a field of a frozen dataclass: given as a timedelta or seconds, checked then, read as a timedelta.

    May be None where its default is. The dataclass keeps it in its `__dict__`, so it must have no slots.
    """

    def __init__(
        self, default: D, *, least: timedelta | None = None, most: timedelta = DURATION_MAX, field: str = ""
    ) -> None:
        """`least` and `most` as for `check_duration`. `field` is what errors call it; else its class and name."""
        self._default = default
        self._least = least
        self._most = most
        self._field = field

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._field = self._field or f"{owner.__name__}.{name}"

    def __get__(self, holder: object | None, owner: type | None = None) -> D:
        if holder is None:
            return self._default  # where a dataclass looks for it
        duration: D = holder.__dict__[self._name]
        return duration

    def __set__(self, holder: object, given: float | D) -> None:
        duration: timedelta | None = None
        if given is not None or self._default is not None:
            duration = check_duration(self._field, given, least=self._least, most=self._most)
        holder.__dict__[self._name] = duration
