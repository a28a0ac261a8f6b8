"""Stop wherever a run may be: in doubt, delayed, parked, held, deaf to cancellation, in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from sagas import (
    Client,
    Fate,
    MongoStore,
    NonRetryable,
    Operator,
    Retryable,
    RetryPolicy,
    RunHeld,
    RunRolledBack,
    Saga,
    State,
    Step,
    StopOutcome,
)
from tests.stop.shop import WHY, Order, Shop, fulfil, held, kinds, working
from tests.support.waiting import eventually

MENDED: Any = {"by": "olga@shop", "reason": "found out"}
SOON = RetryPolicy(max_attempts=3, initial_wait=timedelta(milliseconds=1), jitter=False)

Does = Callable[[Order, Step[Shop]], Awaitable[Any]]


def paid(charge: Does, *, probe: Does | None = None, retry: RetryPolicy = SOON) -> Saga[Order]:
    """Reserve, then a pivot to suit, then ship."""
    saga = Saga("paid", Order)

    @saga.step
    async def reserve(order: Order, step: Step[Shop]) -> Order:
        return order

    @reserve.compensation
    async def release(order: Order, step: Step[Shop]) -> None:
        step.resources.done.append("release")

    pivot = saga.pivot(name="charge", retry=retry)(charge)
    if probe is not None:
        pivot.probe(probe)

    @saga.step
    async def ship(order: Order, step: Step[Shop]) -> Order:
        step.resources.done.append("ship")
        return order

    return saga


async def lost(order: Order, step: Step[Shop]) -> Order:
    step.resources.done.append("charge")
    raise TimeoutError


# -------------------------------------------------------------------- the pivot in doubt


@pytest.mark.parametrize("happened", [True, False])
async def test_a_stop_while_the_pivots_probe_is_asking_is_refused_whatever_the_probe_then_finds(
    client: Client, store: MongoStore, shop: Shop, happened: bool
) -> None:
    async def lost_then_declined(order: Order, step: Step[Shop]) -> Order:
        if step.try_number == 1:
            raise TimeoutError
        raise NonRetryable("declined")

    async def ask(order: Order, step: Step[Shop]) -> Order | None:
        await step.resources.wait()
        return order if happened else None

    saga = paid(lost_then_declined, probe=ask)
    async with working(store, shop, saga):
        run = await client.start(saga, Order())
        await shop.inside.wait()
        preview, answer = await run.preview_stop(), await run.stop(**WHY)
        assert (preview.outcome, answer.outcome) == (StopOutcome.REFUSED, StopOutcome.REFUSED)
        assert preview.undo == ()
        shop.go_on.set()
        if happened:
            await run.result(10)
        else:
            with pytest.raises(RunRolledBack):
                await run.result(10)
    answer = await run.stop(**WHY)
    assert answer.outcome is StopOutcome.REFUSED
    assert shop.done == (["ship"] if happened else ["release"])
    assert (await run.info()).state is (State.COMPLETED if happened else State.COMPENSATED)
    assert ("pivot itself failed" in answer.next) == (not happened)
    assert (await kinds(client, run.run_id)).count("stop_refused") == 1


async def test_a_stop_while_a_pivot_without_a_probe_waits_to_be_tried_again_is_refused_and_does_not_hurry_it(
    client: Client, store: MongoStore, shop: Shop
) -> None:
    async def later(order: Order, step: Step[Shop]) -> Order:
        if step.try_number == 1:
            raise Retryable("later", retry_after=timedelta(hours=1), in_doubt=True)
        return order

    saga = paid(later)
    async with working(store, shop, saga):
        run = await client.start(saga, Order())

        async def parked() -> bool:
            info = await run.info()
            return info.state is State.PENDING and info.attempts == 1

        await eventually(parked, what="the pivot is parked")
        before = await run.info()
        assert (await run.stop(**WHY)).outcome is StopOutcome.REFUSED
        assert (await run.info()).due_at == before.due_at
        await Operator(store).retry_now(run.run_id, **MENDED)
        await run.result(10)
    assert (await kinds(client, run.run_id)).count("stop_refused") == 1
    assert shop.done == ["ship"]


@pytest.mark.parametrize("happened", [True, False])
@pytest.mark.parametrize("probed", [True, False])
async def test_a_run_held_in_doubt_refuses_its_stop_and_goes_the_way_of_the_verdict(
    client: Client, store: MongoStore, shop: Shop, probed: bool, happened: bool
) -> None:
    saga = paid(lost, probe=lost if probed else None)
    async with working(store, shop, saga):
        run = await client.start(saga, Order())
        with pytest.raises(RunHeld):
            await run.result(10)
        assert (await run.preview_stop()).outcome is StopOutcome.REFUSED
        answer = await run.stop(**WHY)
        assert (answer.outcome, answer.state) == (StopOutcome.REFUSED, State.IN_DOUBT)
        assert "waits for an operator" in answer.next
        shop.done.clear()
        context = Order(number=7) if happened else None
        await Operator(store).verdict(saga, run.run_id, happened=happened, context=context, **MENDED)
        if happened:
            assert (await run.result(10)).number == 7
        else:
            with pytest.raises(RunRolledBack):
                await run.result(10)
    assert shop.done == (["ship"] if happened else ["release"])
    assert (await run.stop(**WHY)).outcome is StopOutcome.REFUSED
    assert (await kinds(client, run.run_id)).count("stop_refused") == 1


# -------------------------------------------------------------------- not running


async def test_a_stop_of_a_delayed_run_cancels_it_at_once_and_for_ever(
    client: Client, store: MongoStore, shop: Shop
) -> None:
    run = await client.start(fulfil, Order(), delay=timedelta(hours=1))
    answer = await run.stop(**WHY)
    assert (answer.outcome, answer.state) == (StopOutcome.CANCELLED, State.CANCELLED)
    assert (await run.info()).due_at is None
    again = await client.start(fulfil, Order(), key="the same")
    await again.stop(**WHY)
    assert not (await client.start(fulfil, Order(), key="the same")).created
    async with working(store, shop):
        with pytest.raises(RunRolledBack):
            await run.result(5)
    assert shop.done == []


@pytest.mark.parametrize(
    ("does", "state", "outcome", "ends"),
    [
        ("ship fails", State.FORWARD_INCOMPLETE, StopOutcome.REFUSED, State.COMPLETED),
        ("release fails", State.COMPENSATION_FAILED, StopOutcome.WILL_BE_UNDONE, State.COMPENSATED),
    ],
)
async def test_a_stop_of_a_held_run_waits_with_it_and_is_what_its_resume_leads_to(
    client: Client, store: MongoStore, shop: Shop, does: str, state: State, outcome: StopOutcome, ends: State
) -> None:
    run_id = await held(client, store, shop, does)
    preview, answer = await client.preview_stop(run_id), await client.stop(run_id, **WHY)
    assert (preview.outcome, answer.outcome, answer.state) == (outcome, outcome, state)
    assert "operator" in answer.next
    if outcome is StopOutcome.WILL_BE_UNDONE:
        assert [undo.step for undo in preview.undo] == ["reserve"], "the other one is undone already"
    shop.mended = True
    await Operator(store).resume(run_id, **MENDED)
    async with working(store, shop):

        async def at_rest() -> bool:
            return (await client.get(run_id)).state is ends

        await eventually(at_rest, what=f"it ends as {ends}")


async def test_a_stop_of_a_broken_run_is_honoured_once_it_can_be_executed_again(
    client: Client, store: MongoStore, shop: Shop
) -> None:
    """A worker with a changed definition of the same version has had it between a step and the next."""
    run = await client.start(fulfil, Order(does="reserve is turned away"))
    async with working(store, shop):

        async def parked() -> bool:
            return (await run.info()).state is State.PENDING and (await run.info()).attempts == 1

        await eventually(parked, what="it is parked")
    await Operator(store).retry_now(run.run_id, **MENDED)
    changed = Saga("fulfil", Order)
    changed.step(name="another", no_compensation=True)(lambda order, _: order)
    async with working(store, shop, changed):
        with pytest.raises(RunHeld):
            await run.result(10)
    answer = await run.stop(**WHY)
    assert (answer.outcome, answer.state) == (StopOutcome.WILL_BE_UNDONE, State.BROKEN)
    assert "as soon as it can be executed again" in answer.next
    await Operator(store).resume(run.run_id, **MENDED)
    async with working(store, shop):
        with pytest.raises(RunRolledBack):
            await run.result(10)
    assert (await run.info()).state is State.CANCELLED


# -------------------------------------------------------------------- deaf


async def test_a_step_that_swallows_its_cancellation_delays_a_stop_by_its_lease_and_no_longer(
    client: Client, store: MongoStore, shop: Shop
) -> None:
    deaf = Saga("deaf", Order)

    @deaf.step(stop_grace=0, timeout=None)
    async def reserve(order: Order, step: Step[Shop]) -> Order:
        step.resources.inside.set()
        while not step.resources.go_on.is_set():
            try:
                await step.resources.go_on.wait()
            except asyncio.CancelledError:
                step.resources.done.append("swallowed")
        step.resources.done.append("late")
        return order

    @reserve.compensation
    async def release(order: Order, step: Step[Shop]) -> None:
        step.resources.done.append(f"release {step.fate}")

    async with working(store, shop, deaf, lease=timedelta(seconds=1), poll=timedelta(milliseconds=50)):
        run = await client.start(deaf, Order())
        await shop.inside.wait()
        asked_at = asyncio.get_running_loop().time()
        try:
            assert (await run.stop(**WHY)).outcome is StopOutcome.WILL_BE_UNDONE
            with pytest.raises(RunRolledBack):
                await run.result(20)
            took = asyncio.get_running_loop().time() - asked_at
            told = await kinds(client, run.run_id)
        finally:
            shop.go_on.set()  # else it would swallow the end of the loop too

        async def ended() -> bool:
            return "late" in shop.done

        await eventually(ended, what="the step returns at last")
    assert took > 1.0, "nobody may go on beside it while the lease lasts"
    assert [one for one in shop.done if one != "swallowed"] == ["release in_doubt", "late"]
    assert "swallowed" in shop.done
    assert told == ["taken_over", "rollback_begun", "compensation_succeeded"]
    assert await kinds(client, run.run_id) == told, "what came late was written"
    assert (await run.info()).state is State.CANCELLED


# -------------------------------------------------------------------- in threads


class Threads(Shop):
    """A shop whose steps are plain functions in threads."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.let_go = threading.Event()
        self.undoing = threading.Event()
        self.let_undo = threading.Event()


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads()
    yield threads
    for event in (threads.let_go, threads.let_undo):  # whatever became of the test, no thread outlives it
        event.set()


