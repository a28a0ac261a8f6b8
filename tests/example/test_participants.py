"""The participants honour idempotency keys, promise nothing they lack, and can be undone before they are asked."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from docs.examples.order_fulfilment.inventory import OutOfStock
from docs.examples.order_fulfilment.network import Lost, Outages, Refused
from docs.examples.order_fulfilment.orders import OrderLine
from docs.examples.order_fulfilment.payment import CardDeclined
from docs.examples.order_fulfilment.shop import Shop


def lines(**units: int) -> list[OrderLine]:
    """`lines(p1=3)`: three units of product 1."""
    return [OrderLine(product=int(name[1:]), quantity=n, unit_price_cents=100) for name, n in units.items()]


async def on_hand(shop: Shop) -> dict[int, int]:
    return {found["_id"]: found["on_hand"] async for found in shop.inventory.stock.find()}


async def kinds(ledger: Any) -> Counter[str]:
    return Counter([entry["kind"] async for entry in ledger.find()])


# ---------------------------------------------------------------------------------------- inventory


async def test_a_repeated_reservation_takes_the_goods_once(shop: Shop) -> None:
    wanted = lines(p1=3, p2=1)
    first = await shop.inventory.reserve("k", order=1, lines=wanted)
    again = await asyncio.gather(*(shop.inventory.reserve("k", order=1, lines=wanted) for _ in range(5)))

    assert set(again) == {first}
    assert await on_hand(shop) == {1: 7, 2: 4}


async def test_a_reservation_takes_all_or_nothing_and_its_refusal_stands(shop: Shop) -> None:
    with pytest.raises(OutOfStock, match="6 units of product 2"):
        await shop.inventory.reserve("k", order=1, lines=lines(p1=3, p2=6))
    assert await on_hand(shop) == {1: 10, 2: 5}

    await shop.inventory.stock.update_one({"_id": 2}, {"$set": {"on_hand": 100}})
    with pytest.raises(OutOfStock):
        await shop.inventory.reserve("k", order=1, lines=lines(p1=3, p2=6))


async def test_whoever_comes_at_the_same_time_the_stock_never_goes_below_zero(shop: Shop) -> None:
    answers = await asyncio.gather(
        *(shop.inventory.reserve(f"k{n}", order=n, lines=lines(p1=2, p2=1)) for n in range(20)), return_exceptions=True
    )

    assert sum(isinstance(answer, str) for answer in answers) == 5
    assert sum(isinstance(answer, OutOfStock) for answer in answers) == 15
    assert await on_hand(shop) == {1: 0, 2: 0}


async def test_a_release_puts_the_goods_back_once(shop: Shop) -> None:
    wanted = lines(p1=3)
    reservation = await shop.inventory.reserve("k", order=1, lines=wanted)
    for _ in range(2):
        await shop.inventory.release("undo", order=1, lines=wanted, reservation=reservation)

    assert await on_hand(shop) == {1: 10, 2: 5}
    assert await kinds(shop.inventory.ledger) == {"reserved": 1, "released": 1}


async def test_a_reservation_that_arrives_after_its_release_is_refused(shop: Shop) -> None:
    await shop.inventory.release("undo", order=1, lines=lines(p1=3), reservation="k")
    with pytest.raises(Refused, match="was undone before it arrived"):
        await shop.inventory.reserve("k", order=1, lines=lines(p1=3))

    assert await on_hand(shop) == {1: 10, 2: 5}


async def test_a_release_and_a_late_reservation_at_the_same_time_leave_nothing_reserved(shop: Shop) -> None:
    for n in range(20):
        await asyncio.gather(
            shop.inventory.release(f"undo{n}", order=n, lines=lines(p1=3, p2=1), reservation=f"k{n}"),
            shop.inventory.reserve(f"k{n}", order=n, lines=lines(p1=3, p2=1)),
            return_exceptions=True,
        )

    assert await on_hand(shop) == {1: 10, 2: 5}


async def test_a_reservation_that_died_halfway_is_finished_by_the_next_request(shop: Shop) -> None:
    assert await shop.inventory._take("k", {1: 3}) is None  # then its process was killed
    await shop.inventory.reserve("k", order=1, lines=lines(p1=3, p2=1))

    assert await on_hand(shop) == {1: 7, 2: 4}


async def test_a_reservation_that_died_halfway_is_undone_by_its_release(shop: Shop) -> None:
    assert await shop.inventory._take("k", {1: 3}) is None  # then its process was killed
    await shop.inventory.release("undo", order=1, lines=lines(p1=3, p2=1), reservation="k")

    assert await on_hand(shop) == {1: 10, 2: 5}


# ---------------------------------------------------------------------------------------- payment


async def test_a_repeated_charge_takes_the_money_once_and_can_be_found(shop: Shop) -> None:
    assert await shop.payment.find_charge("c", order=1) is None
    authorisation = await shop.payment.authorise("a", order=1, amount_cents=500)
    charges = {await shop.payment.charge("c", order=1, authorisation=authorisation, amount_cents=500) for _ in range(3)}

    assert charges == {await shop.payment.find_charge("c", order=1)}
    assert await kinds(shop.payment.ledger) == {"authorised": 1, "charged": 1}


async def test_a_card_is_good_for_ten_thousand_and_no_more(shop: Shop) -> None:
    await shop.payment.authorise("a1", order=1, amount_cents=10_000_00)
    with pytest.raises(CardDeclined, match=r"10,000\.01"):
        await shop.payment.authorise("a2", order=2, amount_cents=10_000_01)


async def test_every_fiftieth_card_is_blocked_when_it_is_to_be_charged(shop: Shop) -> None:
    authorisation = await shop.payment.authorise("a", order=100, amount_cents=500)
    for _ in range(2):
        with pytest.raises(CardDeclined):
            await shop.payment.charge("c", order=100, authorisation=authorisation, amount_cents=500)

    assert await shop.payment.find_charge("c", order=100) is None


async def test_a_voided_authorisation_cannot_be_charged(shop: Shop) -> None:
    authorisation = await shop.payment.authorise("a", order=1, amount_cents=500)
    for _ in range(2):
        await shop.payment.void("undo", order=1, authorisation=authorisation)

    with pytest.raises(CardDeclined):
        await shop.payment.charge("c", order=1, authorisation=authorisation, amount_cents=500)
    assert await kinds(shop.payment.ledger) == {"authorised": 1, "voided": 1, "declined": 1}


async def test_an_authorisation_that_arrives_after_it_was_voided_is_refused(shop: Shop) -> None:
    await shop.payment.void("undo", order=1, authorisation="a")
    with pytest.raises(Refused, match="was undone before it arrived"):
        await shop.payment.authorise("a", order=1, amount_cents=500)


# ---------------------------------------------------------------------------------------- shipping


async def test_a_repeated_booking_fetches_one_parcel(shop: Shop) -> None:
    booked = {await shop.shipping.book("s", order=1, carrier=2, ship_to="Reims") for _ in range(3)}

    assert len(booked) == 1
    assert await kinds(shop.shipping.ledger) == {"shipped": 1}


# ---------------------------------------------------------------------------------------- the way there


def test_outages_depend_on_the_seed_alone_and_the_third_request_always_gets_through() -> None:
    keys = [f"run/{n}" for n in range(2_000)]
    first = [Outages(seed=1, percent=10).at(key, 1) for key in keys]

    assert first == [Outages(seed=1, percent=10).at(key, 1) for key in keys]
    assert first != [Outages(seed=2, percent=10).at(key, 1) for key in keys]
    assert 60 < first.count(Lost.REQUEST) < 140
    assert 60 < first.count(Lost.ANSWER) < 140
    assert not any(Outages(seed=1, percent=100).at(key, 3) for key in keys)


def key_that_loses(what: Lost, outages: Outages) -> str:
    return next(key for n in range(1000) if outages.at(key := f"key {n}", 1) is what)


async def test_a_lost_request_had_no_effect_and_a_lost_answer_had_one(shop: Shop, database: Any) -> None:
    outages = Outages(seed=1, percent=100)
    flaky = Shop.on(database, caller="a worker", outages=outages)

    with pytest.raises(ConnectionError):
        await flaky.shipping.book(key_that_loses(Lost.REQUEST, outages), order=1, carrier=1, ship_to="A")
    assert await kinds(shop.shipping.ledger) == {}
    with pytest.raises(TimeoutError):
        await flaky.shipping.book(key_that_loses(Lost.ANSWER, outages), order=2, carrier=1, ship_to="B")
    assert await kinds(shop.shipping.ledger) == {"shipped": 1}


async def test_a_refusal_gets_lost_like_any_answer(database: Any, shop: Shop) -> None:
    outages = Outages(seed=1, percent=100)
    flaky = Shop.on(database, caller="a worker", outages=outages)
    with pytest.raises(TimeoutError):
        await flaky.inventory.reserve(key_that_loses(Lost.ANSWER, outages), order=1, lines=lines(p1=11))


async def test_requests_are_counted_and_who_died_waiting_is_remembered(database: Any, shop: Shop) -> None:
    await shop.shipping.book("s", order=1, carrier=1, ship_to="A")
    victim = asyncio.create_task(_book_and_never_return(database))
    async with asyncio.timeout(10):
        await victim

    (request,) = await shop.network.requests()
    assert (request.key, request.count, request.unanswered) == ("s", 2, ("the victim",))
    assert await shop.network.unanswered("the victim") == 1
    assert await shop.network.unanswered("a worker") == 0


async def _book_and_never_return(database: Any) -> None:
    """As far as a process gets that is killed after its request has left."""
    await Shop.on(database, caller="the victim").network._departed("ship", 1, "s")
