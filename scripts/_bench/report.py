"""Medians over runs, the table and the JSON."""

from __future__ import annotations

import statistics
from typing import Any

from scripts._bench.figures import Row

__all__ = ["medians", "table"]


def medians(runs: list[list[Row]]) -> list[Row]:
    """One row for the same row of each run: its labels, the median of each number, and how far the runs lie apart."""
    merged = []
    for same in zip(*runs, strict=True):
        row: Row = {}
        spread: dict[str, float] = {}
        for column, value in same[0].items():
            if not isinstance(value, float):
                row[column] = value
                continue
            values = [one[column] for one in same]
            row[column] = statistics.median(values)
            if len(values) > 1 and row[column]:
                spread[column] = (max(values) - min(values)) / row[column]
        if spread:
            row["spread"] = spread
        merged.append(row)
    return merged


def table(report: dict[str, Any]) -> str:
    """For a person. After a number of several runs stands how far they lie apart, as a share of it."""
    setup = ", ".join(f"{name} {value}" for name, value in report["setup"].items())
    parts = [f"Setup: {setup}."]
    for name, figure in report["figures"].items():
        parts.append(f"\n{figure['title']} ({name})\n  {figure['setup']}\n\n{_rows(figure['rows'])}")
    return "\n".join(parts)


def _rows(rows: list[Row]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row if column != "spread"))
    lines = [columns, *([_cell(row, column) for column in columns] for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    return "\n".join(
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )


def _cell(row: Row, column: str) -> str:
    value = row.get(column)
    if value is None:
        return ""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    spread = row.get("spread", {}).get(column)
    return f"{value:,.{digits}f}" + (f" ±{spread / 2:.0%}" if spread is not None else "")
