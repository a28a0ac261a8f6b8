"""What commands print: tables for people, one JSON object a line for programs, and the exit codes.

stdout is data, stderr is talk.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import Any, Final

__all__ = ["DONE", "REFUSED", "UNREACHABLE", "USAGE", "plain", "several", "table", "time", "to_json"]

DONE: Final = 0
REFUSED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, *rows]
    widths = [max(len(str(line[at])) for line in lines) for at in range(len(columns))]
    return "\n".join(
        "  ".join(f"{value!s:<{width}}" for value, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def several(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def time(at: datetime | None) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S}" if at is not None else ""


def to_json(value: Any) -> str:
    return json.dumps(asdict(value) if is_dataclass(value) and not isinstance(value, type) else value, default=plain)


def plain(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
