"""All that the audit looks at, as plain data, so that a test can plant a fault in a copy of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

from docs.examples.order_fulfilment.audit import Audit, Ledgers, audit, read_ledgers
from docs.examples.order_fulfilment.orders import Order, OrderLine
from docs.examples.order_fulfilment.shop import Shop
from sagas import Client, JournalLine, RunInfo, StopAnswer

__all__ = ["TOO_DEAR", "TOO_MUCH", "Facts", "order"]

TOO_MUCH: Final = 13
TOO_DEAR: Final = 14


def order(number: int) -> Order:
    """A small order, unless its number says that it asks for too much."""
    quantity = 99 if number == TOO_MUCH else 2
    price = 9_000_00 if number == TOO_DEAR else 10_00
    return Order(
        number=number,
        customer="VINET",
        ship_to="Reims",
        carrier=3,
        lines=(
            OrderLine(product=1, quantity=quantity, unit_price_cents=price),
            OrderLine(product=2, quantity=1, unit_price_cents=5_00, discount_percent=10),
        ),
    )


@dataclass(frozen=True)
class Facts:
    """Orders, runs, journals, ledgers, and what was answered to whom pressed Stop."""

    orders: list[Order]
    runs: list[RunInfo]
    journals: dict[str, list[JournalLine]]
    ledgers: Ledgers
    answers: dict[int, StopAnswer] = field(default_factory=dict)

    @classmethod
    async def gathered(
        cls, orders: list[Order], sagas: Client, shop: Shop, answers: dict[int, StopAnswer] | None = None
    ) -> Facts:
        """As they stand now."""
        page = await sagas.runs()
        journals = {run.run_id: await sagas.journal(run.run_id) for run in page.runs}
        return cls(orders, page.runs, journals, await read_ledgers(shop), answers or {})

    def audit(self) -> Audit:
        return audit(self.orders, self.runs, self.journals, self.ledgers, self.answers)

    def run(self, number: int) -> RunInfo:
        return next(run for run in self.runs if run.key == f"order-{number}")

    def journal(self, number: int) -> list[JournalLine]:
        return self.journals[self.run(number).run_id]

    def having(self, **ledgers: list[Any]) -> Facts:
        """With other ledgers."""
        return replace(self, ledgers=replace(self.ledgers, **ledgers))

    def having_run(self, number: int, **change: Any) -> Facts:
        """With one run's record changed."""
        changed = self.run(number)
        return replace(self, runs=[replace(run, **change) if run == changed else run for run in self.runs])

    def having_journal(self, number: int, journal: list[JournalLine]) -> Facts:
        """With another journal of one run."""
        return replace(self, journals={**self.journals, self.run(number).run_id: journal})

    def having_answer(self, number: int, **change: Any) -> Facts:
        """With one answer changed."""
        return replace(self, answers={**self.answers, number: replace(self.answers[number], **change)})
