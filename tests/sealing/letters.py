"""A saga with every outcome there is, and an office that uses all verbs on it; a canary in whatever a user can set."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from pydantic import BaseModel, field_validator

from sagas import (
    Client,
    InvalidInput,
    Keyring,
    Limits,
    MongoStore,
    NonRetryable,
    Operator,
    OperatorRefused,
    PayloadTooLarge,
    Retryable,
    RetryPolicy,
    Run,
    RunHeld,
    RunInfo,
    RunRolledBack,
    Saga,
    State,
    Step,
    StopOutcome,
    Worker,
    WorkerOptions,
)
from tests.sealing.deployment import POLL
from tests.sealing.witness import Witness
from tests.sealing.wrapping import CountingWrapper
from tests.support.waiting import eventually

__all__ = ["LIMITS", "Letter", "Office", "everything_a_user_does", "letters"]

LIMITS: Final = Limits(context_bytes_max=8 * 1024)
ONCE: Final = RetryPolicy(max_attempts=1)


class Letter(BaseModel):
    """What is a user's: the text and the labels. `act` says what the steps are to do with it."""

    text: str
    labels: dict[str, int] = {}
    act: str = ""

    @field_validator("text")
    @classmethod
    def _not_rude(cls, text: str) -> str:
        if text.startswith("rude"):
            raise ValueError(f"{text} is not polite")
        return text


class Strict(BaseModel):
    """What a letter became in a later release: none that was written before validates."""

    text: int
    labels: dict[int, str] = {}
    act: str = ""


@dataclass
class Post:
    """What the steps share. It knows the canary, and says it wherever a step can say something."""

    canary: str
    inside: asyncio.Event = field(default_factory=asyncio.Event)
    tried: set[str] = field(default_factory=set)

    def first(self, step: Step[Post]) -> bool:
        seen = step.idempotency_key in self.tried
        self.tried.add(step.idempotency_key)
        return not seen


UNFIT: Final[dict[str, Callable[[Letter, str], Any]]] = {
    "rude": lambda letter, said: letter.model_copy(update={"text": f"rude {said}"}),
    "unlike": lambda letter, said: letter.model_copy(update={"labels": {said: said}}),
    "unwritable": lambda letter, _: letter.model_copy(update={"text": object()}),
    "another": lambda _, said: said,
    "large": lambda letter, said: letter.model_copy(update={"text": said * 500}),
}
"""What a step may return and should not."""

letters = Saga("letters", Letter)


@letters.step(retry=RetryPolicy(max_attempts=3, initial_wait=timedelta(0)), stop_grace=0)
async def write(letter: Letter, step: Step[Post]) -> Letter:
    said, first = step.resources.canary, step.resources.first(step)
    if letter.act in UNFIT:
        return UNFIT[letter.act](letter, said)  # type: ignore[no-any-return]
    match letter.act:
        case "raise":
            try:
                json.loads(said)
            except ValueError as cause:
                raise RuntimeError(f"cannot write {said}") from cause
        case "group":
            raise ExceptionGroup(said, [ValueError(said), LookupError(said)])
        case "again" if first:
            raise Retryable(said)
        case "later" if first:
            raise Retryable(said, retry_after=3600)
        case "wait" if first:
            step.resources.inside.set()
            await asyncio.Event().wait()
    return letter


@write.compensation(retry=ONCE)
async def tear(letter: Letter, step: Step[Post]) -> None:
    if letter.act == "untorn" and step.resources.first(step):
        raise NonRetryable(step.resources.canary)


@letters.step(no_compensation=True, transactional=True, retry=ONCE)
async def register(letter: Letter, step: Step[Post]) -> Letter:
    if letter.act == "unregistered":
        raise LookupError(step.resources.canary)
    if letter.act == "register rude":
        return letter.model_copy(update={"text": f"rude {step.resources.canary}"})
    return letter


@letters.pivot(retry=ONCE)
async def send(letter: Letter, step: Step[Post]) -> Letter:
    if letter.act == "untorn":
        raise NonRetryable(step.resources.canary)
    if letter.act == "doubt":
        raise TimeoutError(step.resources.canary)
    return letter


@send.probe
async def ask(letter: Letter, step: Step[Post]) -> Letter | None:
    raise RuntimeError(f"{step.resources.canary} {letter.text}")


@letters.step(retry=ONCE)
async def thank(letter: Letter, step: Step[Post]) -> Letter:
    if letter.act == "unthanked" and step.resources.first(step):
        raise NonRetryable(step.resources.canary)
    return letter


# The same saga in a later release, which reads what was stored before as something else.
later = Saga("letters", Strict)


async def same(strict: Strict, _: Step[Post]) -> Strict:
    return strict


later.step(name="write")(same).compensation(lambda _, __: None)
later.step(name="register", no_compensation=True, transactional=True)(same)
later.pivot(name="send")(same)
later.step(name="thank")(same)


