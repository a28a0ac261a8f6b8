"""The audit: the participants' ledgers against the runs and their journals.

For every order the journal of its run says what the shop owes: which effects there must be, which there must not be,
and, where a run is not at its end, which there may be. The ledgers say what there is. What does not fit is a finding:

    doubles    effects that were had more often than they are owed
    missing    effects that are owed and not there: a shipment, but also the undoing of what an undone run left behind

And each answer that somebody got who pressed Stop is held against what became of the run (answers.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sagas import HELD, OPEN, JournalLine, RunInfo, State, StopAnswer, StopOutcome

from .answers import untrue
from .network import QUESTION, Request
from .orders import Order, order_key
from .shop import Shop

__all__ = ["Audit", "Finding", "Ledgers", "Question", "audit", "read_ledgers"]

Entry = Mapping[str, Any]


class Question(StrEnum):
    """What the audit asks, in the order in which it answers."""

    STOCK = "Every unit delivered is on hand or reserved"
    COMPLETE = "Each completed order has its reservation, authorisation, charge and message"
    SHIPPED = "Each charge has its shipment, or its run is held"
    UNDONE = "Each undone order left no effect"
    ONCE = "Nothing was done twice"
    ANSWERED = "Each answer to a stop came true"


@dataclass(frozen=True)
class Finding:
    """One thing that does not fit."""

    question: Question
    text: str
    doubles: int = 0
    missing: int = 0


@dataclass(frozen=True)
class Ledgers:
    """All that the participants wrote down."""

    stock: Sequence[Entry]
    reservations: Sequence[Entry]
    payments: Sequence[Entry]
    shipments: Sequence[Entry]
    messages: Sequence[Entry]
    requests: Sequence[Request]


@dataclass(frozen=True)
class Audit:
    """What came of it."""

    findings: list[Finding]
    runs: Counter[State]
    unfinished: list[str]
    """Orders whose run is still open, or is not there at all, or whose stop is not answered."""
    steps_run: int
    """Outcomes of steps and compensations in the journals."""
    steps_replayed: int
    """Executions beyond those: repeated after an outage, or because a worker died before the outcome was journaled."""
    cut_off: int
    """Requests whose caller died waiting for the answer."""
    stops: Counter[StopOutcome]
    """What was answered to those who pressed Stop."""

    @property
    def doubles(self) -> int:
        return sum(finding.doubles for finding in self.findings)

    @property
    def missing(self) -> int:
        return sum(finding.missing for finding in self.findings)

    @property
    def held(self) -> int:
        return sum(count for state, count in self.runs.items() if state in HELD)

    @property
    def completed(self) -> int:
        return self.runs[State.COMPLETED]

    @property
    def compensated(self) -> int:
        return self.runs[State.COMPENSATED]

    @property
    def cancelled(self) -> int:
        return self.runs[State.CANCELLED]

    @property
    def untrue_answers(self) -> int:
        """Contradictions between an answer and what became of its run."""
        return sum(finding.question is Question.ANSWERED for finding in self.findings)


async def read_ledgers(shop: Shop) -> Ledgers:
    """Everything that the participants have on record."""
    return Ledgers(
        stock=await shop.inventory.stock.find().to_list(),
        reservations=await shop.inventory.ledger.find().to_list(),
        payments=await shop.payment.ledger.find().to_list(),
        shipments=await shop.shipping.ledger.find().to_list(),
        messages=await shop.outbox.messages.find().to_list(),
        requests=await shop.network.requests(),
    )


def audit(
    orders: Iterable[Order],
    runs: Iterable[RunInfo],
    journals: Mapping[str, Sequence[JournalLine]],
    ledgers: Ledgers,
    answers: Mapping[int, StopAnswer],
    *,
    unanswered: Collection[int] = (),
) -> Audit:
    """Compare what is with what ought to be.

    `journals` is by run id, `answers` (to stops) by order number; of the orders in `unanswered` nobody knows what their
    stop came to.
    """
    by_number = {order.number: order for order in orders}
    by_key = {run.key: run for run in runs}
    effects = _Effects(ledgers)
    requested = Counter(request.order for request in ledgers.requests)
    findings = [*_stock(ledgers, effects)]
    unfinished = []
    for order in by_number.values():
        run = by_key.get(order_key(order))
        if run is None or run.state in OPEN:
            unfinished.append(f"order {order.number}" + (f": run {run.run_id} is {run.state}" if run else ": no run"))
        if run is not None:
            findings += _order(order, run, _Journal(journals[run.run_id]), effects)
        if order.number in unanswered:
            unfinished.append(f"order {order.number}: its stop is not answered")
        elif run is not None:
            contradictions = untrue(
                answers.get(order.number),
                run,
                journals[run.run_id],
                effects=effects.kinds(order.number),
                requests=requested[order.number],
            )
            findings += (Finding(Question.ANSWERED, f"{_who(order, run)}: {text}") for text in contradictions)
    for number in sorted(effects.orders() - by_number.keys()):
        findings.append(Finding(Question.ONCE, f"order {number}: nobody ordered it, and it has effects", doubles=1))
    asked = [request for request in ledgers.requests if request.verb != QUESTION]
    return Audit(
        findings=findings,
        runs=Counter(run.state for run in by_key.values()),
        unfinished=unfinished,
        steps_run=sum(_Journal(journal).outcomes for journal in journals.values()),
        steps_replayed=sum(request.count - 1 for request in asked),
        cut_off=sum(len(request.unanswered) for request in ledgers.requests),
        stops=Counter(answer.outcome for answer in answers.values()),
    )


# ---------------------------------------------------------------------------------------- what is owed

_EFFECTS: Final = {
    "reserve_stock": "reservation",
    "authorise_payment": "authorisation",
    "charge_card": "charge",
    "book_shipment": "shipment",
    "notify_customer": "message",
}
"""Which effect each step has."""


_COMPENSATED: Final = frozenset({"reserve_stock", "authorise_payment"})
"""The steps that have a compensation."""

_UNDONE: Final = frozenset({State.COMPENSATED, State.CANCELLED, State.TIMED_OUT})
"""A run that says so of itself owes nothing, and has nothing."""

_OTHER_OUTCOMES: Final = ("step_failed", "compensation_succeeded", "compensation_failed")


class _Journal:
    """What a run's journal proves about its effects."""

    def __init__(self, lines: Sequence[JournalLine]) -> None:
        self.done = {line.step or "" for line in lines if _succeeded(line)}
        self.undone = {line.step or "" for line in lines if line.kind == "compensation_succeeded"}
        self.outcomes = sum(_succeeded(line) or line.kind in _OTHER_OUTCOMES for line in lines)

    def owed(self, step: str, state: State) -> tuple[int, int]:
        """How many effects of this step there must be at least, and may be at most."""
        if step in self.undone or state in _UNDONE:
            return 0, 0
        if step in self.done:
            return 1, 1
        return (0, 1) if state in HELD or state in OPEN else (0, 0)