blocking = Saga("blocking", Order)


@blocking.step(stop_grace=0.05, timeout=None)
def reserve(order: Order, step: Step[Threads]) -> Order:
    step.resources.entered.set()
    if order.does == "listens":
        while not step.stop_asked:
            step.resources.let_go.wait(0.001)
    else:
        step.resources.let_go.wait(30)
    step.resources.done.append("reserve")
    return order


@reserve.compensation
def release(order: Order, step: Step[Threads]) -> None:
    step.resources.undoing.set()
    step.resources.let_undo.wait(30)
    step.resources.done.append(f"release {step.fate}")


async def set_in_thread(event: threading.Event) -> None:
    async def look() -> bool:
        return event.is_set()

    await eventually(look, what="the thread has come so far")


async def test_a_plain_function_that_sees_the_stop_finishes_and_is_compensated_as_known(
    client: Client, store: MongoStore, threads: Threads
) -> None:
    threads.let_undo.set()
    async with working(store, threads, blocking):
        run = await client.start(blocking, Order(does="listens"))
        await set_in_thread(threads.entered)
        assert (await run.stop(**WHY)).outcome is StopOutcome.WILL_BE_UNDONE
        with pytest.raises(RunRolledBack):
            await run.result(10)
    assert threads.done == ["reserve", f"release {Fate.KNOWN}"]
    assert await kinds(client, run.run_id) == ["step_succeeded", "rollback_begun", "compensation_succeeded"]


