"""Faults of the engine are never outcomes of steps.

For each question that a worker asks the store, and each kind of trouble that MongoDB can be in when it is asked (by the
server's own `failCommand`): once, more often than the driver itself tries again, and for longer than the store's
patience. However it goes, the run ends as it would have ended without the trouble, and every effect has happened once.

Only the question under test goes over the client that the fail point hits; everything else goes over another one. So
what is hit is known exactly, and the server's own count of it is compared.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

import pytest
from pymongo import AsyncMongoClient

import sagas.worker
from sagas import Client, Start, State, Worker, WorkerOptions
from sagas_store import MongoStore
from sagas_store.claims import Claims
from sagas_store.clock import ServerClock
from sagas_store.embedded import EmbeddedMongo
from sagas_store.errors import StoreUnavailable
from sagas_store.faults import Patience, is_transient
from sagas_store.inserts import InsertTogether
from sagas_store.journal import Journal
from sagas_store.runs import Runs
from sagas_store.states import HELD, SETTLED
from tests.faults.shop import PARKED_FOR, SAGAS, Order, Shop, by_name
from tests.support.failpoints import LOOKS_AGAIN_SOON, fail_point, look_again_at_once
from tests.support.oracle import check
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

T = TypeVar("T")

POLL: Final = timedelta(milliseconds=20)
REPLY: Final = timedelta(milliseconds=100)
"""How long one reply is waited for, where it does not come. Until then the driver tries again by itself, too."""
TINY: Final = timedelta(milliseconds=100)
"""A patience that a lasting trouble outlasts."""


# --- the questions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """Something that a worker asks the store while it drives a run of a saga."""

    saga: str
    method: str
    """The store's method that goes over the victim's client."""
    operation: str
    """The operation's name inside it."""
    command: str
    nth: int = 1
    """Which of the run's operations of that name is hit."""
    what: str = ""
    crowd: int = 1
    """How many runs the worker drives at the same time, so that their writes go together."""
    again: bool = False
    """The same command was put to every trouble under another name already; here the worst of them are enough."""
    brief: bool = False
    """Asked anew rather than repeated: one reply that does not come is longer than its patience."""

    def __str__(self) -> str:
        return f"{self.operation}{f' ({self.what})' if self.what else ''}"

    @property
    def writes(self) -> bool:
        return self.command != "find"


QUESTIONS: Final = [
    Question("forward", "take", "find due runs", "find"),
    Question("forward", "take", "claim", "update"),
    Question("forward", "take", "read claimed runs", "find"),
    Question("forward", "next_due_at", "find next due run", "find"),
    Question("forward", "append", "append", "insert", what="a step's success"),
    Question("forward", "append", "append", "insert", nth=2, what="the pivot's success"),
    Question("forward", "append", "append", "insert", nth=3, what="the last success", again=True),
    Question("forward", "pass_gate", "pass the gate", "update"),
    Question("forward", "settle", "move to completed", "update", what="settle"),
    Question("declined", "append", "append", "insert", nth=2, what="a failure", again=True),
    Question("declined", "append", "append", "insert", nth=3, what="the rollback's beginning", again=True),
    Question("declined", "append", "append", "insert", nth=4, what="a compensation", again=True),
    Question("declined", "show_rolling_back", "show rolling back", "update"),
    Question("declined", "settle", "move to compensated", "update", what="settle"),
    Question("stuck", "hold", "move to forward_incomplete", "update", what="hold"),
    Question("parked", "append", "append", "insert", nth=2, what="a retry", again=True),
    Question("parked", "park", "move to pending", "update", what="park"),
    Question("parked", "load_many", "read journals", "find", what="takeover"),
    Question("parked", "append", "append", "insert", nth=3, what="a takeover"),
    Question("slow", "renew", "renew", "update", what="heartbeat", brief=True),
    Question("slow", "renew", "read stops", "find", what="heartbeat", brief=True),
    Question("forward", "append", "append", "insert", what="six steps' successes", crowd=6),
    Question("forward", "settle", "move runs", "update", what="settle six", crowd=6),
]
ENDS: Final = {
    "forward": State.COMPLETED,
    "declined": State.COMPENSATED,
    "parked": State.COMPLETED,
    "slow": State.COMPLETED,
    "stuck": State.FORWARD_INCOMPLETE,
    "transactional": State.COMPLETED,
}
CALLED: Final = {
    "forward": ["reserve", "charge", "ship"],
    "declined": ["reserve", "reserve (undone)"],
    "parked": ["reserve", "charge", "ship"],
    "slow": ["reserve", "charge", "ship"],
    "stuck": ["reserve", "charge"],
    "transactional": ["reserve"],
}
"""What the participants see, in order, where nothing has to be done again."""

