"""The shop: all participants together. A worker holds one, and every step gets it as `step.resources`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pymongo.asynchronous.database import AsyncDatabase

from .inventory import Inventory
from .network import Network, Outages
from .outbox import Outbox
from .payment import Payment
from .shipping import Shipping

__all__ = ["Shop"]


@dataclass(frozen=True)
class Shop:
    """The participants. They keep their ledgers in a database of their own, beside the engine's."""

    network: Network
    inventory: Inventory
    payment: Payment
    shipping: Shipping
    outbox: Outbox

    @classmethod
    def on(
        cls,
        database: AsyncDatabase[Any],
        *,
        caller: str,
        outages: Outages | None = None,
        delay: timedelta = timedelta(0),
    ) -> Shop:
        """The shop whose ledgers are in `database`, as `caller` reaches it."""
        network = Network(database, caller=caller, outages=outages or Outages(), delay=delay)
        return cls(
            network,
            Inventory(database, network),
            Payment(database, network),
            Shipping(database, network),
            Outbox(database, network),
        )

    async def open(self, delivered: Mapping[int, int]) -> None:
        """Open for business, once, with so many units of each product."""
        await self.network.open()
        await self.inventory.open(delivered)
        await self.payment.open()
        await self.outbox.open()
