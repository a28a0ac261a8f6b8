"""Start and stop raced: ten thousand times by key against the start itself, five thousand against a worker's claim.

Never stuck: every run settles. Never both: what was cancelled ran nothing, what was undone undid what ran, and where
nobody had anything to stop the run completed. A run is one step, so that there is little else than the race.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections import Counter
from typing import Any

import pytest

from sagas import Client, MongoStore, RunNotFound, Saga, Start, State, Step, StopAnswer, StopOutcome
from sagas_store.records import RunRecord
from tests.stop.shop import WHY, Order, Shop, working
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

STARTS = 10_000
CLAIMS = 2_500
TOGETHER = 250

Told = StopOutcome | None
"""What whoever pressed Stop was told; None: there is no such run."""


class Ledger:
    """How often each order was reserved and released."""

    def __init__(self) -> None:
        self.reserved: Counter[int] = Counter()
        self.released: Counter[int] = Counter()
        self._began: dict[int, asyncio.Event] = {}

    def began(self, number: int) -> asyncio.Event:
        """Set once the step has begun."""
        return self._began.setdefault(number, asyncio.Event())

    @property
    def saga(self) -> Saga[Order]:
        saga = Saga("brief", Order)

        @saga.step
        async def reserve(order: Order, step: Step[Any]) -> Order:
            self.began(order.number).set()
            self.reserved[order.number] += 1
            return order

        @reserve.compensation
        async def release(order: Order, step: Step[Any]) -> None:
            self.released[order.number] += 1

        return saga

    def agrees(self, number: int, told: Told, run: RunRecord) -> str:
        """The answer, the run and what was done; returns them in words."""
        did = self.reserved[number], self.released[number]
        match told:
            case StopOutcome.CANCELLED:
                expected = (State.CANCELLED, (0, 0))
            case StopOutcome.WILL_BE_UNDONE:
                expected = (State.CANCELLED, (did[0], did[0]))
                assert did[0] <= 1
            case _:
                expected = (State.COMPLETED, (1, 0))
                assert run.stop is None
        assert (run.state, did) == expected, f"{number}: told {told}, {run.state}, reserved and released {did}"
        return f"{told or 'no such run'}: {run.state}, reserved {did[0]}, released {did[1]}"


def outcome_of(answer: StopAnswer) -> StopOutcome:
    """What was answered; that it has ended is said of nothing that goes on."""
    ended = answer.outcome is StopOutcome.ALREADY_SETTLED
    assert not ended or answer.state is State.COMPLETED, f"told that it has ended, as {answer.state}"
    return answer.outcome


@pytest.fixture
def rng() -> random.Random:
    """Chance, printed so that a failure can be replayed with SAGAS_SEED."""
    seed = int(os.environ.get("SAGAS_SEED") or secrets.randbelow(2**32))
    print(f"SAGAS_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def settled(store: MongoStore) -> Any:
    """Waits until all these runs are settled, and reads them."""

    async def read(run_ids: list[str]) -> list[RunRecord]:
        async def look() -> bool:
            return len(await store.runs.at_rest(run_ids)) == len(run_ids)

        await eventually(look, what="every run is at rest", within_s=60)
        found: dict[str, RunRecord] = {}
        for begin in range(0, len(run_ids), 1000):
            found |= await store.runs.get_many(run_ids[begin : begin + 1000])
        return [found[run_id] for run_id in run_ids]

    return read


async def turns(rng: random.Random, at_most: int) -> None:
    for _ in range(rng.randrange(at_most)):
        await asyncio.sleep(0)


async def test_a_start_and_a_stop_of_the_same_key_are_never_both_honoured(
    client: Client, store: MongoStore, shop: Shop, rng: random.Random, settled: Any
) -> None:
    ledger = Ledger()
    saga = ledger.saga
    told: dict[int, Told] = {}
    ids: dict[int, str] = {}

    async def start(number: int) -> None:
        await turns(rng, 8)
        ids[number] = (await client.start(saga, Order(number=number), key=f"key {number}")).run_id

    async def stop(number: int) -> None:
        await turns(rng, 8)
        try:
            told[number] = outcome_of(await (await client.find(saga, key=f"key {number}")).stop(**WHY))
        except RunNotFound:
            told[number] = None

    async with working(store, shop, saga, concurrency=256):
        for begin in range(0, STARTS, TOGETHER):
            numbers = range(begin, begin + TOGETHER)
            both = [verb(number) for number in numbers for verb in (start, stop)]
            rng.shuffle(both)
            await asyncio.gather(*both)
        runs = await settled([ids[number] for number in range(STARTS)])
    seen = Counter(ledger.agrees(number, told[number], run) for number, run in enumerate(runs))
    print(*(f"{times:5}  {what}" for what, times in sorted(seen.items())), sep="\n")
    assert {None, StopOutcome.CANCELLED} <= {told[number] for number in told}


async def test_a_claim_and_a_stop_of_the_same_run_are_never_both_honoured(
    client: Client, store: MongoStore, shop: Shop, rng: random.Random, settled: Any
) -> None:
    ledger = Ledger()
    saga = ledger.saga
    told: dict[int, Told] = {}
    ids: list[str] = []
    async with working(store, shop, saga, concurrency=64), working(store, shop, saga, concurrency=64):
        for begin in range(0, CLAIMS, TOGETHER):
            numbers = range(begin, begin + TOGETHER)
            runs = await client.start_many(saga, [Start(Order(number=number)) for number in numbers])
            ids += [run.run_id for run in runs]

            async def stop(number: int, run: Any) -> None:
                if rng.random() < 0.3:
                    await ledger.began(number).wait()  # and so runs into the worker's other two writes
                await turns(rng, 40)
                told[number] = outcome_of(await run.stop(**WHY))

            pressed = [stop(number, run) for number, run in zip(numbers, runs, strict=True)]
            rng.shuffle(pressed)
            await asyncio.gather(*pressed)
        found = await settled(ids)
    seen = Counter(ledger.agrees(number, told[number], run) for number, run in enumerate(found))
    print(*(f"{times:5}  {what}" for what, times in sorted(seen.items())), sep="\n")
    assert set(told.values()) >= {StopOutcome.CANCELLED, StopOutcome.WILL_BE_UNDONE}