# --- the troubles -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trouble:
    name: str
    data: dict[str, Any]
    of_writes_only: bool = False
    worst: bool = False
    """One in which nothing has happened, and one in which all has and only the answer is bad."""


TROUBLES: Final = [
    Trouble("the connection is lost", {"closeConnection": True}, worst=True),
    Trouble("not the primary", {"errorCode": 10107, "errorLabels": ["RetryableWriteError"]}),
    Trouble("time is up", {"errorCode": 50}),
    Trouble("no reply", {"blockConnection": True, "blockTimeMS": 300}),
    Trouble(
        "no majority in time", {"writeConcernError": {"code": 64, "errmsg": "late"}}, of_writes_only=True, worst=True
    ),
    Trouble("shutting down", {"writeConcernError": {"code": 91, "errmsg": "shutting down"}}, of_writes_only=True),
]
DURATIONS: Final = {"once": 1, "thrice": 3, "for longer than patience": None}


@dataclass(frozen=True)
class Combination:
    question: Question
    trouble: Trouble
    duration: str

    def __str__(self) -> str:
        return f"{self.question}: {self.trouble.name} {self.duration}"

    @property
    def times(self) -> int | None:
        return DURATIONS[self.duration]

    @property
    def lasting(self) -> bool:
        return self.times is None or (self.question.brief and "blockConnection" in self.trouble.data)


def combinations(questions: list[Question]) -> list[Combination]:
    return [
        Combination(question, trouble, duration)
        for question in questions
        for trouble in TROUBLES
        if (question.writes or not trouble.of_writes_only) and (trouble.worst or not question.again)
        for duration in DURATIONS
    ]


COMBINATIONS: Final = combinations(QUESTIONS)
TRANSACTIONAL: Final = [
    *combinations([Question("transactional", "", "commit", "commitTransaction")]),
    # The statements of a transaction wait for no majority; its commit does.
    *(
        combination
        for combination in combinations([Question("transactional", "", "transaction", "insert")])
        if not combination.trouble.of_writes_only
    ),
]


# --- the victim -------------------------------------------------------------------------------------------------------


@dataclass
class Fault(Patience):
    """The store's patience, with trouble brewing while the question under test is asked."""

    combination: Combination
    admin: AsyncMongoClient[Any]
    app_name: str
    where: dict[str, str]
    """Narrows the fail point down to the engine's own collection, where the step writes in the same transaction."""
    asked: int = 0
    hits: int = 0
    met: asyncio.Event = field(default_factory=asyncio.Event)
    """The question was asked, and answered or given up."""
    given_up_at: datetime | None = None
    asking: int = 0
    one_by_one: asyncio.Lock = field(default_factory=asyncio.Lock)
    brewing: AsyncExitStack = field(default_factory=AsyncExitStack)

    def __post_init__(self) -> None:
        super().__init__(timedelta(seconds=20), timedelta(seconds=10))

    async def call(
        self,
        operation: str,
        attempt: Callable[[], Awaitable[T]],
        *,
        passes: Callable[[BaseException], bool] = is_transient,
        within_s: float = math.inf,
    ) -> T:
        question = self.combination.question
        if operation == question.operation:
            # What a batch has not settled is asked alone then, and is the same question.
            self.asked += not (isinstance(attempt, InsertTogether) and attempt._alone)
            if self.asked == question.nth:
                async with self.trouble():
                    return await super().call(operation, attempt, passes=passes, within_s=within_s)
        return await super().call(operation, attempt, passes=passes, within_s=within_s)

    async def transact(self, transaction: Callable[[], Awaitable[T]]) -> T:
        self.asked += self.combination.question.operation == "transaction"
        if self.combination.question.operation != "transaction" or self.asked > 1:
            return await super().transact(transaction)
        async with self.trouble():
            return await super().transact(transaction)

    @asynccontextmanager
    async def trouble(self) -> AsyncIterator[None]:
        """The fail point is on while the question is asked, by however many at once, and for nothing else."""
        async with self.one_by_one:
            if not self.asking:
                await self.brewing.enter_async_context(self.fail_point())
            self.asking += 1
        try:
            yield
        except StoreUnavailable:
            assert self.combination.lasting, "given up although patience was not spent"
            self.given_up_at = (await self.admin.admin.command("hello"))["localTime"]
            raise
        finally:
            async with self.one_by_one:
                self.asking -= 1
                if not self.asking:
                    await self.brewing.aclose()
            self.met.set()

    @asynccontextmanager
    async def fail_point(self) -> AsyncIterator[None]:
        combination, point = self.combination, None
        left = combination.times - self.hits if combination.times is not None else None
        if left == 0:
            yield
            return
        usual = self.total_s, self.reply_s
        if combination.lasting:
            self.total_s = TINY.total_seconds()
        if combination.lasting or "blockConnection" in combination.trouble.data:
            self.reply_s = REPLY.total_seconds()
        try:
            async with fail_point(
                self.admin,
                [combination.question.command],
                with_app_name=self.app_name,
                times=left,
                **self.where,
                **combination.trouble.data,
            ) as point:
                yield
        finally:
            assert point is not None
            self.total_s, self.reply_s = usual
            self.hits += point.hits