class Office:
    """Clients, operators and workers that are used in every way there is, with a canary wherever one fits."""

    def __init__(self, database: Any, witness: Witness, wrapper: CountingWrapper | None) -> None:
        """Without a wrapper nothing is sealed."""
        self.canary = f"canary{secrets.token_hex(12)}"
        self.tenant = f"tenant{secrets.token_hex(6)}"
        self.who = f"person{secrets.token_hex(6)}"
        self.words: dict[str, Any] = {"by": self.who, "reason": f"because of {self.canary}"}
        self.post = Post(self.canary)
        self.witness = witness
        self.database = database
        self.wrapper = wrapper
        keyring = Keyring(wrapper, pause=timedelta(0)) if wrapper is not None else None
        self.store = MongoStore(database, keyring=keyring)
        self.client = Client(self.store, limits=LIMITS)
        self.operator = Operator(self.store, limits=LIMITS)

    def anew(self) -> Office:
        """Another process of it, which remembers no key."""
        other = Office(self.database, self.witness, self.wrapper)
        other.canary, other.tenant, other.words, other.post = self.canary, self.tenant, self.words, self.post
        return other

    def letter(self, act: str = "") -> Letter:
        return Letter(text=self.canary, labels={self.canary: 1}, act=act)

    async def start(self, act: str = "", **more: Any) -> Run[Letter]:
        return await self.client.start(
            letters, self.letter(act), key=f"{self.canary} {act}", tenant=self.tenant, **more
        )

    @asynccontextmanager
    async def working(self, saga: Saga[Any] = letters) -> AsyncIterator[None]:
        options = WorkerOptions(poll=POLL, handle_signals=False, limits=LIMITS)
        worker = Worker(self.store, [saga], resources=self.post, name="post-office", options=options)
        running = asyncio.create_task(worker.run())
        try:
            yield
        finally:
            worker.stop()
            await asyncio.wait_for(running, 20)

    async def ends(self, run: Run[Any], *states: State) -> None:
        """It comes to rest in one of these states; what its caller is told of it is kept."""
        try:
            await run.result(20)
        except (RunHeld, RunRolledBack) as error:
            self.witness.keep_error(error)
        info = await run.info()
        assert info.state in states, f"{await self.client.journal(run.run_id)}"

    async def until(self, holds: Callable[[RunInfo], bool], run: Run[Any], what: str) -> None:
        async def there() -> bool:
            return holds(await run.info())

        await eventually(there, what=what)

    async def make_due(self, run: Run[Any]) -> None:
        await self.database["sagas.runs"].update_one(
            {"_id": run.run_id, "state": "pending"}, [{"$set": {"due_at": "$$NOW"}}]
        )


async def everything_a_user_does(office: Office) -> None:
    """Every outcome that a saga has, every verb with words in it, every failure of a step."""
    told, words = office.witness.told, office.words
    async with office.working():
        await office.ends(await office.start(), State.COMPLETED)
        await office.ends(await office.start("again"), State.COMPLETED)
        for act in ("raise", "group", "unregistered", *UNFIT):
            await office.ends(await office.start(act), State.COMPENSATED)
        await office.ends(await office.start("register rude"), State.COMPENSATED)

        doubtful = await office.start("doubt")
        await office.ends(doubtful, State.IN_DOUBT)
        await told(office.operator.resume(doubtful.run_id, **words), OperatorRefused)
        verdict: Any = {"happened": True, **words}
        wrong = office.letter().model_copy(update={"labels": {office.canary: office.canary}})
        await told(office.operator.verdict(letters, doubtful.run_id, context=wrong, **verdict), InvalidInput)
        large = Letter(text=office.canary * 500)
        await told(office.operator.verdict(letters, doubtful.run_id, context=large, **verdict), PayloadTooLarge)
        await office.operator.verdict(letters, doubtful.run_id, context=office.letter(), **verdict)
        await office.ends(doubtful, State.COMPLETED)

        stuck = await office.start("unthanked")
        await office.ends(stuck, State.FORWARD_INCOMPLETE)
        assert (await office.client.stop(stuck.run_id, **words)).outcome is StopOutcome.REFUSED
        await office.operator.resume(stuck.run_id, **words)
        await office.ends(stuck, State.COMPLETED)

        untorn = await office.start("untorn")
        await office.ends(untorn, State.COMPENSATION_FAILED)
        await office.operator.resume(untorn.run_id, **words)
        await office.ends(untorn, State.COMPENSATED)
        new = office.client.run(letters, run_id=await office.operator.restart_as_new(untorn.run_id, **words))
        await office.ends(new, State.COMPENSATION_FAILED)

        parked = await office.start("later")
        await office.until(lambda info: info.state is State.PENDING and info.attempts == 1, parked, "it is parked")
        await office.witness.look()
        await office.operator.retry_now(parked.run_id, **words)
        await office.ends(parked, State.COMPLETED)

        waiting = await office.start("wait")
        await asyncio.wait_for(office.post.inside.wait(), 20)
        await office.witness.look()
        assert (await waiting.stop(**words)).outcome is StopOutcome.WILL_BE_UNDONE
        await office.ends(waiting, State.CANCELLED)

        delayed = await office.start("delayed", delay=timedelta(hours=1))
        assert (await delayed.stop(**words)).outcome is StopOutcome.CANCELLED
        await told(delayed.result(5), RunRolledBack)

    broken = await office.start("changed", delay=timedelta(hours=1))
    await office.make_due(broken)
    await office.witness.look()
    async with office.working(later):
        await office.ends(broken, State.BROKEN)
