"""`replace` for whatever kind of frozen record: a dataclass or a named tuple."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

__all__ = ["replace"]

T = TypeVar("T")


def replace(record: T, **changes: Any) -> T:
    """The record with some fields changed."""
    if hasattr(record, "_replace"):
        return record._replace(**changes)  # type: ignore[no-any-return]
    return dataclasses.replace(record, **changes)  # type: ignore[type-var]