async def test_a_plain_function_that_does_not_end_is_left_behind_in_doubt_and_its_late_result_is_not_written(
    client: Client, store: MongoStore, threads: Threads
) -> None:
    threads.let_undo.set()
    async with working(store, threads, blocking):
        run = await client.start(blocking, Order())
        await set_in_thread(threads.entered)
        assert (await run.stop(**WHY)).outcome is StopOutcome.WILL_BE_UNDONE
        with pytest.raises(RunRolledBack):
            await run.result(10)
        told = await kinds(client, run.run_id)
        threads.let_go.set()

        async def ended() -> bool:
            return "reserve" in threads.done

        await eventually(ended, what="the thread ends at last")
    assert threads.done == [f"release {Fate.IN_DOUBT}", "reserve"]
    assert told == ["interrupted", "rollback_begun", "compensation_succeeded"]
    assert await kinds(client, run.run_id) == told


async def test_a_compensation_in_a_thread_is_finished_whoever_stops_or_drains_meanwhile(
    client: Client, store: MongoStore, threads: Threads
) -> None:
    async with working(store, threads, blocking) as worker:
        run = await client.start(blocking, Order(does="listens"))
        await set_in_thread(threads.entered)
        first = await run.stop(**WHY)
        await set_in_thread(threads.undoing)
        second = await run.stop(by="bob@shop", reason="me too")
        worker.stop()
        worker.stop()
        assert (second.outcome, second.asked_at) == (first.outcome, first.asked_at)
        threads.let_undo.set()
    async with working(store, threads, blocking):
        with pytest.raises(RunRolledBack):
            await run.result(10)
    assert threads.done == ["reserve", f"release {Fate.KNOWN}"]
    assert (await run.info()).state is State.CANCELLED


# -------------------------------------------------------------------- several at once


@pytest.mark.parametrize("does", ["ok, not begun", "reserve is turned away", "charge waits", "release waits"])
async def test_of_many_who_press_stop_at_once_one_is_recorded_and_all_are_told_the_same(
    client: Client, store: MongoStore, shop: Shop, does: str
) -> None:
    async with working(store, shop):
        delay = timedelta(hours=1) if does == "ok, not begun" else timedelta(0)
        run = await client.start(fulfil, Order(does=does), delay=delay)
        if does == "reserve is turned away":

            async def parked() -> bool:
                return (await run.info()).attempts == 1 and (await run.info()).state is State.PENDING

            await eventually(parked, what="it is parked")
        elif not delay:
            await shop.inside.wait()
        answers = await asyncio.gather(*(run.stop(by=f"person {n}", reason="why") for n in range(8)))
        assert sum(answer.first for answer in answers) == 1
        (recorded,) = (answer.by for answer in answers if answer.first)
        assert {(answer.outcome, answer.by, answer.asked_at) for answer in answers} == {
            (answers[0].outcome, recorded, answers[0].asked_at)
        }
        shop.go_on.set()

        async def ended() -> bool:
            return (await run.info()).settled_at is not None

        await eventually(ended, what="it settles")
