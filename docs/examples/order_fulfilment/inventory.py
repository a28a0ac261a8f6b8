"""The inventory: sets goods aside for an order, and puts them back. It never promises what is not on the shelf.

    stock           one document per product: units delivered in all, units on hand, and units taken, by reservation
    reservations    the ledger: `reserved`, `refused` (out of stock), `closed`, and `released` with what it releases

Each write touches one document and can be repeated, so whoever dies between two of them leaves nothing that the next
request under the same key does not finish. A transaction over several products would read more simply; but this
inventory lives in the worker's process, and a transaction whose client is killed keeps its documents locked until the
server gives it up, a minute later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pymongo.asynchronous.database import AsyncDatabase

from .ledger import CLOSED, enter, refuse_closed
from .network import Network, Refused
from .orders import OrderLine

__all__ = ["Inventory", "OutOfStock"]


class OutOfStock(Refused):
    """There are not enough units of a product on hand."""


class Inventory:
    """The inventory as a step sees it."""

    def __init__(self, database: AsyncDatabase[Any], network: Network) -> None:
        self.stock = database["stock"]
        self.ledger = database["reservations"]
        self._network = network

    async def open(self, delivered: Mapping[int, int]) -> None:
        """Take delivery of the goods, before the first order."""
        never_below_zero = {"$jsonSchema": {"properties": {"on_hand": {"minimum": 0}}}}
        await self.stock.database.create_collection(self.stock.name, validator=never_below_zero)
        await self.ledger.create_index("releases", unique=True, sparse=True)
        await self.stock.insert_many(
            {"_id": product, "delivered": units, "on_hand": units, "taken": {}} for product, units in delivered.items()
        )

    async def reserve(self, key: str, *, order: int, lines: Iterable[OrderLine]) -> str:
        """Set the goods aside, all or none, and return the reservation's id. Raises OutOfStock.

        Safe to repeat: the same key gets the same answer, and the goods are taken once.
        """
        units = _units(lines)

        async def effect() -> str:
            short = await self._take(key, units)
            entry = {"_id": key, "kind": "reserved", "order": order, "units": {str(p): n for p, n in units.items()}}
            if short is not None:
                entry |= {"kind": "refused", "why": f"there are no {units[short]} units of product {short}"}
            standing = await enter(self.ledger, entry)
            if standing["kind"] != "reserved":
                await self._put_back(key, units)
                refuse_closed(standing)
                raise OutOfStock(standing["why"])
            return key

        return await self._network.carry("reserve", order, key, effect)

    async def release(self, key: str, *, order: int, lines: Iterable[OrderLine], reservation: str) -> None:
        """Put the goods of a reservation back, if there is one; from now on there will be none.

        `reservation` is the key that it was, or was to be, asked for with. Safe to repeat.
        """
        units = _units(lines)

        async def effect() -> None:
            standing = await enter(self.ledger, {"_id": reservation, "kind": CLOSED, "order": order})
            if standing["kind"] == "reserved":
                await enter(self.ledger, {"_id": key, "kind": "released", "order": order, "releases": reservation})
            await self._put_back(reservation, units)

        await self._network.carry("release", order, key, effect)

    async def _take(self, key: str, units: Mapping[int, int]) -> int | None:
        """Take what has not been taken under this key; returns the first product of which there is not enough."""
        for product, wanted in units.items():
            taken = await self.stock.update_one(
                # Matches nothing when there is not enough, when an earlier request took it, and when it was put back.
                {"_id": product, "on_hand": {"$gte": wanted}, f"taken.{key}": {"$exists": False}},
                {"$inc": {"on_hand": -wanted}, "$set": {f"taken.{key}": wanted}},
            )
            ours = {"_id": product, f"taken.{key}": wanted}
            if not taken.matched_count and await self.stock.find_one(ours) is None:
                return product
        return None

    async def _put_back(self, key: str, units: Mapping[int, int]) -> None:
        """Put back what was taken under this key. What was not taken yet cannot be taken any more."""
        for product in units:
            await self.stock.update_one(
                {"_id": product},
                [
                    {
                        "$set": {
                            "on_hand": {"$add": ["$on_hand", {"$ifNull": [f"$taken.{key}", 0]}]},
                            f"taken.{key}": 0,
                        }
                    }
                ],
            )


def _units(lines: Iterable[OrderLine]) -> Counter[int]:
    """How many units of each product."""
    units: Counter[int] = Counter()
    for line in lines:
        units[line.product] += line.quantity
    return units
