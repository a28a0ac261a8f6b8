"""The carrier: takes parcels. Its ledger has a `shipped` entry per parcel; it never says no."""

from __future__ import annotations

from typing import Any

from pymongo.asynchronous.database import AsyncDatabase

from .ledger import enter
from .network import Network

__all__ = ["Shipping"]


class Shipping:
    """The carrier as a step sees it."""

    def __init__(self, database: AsyncDatabase[Any], network: Network) -> None:
        self.ledger = database["shipments"]
        self._network = network

    async def book(self, key: str, *, order: int, carrier: int, ship_to: str) -> str:
        """Have a parcel fetched and return the shipment's id. Safe to repeat: one parcel is fetched."""

        async def effect() -> str:
            await enter(
                self.ledger, {"_id": key, "kind": "shipped", "order": order, "carrier": carrier, "ship_to": ship_to}
            )
            return key

        return await self._network.carry("ship", order, key, effect)
