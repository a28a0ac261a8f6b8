"""What is given to start a run, and the times that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from sagas.choosing import check_aware
from sagas.errors import InvalidInput
from sagas.texts import check_tenant, check_text
from sagas_store.inputs import kind_of
from sagas_store.numbers import NONE, DurationField, as_duration, check_duration

__all__ = ["Start", "deadline_from", "due_from"]

C = TypeVar("C", bound=BaseModel)


@dataclass(frozen=True)
class Start(Generic[C]):
    """One run of a `start_many`; what `Client.start` says of its arguments goes for these. Raises InvalidInput."""

    context: C
    key: str | None = None
    due_at: datetime | None = None
    delay: DurationField[timedelta | None] = DurationField(None, least=NONE, most=timedelta.max, field="delay")
    deadline: datetime | timedelta | float | None = None
    tenant: str | None = None

    def __post_init__(self) -> None:
        if self.key is not None:
            check_text("key", self.key, least=1)
        if self.due_at is not None and self.delay is not None:
            raise InvalidInput("due_at, delay", "give at most one of them")
        if self.due_at is not None:
            check_aware("due_at", self.due_at)
        if self.deadline is not None:
            _check_deadline(self.deadline)
        check_tenant(self.tenant)


def due_from(now: datetime, start: Start[Any]) -> datetime:
    """From when a worker may take the run. Raises InvalidInput."""
    if start.due_at is not None:
        return check_aware("due_at", start.due_at)
    return _after("delay", now, start.delay) if start.delay is not None else now


def deadline_from(now: datetime, due_at: datetime, deadline: datetime | timedelta | float | None) -> datetime | None:
    """Until when the run must have reached its pivot, if there is an end to it. Raises InvalidInput."""
    if deadline is None:
        return None
    given = _check_deadline(deadline)
    at = _after("deadline", now, given) if isinstance(given, timedelta) else given
    if at <= due_at:
        raise InvalidInput("deadline", "must be after the run may begin, else it could only time out")
    return at


def _check_deadline(deadline: object) -> datetime | timedelta:
    """A time, or how long from now. Raises InvalidInput."""
    if isinstance(deadline, datetime):
        return check_aware("deadline", deadline)
    if as_duration(deadline) is None and not isinstance(deadline, int | float):
        given = kind_of(deadline)
        raise InvalidInput("deadline", f"must be an aware datetime, or a timedelta or seconds from now, not {given}")
    return check_duration("deadline", deadline, most=timedelta.max)


def _after(field: str, now: datetime, wait: timedelta) -> datetime:
    try:
        return now + wait
    except OverflowError:
        raise InvalidInput(field, "is beyond the years 1 to 9999") from None
