"""Orders: the context of the saga, read from CSV files in the Northwind layout or made up from a seed."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import BaseModel, ConfigDict

__all__ = [
    "BadFile",
    "Book",
    "Order",
    "OrderLine",
    "Product",
    "built_in_orders",
    "order_key",
    "read_orders",
    "stock_needed",
]

STOCKED_PERCENT: Final = 97
"""How much of what all orders together ask for is in stock before the first of them."""


class OrderLine(BaseModel):
    """So many of one product. Money is in cents, so that sums are exact."""

    model_config = ConfigDict(frozen=True)

    product: int
    quantity: int
    unit_price_cents: int
    discount_percent: int = 0

    @property
    def amount_cents(self) -> int:
        return (self.quantity * self.unit_price_cents * (100 - self.discount_percent) + 50) // 100


class Order(BaseModel):
    """What the customer wants and, as the steps go on, by which references the participants know it."""

    model_config = ConfigDict(frozen=True)

    number: int
    customer: str
    ship_to: str
    carrier: int
    lines: tuple[OrderLine, ...]

    reservation_id: str | None = None
    authorisation_id: str | None = None
    charge_id: str | None = None
    shipment_id: str | None = None

    @property
    def total_cents(self) -> int:
        return sum(line.amount_cents for line in self.lines)


class Product(NamedTuple):
    """A line of the catalogue."""

    number: int
    name: str
    units_in_stock: int


@dataclass(frozen=True)
class Book:
    """All orders of one demonstration and the products they are about."""

    orders: Sequence[Order]
    products: Sequence[Product]


def order_key(order: Order) -> str:
    """The key under which an order's run is started, so that no order ever gets two."""
    return f"order-{order.number}"


