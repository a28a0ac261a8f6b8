"""What commands print and ask: tables for people, one JSON object a line for programs, and the exit codes.

stdout is data, stderr is talk.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import Any, Final

__all__ = [
    "DONE",
    "REFUSED",
    "UNREACHABLE",
    "USAGE",
    "harmless",
    "one_line",
    "plain",
    "several",
    "table",
    "time",
    "to_json",
    "types",
]

DONE: Final = 0
REFUSED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3

_LINE_MAX: Final = 300


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, *rows]
    widths = [max(len(str(line[at])) for line in lines) for at in range(len(columns))]
    return "\n".join(
        "  ".join(f"{value!s:<{width}}" for value, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def several(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def one_line(text: str) -> str:
    """Words that somebody else has written, for a table."""
    line = harmless(" ".join(text.split()))
    return line if len(line) <= _LINE_MAX else line[:_LINE_MAX] + " ..."


def harmless(text: str) -> str:
    """Text that may come from anywhere, without what would steer the terminal."""
    return "".join(one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text)


def time(at: datetime | None) -> str:
    """To the second; Z as everywhere for UTC."""
    return f"{at:%Y-%m-%d %H:%M:%S}Z" if at is not None else ""


def types(word: str) -> bool:
    """Whether the person at the terminal types this word when asked to."""
    print(f"Type {word} to go on: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() == word


def to_json(value: Any) -> str:
    return json.dumps(asdict(value) if is_dataclass(value) and not isinstance(value, type) else value, default=plain)


def plain(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
