"""Processes that die, freeze or are interrupted at a chosen point, without a process and without waiting.

A `World` is one run of one `Shape` (a saga described as data) with the participants that carry out its effects. A
`Process` stands for one worker process: it claims, loads and drives as the worker does, through a store whose every
trip to the server, and every effect of a step, is a *point* with a number. A `Plan` says what happens just before or
just after point n takes effect:

    die         `Died` is raised, and from then on at every further point: a dead process writes nothing
    suspend     it waits there for `resume`, as a process that the system has stopped
    interrupt   the drain's grace is over: the attempt is told to break off and hand back
    drain       a drain has begun
    lose        the heartbeat learned that the lease is lost
    stop        a person presses Stop on the run; `stop, heard of`: and the worker is told; `stop, die`: and it dies
    deadline    the run's deadline passes; `deadline, heard of`: and a timer of the worker's says so; `deadline, die`

A process may have several plans, one after the other.

No real time passes. Leases lapse and parked runs become due because `World.lapse` moves `due_at` back in the database
and the world's clock forward.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from sagas import Client, NonRetryable, Retryable, RetryPolicy, Saga, Step, StepDefinition, Worker, WorkerOptions
from sagas.clock import monotonic, new_token
from sagas.decide import Activity
from sagas.executor import Attempt, Executor
from sagas.keyring import Keyring, keys_of
from sagas.lease import Lease
from sagas.limits import Limits
from sagas.payload import dump_context, load_context
from sagas.sealing import Slot
from sagas.stopping import StopAnswer
from sagas.wrapping import KeyWrapper
from sagas_store import MongoStore
from sagas_store.drivers import Driver
from sagas_store.entries import Entry
from sagas_store.records import NewRun, RunRecord
from sagas_store.states import OPEN, State
from tests.support.changing import replace
from tests.support.oracle import Call, check

__all__ = [
    "EFFECTS",
    "Died",
    "Gate",
    "Order",
    "Part",
    "Plan",
    "Process",
    "Server",
    "Shape",
    "World",
    "plans",
    "working",
]

T = TypeVar("T")

EFFECTS: Final = "effects"
"""The collection into which transactional steps write."""

LEASE: Final = timedelta(minutes=5)
_TIMEOUT_S: Final = 0.02
_LONG: Final = timedelta(hours=1)
_IN_PLACE: Final = timedelta(milliseconds=1)


_LAST: Final = frozenset({"interrupt", "drain", "lose", "suspend"})
"""It was told to go, or has been frozen: that attempt was its last."""

_TOLD: Final[dict[str, Callable[[Attempt], None]]] = {
    "interrupt": Attempt.interrupt,
    "drain": Attempt.drain,
    "lose": Attempt.lose,
    "stop, heard of": Attempt.notice_stop,
    "deadline, heard of": Attempt._turn_back_soon,  # what its timer would do
}

_WEEKS: Final = timedelta(weeks=20)

_numbers: Final = itertools.count(1)


class Died(BaseException):
    """The process is gone. A BaseException, because no code of a dead process handles anything."""


class Order(BaseModel):
    """The context: which steps it has been through."""

    trail: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------ sagas as data


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A step and how its participant behaves, call by call; the last behaviour repeats.

    ok             it has its effect and answers
    refuse         no effect, a definite no
    again          no effect, a definite "later"
    lost           no effect, no answer (a TimeoutError)
    lost_after     its effect, no answer
    hang           its effect, then silence until the step's timeout
    wrong          its effect, and an answer that cannot be journaled
    fail_after     its effect, then a definite no: for transactional steps, whose effect goes with the transaction
    """

    name: str
    does: tuple[str, ...] = ("ok",)
    undo: tuple[str, ...] | None = ("ok",)
    """None: no compensation. Ignored from the pivot on."""
    probe: str | None = None
    """`truth`, `lost` (never answers) or None: it has no probe."""
    pivot: bool = False
    transactional: bool = False
    tries: int = 3
    wait: timedelta = _IN_PLACE
    grace: timedelta = timedelta(seconds=10)
    """How long a stop leaves it to finish."""

    @property
    def timeout(self) -> float:
        if "hang" not in self.does:
            return 60.0
        return 25 * _TIMEOUT_S if self.transactional else _TIMEOUT_S  # its effect is a trip to the server

    @property
    def undo_timeout(self) -> float:
        return _TIMEOUT_S if self.undo is not None and "hang" in self.undo else 60.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A saga, how its participants behave, and where it must end, whatever dies."""

    name: str
    parts: tuple[Part, ...]
    ends: State
    deadline: bool = False
    """It has one, in some weeks. It passes only where a plan says so."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens at point `at` (from 1), before or after it takes effect."""

    at: int
    after: bool
    fate: str = "die"

    def __str__(self) -> str:
        return f"{self.fate} {'after' if self.after else 'before'} point {self.at}"