def _succeeded(line: JournalLine) -> bool:
    """Whether this line says that a step's effect happened."""
    if line.kind == "probe_succeeded":
        # A probe that found nothing is followed by the step itself, or by turning back when its tries are spent.
        return line.next not in {f"step:{line.step}", "rollback:step_failed"}
    return line.kind == "step_succeeded"


def _order(order: Order, run: RunInfo, journal: _Journal, effects: _Effects) -> Iterator[Finding]:
    who = _who(order, run)
    if run.state is State.COMPLETED and (gaps := _EFFECTS.keys() - journal.done):
        yield Finding(Question.COMPLETE, f"{who}: its journal lacks {', '.join(sorted(gaps))}", missing=len(gaps))
    if run.state in _UNDONE and (left := (journal.done & _COMPENSATED) - journal.undone):
        text = f"{who}: its journal lacks the undoing of {', '.join(sorted(left))}"
        yield Finding(Question.UNDONE, text, missing=len(left))
    for step, effect in _EFFECTS.items():
        there = effects.of(order.number, effect)
        least, most = journal.owed(step, run.state)
        if len(there) > max(most, 1):
            yield Finding(Question.ONCE, f"{who}: {len(there)} {effect}s", doubles=len(there) - max(most, 1))
        if there and most == 0:
            yield Finding(Question.UNDONE, f"{who}: its {effect} is still there", missing=1)
        if len(there) < least:
            question = Question.SHIPPED if effect == "shipment" else Question.COMPLETE
            yield Finding(question, f"{who}: its {effect} is missing", missing=1)
        for entry in there:
            yield from _extent(order, who, effect, entry)


def _who(order: Order, run: RunInfo) -> str:
    return f"order {order.number} ({run.state}, run {run.run_id})"


def _extent(order: Order, who: str, effect: str, entry: Entry) -> Iterator[Finding]:
    """Whether an effect is as large as the order."""
    if effect == "reservation":
        owed, there = sum(line.quantity for line in order.lines), sum(entry["units"].values())
    elif effect in {"authorisation", "charge"}:
        owed, there = order.total_cents, entry["amount_cents"]
    else:
        return
    if there != owed:
        text = f"{who}: its {effect} is over {there:,}, the order over {owed:,}"
        yield Finding(Question.COMPLETE, text, doubles=int(there > owed), missing=int(there < owed))


# ---------------------------------------------------------------------------------------- what there is


class _Effects:
    """The effects that stand, by order: what was undone is left out."""

    def __init__(self, ledgers: Ledgers) -> None:
        released = {entry.get("releases") for entry in ledgers.reservations}
        voided = {entry.get("voids") for entry in ledgers.payments}
        self.reservations = [
            entry for entry in ledgers.reservations if entry["kind"] == "reserved" and entry["_id"] not in released
        ]
        standing = {
            "reservation": self.reservations,
            "authorisation": [
                entry for entry in ledgers.payments if entry["kind"] == "authorised" and entry["_id"] not in voided
            ],
            "charge": [entry for entry in ledgers.payments if entry["kind"] == "charged"],
            "shipment": ledgers.shipments,
            "message": ledgers.messages,
        }
        self._by_order: dict[tuple[int, str], list[Entry]] = {}
        for effect, entries in standing.items():
            for entry in entries:
                self._by_order.setdefault((entry["order"], effect), []).append(entry)

    def of(self, order: int, effect: str) -> list[Entry]:
        return self._by_order.get((order, effect), [])

    def kinds(self, order: int) -> list[str]:
        """Which effects of an order stand."""
        return [effect for effect in _EFFECTS.values() if self.of(order, effect)]

    def orders(self) -> set[int]:
        return {order for order, _ in self._by_order}


def _stock(ledgers: Ledgers, effects: _Effects) -> Iterator[Finding]:
    reserved: Counter[int] = Counter()
    for entry in effects.reservations:
        reserved.update({int(product): units for product, units in entry["units"].items()})
    for product in ledgers.stock:
        ought = product["delivered"] - reserved[product["_id"]]
        if product["on_hand"] != ought:
            text = f"product {product['_id']}: {product['on_hand']} on hand, the reservations leave {ought}"
            yield Finding(
                Question.STOCK, text, doubles=int(product["on_hand"] < ought), missing=int(product["on_hand"] > ought)
            )
