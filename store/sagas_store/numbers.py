"""Numbers and durations that come from outside, checked where they are given.

What is no number, or more than the database takes, would otherwise be found out later: at every claim, or in the middle
of a run.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from sagas_store.errors import InvalidInput

__all__ = ["COUNT_MAX", "DURATION_MAX", "check_count", "check_duration"]

COUNT_MAX: Final = 2**31 - 1
"""What the server takes as a count, a limit or a number of milliseconds in each of its commands."""
DURATION_MAX: Final = timedelta(days=3650)
"""Ten years: added to the present it is still a date that everybody can store."""


def check_count(field: str, value: object, *, least: int = 1, most: int = COUNT_MAX) -> int:
    """The whole number. Raises InvalidInput, which names the field and the bound."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInput(field, f"must be a whole number, not {type(value).__name__}")
    if value < least:
        raise InvalidInput(field, f"must be at least {least}")
    if value > most:
        raise InvalidInput(field, f"must be at most {most:,}")
    return value


def check_duration(
    field: str, value: object, *, least: timedelta | None = None, most: timedelta = DURATION_MAX
) -> timedelta:
    """The duration, above zero unless `least` is given. Raises InvalidInput, which names the field and the bound."""
    if not isinstance(value, timedelta):
        raise InvalidInput(field, f"must be a timedelta, not {type(value).__name__}")
    if least is None and value <= timedelta(0):
        raise InvalidInput(field, "must be above zero")
    if least is not None and value < least:
        raise InvalidInput(field, "must not be negative" if not least else f"must be at least {least}")
    if value > most:
        raise InvalidInput(field, f"must be at most {most.total_seconds():,.0f} seconds")
    return value
