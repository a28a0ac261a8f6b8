"""People who change their minds: on a share of the orders somebody presses Stop, each at a moment of its own.

Which orders, and at which moments, is drawn from the seed. A moment is a point on the order's way: while it waits for
its turn, or shortly after a participant was asked for something. An order that never gets so far is stopped when it has
come to rest. What the answer is depends on who comes first, as it does in life; that it comes true is for the audit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sagas import Run, StopAnswer

from .network import Network
from .orders import Order

__all__ = ["Stops", "Wish", "wishes"]

MOMENTS: Final = (None, "reserve", "authorise", "charge", "ship", "notify")
"""None: while it waits for its turn. Else when this has been asked of a participant."""
_PAUSE_MAX_S: Final = 0.05
_LOOK_S: Final = 0.02


@dataclass(frozen=True)
class Wish:
    """When somebody presses Stop on one order."""

    order: Order
    verb: str | None
    """Once this was asked for the order; None: once so many orders are `through`."""
    through: float
    pause_s: float
    """And so much later."""

    @property
    def by(self) -> str:
        return f"customer {self.order.customer}"

    @property
    def reason(self) -> str:
        return f"order {self.order.number} is not wanted any more"


def wishes(orders: Sequence[Order], *, rate: float, seed: int) -> list[Wish]:
    """Which of the orders are stopped, and when: a function of the seed. `rate` is their share, from 0 to 1."""
    rng = random.Random(f"{seed}/stops")
    chosen = sorted(rng.sample(range(len(orders)), round(rate * len(orders))))
    return [
        # At the latest when half of those before it are through: later it would often be in hand already.
        Wish(orders[place], rng.choice(MOMENTS), rng.uniform(0, place / 2), rng.uniform(0, _PAUSE_MAX_S))
        for place in chosen
    ]


class Stops:
    """Presses Stop as wished, and keeps the answers."""

    def __init__(self, planned: Sequence[Wish]) -> None:
        self.answers: dict[int, StopAnswer] = {}
        """What was answered, by order number."""
        self._planned = planned

    @property
    def unanswered(self) -> set[int]:
        """Orders on which Stop was to be pressed, and there is no answer (yet)."""
        return {wish.order.number for wish in self._planned} - self.answers.keys()

    async def press(self, runs: Mapping[int, Run[Order]], network: Network, at_rest: Collection[int]) -> None:
        """Press Stop on each order at its moment; returns when the last answer is in.

        `runs` is by order number; `at_rest` are the orders whose runs have come to rest, and grows meanwhile.
        """
        waiting = {wish.order.number: wish for wish in self._planned}
        pressing: set[asyncio.Task[None]] = set()
        try:
            while waiting or pressing:
                asked = await network.asked((wish.order.number, wish.verb) for wish in waiting.values() if wish.verb)
                for number, wish in list(waiting.items()):
                    come = number in asked if wish.verb else len(at_rest) >= wish.through
                    if come or number in at_rest:
                        del waiting[number]
                        pressing.add(asyncio.create_task(self._press(wish, runs[number])))
                done, pressing = await asyncio.wait(pressing, timeout=_LOOK_S) if pressing else (set(), pressing)
                for task in done:
                    task.result()
                await asyncio.sleep(_LOOK_S)
        finally:
            for task in pressing:
                task.cancel()
            await asyncio.gather(*pressing, return_exceptions=True)  # before its connections are closed

    async def _press(self, wish: Wish, run: Run[Order]) -> None:
        await asyncio.sleep(wish.pause_s)
        self.answers[wish.order.number] = await run.stop(by=wish.by, reason=wish.reason)