def stock_needed(book: Book) -> dict[int, int]:
    """How many units of each product the warehouse holds before the first order."""
    wanted = dict.fromkeys((product.number for product in book.products), 0)
    for order in book.orders:
        for line in order.lines:
            wanted[line.product] += line.quantity
    return {
        product.number: max(product.units_in_stock, wanted[product.number] * STOCKED_PERCENT // 100)
        for product in book.products
    }


# ---------------------------------------------------------------------------------------- from files


class BadFile(ValueError):
    """A file is not what it should be; the message names the file, the line and what is wrong there."""

    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        super().__init__(f"{path}{f', line {line}' if line else ''}: {problem}")


def read_orders(orders: Path, order_lines: Path, products: Path) -> Book:
    """The orders of three files in the Northwind layout. Raises BadFile."""
    catalogue = [
        Product(row.whole("productID"), row["productName"], row.whole("unitsInStock"))
        for row in _rows(products, ("productID", "productName", "unitsInStock"))
    ]
    known = {product.number for product in catalogue}
    lines: dict[int, list[OrderLine]] = {}
    for row in _rows(order_lines, ("orderID", "productID", "unitPrice", "quantity", "discount")):
        line = OrderLine(
            product=row.whole("productID"),
            quantity=row.whole("quantity", least=1),
            unit_price_cents=row.hundredths("unitPrice"),
            discount_percent=row.hundredths("discount", most=100),
        )
        if line.product not in known:
            raise row.wrong(f"{products} has no product {line.product}")
        lines.setdefault(row.whole("orderID"), []).append(line)
    found: dict[int, Order] = {}
    for row in _rows(orders, _ORDER_COLUMNS, free_text="shipAddress"):
        number = row.whole("orderID")
        if number in found:
            raise row.wrong(f"order {number} is there twice")
        if number not in lines:
            raise row.wrong(f"{order_lines} has no line of order {number}")
        address = (row[column] for column in _ORDER_COLUMNS if column.startswith("ship") and column != "shipVia")
        found[number] = Order(
            number=number,
            customer=row["customerID"],
            ship_to=", ".join(part for part in address if part),
            carrier=row.whole("shipVia"),
            lines=tuple(lines[number]),
        )
    if strays := lines.keys() - found.keys():
        raise BadFile(order_lines, None, f"{orders} has no order {min(strays)}")
    return Book(list(found.values()), catalogue)


_ORDER_COLUMNS: Final = (
    "orderID", "customerID", "shipVia",
    "shipName", "shipAddress", "shipCity", "shipRegion", "shipPostalCode", "shipCountry",
)  # fmt: skip


class _Row:
    """One row by column name, with what it takes to complain about it."""

    def __init__(self, path: Path, line: int, values: dict[str, str]) -> None:
        self._path, self._line, self._values = path, line, values

    def __getitem__(self, column: str) -> str:
        value = self._values[column]
        return "" if value == "NULL" else value

    def whole(self, column: str, *, least: int = 0) -> int:
        text = self[column].strip()
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise self.wrong(f"{column} should be a whole number from {least} on, not {text!r}")
        return int(text)

    def hundredths(self, column: str, *, most: int | None = None) -> int:
        """14.00 is 1400: cents of a price, percent of a discount."""
        units, _, fraction = self[column].strip().partition(".")
        digits = units + f"{fraction:0<2}"
        if not (digits.isascii() and digits.isdigit() and units and len(fraction.rstrip("0")) <= 2):
            raise self.wrong(f"{column} should be a number with two decimals, not {self[column]!r}")
        value = int(units + f"{fraction:0<2}"[:2])
        if most is not None and value > most:
            raise self.wrong(f"{column} should be at most {most / 100:g}, not {self[column]!r}")
        return value

    def wrong(self, problem: str) -> BadFile:
        return BadFile(self._path, self._line, problem)


def _rows(path: Path, needed: Iterable[str], *, free_text: str | None = None) -> Iterator[_Row]:
    """The rows of a CSV file with a header.

    Northwind's addresses hold commas and no quotes, so such a row has more fields than the header. `free_text` names
    the column they belong to; columns before it are counted from the left, columns after it from the right.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            if missing := [column for column in needed if column not in header]:
                raise BadFile(path, 1, f"the header lacks {', '.join(missing)}")
            for fields in reader:
                surplus = len(fields) - len(header)
                if not fields:
                    continue
                if surplus > 0 and free_text is not None:
                    at = header.index(free_text)
                    fields[at : at + surplus + 1] = [",".join(fields[at : at + surplus + 1])]
                if len(fields) != len(header):
                    raise BadFile(path, reader.line_num, f"{len(fields)} fields where the header has {len(header)}")
                yield _Row(path, reader.line_num, dict(zip(header, fields, strict=True)))
    except OSError as error:
        raise BadFile(path, None, error.strerror or str(error)) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadFile(path, None, f"not a CSV file in UTF-8 ({error})") from None


# ---------------------------------------------------------------------------------------- from a seed

_CATALOGUE: Final = (
    "Espresso beans", "Filter coffee", "Green tea", "Earl Grey", "Cocoa powder", "Oat milk", "Cane sugar", "Honey",
    "Rye bread", "Oatcakes", "Butter biscuits", "Ginger snaps", "Olive oil", "Cider vinegar", "Sea salt",
    "Black pepper", "Basmati rice", "Red lentils", "Penne", "Tomato sauce", "Goat cheese", "Gruyere", "Dried figs",
)  # fmt: skip
_SAFFRON: Final = Product(len(_CATALOGUE) + 1, "Saffron, one kilogram", 5)
_SAFFRON_CENTS: Final = 3_400_00
_SAFFRON_PERCENT: Final = 5
"""Of the orders; half of those are over more than a card is good for."""
_CUSTOMERS: Final = ("Arden", "Blythe", "Castle", "Devlin", "Ellery", "Fenwick", "Garnet", "Hadley", "Ingram", "Jarvis")
_TOWNS: Final = ("Aarhus", "Bergen", "Cork", "Delft", "Esbjerg", "Faro", "Ghent", "Haarlem")


def built_in_orders(count: int, *, seed: int) -> Book:
    """So many made-up orders, numbered from 1; the same seed gives the same ones."""
    rng = random.Random(seed)
    products = [Product(number, name, rng.randrange(10, 60)) for number, name in enumerate(_CATALOGUE, start=1)]
    prices = {product.number: rng.randrange(150, 4_000, 5) for product in products}

    def lines() -> Iterator[OrderLine]:
        for product in rng.sample(products, rng.randrange(1, 5)):
            yield OrderLine(
                product=product.number,
                quantity=rng.randrange(1, 12),
                unit_price_cents=prices[product.number],
                discount_percent=rng.choice((0, 0, 0, 5, 10)),
            )
        if rng.randrange(100) < _SAFFRON_PERCENT:
            yield OrderLine(product=_SAFFRON.number, quantity=rng.randrange(1, 5), unit_price_cents=_SAFFRON_CENTS)

    orders = [
        Order(
            number=number,
            customer=rng.choice(_CUSTOMERS),
            ship_to=f"{rng.randrange(1, 200)} Market Street, {rng.choice(_TOWNS)}",
            carrier=rng.randrange(1, 4),
            lines=tuple(lines()),
        )
        for number in range(1, count + 1)
    ]
    return Book(orders, [*products, _SAFFRON])
