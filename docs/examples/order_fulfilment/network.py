"""The way between a step and a participant: requests are counted there, take a while, and sometimes get lost.

Everything a step asks of a participant passes through `Network.carry`. One document per idempotency key remembers how
often the request was made and who is still waiting for an answer: a caller that was killed waits there for ever, which
is how the audit knows that a kill landed in the middle of a step.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, Final, TypeVar

from pymongo import WriteConcern
from pymongo.asynchronous.database import AsyncDatabase

__all__ = ["QUESTION", "Lost", "Network", "Outages", "Refused", "Request"]

T = TypeVar("T")

QUESTION: Final = "question"
"""The verb of a request without an effect."""


class Refused(Exception):
    """A participant's answer is no: nothing happened, and asking again gets the same answer."""


class Lost(Enum):
    """What an outage swallows."""

    REQUEST = "request"
    """It never arrived, so nothing happened."""
    ANSWER = "answer"
    """It arrived and had its effect, and whoever asked does not know."""


@dataclass(frozen=True, kw_only=True)
class Outages:
    """When requests get lost: a function of the seed alone, whatever runs at the same time."""

    seed: int = 0
    percent: int = 0
    """Of all first and second requests under a key. The third always gets through, so no outage lasts for ever."""

    def at(self, key: str, number: int) -> Lost | None:
        """What gets lost of the `number`th request (from 1) under this key."""
        if number > _OUTAGE_REQUESTS_MAX or _drawn(f"{self.seed}/{key}/{number}", 100) >= self.percent:
            return None
        return Lost.REQUEST if _drawn(f"{self.seed}/{key}/{number}/what", 2) else Lost.ANSWER


_OUTAGE_REQUESTS_MAX: Final = 2


@dataclass(frozen=True)
class Request:
    """All requests under one key."""

    key: str
    verb: str
    order: int
    count: int
    unanswered: tuple[str, ...]
    """The callers that wait for an answer, or died waiting."""


class Network:
    """Carries requests to the participants on behalf of `caller` (a worker's name)."""

    def __init__(
        self,
        database: AsyncDatabase[Any],
        *,
        caller: str,
        outages: Outages,
        delay: timedelta = timedelta(0),
    ) -> None:
        """`delay`: how long a request is under way at most, and its answer again."""
        # A count that a failover forgets does no harm: the ledgers are what has to be true.
        self._requests = database.get_collection("requests", write_concern=WriteConcern(1))
        self._caller = caller
        self._outages = outages
        self._delay_s = delay.total_seconds()

    async def open(self) -> None:
        """Before the first request."""
        await self._requests.create_index([("order", 1), ("verb", 1)])

    async def carry(self, verb: str, order: int, key: str, effect: Callable[[], Awaitable[T]]) -> T:
        """Perform `effect` at the participant and bring back its answer.

        Raises Refused when the answer is no, ConnectionError or TimeoutError when the request or the answer got lost.
        """
        number = await self._departed(verb, order, key)
        lost = self._outages.at(key, number)
        try:
            await self._under_way(f"{key}/{number}/out")
            if lost is Lost.REQUEST:
                raise ConnectionError(f"{verb}: no connection")
            answer = await _answer(effect)
            await self._under_way(f"{key}/{number}/back")
            if lost is Lost.ANSWER:
                raise TimeoutError(f"{verb}: no answer")
            if isinstance(answer, Refused):
                raise answer
            return answer
        finally:
            await self._requests.update_one({"_id": key}, {"$pull": {"unanswered": self._caller}})

    async def requests(self) -> list[Request]:
        """All requests so far."""
        return [
            Request(found["_id"], found["verb"], found["order"], found["count"], tuple(found["unanswered"]))
            async for found in self._requests.find()
        ]

    async def unanswered(self, caller: str) -> int:
        """How many requests of this caller are without an answer right now."""
        return await self._requests.count_documents({"unanswered": caller})

    async def asked(self, what: Iterable[tuple[int, str]]) -> set[int]:
        """Of these orders, each with a verb: those for which that has been asked of a participant."""
        by_verb: dict[str, list[int]] = {}
        for order, verb in what:
            by_verb.setdefault(verb, []).append(order)
        if not by_verb:
            return set()
        any_of = [{"order": {"$in": orders}, "verb": verb} for verb, orders in by_verb.items()]
        return {found["order"] async for found in self._requests.find({"$or": any_of}, {"order": 1})}

    async def _departed(self, verb: str, order: int, key: str) -> int:
        counted = await self._requests.find_one_and_update(
            {"_id": key},
            {
                "$inc": {"count": 1},
                "$push": {"unanswered": self._caller},
                "$setOnInsert": {"verb": verb, "order": order},
            },
            {"count": 1},
            upsert=True,
            return_document=True,
        )
        assert counted is not None, "an upsert returns what it made"
        return int(counted["count"])

    async def _under_way(self, leg: str) -> None:
        if self._delay_s:
            await asyncio.sleep(self._delay_s * (0.25 + 0.75 * _drawn(leg, 1000) / 1000))


async def _answer(effect: Callable[[], Awaitable[T]]) -> T | Refused:
    """What the participant says. A refusal travels back like any answer, and gets lost like any."""
    try:
        return await effect()
    except Refused as refused:
        return refused


def _drawn(what: str, below: int) -> int:
    """A number from 0 on that depends on `what` alone."""
    return int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest()) % below
