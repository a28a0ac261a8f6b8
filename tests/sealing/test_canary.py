"""A canary in every field that a user can set is found nowhere: not in the database, the logs or any error."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import pytest
from pydantic import BaseModel, field_validator

from sagas import (
    CannotOpen,
    Client,
    InvalidInput,
    KeyConflict,
    KeyLost,
    Keyring,
    KeyUnavailable,
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
    RunNotFound,
    RunRolledBack,
    Saga,
    Start,
    State,
    Step,
    StopOutcome,
    Tampered,
    Worker,
    WorkerOptions,
)
from sagas.wrapping import KeyName
from sagas_store.schema import SCHEMA
from tests.sealing.deployment import POLL, flip
from tests.sealing.witness import Witness, forms
from tests.sealing.wrapping import CountingWrapper
from tests.support.waiting import eventually

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


async def everything_a_caller_gets_wrong(office: Office) -> None:
    """Every argument that can be wrong, with the canary in it."""
    told, canary = office.witness.told, office.canary
    start = office.client.start
    unfit: list[Any] = [
        Letter(text=canary).model_copy(update={"text": f"rude {canary}"}),
        Letter(text=canary).model_copy(update={"labels": {canary: canary}}),
        Letter(text=canary).model_copy(update={"text": object()}),
        canary,
    ]
    for context in unfit:
        await told(start(letters, context, tenant=office.tenant), InvalidInput)
    await told(start(letters, Letter(text=canary * 500), tenant=office.tenant), PayloadTooLarge)
    for key in (canary * 40, canary + "\ud800", ""):
        await told(start(letters, office.letter(), key=key, tenant=office.tenant), InvalidInput)
    other, key = Letter(text=f"another {canary}"), f"{canary} "
    await told(start(letters, other, key=key, tenant=office.tenant), KeyConflict)
    await told(office.client.start_many(letters, [Start(other, key, tenant=office.tenant)]), KeyConflict)
    many = [Start(one, f"{canary} 2", tenant=office.tenant) for one in (other, office.letter())]
    await told(office.client.start_many(letters, many), KeyConflict)
    async with office.database.client.start_session() as session, await session.start_transaction():
        await told(start(letters, other, key=key, tenant=office.tenant, session=session), KeyConflict)
        await start(letters, other, key=f"{canary} in a transaction", tenant=office.tenant, session=session)
        await session.abort_transaction()
    await told(office.client.find(letters, key=f"{canary} unknown", tenant=office.tenant), RunNotFound)
    for reason in (canary * 500, canary + "\ud800", " "):
        done = (await office.client.runs(limit=1)).runs[0].run_id
        await told(office.client.stop(done, by=office.who, reason=reason), InvalidInput)
        await told(office.operator.restart_as_new(done, by=office.who, reason=reason), InvalidInput)
    await told(office.client.runs(after=canary), InvalidInput)


async def everything_that_happens_to_keys(office: Office) -> None:
    """Payloads that were tampered with, and keys that are away or lost."""
    assert office.wrapper is not None
    told, words = office.witness.told, office.words
    tampered = await office.start("tampered", delay=timedelta(hours=1))
    lost = await office.start("lost", delay=timedelta(hours=1))
    runs = office.database["sagas.runs"]
    found = await runs.find_one({"_id": tampered.run_id})
    await runs.update_one({"_id": tampered.run_id}, {"$set": {"input": flip(found["input"], -1)}})
    async with office.working():
        done = await office.start("for its result")
        await office.ends(done, State.COMPLETED)
        await office.make_due(tampered)
        await office.until(lambda info: info.blocked_by == "Tampered", tampered, "it is blocked")
        await told(office.start("tampered"), Tampered)

    for kind in (KeyUnavailable, KeyLost):
        office.wrapper.failing = functools.partial(_fails, kind)
        away = office.anew()
        if kind is KeyLost:
            await runs.update_one({"_id": lost.run_id}, {"$set": {"blocked.count": 8}})
        async with away.working():
            await office.make_due(lost)
            await office.until(functools.partial(_is_blocked_by, kind), lost, "it is blocked")
        await told(away.start("no key"), kind)
        await told(away.client.run(letters, run_id=done.run_id).result(5), kind)
        await away.client.journal(done.run_id)
        refused = await away.operator.requeue_quarantined(runs=[lost.run_id], **words)
        office.witness.seen["exceptions"] += [why.encode() for why in refused.refused.values()]
        await away.client.close()
    await office.ends(lost, State.QUARANTINED)
    assert (await office.anew().client.stop(lost.run_id, **words)).outcome is StopOutcome.WILL_BE_UNDONE
    await office.witness.look()
    office.wrapper.failing = None
    assert (await office.operator.requeue_quarantined(runs=[lost.run_id], **words)).done == [lost.run_id]
    async with office.working():
        await office.ends(lost, State.CANCELLED)


def _fails(kind: type[CannotOpen], name: KeyName) -> Exception:
    return kind(name.tenant, name.key_id, "gone")


def _is_blocked_by(kind: type[CannotOpen], info: RunInfo) -> bool:
    return info.blocked_by == kind.__name__


DATABASE: Final = {"documents of sagas.runs", "documents of sagas.journal", "change stream", "oplog"}
PRINTED: Final = {"exceptions", "log", "output"}


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
async def test_what_a_user_gave_is_in_no_document_index_stream_oplog_log_or_error(
    database: Any,
    sealed: bool,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await MongoStore(database).schema.apply()
    witness = Witness(database)
    await witness.begin()
    with witness.hearing(caplog, monkeypatch):
        office = Office(database, witness, CountingWrapper() if sealed else None)
        await everything_a_user_does(office)
        await everything_a_caller_gets_wrong(office)
        if sealed:
            await everything_that_happens_to_keys(office)
        await witness.look()
        await witness.end()
        await office.client.close()
    out, err = capfd.readouterr()
    witness.seen["output"] = [out.encode(), err.encode()]

    # What may be seen is seen, in every place where the canary is looked for: so it would be seen there, too.
    assert {"documents of sagas.runs", "keys of list_of_tenant on runs"} <= witness.where(office.tenant)
    assert {*DATABASE, "driver's log"} <= witness.where(office.who)
    assert {"exceptions", "log", "documents of sagas.runs"} <= witness.where("letters")
    indexes = {f"keys of {index.name} on {spec.name}" for spec in SCHEMA for index in spec.indexes}
    if sealed:
        assert indexes <= set(witness.seen)
        assert witness.where(office.canary) == set()
    else:
        assert witness.where(office.canary) == {*DATABASE, "driver's log"}
        assert not witness.where(office.canary) & PRINTED


def test_the_witness_knows_a_word_in_every_form() -> None:
    witness = Witness(None)
    word = "canary0123456789abcdef"
    for count, form in enumerate(forms(word)):
        witness.seen[str(count)].append(b"..." + form + b"...")
    witness.seen["nowhere"].append(b"nothing of it")
    assert witness.where(word) == set("012345")
    for before in range(3):
        coded = base64.b64encode(b"x" * before + word.encode() + b"yz")
        assert any(form in coded for form in forms(word)[3:]), before
