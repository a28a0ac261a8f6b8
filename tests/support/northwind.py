"""Where the Northwind files are: beside the checkout, or where SAGAS_NORTHWIND says. They are read in place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
BESIDE = "../shared/data/northwind"


class Northwind(NamedTuple):
    """The three files that the example reads."""

    orders: Path
    order_lines: Path
    products: Path


def northwind() -> Northwind:
    """The files; skips the test, saying why, where they are not there."""
    given = os.environ.get("SAGAS_NORTHWIND")
    folder = Path(given) if given else (CHECKOUT / BESIDE).resolve()
    files = Northwind(folder / "orders.csv", folder / "order-details.csv", folder / "products.csv")
    if missing := [file.name for file in files if not file.is_file()]:
        pytest.skip(f"no {', '.join(missing)} in {folder}; SAGAS_NORTHWIND may name another folder")
    return files
