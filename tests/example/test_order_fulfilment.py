"""The saga from end to end, and the audit: clean where all is well, and never clean where something is not."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from docs.examples.order_fulfilment.audit import Question
from docs.examples.order_fulfilment.network import Outages
from docs.examples.order_fulfilment.orders import order_key
from docs.examples.order_fulfilment.saga import fulfil_order
from docs.examples.order_fulfilment.shop import Shop
from docs.examples.order_fulfilment.worker import Settings, shop_database
from sagas import Client, MongoStore, Start, State, Worker, WorkerOptions
from tests.example.facts import TOO_DEAR, TOO_MUCH, Facts, order

COMPLETED = range(1, 13)
BLOCKED = 50
STOCK = {1: 40, 2: 20}


async def fulfil(uri: str, name: str) -> Facts:
    """Fifteen orders through one worker, with every third request or its answer lost on the way."""
    orders = [order(number) for number in (*COMPLETED, TOO_MUCH, TOO_DEAR, BLOCKED)]
    async with AsyncMongoClient[Any](uri) as client:
        store = MongoStore(client[name])
        shop = Shop.on(client[shop_database(name)], caller="worker 1", outages=Outages(seed=5, percent=33))
        await store.schema.apply()
        await shop.open(STOCK)
        worker = Worker(store, [fulfil_order], resources=shop, options=WorkerOptions(handle_signals=False))
        async with Client(store) as sagas, asyncio.TaskGroup() as group:
            group.create_task(worker.run())
            runs = await sagas.start_many(fulfil_order, [Start(one, order_key(one)) for one in orders])
            await asyncio.gather(*(run.result(timeout=60) for run in runs), return_exceptions=True)
            worker.stop()
            facts = await Facts.gathered(orders, sagas, shop)
        for database in (name, shop_database(name)):
            await client.drop_database(database)
    return facts


@pytest.fixture(scope="module")
def facts(mongo_uri: str) -> Facts:
    return asyncio.run(fulfil(mongo_uri, f"test_{secrets.token_hex(6)}"))


def test_every_order_ends_as_its_rule_says(facts: Facts) -> None:
    ended = {int((run.key or "").removeprefix("order-")): run.state for run in facts.runs}

    assert ended == dict.fromkeys(COMPLETED, State.COMPLETED) | dict.fromkeys(
        (TOO_MUCH, TOO_DEAR, BLOCKED), State.COMPENSATED
    )


def test_the_audit_finds_nothing_where_all_is_well_however_often_requests_were_repeated(facts: Facts) -> None:
    result = facts.audit()

    assert (result.findings, result.unfinished) == ([], [])
    assert (result.doubles, result.missing) == (0, 0)
    assert (result.completed, result.compensated, result.held) == (12, 3, 0)
    # One order is refused at each of the first three steps: that, what came before it, and its undoing. A step that was
    # in doubt before it was refused is undone as well.
    assert 12 * 5 + 1 + (2 + 1) + (3 + 2) <= result.steps_run <= 12 * 5 + (1 + 1) + (2 + 2) + (3 + 2)
    assert result.steps_replayed > 10
    assert result.cut_off == 0


def test_the_stock_is_what_was_delivered_less_what_was_sold(facts: Facts) -> None:
    on_hand = {product["_id"]: product["on_hand"] for product in facts.ledgers.stock}

    assert on_hand == {1: 40 - 12 * 2, 2: 20 - 12}


# ---------------------------------------------------------------------------------------- planted faults

Plant = Callable[[Facts], Facts]


def _again(ledger: str, kind: str, number: int) -> Plant:
    """The effect of this kind is had once more, under another key."""

    def plant(facts: Facts) -> Facts:
        entries = getattr(facts.ledgers, ledger)
        (one,) = (entry for entry in entries if (entry["kind"], entry["order"]) == (kind, number))
        return facts.having(**{ledger: [*entries, {**one, "_id": "another key"}]})

    return plant


def _lost(ledger: str, kind: str, number: int) -> Plant:
    """The effect of this kind is not there."""

    def plant(facts: Facts) -> Facts:
        entries = getattr(facts.ledgers, ledger)
        left = [entry for entry in entries if (entry["kind"], entry["order"]) != (kind, number)]
        assert len(left) == len(entries) - 1
        return facts.having(**{ledger: left})

    return plant


def _stock(change: int) -> Plant:
    def plant(facts: Facts) -> Facts:
        first, *rest = facts.ledgers.stock
        return facts.having(stock=[{**first, "on_hand": first["on_hand"] + change}, *rest])

    return plant


def _never_started(number: int) -> Plant:
    def plant(facts: Facts) -> Facts:
        gone = facts.run(number)
        return replace(facts, runs=[run for run in facts.runs if run != gone], orders=facts.orders)

    return plant


def _charged_although_undone(facts: Facts) -> Facts:
    charge = {"_id": "x", "kind": "charged", "order": TOO_MUCH, "amount_cents": order(TOO_MUCH).total_cents}
    return facts.having(payments=[*facts.ledgers.payments, charge])


def _charged_too_much(facts: Facts) -> Facts:
    return facts.having(
        payments=[
            {**entry, "amount_cents": entry["amount_cents"] + 1}
            if (entry["kind"], entry["order"]) == ("charged", 1)
            else entry
            for entry in facts.ledgers.payments
        ]
    )


def _nobody_ordered(facts: Facts) -> Facts:
    shipment = {"_id": "x", "kind": "shipped", "order": 999}
    return facts.having(shipments=[*facts.ledgers.shipments, shipment])


@pytest.mark.parametrize(
    ("plant", "question", "doubles", "missing"),
    [
        pytest.param(_again("payments", "charged", 1), Question.ONCE, 1, 0, id="charged twice"),
        pytest.param(_again("payments", "authorised", 1), Question.ONCE, 1, 0, id="authorised twice"),
        pytest.param(_again("shipments", "shipped", 2), Question.ONCE, 1, 0, id="shipped twice"),
        pytest.param(_again("messages", "message", 3), Question.ONCE, 1, 0, id="told twice"),
        pytest.param(_stock(-1), Question.STOCK, 1, 0, id="taken from the shelf twice"),
        pytest.param(_stock(+1), Question.STOCK, 0, 1, id="not taken from the shelf"),
        pytest.param(_charged_too_much, Question.COMPLETE, 1, 0, id="charged too much"),
        pytest.param(_nobody_ordered, Question.ONCE, 1, 0, id="shipped what nobody ordered"),
        pytest.param(_lost("shipments", "shipped", 1), Question.SHIPPED, 0, 1, id="charged and not shipped"),
        pytest.param(_lost("payments", "charged", 2), Question.COMPLETE, 0, 1, id="shipped and not charged"),
        pytest.param(_lost("messages", "message", 3), Question.COMPLETE, 0, 1, id="never told"),
        pytest.param(_lost("payments", "voided", BLOCKED), Question.UNDONE, 0, 1, id="authorisation left behind"),
        pytest.param(_charged_although_undone, Question.UNDONE, 0, 1, id="charged although undone"),
    ],
)
def test_the_audit_detects_a_planted_fault(
    facts: Facts, plant: Plant, question: Question, doubles: int, missing: int
) -> None:
    result = plant(facts).audit()

    assert [finding.question for finding in result.findings] == [question]
    assert (result.doubles, result.missing) == (doubles, missing)


def test_the_audit_detects_a_reservation_that_was_never_put_back(facts: Facts) -> None:
    result = _lost("reservations", "released", BLOCKED)(facts).audit()

    assert {finding.question for finding in result.findings} == {Question.UNDONE, Question.STOCK}
    assert result.missing >= 1


def test_the_audit_detects_a_run_that_calls_itself_undone_and_never_undid_what_it_did(facts: Facts) -> None:
    journal = [line for line in facts.journal(BLOCKED) if line.kind != "compensation_succeeded"]

    result = _lost("payments", "voided", BLOCKED)(facts).having_journal(BLOCKED, journal).audit()
    assert [finding.text.partition(": ")[2] for finding in result.findings] == [
        "its journal lacks the undoing of authorise_payment, reserve_stock",
        "its authorisation is still there",
    ]
    assert {finding.question for finding in result.findings} == {Question.UNDONE}


def test_the_audit_detects_a_second_reservation(facts: Facts) -> None:
    result = _again("reservations", "reserved", 1)(facts).audit()

    assert {finding.question for finding in result.findings} == {Question.ONCE, Question.STOCK}
    assert result.doubles == 1


def test_an_order_without_a_run_is_unfinished(facts: Facts) -> None:
    assert _never_started(TOO_DEAR)(facts).audit().unfinished == [f"order {TOO_DEAR}: no run"]


def test_a_run_that_is_still_open_is_unfinished_and_owes_nothing_yet(facts: Facts) -> None:
    run = facts.run(1)
    early = facts.having_journal(1, facts.journal(1)[:1]).having_run(1, state=State.RUNNING)

    result = _lost("shipments", "shipped", 1)(early).audit()
    assert result.unfinished == [f"order 1: run {run.run_id} is running"]
    assert result.findings == []


def test_a_held_run_may_be_charged_and_not_shipped(facts: Facts) -> None:
    journal = [line for line in facts.journal(1) if line.step not in {"book_shipment", "notify_customer"}]
    held = facts.having_journal(1, journal).having_run(1, state=State.FORWARD_INCOMPLETE)

    result = _lost("shipments", "shipped", 1)(held).audit()
    assert (result.findings, result.held) == ([], 1)


def test_the_audit_detects_a_run_that_calls_itself_completed_and_is_not(facts: Facts) -> None:
    journal = [line for line in facts.journal(1) if line.step != "book_shipment"]

    result = facts.having_journal(1, journal).audit()
    assert Question.COMPLETE in {finding.question for finding in result.findings}
    assert result.missing >= 1


# ---------------------------------------------------------------------------------------- the worker's settings


def test_a_worker_is_set_by_its_environment() -> None:
    settings = Settings.of({"SAGAS_DATABASE": "shop", "ORDER_WORKER_CONCURRENCY": "4", "ORDER_WORKER_LEASE_S": "2.5"})

    assert (settings.database, settings.concurrency) == ("shop", 4)
    assert timedelta(seconds=settings.lease_s) == timedelta(seconds=2.5)
    with pytest.raises(ValueError, match="ORDER_WORKER_CONCURRENCY"):
        Settings.of({"ORDER_WORKER_CONCURRENCY": "none"})
