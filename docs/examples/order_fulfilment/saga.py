"""The saga: what has to happen for an order, in which order, and how it is undone.

Each step hands its idempotency key to the participant, so a step that is run again, by whichever worker, has its effect
once. What a participant refuses (`Refused`) is definite: no step tries again. What gets lost on the way (a
ConnectionError, a TimeoutError) is retried, and may have happened.
"""

from __future__ import annotations

from sagas import Saga, Step

from .orders import Order
from .shop import Shop

__all__ = ["fulfil_order"]

fulfil_order = Saga("fulfil-order", Order, version=1)


@fulfil_order.step(timeout=10)
async def reserve_stock(order: Order, step: Step[Shop]) -> Order:
    """Set the goods aside."""
    reservation = await step.resources.inventory.reserve(step.idempotency_key, order=order.number, lines=order.lines)
    return order.model_copy(update={"reservation_id": reservation})


@reserve_stock.compensation(timeout=10)
async def release_stock(order: Order, step: Step[Shop]) -> None:
    """Put them back, if they were set aside, and keep a late request from setting them aside again."""
    await step.resources.inventory.release(
        step.idempotency_key,
        order=order.number,
        lines=order.lines,
        reservation=order.reservation_id or step.step_key,
    )


@fulfil_order.step(timeout=10)
async def authorise_payment(order: Order, step: Step[Shop]) -> Order:
    """Make sure that the card is good for the amount."""
    authorisation = await step.resources.payment.authorise(
        step.idempotency_key, order=order.number, amount_cents=order.total_cents
    )
    return order.model_copy(update={"authorisation_id": authorisation})


@authorise_payment.compensation(timeout=10)
async def void_authorisation(order: Order, step: Step[Shop]) -> None:
    """Give the amount free, if it was set aside, and keep a late request from setting it aside again."""
    await step.resources.payment.void(
        step.idempotency_key,
        order=order.number,
        authorisation=order.authorisation_id or step.step_key,
    )


@fulfil_order.pivot(timeout=10)
async def charge_card(order: Order, step: Step[Shop]) -> Order:
    """Take the money: the point of no return."""
    charge = await step.resources.payment.charge(
        step.idempotency_key,
        order=order.number,
        authorisation=order.authorisation_id or "",
        amount_cents=order.total_cents,
    )
    return order.model_copy(update={"charge_id": charge})


@charge_card.probe
async def find_charge(order: Order, step: Step[Shop]) -> Order | None:
    """Ask the bank whether the money was taken. The key is the one that the charge was asked for with."""
    charge = await step.resources.payment.find_charge(step.idempotency_key, order=order.number)
    return None if charge is None else order.model_copy(update={"charge_id": charge})


@fulfil_order.step(timeout=10)
async def book_shipment(order: Order, step: Step[Shop]) -> Order:
    """Hand the parcel to the carrier."""
    shipment = await step.resources.shipping.book(
        step.idempotency_key, order=order.number, carrier=order.carrier, ship_to=order.ship_to
    )
    return order.model_copy(update={"shipment_id": shipment})


@fulfil_order.step(timeout=10, transactional=True)
async def notify_customer(order: Order, step: Step[Shop]) -> Order:
    """Tell the customer. The message and the step's outcome are in one transaction, so it is written exactly once."""
    await step.resources.outbox.write(
        step.idempotency_key,
        order=order.number,
        text=f"Order {order.number} for {order.total_cents / 100:,.2f} is on its way.",
        session=step.session,
    )
    return order
