"""A customer's key is lost in the middle of it all, and found again once everybody else's orders are through.

Nobody waits two days for a demo: the holds that the engine puts on the customer's runs are cut short in the database,
so all that a lost key does in that time happens within seconds. Nothing else is helped along.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Final

from sagas import OPEN, Client, Operator, State

from .keys import KeyCabinet
from .orders import Order
from .report import Progress

__all__ = ["LostKey"]

_LOOK_S: Final = 0.05
_AFTER: Final = 0.1
"""The share of the orders that are through when the key is lost."""
_WORDS: Final[Any] = {"by": "the operator", "reason": "the customer's key was found again"}


class LostKey:
    """What happens to one customer's orders while the key is gone."""

    def __init__(self, cabinet: KeyCabinet, orders: Sequence[Order]) -> None:
        self.back = asyncio.Event()
        """Set once the key is back and the runs go on."""
        self.customer: str | None = None
        self.quarantined = 0
        self.requeued = 0
        self._cabinet = cabinet
        self._orders = orders

    async def happen(
        self, client: Client, operator: Operator, runs: Any, at_rest: Collection[int], progress: Progress
    ) -> None:
        """Lose a key, wait until all that need it are quarantined, find it again and requeue them.

        `runs` is the engine's collection, for passing the time. `at_rest` are the orders whose runs have come to rest.
        """
        while len(at_rest) < _AFTER * len(self._orders):
            await asyncio.sleep(_LOOK_S)
        waiting = Counter(order.customer for order in self._orders if order.number not in at_rest)
        ((customer, _),) = waiting.most_common(1)
        self.customer = customer
        self._cabinet.lose(customer)
        progress.say(f"{customer}'s key is lost; two days pass for {customer}'s orders")
        while (await client.runs(tenant=customer, state=OPEN, limit=1)).runs:
            on_hold = {"tenant": customer, "state": State.PENDING, "blocked": {"$exists": True}}
            await runs.update_many(on_hold, [{"$set": {"due_at": "$$NOW"}}])
            await asyncio.sleep(_LOOK_S)
        held = await operator.list_held(status=State.QUARANTINED, tenant=customer)
        self.quarantined = sum(group.count for group in held)
        progress.say(f"{self.quarantined} of {customer}'s orders are quarantined; everybody else's go on")
        others = {order.number for order in self._orders if order.customer != customer}
        while not others.issubset(at_rest):
            await asyncio.sleep(_LOOK_S)
        self._cabinet.find_again(customer)
        done = await operator.requeue_quarantined(tenant=customer, **_WORDS)
        self.requeued = len(done.done)
        progress.say(f"{customer}'s key is back; {self.requeued} orders are requeued")
        self.back.set()
