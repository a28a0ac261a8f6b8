"""The bank: authorises an amount, charges it, or voids the authorisation.

One ledger. Authorisations are `authorised`, `declined` or `closed`; `voided` names what it voids; charges are `charged`
or `declined`. The answer under a key stands: a charge that was declined stays declined, whoever asks again.
"""

from __future__ import annotations

from typing import Any, Final

from pymongo.asynchronous.database import AsyncDatabase

from .ledger import CLOSED, enter, refuse_closed
from .network import QUESTION, Network, Refused

__all__ = ["CardDeclined", "Payment"]

CARD_LIMIT_CENTS: Final = 10_000_00
"""A card is good for this much."""
BLOCKED_EVERY: Final = 50
"""The card of every order whose number this divides is blocked between its authorisation and its charge."""


class CardDeclined(Refused):
    """The bank will not pay."""


class Payment:
    """The bank as a step sees it."""

    def __init__(self, database: AsyncDatabase[Any], network: Network) -> None:
        self.ledger = database["payments"]
        self._network = network

    async def open(self) -> None:
        """Before the first order."""
        await self.ledger.create_index("voids", unique=True, sparse=True)

    async def authorise(self, key: str, *, order: int, amount_cents: int) -> str:
        """Set the amount aside and return the authorisation's id. Raises CardDeclined. Safe to repeat."""
        kind = "authorised" if amount_cents <= CARD_LIMIT_CENTS else "declined"

        async def effect() -> str:
            entry = await enter(self.ledger, {"_id": key, "kind": kind, "order": order, "amount_cents": amount_cents})
            refuse_closed(entry)
            if entry["kind"] == "declined":
                raise CardDeclined(f"the card is not good for {amount_cents / 100:,.2f}")
            return key

        return await self._network.carry("authorise", order, key, effect)

    async def void(self, key: str, *, order: int, authorisation: str) -> None:
        """Give the amount free, if it was set aside; from now on it will not be.

        `authorisation` is the key that it was, or was to be, asked for with. Safe to repeat.
        """

        async def effect() -> None:
            standing = await enter(self.ledger, {"_id": authorisation, "kind": CLOSED, "order": order})
            if standing["kind"] == "authorised":
                await enter(self.ledger, {"_id": key, "kind": "voided", "order": order, "voids": authorisation})

        await self._network.carry("void", order, key, effect)

    async def charge(self, key: str, *, order: int, authorisation: str, amount_cents: int) -> str:
        """Take the money and return the charge's id. Raises CardDeclined. Safe to repeat: the money is taken once."""

        async def effect() -> str:
            good = await self.ledger.find_one({"_id": authorisation, "kind": "authorised"})
            void = await self.ledger.find_one({"voids": authorisation})
            blocked = good is None or void is not None or order % BLOCKED_EVERY == 0
            entry = await enter(
                self.ledger,
                {
                    "_id": key,
                    "kind": "declined" if blocked else "charged",
                    "order": order,
                    "amount_cents": amount_cents,
                    "authorisation": authorisation,
                },
            )
            if entry["kind"] == "declined":
                raise CardDeclined("the card was blocked after its authorisation")
            return key

        return await self._network.carry("charge", order, key, effect)

    async def find_charge(self, key: str, *, order: int) -> str | None:
        """The id of the charge that was made under this key, or None. A question: it has no effect."""

        async def look() -> str | None:
            return key if await self.ledger.find_one({"_id": key, "kind": "charged"}) is not None else None

        return await self._network.carry(QUESTION, order, f"{key}/question", look)
