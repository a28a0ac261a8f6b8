"""The shop's own outbox: a message to the customer, for the mail program to send.

It is no other party's service but a collection of the shop's, so its step is transactional: the message and the step's
outcome commit together. That is why it needs no idempotency key. A message written twice would be here twice.
"""

from __future__ import annotations

from typing import Any

from pymongo.asynchronous.database import AsyncDatabase

from .network import Network

__all__ = ["Outbox"]


class Outbox:
    """The outbox as a step sees it."""

    def __init__(self, database: AsyncDatabase[Any], network: Network) -> None:
        self.messages = database["messages"]
        self._network = network

    async def open(self) -> None:
        """Before the first order: a collection does not appear in the middle of many transactions."""
        await self.messages.database.create_collection(self.messages.name)

    async def write(self, key: str, *, order: int, text: str, session: Any) -> None:
        """Put a message into the outbox, if and when the transaction of `session` commits."""

        async def effect() -> None:
            await self.messages.insert_one({"kind": "message", "order": order, "text": text}, session=session)

        await self._network.carry("notify", order, key, effect)
