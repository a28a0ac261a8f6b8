"""Orders from files and from a seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.examples.order_fulfilment.orders import (
    BadFile,
    Book,
    Order,
    OrderLine,
    Product,
    built_in_orders,
    read_orders,
    stock_needed,
)
from tests.support.northwind import northwind

ORDERS = "orderID,customerID,shipVia,shipName,shipAddress,shipCity,shipRegion,shipPostalCode,shipCountry,note"
LINES = "orderID,productID,unitPrice,quantity,discount"
PRODUCTS = "productID,productName,unitsInStock"


def files(folder: Path, *, orders: str = "", lines: str = "", products: str = "") -> tuple[Path, Path, Path]:
    given = {
        "orders.csv": f"{ORDERS}\n{orders or '1,VINET,3,Vins,59 rue,Reims,NULL,51100,France,x'}\n",
        "lines.csv": f"{LINES}\n{lines or '1,11,14.00,12,0'}\n",
        "products.csv": f"{PRODUCTS}\n{products or '11,Queso,22'}\n",
    }
    for name, text in given.items():
        (folder / name).write_text(text)
    return folder / "orders.csv", folder / "lines.csv", folder / "products.csv"


def test_all_northwind_orders_are_read_whatever_their_addresses_hold() -> None:
    book = read_orders(*northwind())

    assert len(book.orders) == 830
    assert sum(len(order.lines) for order in book.orders) == 2155
    assert len(book.products) == 77
    by_number = {order.number: order for order in book.orders}
    assert by_number[10250].ship_to == "Hanari Carnes, Rua do Paço, 67, Rio de Janeiro, RJ, 05454-876, Brazil"
    assert by_number[10248].ship_to == "Vins et alcools Chevalier, 59 rue de l'Abbaye, Reims, 51100, France"
    assert by_number[10248].total_cents == 440_00
    assert {order.carrier for order in book.orders} == {1, 2, 3}


def test_surplus_commas_belong_to_the_address_and_null_is_nothing(tmp_path: Path) -> None:
    row = "1,VINET,3,Vins,2, rue du Commerce, floor 3,Lyon,NULL,69004,France,as usual"

    (order,) = read_orders(*files(tmp_path, orders=row)).orders

    assert order.ship_to == "Vins, 2, rue du Commerce, floor 3, Lyon, 69004, France"
    assert (order.number, order.customer, order.carrier) == (1, "VINET", 3)


def test_money_is_exact(tmp_path: Path) -> None:
    (order,) = read_orders(*files(tmp_path, lines="1,11,14.4,3,0.15\n1,11,9.80,1,0.05")).orders

    assert order.lines[0] == OrderLine(product=11, quantity=3, unit_price_cents=1440, discount_percent=15)
    assert order.total_cents == 3672 + 931


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"orders": "1,VINET,3,Vins,59 rue,Reims"}, "orders.csv, line 2: 6 fields where the header has 10"),
        ({"orders": "one,VINET,3,V,a,R,r,5,F,x"}, "orders.csv, line 2: orderID should be a whole number"),
        ({"orders": "1,A,3,V,a,R,r,5,F,x\n1,B,3,V,a,R,r,5,F,x"}, "orders.csv, line 3: order 1 is there twice"),
        ({"orders": "2,A,3,V,a,R,r,5,F,x"}, "lines.csv has no line of order 2"),
        ({"lines": "1,11,14.00,12,0\n9,11,1.00,1,0"}, "orders.csv has no order 9"),
        ({"lines": "1,12,14.00,12,0"}, "products.csv has no product 12"),
        ({"lines": "1,11,14.00,0,0"}, "quantity should be a whole number from 1 on, not '0'"),
        ({"lines": "1,11,-14.00,1,0"}, "unitPrice should be a number with two decimals, not '-14.00'"),
        ({"lines": "1,11,1.234,1,0"}, "unitPrice should be a number with two decimals, not '1.234'"),
        ({"lines": "1,11,1.00,1,1.5"}, "discount should be at most 1, not '1.5'"),
        ({"products": "11,Queso,many"}, "products.csv, line 2: unitsInStock should be a whole number"),
    ],
)
def test_a_bad_file_is_refused_with_line_and_reason(tmp_path: Path, wrong: dict[str, str], says: str) -> None:
    with pytest.raises(BadFile) as refused:
        read_orders(*files(tmp_path, **wrong))
    assert says in str(refused.value)


def test_a_file_that_is_missing_or_something_else_is_refused(tmp_path: Path) -> None:
    orders, lines, products = files(tmp_path)
    with pytest.raises(BadFile, match="No such file"):
        read_orders(tmp_path / "none.csv", lines, products)
    with pytest.raises(BadFile, match="the header lacks orderID"):
        read_orders(products, lines, products)
    orders.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadFile, match="not a CSV file in UTF-8"):
        read_orders(orders, lines, products)


def test_the_stock_is_a_little_less_than_what_is_asked_for_and_never_less_than_the_catalogue_says() -> None:
    orders = [
        Order(
            number=number,
            customer="A",
            ship_to="B",
            carrier=1,
            lines=(
                OrderLine(product=1, quantity=50, unit_price_cents=1),
                OrderLine(product=2, quantity=1, unit_price_cents=1),
            ),
        )
        for number in (1, 2)
    ]
    book = Book(orders, [Product(1, "much wanted", 10), Product(2, "in plenty", 30), Product(3, "unwanted", 7)])

    assert stock_needed(book) == {1: 97, 2: 30, 3: 7}


def test_a_seed_makes_the_same_orders_again() -> None:
    book = built_in_orders(50, seed=7)

    assert book == built_in_orders(50, seed=7)
    assert book != built_in_orders(50, seed=8)
    assert [order.number for order in book.orders] == list(range(1, 51))
    assert all(order.lines and order.total_cents for order in book.orders)