class LaterClock(ServerClock):
    """The server's clock, which goes forward when the story says that an hour has passed."""

    later = timedelta(0)

    def now(self) -> datetime:
        return super().now() + self.later


class Routed:
    """Asks the victim the question under test, and the healthy one all others."""

    def __init__(self, healthy: Any, victim: Any, method: str) -> None:
        self.healthy, self.victim, self.method = healthy, victim, method

    def __getattr__(self, name: str) -> Any:
        return getattr(self.victim if name == self.method else self.healthy, name)


@asynccontextmanager
async def stricken_store(uri: str, healthy: Any, combination: Combination) -> AsyncIterator[tuple[MongoStore, Fault]]:
    """A worker's store of which one question goes over a client that meets the trouble."""
    app_name = f"victim-{secrets.token_hex(4)}"
    async with AsyncMongoClient[Any](uri, appName=app_name, **LOOKS_AGAIN_SOON) as client:
        in_journal = {"namespace": f"{healthy.name}.sagas.journal"}
        where = in_journal if combination.question.operation == "transaction" else {}
        fault = Fault(combination, healthy.client, app_name, where)
        if not combination.question.method:  # a transaction is one client's affair as a whole
            store = MongoStore(client[healthy.name])
            await client.admin.command("ping")
            store._patience = store.journal._patience = fault
        else:
            await client.admin.command("ping")
            store = MongoStore(healthy)
            victim = MongoStore(client[healthy.name])
            method = combination.question.method
            store.claims = Routed(  # type: ignore[assignment]
                store.claims, Claims(victim.claims._collection, fault), method
            )
            store.runs = Routed(store.runs, Runs(victim.runs._collection, fault), method)  # type: ignore[assignment]
            store.journal = Routed(  # type: ignore[assignment]
                store.journal, Journal(victim.journal._collection, fault), method
            )
        store.clock = LaterClock()
        store._ready = True  # checked by the fixture, not by each of hundreds of tests
        yield store, fault


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    look_again_at_once(monkeypatch)
    # A heartbeat every tenth of a second under a lease of five minutes: no lease lapses by the test machine's slowness.
    monkeypatch.setattr(sagas.worker, "RENEWALS_PER_LEASE", 3000)


# --- the story --------------------------------------------------------------------------------------------------------


