"""What preview_stop says, in every state and phase, is what the stop then pressed says, and what comes of it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from sagas import (
    SETTLED,
    Client,
    Kind,
    MongoStore,
    NonRetryable,
    Operator,
    OperatorRefused,
    Retryable,
    RetryPolicy,
    Run,
    Saga,
    State,
    Step,
    StopOutcome,
)
from tests.stop.shop import WHY, Order, Shop, working
from tests.support.waiting import eventually

MENDED: Any = {"by": "olga@shop", "reason": "mended"}
TWICE = RetryPolicy(max_attempts=2, initial_wait=timedelta(milliseconds=1), jitter=False)
UNDONE, REFUSED = StopOutcome.WILL_BE_UNDONE, StopOutcome.REFUSED

tour = Saga("tour", Order)
"""Three steps before the pivot, one after it."""
plain = Saga("plain", Order)


async def act(name: str, order: Order, step: Step[Shop]) -> None:
    """Do what the order says of this step or compensation, once."""
    shop = step.resources
    if shop.mended:
        return
    if order.does == f"{name} waits":
        await shop.wait()
    if order.does in (f"{name} parks", f"{name} parks in doubt"):
        raise Retryable("later", retry_after=timedelta(hours=1), in_doubt=order.does.endswith("in doubt"))
    if order.does == f"{name} fails":
        raise NonRetryable("no")
    if order.does == f"{name} is unknown":
        raise TimeoutError


def step_of(name: str) -> Any:
    async def do(order: Order, step: Step[Shop]) -> Order:
        await act(name, order, step)
        return order

    return do


def undo_of(name: str) -> Any:
    async def undo(order: Order, step: Step[Shop]) -> None:
        await act(f"undo {name}", order, step)
        step.resources.done.append(f"{name} {step.fate}")

    return undo


for letter in "abc":
    tour.step(name=letter, stop_grace=0.05)(step_of(letter)).compensation(retry=TWICE)(undo_of(letter))


@tour.pivot(name="p", retry=TWICE)
async def pivot(order: Order, step: Step[Shop]) -> Order:
    if order.does.startswith("undo"):
        raise NonRetryable("declined")
    await act("p", order, step)
    return order


tour.step(name="z", retry=TWICE)(step_of("z"))
plain.step(name="a", no_compensation=True, retry=TWICE)(step_of("a"))


@dataclass(frozen=True)
class Case:
    """How a run comes to stand where a stop is asked, and what is said to it there."""

    does: str
    state: State
    outcome: StopOutcome
    undo: tuple[str, ...] = ()
    then: str = ""
    saga: Saga[Order] = tour


ENDED = StopOutcome.ALREADY_SETTLED
CASES = [
    Case("nothing yet", State.PENDING, StopOutcome.CANCELLED),
    Case("a parks", State.PENDING, UNDONE),
    Case("a parks in doubt", State.PENDING, UNDONE, ("a in_doubt",)),
    Case("c parks", State.PENDING, UNDONE, ("b known", "a known")),
    Case("c parks in doubt", State.PENDING, UNDONE, ("c in_doubt", "b known", "a known")),
    Case("p parks", State.PENDING, REFUSED),
    Case("p parks in doubt", State.PENDING, REFUSED),
    Case("z parks", State.PENDING, REFUSED),
    Case("a waits", State.RUNNING, UNDONE, ("a in_doubt",)),
    Case("c waits", State.RUNNING, UNDONE, ("c in_doubt", "b known", "a known")),
    Case("b waits", State.PENDING, UNDONE, ("b in_doubt", "a known"), "its worker was drained"),
    Case("p waits", State.RUNNING, REFUSED),
    Case("z waits", State.RUNNING, REFUSED),
    Case("undo b waits", State.RUNNING, UNDONE, ("b known", "a known")),
    Case("undo b parks", State.PENDING, UNDONE, ("b known", "a known")),
    Case("undo b parks", State.PENDING, REFUSED, (), "and nobody has shown it"),
    Case("p is unknown", State.IN_DOUBT, REFUSED),
    Case("z fails", State.FORWARD_INCOMPLETE, REFUSED),
    Case("undo b fails", State.COMPENSATION_FAILED, UNDONE, ("b known",)),
    Case("c parks", State.BROKEN, UNDONE, ("b known", "a known"), "broken"),
    Case("z parks", State.BROKEN, REFUSED, (), "broken"),
    Case("c parks", State.QUARANTINED, UNDONE, ("b known", "a known"), "quarantined"),
    Case("z parks", State.QUARANTINED, REFUSED, (), "quarantined"),
    Case("everything", State.COMPLETED, ENDED),
    Case("b fails", State.COMPENSATED, ENDED),
    Case("a fails", State.FAILED, ENDED, saga=plain),
    Case("b waits", State.TIMED_OUT, ENDED, then="timed_out"),
    # Asked before: then the first one's answer comes back.
    Case("nothing yet", State.CANCELLED, StopOutcome.CANCELLED, then="stopped"),
    Case("c parks", State.PENDING, UNDONE, ("b known", "a known"), "stopped"),
    Case("c parks", State.CANCELLED, UNDONE, then="stopped and undone"),
    Case("p parks", State.PENDING, REFUSED, then="stopped"),
    Case("p parks", State.COMPLETED, REFUSED, then="stopped and completed"),
]


def test_there_is_a_case_for_every_state() -> None:
    assert {case.state for case in CASES} == set(State)


async def brought_there(case: Case, client: Client, store: MongoStore, shop: Shop, stack: AsyncExitStack) -> Run[Order]:
    """The run; its worker goes on until the stack is closed where a step is under way."""
    timed = case.then == "timed_out"
    run = await client.start(case.saga, Order(does=case.does), deadline=timedelta(milliseconds=700) if timed else None)
    runs = store.database["sagas.runs"]

    async def there() -> bool:
        info = await run.info()
        return (info.state is State.PENDING and info.attempts == 1) or info.state not in (State.PENDING, State.RUNNING)

    if case.does != "nothing yet":
        worker = AsyncExitStack()
        await worker.enter_async_context(working(store, shop, case.saga))
        if "waits" in case.does and not timed:
            await asyncio.wait_for(shop.inside.wait(), 10)
        else:
            await eventually(there, what="it is there", within_s=20)
        if case.state is State.RUNNING:
            stack.push_async_exit(worker)
        else:
            await worker.aclose()
    if case.then in ("broken", "quarantined"):
        held = {"state": case.then, "held": {"reason": "as the store writes it", "since": "$$NOW"}}
        blocked = {"blocked": {"count": 9, "since": "$$NOW", "failure": "KeyLost", "why": "gone"}}
        fields = {**held, **(blocked if case.then == "quarantined" else {})}
        await runs.update_one({"_id": run.run_id}, [{"$set": fields}, {"$unset": ["due_at"]}])
    if case.then == "and nobody has shown it":  # its worker died between the journal and the run
        await runs.update_one({"_id": run.run_id}, {"$set": {"phase": "past_gate"}})
    if case.then.startswith("stopped"):
        await run.stop(by="bob@shop", reason="earlier")
    if case.then.startswith("stopped and"):
        await to_its_end(run, case, store, shop)
    return run


async def to_its_end(run: Run[Order], case: Case, store: MongoStore, shop: Shop) -> None:
    """Mend what it waits for, let it go on, and wait until it is settled."""
    shop.mended = True
    if case.outcome is not UNDONE or case.does.startswith("undo"):
        shop.go_on.set()  # else the step in hand is broken off when its grace is over
    operator = Operator(store)

    async def settled() -> bool:
        state = (await run.info()).state
        try:
            if state is State.PENDING:
                await operator.retry_now(run.run_id, **MENDED)
            elif state is State.QUARANTINED:
                await operator.requeue_quarantined(runs=[run.run_id], **MENDED)
            elif state is State.IN_DOUBT:
                await operator.verdict(case.saga, run.run_id, happened=True, context=Order(), **MENDED)
            elif state is not State.RUNNING and state not in SETTLED:
                await operator.resume(run.run_id, **MENDED)
        except OperatorRefused:
            pass  # a worker has it by now
        return state in SETTLED

    async with working(store, shop, case.saga):
        await eventually(settled, what="it is settled", within_s=20)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.does} {case.then} {case.state}")
async def test_what_is_previewed_is_what_is_answered_and_what_comes_of_it(
    client: Client, store: MongoStore, shop: Shop, case: Case
) -> None:
    async with AsyncExitStack() as stack:
        run = await brought_there(case, client, store, shop, stack)
        before = await run.info()
        assert before.state is case.state
        preview = await run.preview_stop()
        assert (await run.info()) == before, "it only looks"
        answer = await run.stop(**WHY)
        assert (preview.outcome, answer.outcome) == (case.outcome, case.outcome)
        assert preview.why
        shop.done.clear()
        told = tuple(f"{undo.step} {undo.fate}" for undo in preview.undo)
        assert told == case.undo
        if case.state not in SETTLED:
            await to_its_end(run, case, store, shop)
        ends = (await run.info()).state
    journal = [line.kind for line in await run.journal()]
    if case.outcome is UNDONE and case.state not in SETTLED:
        assert tuple(shop.done) == case.undo, "that is what was undone, in this order"
        assert ends in (State.CANCELLED, State.COMPENSATED)
    elif case.outcome is REFUSED and not case.does.startswith("undo"):
        assert (ends, shop.done) == (State.COMPLETED, [])
        assert journal.count(Kind.STOP_REFUSED) == 1
    elif case.outcome is StopOutcome.CANCELLED:
        assert (ends, journal) == (State.CANCELLED, [])
    elif case.outcome is ENDED:
        assert (ends, shop.done) == (case.state, [])