# ------------------------------------------------------------------------------------ the server, shared


class Server:
    """A database with the schema applied, and one reading of its clock: what all worlds of a test share."""

    def __init__(self, database: Any, store: MongoStore, *, wrapper: KeyWrapper | None = None) -> None:
        """With a `wrapper` the store has a keyring of it, and so has every process: payloads are sealed."""
        self.database = database
        self.store = store
        self.wrapper = wrapper
        self.keys = keys_of(store)
        self.runs = database["sagas.runs"]
        self.effects = database[EFFECTS]
        self.client = Client(store)
        self.threads = ThreadPoolExecutor(2)
        self._read_at = monotonic()
        self._server_time: datetime | None = None

    async def ready(self) -> None:
        await self.database.create_collection(EFFECTS)
        await self.keys.sealer(None, "0")  # makes the keys, where there are any
        self._read_at = monotonic()
        self._server_time = (await self.database.command("hello"))["localTime"].replace(
            tzinfo=self.store.clock.now().tzinfo
        )

    def clock_reading(self) -> datetime:
        assert self._server_time is not None
        return self._server_time + timedelta(seconds=monotonic() - self._read_at)

    def close(self) -> None:
        self.threads.shutdown(wait=False)


# ------------------------------------------------------------------------------------ one process


class Process:
    """One worker process with its plans."""

    def __init__(
        self, world: World, name: str, *plans: Plan | None, patience: timedelta = timedelta(seconds=30)
    ) -> None:
        self.world = world
        self.name = name
        self.plans = [plan for plan in plans if plan is not None]
        self.met: list[Plan] = []
        """The plans that have come about."""
        self.trail: list[str] = []
        """The points reached so far, by name."""
        self.dead = False
        self.suspended = asyncio.Event()
        self.resumed = asyncio.Event()
        self.claims = 0
        self.seq = 0
        """The newest entry that it knows of."""
        self.late_s = 0.0
        """How far its own clock has jumped while it was suspended."""
        self.store = _wired(self, patience)
        self.executor = Executor(
            self.store,
            {(world.saga.name, world.saga.version): world.saga},
            resources=self,
            threads=world.server.threads,
            thread_count=2,
            limits=Limits(),
            park_after=timedelta(seconds=2),
            monotonic=monotonic,
        )
        self.attempt: Attempt | None = None
        self.last_token: str | None = None

    @property
    def reached(self) -> bool:
        """Whether everything planned for it has come about."""
        return bool(self.plans) and len(self.met) == len(self.plans)

    def monotonic(self) -> float:
        """What it keeps its leases by. That the world skips some hours is not seen here, until it is told."""
        return monotonic() + self.late_s

    async def point(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """Do `call`, with this process's fate before or after it."""
        if self.dead:
            raise Died(name)
        self.trail.append(name)
        here = len(self.trail)
        await self._meet(here, after=False)
        done = await call()
        await self._meet(here, after=True)
        return done

    async def _meet(self, here: int, *, after: bool) -> None:
        for plan in self.plans:
            if (plan.at, plan.after) == (here, after):
                self.met.append(plan)
                await self._suffer(plan.fate)

    async def _suffer(self, fate: str) -> None:
        with self._time_standing_still():
            if fate.startswith("stop"):
                await self.world.press_stop()
            if fate.startswith("deadline"):
                await self.world.pass_deadline()
        if fate.endswith("die"):
            self.dead = True
            raise Died(self.name)
        if fate == "suspend":
            self.suspended.set()
            try:
                await self.resumed.wait()
            except asyncio.CancelledError:  # a timeout of its own; a stopped process hears of that once it goes on
                await self.resumed.wait()
                raise
        elif self.attempt is not None and fate in _TOLD:
            _TOLD[fate](self.attempt)

    @contextlib.contextmanager
    def _time_standing_still(self) -> Iterator[None]:
        """What others do meanwhile takes nothing of the timeout of the step in hand: no chance in what it meets."""
        scope, loop = self.attempt._scope if self.attempt is not None else None, asyncio.get_running_loop()
        lines = self.executor.timeouts._lines
        place = next(((seconds, line) for seconds, line in lines.items() if scope in line), None)
        if scope is None or place is None:
            yield
            return
        seconds, line = place
        left_s = line.pop(scope) - loop.time()
        yield
        line[scope] = loop.time() + left_s
        assert lines.get(seconds, line) is line
        if seconds not in lines:  # it was empty when its time came
            lines[seconds] = line
            loop.call_later(left_s, self.executor.timeouts._look, seconds)

    async def work_once(self) -> State | None:
        """Claim a run that is due, drive it, and return the state it was left in; None when nothing was due."""
        token = new_token()
        asked_at = self.monotonic()
        claimed = await self.store.claims.take(
            [(self.world.saga.name, self.world.saga.version)], token=token, worker=self.name, lease=LEASE, limit=1
        )
        if not claimed:
            return None
        (run,) = claimed
        self.claims += 1
        self.last_token = token
        entries = (await self.store.journal.load_many([run.run_id]))[run.run_id] if run.attempts > 1 else []
        lease = Lease(run.run_id, token, LEASE, asked_at=asked_at, monotonic=self.monotonic)
        self.attempt = self.executor.attempt(run, entries, lease)
        try:
            return await self.attempt.drive()
        finally:
            self.attempt = None

    async def work(self) -> State | None:
        """Work until the run is at rest or the process has met its end; returns the state the run was left in."""
        with contextlib.suppress(Died):
            for _ in range(20):
                state = await self.work_once()
                if state is None or state not in OPEN:
                    return state
                if any(plan.fate in _LAST for plan in self.met):
                    return state
                await self.world.lapse()
            raise AssertionError(f"{self.name} did not bring the run to rest in 20 attempts")
        return None

    @contextlib.asynccontextmanager
    async def working_until_suspended(self) -> AsyncIterator[asyncio.Task[State | None]]:
        """Work in a task, until it is suspended or has ended; leaves no task behind."""
        working = asyncio.create_task(self.work())
        waiting = asyncio.create_task(self.suspended.wait())
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        try:
            yield working
        finally:
            waiting.cancel()
            working.cancel()
            self.resumed.set()
            await asyncio.gather(waiting, working, return_exceptions=True)


class _Trips:
    """A collection whose every trip to the server is a point of a process."""

    def __init__(self, process: Process, name: str, collection: Any) -> None:
        self._process = process
        self._name = name
        self._collection = collection

    async def insert_one(self, document: Any, **more: Any) -> Any:
        trip = functools.partial(self._collection.insert_one, document, **more)
        in_transaction = more.get("session") is not None
        name = f"{self._name} insert {document['kind']}" + (" in a transaction" if in_transaction else "")
        done = await self._process.point(name, trip)
        if not in_transaction:
            self._process.seq = document["_id"]["seq"]
        return done

    async def update_one(self, filter_: Any, update: Any, **more: Any) -> Any:
        trip = functools.partial(self._collection.update_one, filter_, update, **more)
        return await self._process.point(f"{self._name} update{_what_for(update)}", trip)

    async def update_many(self, *arguments: Any) -> Any:
        return await self._process.point(
            f"{self._name} update many", functools.partial(self._collection.update_many, *arguments)
        )

    async def find_one(self, *arguments: Any) -> Any:
        return await self._process.point(
            f"{self._name} find one", functools.partial(self._collection.find_one, *arguments)
        )

    def find(self, *arguments: Any, **more: Any) -> _Trip:
        return _Trip(self._process, f"{self._name} find", self._collection.find(*arguments, **more))


def _what_for(update: Any) -> str:
    """What a holder's move is for, told by the field that only it writes."""
    fields = update[0]["$set"]
    return next((f": {word}" for name, word in _WRITES.items() if name in fields), "")


_WRITES: Final = {
    "gate_passed_at": "pass the gate",
    "settled_at": "settle",
    "held": "hold",
    "due_at": "park",
    "phase": "show rolling back",
}


@dataclass(frozen=True, slots=True)
class _Trip:
    """A cursor, read in one trip."""

    process: Process
    name: str
    cursor: Any

    async def to_list(self, length: int | None) -> list[Any]:
        found: list[Any] = await self.process.point(self.name, functools.partial(self.cursor.to_list, length))
        if found and isinstance(found[-1]["_id"], dict):
            self.process.seq = found[-1]["_id"]["seq"]
        return found


class _Sessions:
    """A driver whose commits are points of a process."""

    def __init__(self, process: Process, driver: Driver) -> None:
        self._process = process
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[Any]:
        async with self._driver.session() as session:
            commit = session.commit_transaction

            async def commit_and_know() -> None:
                await self._process.point("commit", commit)
                self._process.seq += 1  # the one entry of a transaction

            session.commit_transaction = commit_and_know  # type: ignore[method-assign]
            yield session


_AT_ONCE: Final = timedelta(seconds=1)


def _wired(process: Process, patience: timedelta) -> MongoStore:
    """A store of the process's own."""
    world = process.world
    keyring = Keyring(world.server.wrapper) if world.server.wrapper is not None else None
    store = MongoStore(
        world.server.database, keyring=keyring, monotonic=world.monotonic, patience=patience, reply=patience
    )
    store.clock.observe(world.now())
    store.runs._collection = _Trips(process, "runs", store.runs._collection)  # type: ignore[assignment]
    store.journal._collection = _Trips(process, "journal", store.journal._collection)  # type: ignore[assignment]
    store.keys._collection = _Trips(process, "keys", store.keys._collection)  # type: ignore[assignment]
    store.claims._collection = store.interventions._collection = store.runs._collection
    store._ready = True  # the server is known; to ask it again is no part of the story
    store._driver = _Sessions(process, store._driver)  # type: ignore[assignment]
    return store


# ------------------------------------------------------------------------------------ one run and its participants


@dataclass(slots=True)
class World:
    """One run, the participants that outlive every process, and the ledger that they keep."""

    server: Server
    shape: Shape
    name: str = field(init=False)
    """The run's id and the saga's name: nobody else's worker takes it."""
    saga: Saga[Order] = field(init=False)
    ledger: list[Call] = field(default_factory=list)
    happened: set[str] = field(default_factory=set)
    """Keys whose effect happened."""
    closed: set[str] = field(default_factory=set)
    """Keys that were compensated: what arrives under them later has no effect."""
    answers: list[StopAnswer] = field(default_factory=list)
    """What whoever pressed Stop was told."""
    _ahead_s: float = 0.0
    _calls: Counter[tuple[Activity, str]] = field(default_factory=Counter)
    processes: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name = f"{self.shape}-{next(_numbers)}"
        self.saga = self._define()

    # ---------------------------------------------------------------- driving

    def monotonic(self) -> float:
        """Seconds of this world's clock: the real ones and those that were skipped."""
        return monotonic() + self._ahead_s

    def now(self) -> datetime:
        return self.server.clock_reading() + timedelta(seconds=self._ahead_s)

    async def start(self) -> None:
        """Insert the run, due now."""
        created_at = self.server.clock_reading() - timedelta(seconds=1)
        sealer = await self.server.keys.sealer(None, self.name)
        await self.server.store.runs.insert(
            NewRun(
                run_id=self.name,
                saga=self.saga.name,
                version=self.saga.version,
                fingerprint=self.saga.fingerprint,
                input=sealer.seal(Slot.INPUT, 0, dump_context(Order, Order())[0]),
                keys=(sealer.key_id,) if sealer.key_id is not None else (),
                created_at=created_at,
                due_at=created_at,
                deadline=created_at + _WEEKS if self.shape.deadline else None,
            )
        )

    def process(self, *plans: Plan | None, **more: Any) -> Process:
        process = Process(self, f"worker-{len(self.processes) + 1}", *plans, **more)
        self.processes.append(process)
        return process

    async def lapse(self) -> None:
        """Whatever it waits for, a lease's end or a retry's time, is over now."""
        self._ahead_s += 2 * _LONG.total_seconds()
        await self.server.runs.update_one(
            {"_id": self.name, "due_at": {"$exists": True}},
            [{"$set": {"due_at": {"$dateSubtract": {"startDate": "$$NOW", "unit": "second", "amount": 1}}}}],
        )

    async def press_stop(self) -> None:
        self.answers.append(await self.server.client.stop(self.name, by="the test", reason="chance"))

    async def pass_deadline(self) -> None:
        """By the world's clock and by the server's, which cannot be turned: there the deadline comes to meet it."""
        self._ahead_s += 2 * _WEEKS.total_seconds()
        await self.server.runs.update_one(
            {"_id": self.name, "deadline": {"$exists": True}},
            [{"$set": {"deadline": {"$dateSubtract": {"startDate": "$$NOW", "unit": "second", "amount": 1}}}}],
        )

    async def finish(self, *plans: Plan | None, **more: Any) -> Process:
        """Another worker takes over and goes on until the run is at rest."""
        await self.lapse()
        process = self.process(*plans, **more)
        await process.work()
        return process

    # ---------------------------------------------------------------- looking

    async def run(self) -> RunRecord:
        run = await self.server.store.runs.get(self.name)
        assert run is not None
        return run

    async def journal(self) -> list[Entry]:
        return await self.server.store.journal.load(self.name)

    async def check(self, *, at_rest: bool = True, suspended: bool = False, ends: bool = True) -> RunRecord:
        """Ask the oracle; then that the run ended as its shape says, with the context that its steps made."""
        run, journal = await self._in_order(await self.run()), await self.journal()
        written = {effect["call"] async for effect in self.server.effects.find({"run": self.name})}
        for call in self.ledger:
            call.applied = call.applied or call.order in written
        check(self.saga, run, journal, self.ledger, self.answers, at_rest=at_rest, suspended=suspended)
        if ends:
            assert run.state is self.shape.ends, f"{self.name} ended as {run.state}, not {self.shape.ends}"
        if run.state is State.COMPLETED:
            seq, stored = await self.server.store.journal.last_context(self.name) or (0, b"")
            opener = await self.server.keys.opener(None, self.name, [stored])
            context = load_context(Order, opener.open(Slot.CONTEXT, seq, stored), "the result")
            assert context.trail == tuple(part.name for part in self.shape.parts), context
        return run

    async def _in_order(self, run: RunRecord) -> RunRecord:
        """With a hold that came before the stop dated so.

        A write reads the clock before it gets its turn, so the times of two that were under way at once may be the
        wrong way round. The oplog has them in their order.
        """
        stop, held = run.stop, run.held
        if stop is None or held is None or not timedelta(0) < held.since - stop.asked_at < _AT_ONCE:
            return run
        runs = self.server.runs
        oplog = runs.database.client.local["oplog.rs"]
        writes = oplog.find({"ns": runs.full_name, "o2._id": self.name}, sort=[("$natural", 1)])
        fields = [one["o"].get("diff", {}).get("i", {}).keys() async for one in writes]
        order = [name for names in fields for name in ("held", "stop") if name in names]
        return replace(run, held=replace(held, since=stop.asked_at)) if order == ["held", "stop"] else run

    # ---------------------------------------------------------------- the saga and its participants

    def _define(self) -> Saga[Order]:
        saga = Saga(self.name, Order)
        for part in self.shape.parts:
            self._declare(saga, part)
        return saga

    def _declare(self, saga: Saga[Order], part: Part) -> None:
        retry = RetryPolicy(max_attempts=part.tries, initial_wait=part.wait, max_wait=part.wait, jitter=False)

        async def forward(order: Order, step: Step[Process]) -> Order:
            return await self._forward(part, order, step)

        async def undo(order: Order, step: Step[Process]) -> None:
            await self._undo(part, step)

        async def ask(order: Order, step: Step[Process]) -> Order | None:
            return await self._ask(part, order, step)

        after_pivot = any(earlier.pivot for earlier in self.shape.parts[: self.shape.parts.index(part)])
        kwargs: dict[str, Any] = {
            "name": part.name,
            "retry": retry,
            "timeout": part.timeout,
            "transactional": part.transactional,
        }
        step: StepDefinition[Order]
        if part.pivot:
            step = saga.pivot(**kwargs)(forward)
        else:
            step = saga.step(**kwargs, stop_grace=part.grace, no_compensation=part.undo is None and not after_pivot)(
                forward
            )
        if part.undo is not None and not part.pivot and not after_pivot:
            step.compensation(retry=retry, timeout=part.undo_timeout)(undo)
        if part.probe is not None:
            step.probe(ask)

    def _begin(self, activity: Activity, step: Step[Process]) -> tuple[Call, int]:
        """Write the call into the ledger; returns it and how often this was called so far, from 1."""
        call = Call(
            order=len(self.ledger) + 1,
            activity=activity,
            step=step.name,
            key=step.idempotency_key,
            attempt=step.attempt,
            try_number=step.try_number,
            seen_seq=step.resources.seq,
        )
        self.ledger.append(call)
        self._calls[activity, step.name] += 1
        return call, self._calls[activity, step.name]

    async def _effect(self, call: Call, step: Step[Process]) -> None:
        """The participant acts, once per key, unless it was told to undo it already."""

        async def act() -> None:
            if step.session is not None:
                await self.server.effects.insert_one({"run": self.name, "call": call.order}, session=step.session)
            elif call.key not in self.happened | self.closed:
                self.happened.add(call.key)
                call.applied = True

        await step.resources.point(f"effect of {call.activity} {step.name}", act)
        await asyncio.sleep(0)  # a participant answers over a network: here the engine may break off

    async def _forward(self, part: Part, order: Order, step: Step[Process]) -> Order:
        call, count = self._begin(Activity.STEP, step)
        done = order.model_copy(update={"trail": (*order.trail, part.name)})
        order.trail = ("changed in place",)  # nobody may see this
        behaviour = part.does[min(count, len(part.does)) - 1]
        if behaviour == "refuse":
            raise NonRetryable("no")
        if behaviour == "again":
            raise Retryable("later")
        if behaviour == "lost":
            raise TimeoutError
        await self._effect(call, step)
        if behaviour == "lost_after":
            raise TimeoutError
        if behaviour == "fail_after":
            raise NonRetryable("no, after all")
        if behaviour == "hang":
            await asyncio.Event().wait()
        if behaviour == "wrong":
            return {"trail": ()}  # type: ignore[return-value]
        return done

    async def _undo(self, part: Part, step: Step[Process]) -> None:
        call, count = self._begin(Activity.COMPENSATION, step)
        assert part.undo is not None
        behaviour = part.undo[min(count, len(part.undo)) - 1]
        if behaviour == "refuse":
            raise NonRetryable("no")
        if behaviour == "again":
            raise Retryable("later")
        if behaviour == "lost":
            raise TimeoutError
        self.closed.add(step.idempotency_key.removesuffix("/compensation"))
        await self._effect(call, step)
        if behaviour == "lost_after":
            raise TimeoutError
        if behaviour == "hang":
            await asyncio.Event().wait()

    async def _ask(self, part: Part, order: Order, step: Step[Process]) -> Order | None:
        self._begin(Activity.PROBE, step)

        async def look() -> bool:
            return step.idempotency_key in self.happened

        answer = await step.resources.point(f"probe of {part.name}", look)
        if part.probe == "lost":
            raise TimeoutError
        return order.model_copy(update={"trail": (*order.trail, part.name)}) if answer else None


@contextlib.asynccontextmanager
async def working(
    store: MongoStore,
    *sagas: Saga[Any],
    resources: object = None,
    name: str = "worker",
    monotonic: Callable[[], float] = monotonic,
    **options: Any,
) -> AsyncIterator[tuple[Worker, asyncio.Task[None]]]:
    """A real worker in this process, and the task that runs it; told to go at the end, with no grace."""
    options = {"poll": timedelta(milliseconds=50), "handle_signals": False, **options}
    worker = Worker(store, sagas, resources=resources, name=name, options=WorkerOptions(**options), monotonic=monotonic)
    task = asyncio.create_task(worker.run())
    try:
        yield worker, task
    finally:
        worker.stop()
        worker.stop()
        ended, _ = await asyncio.wait({task}, timeout=10)
        if not ended:
            task.cancel()
            raise AssertionError("the worker did not come to its end within 10 s")
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


class Gate:
    """Where a step of a test waits until it is let go, and says so."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.opened = asyncio.Event()
        self.broken_off = asyncio.Event()

    async def wait(self) -> None:
        self.entered.set()
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.broken_off.set()
            raise


def plans(points: int, fate: str) -> Iterator[Plan]:
    """Before and after each of so many points."""
    return (Plan(at, after, fate) for at, after in itertools.product(range(1, points + 1), (False, True)))