@dataclass
class Story:
    """One worker drives one run while its store meets the trouble."""

    healthy: Any
    store: MongoStore
    fault: Fault
    shop: Shop = field(default_factory=Shop)

    async def told(self) -> None:
        combination = self.fault.combination
        saga = by_name(combination.question.saga)
        self.shop.effects_of_database = self.store._driver.database["effects"]
        options = WorkerOptions(poll=POLL, handle_signals=False)
        worker = Worker(self.store, SAGAS, resources=self.shop, options=options)
        calm = MongoStore(self.healthy)
        calm._ready = True
        async with Client(calm) as client:
            starts = [Start(Order(number=str(number))) for number in range(combination.question.crowd)]
            runs = [run.run_id for run in await client.start_many(saga, starts)]
        running = asyncio.create_task(worker.run())
        try:
            await self.until_at_rest(worker, runs)
            await self.met()
        finally:
            worker.stop()
            await ended(running)
        for run_id in runs:
            await self.judged(run_id)

    async def until_at_rest(self, worker: Worker, run_ids: list[str]) -> None:
        """Let time pass for them: parked runs become due, and the leases of attempts that were given up lapse."""
        runs = self.healthy["sagas.runs"]
        at_rest = [str(state) for state in SETTLED | HELD]

        async def look() -> bool:
            if self.fault.met.is_set():
                self.shop.heartbeat.set()
            if await runs.count_documents({"state": {"$in": at_rest}}) == len(run_ids):
                return True
            if not worker._attempts:
                await self.hour_passes()
            return False

        await eventually(look, what=f"runs {run_ids} come to rest")

    async def hour_passes(self) -> None:
        """What was parked is due now; a lease that was given up is over. One that was taken since is not touched."""
        runs = self.healthy["sagas.runs"]
        due_now = [{"$set": {"due_at": "$$NOW"}}]
        later = {"$expr": {"$gt": ["$due_at", "$$NOW"]}}
        if (await runs.update_many({"state": "pending", **later}, due_now)).modified_count:
            clock = self.store.clock
            assert isinstance(clock, LaterClock)
            clock.later += PARKED_FOR
        if (at := self.fault.given_up_at) is not None:
            # An hour is long enough for the server to drop a transaction that was left open; it takes it a minute.
            if sessions := self.shop.sessions:
                await self.healthy.client.admin.command({"killSessions": sessions})
                self.shop.sessions = []
            await runs.update_many({"state": "running", "claim.at": {"$lte": at}, **later}, due_now)

    async def met(self) -> None:
        """The question was asked at last: a worker that finds nothing due asks when something will be."""
        async with asyncio.timeout(10):
            await self.fault.met.wait()

    async def judged(self, run_id: str) -> None:
        combination = self.fault.combination
        name = combination.question.saga
        store = MongoStore(self.healthy)
        run = await store.runs.get(run_id)
        assert run is not None
        journal = await store.journal.load(run_id)
        assert run.state is ENDS[name], "it ends as it would have ended without the trouble"
        calls = self.shop.calls.get(run_id, [])
        if name != "transactional":
            check(by_name(name), run, journal, calls)
        else:
            effects = [effect["key"] async for effect in self.healthy["effects"].find()]
            assert effects == [f"{run_id}/charge"], "its effect and its entry have committed together, once"
        called = self.shop.called(run_id)
        if combination.lasting:  # an attempt may have been given up between an effect and its entry
            assert sorted(set(called)) == sorted(CALLED[name])
            assert run.attempts <= 3
        else:
            assert called == CALLED[name], "nothing was done again"
            assert run.attempts == (2 if name == "parked" else 1), "no attempt was given up"
        applied = [call.key for call in calls if call.applied]
        assert len(applied) == len(set(applied)), "every effect has happened once"
        if combination.lasting:
            assert self.fault.hits >= 1
        elif combination.times is not None and combination.trouble.of_writes_only:
            # The write was made all the same: a repeat that comes when a majority has it finds it, and asks no more.
            assert min(2, combination.times) <= self.fault.hits <= combination.times
        else:
            assert self.fault.hits == combination.times


async def ended(running: asyncio.Task[None]) -> None:
    """The worker that was told to stop has stopped; if not, what everybody is waiting for is printed."""
    done, _ = await asyncio.wait([running], timeout=15)
    if not done:
        for task in asyncio.all_tasks():
            task.print_stack()
    assert done, "a worker that is told to stop stops"
    await running


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
async def test_a_fault_of_the_engine_is_no_outcome_of_a_step(
    faulty_mongo: EmbeddedMongo, healthy: Any, combination: Combination
) -> None:
    async with stricken_store(faulty_mongo.uri, healthy, combination) as (store, fault):
        async with asyncio.timeout(60):
            await Story(healthy, store, fault).told()


@pytest.mark.parametrize("combination", TRANSACTIONAL, ids=str)
async def test_a_fault_in_a_transaction_is_no_outcome_of_a_step(
    faulty_mongo: EmbeddedMongo, healthy: Any, combination: Combination
) -> None:
    async with stricken_store(faulty_mongo.uri, healthy, combination) as (store, fault):
        async with asyncio.timeout(60):
            await Story(healthy, store, fault).told()


def test_every_question_of_a_worker_meets_every_trouble_for_every_time() -> None:
    asked = {question.operation for question in QUESTIONS}
    assert asked >= {
        "find due runs", "claim", "read claimed runs", "append", "renew", "pass the gate", "move to completed",
        "move to pending", "read journals",
    }  # fmt: skip
    for question in QUESTIONS:
        met = {(one.trouble.name, one.duration) for one in COMBINATIONS if one.question == question}
        troubles = [one for one in TROUBLES if question.writes or not one.of_writes_only]
        assert met == {(one.name, how) for one in troubles for how in DURATIONS if one.worst or not question.again}
    print(f"{len(COMBINATIONS) + len(TRANSACTIONAL)} combinations of a question, a trouble and a duration")
