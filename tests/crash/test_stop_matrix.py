"""Stop, at every point and against every write; deadlines; and whatever happens to a rollback that has begun.

For every shape of saga and every trip to the server and every effect: press Stop before it and after it, and let the
worker hear of it, not hear of it, or die of something else. Then press it while the worker's own write is under way, so
that either may come first. Then let the worker die at each point after a stop; and let everything that may happen to a
rollback happen at each of its points. The oracle compares what was answered, the run, its journal and what was done.

`SAGAS_SEED` replays what is drawn by chance; it is printed.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final, TypeVar

import pytest

from sagas.decide import Activity
from sagas.lease import LeaseLapsed
from sagas.stopping import StopOutcome
from sagas_store.entries import Cause, Kind
from sagas_store.records import RunRecord
from sagas_store.states import Decision, State
from tests.crash.matrix import SHAPES, all_points, at_once, report, started, two, undisturbed
from tests.support.changing import replace
from tests.support.crashing import Part, Plan, Process, Server, Shape, World, plans
from tests.support.oracle import UNDONE

T = TypeVar("T")

pytestmark = pytest.mark.slow

GATE: Final = "runs update: pass the gate"

STOPPED: Final = (
    *SHAPES,
    # A step in hand that is broken off at once; elsewhere it has its grace, and ends before that is over.
    Shape(
        "broken-off-at-once",
        two(reserve=Part(name="reserve", does=("hang", "ok"), grace=timedelta(0))),
        State.COMPLETED,
    ),
)


ALLOWED: Final = {
    Decision.CANCELLED: {State.CANCELLED},
    # Undone for whatever came first; a compensation that fails for good leaves it to a person.
    Decision.WILL_BE_UNDONE: {*UNDONE, State.COMPENSATION_FAILED},
    # Forward, to its end or to where it is stuck; backward only where the pivot itself failed.
    Decision.REFUSED: {
        *(State.COMPLETED, State.FORWARD_INCOMPLETE, State.IN_DOUBT),
        *(State.COMPENSATED, State.COMPENSATION_FAILED),
    },
}


def ended_as_answered(run: RunRecord) -> str:
    """Where it ended, which must follow from what was decided of the stop; the oracle compares the effects."""
    if run.stop is None:
        return f"settled before: {run.state}"
    assert run.state in ALLOWED[run.stop.decision], f"answered {run.stop.decision}, ended as {run.state}"
    return f"{run.stop.decision}: {run.state}"


def told(ended: list[str]) -> None:
    for how in sorted(set(ended)):
        print(f"{ended.count(how):5}  {how}")


# ------------------------------------------------------------------------------------ at every point


async def is_stopped(server: Server, shape: Shape, plan: Plan) -> str:
    """Press Stop at that point: what was answered then is how it ends, whoever brings it there."""
    async with started(server, shape, plan) as world:
        first = world.process(plan)
        await first.work()
        assert first.reached, "the point was never reached"
        await world.finish()
        return ended_as_answered(await world.check(ends=False))


@pytest.mark.parametrize("fate", ["stop, heard of", "stop", "stop, die"])
async def test_a_stop_pressed_at_any_point_ends_as_it_was_answered(server: Server, fate: str) -> None:
    points = await all_points(server, STOPPED)
    todo = [(shape, plan) for shape in STOPPED for plan in plans(len(points[shape]), fate)]
    ended = await at_once(is_stopped(server, shape, plan) for shape, plan in todo)
    report(f"points to press stop at ({fate})", {shape: 2 * len(points[shape]) for shape in STOPPED})
    told(ended)
    decided = {how.partition(":")[0] for how in ended}
    assert decided == {"cancelled", "will_be_undone", "refused", "settled before"}


# ------------------------------------------------------------------------------------ against every write


class Presser:
    """Presses Stop beside one of the worker's writes, each after some turns of the loop, so that either may come first.

    Only where the two were under way at the same time does the race count.
    """

    def __init__(self, world: World, process: Process, at: int, rng: random.Random) -> None:
        self.world = world
        self.process = process
        self.at = at
        self.turns = rng.randrange(25), rng.randrange(25)
        self.heard = rng.random() < 0.5
        self.dies = rng.random() < 0.2
        self.what = ""
        self.pressing: asyncio.Task[None] | None = None
        self.under_way: list[tuple[float, float]] = []
        point = process.point

        async def point_and_press(name: str, call: Callable[[], Awaitable[T]]) -> T:
            if len(process.trail) + 1 != at or self.pressing is not None:
                return await point(name, call)
            self.what = name
            self.pressing = asyncio.create_task(self._press())
            done = await point(name, lambda: self._timed(self.turns[0], call))
            if self.dies:
                await process._suffer("die")
            return done

        process.point = point_and_press  # type: ignore[method-assign]

    async def _timed(self, turns: int, call: Callable[[], Awaitable[T]]) -> T:
        for _ in range(turns):
            await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        done = await call()
        self.under_way.append((begun, loop.time()))
        return done

    async def _press(self) -> None:
        await self._timed(self.turns[1], self.world.press_stop)
        if self.heard and self.process.attempt is not None and not self.process.dead:
            self.process.attempt.notice_stop()

    @property
    def together(self) -> bool:
        """Whether both were under way at once."""
        return max(begun for begun, _ in self.under_way) < min(ended for _, ended in self.under_way)


async def is_raced(server: Server, shape: Shape, at: int, seed: int) -> tuple[str, StopOutcome, bool]:
    """Press Stop beside that point: what it was, what was answered, and whether they were under way together."""
    rng = random.Random(seed)
    async with started(server, shape, f"stop beside point {at}, SAGAS_SEED of this one {seed}") as world:
        first = world.process()
        presser = Presser(world, first, at, rng)
        await first.work()
        assert presser.pressing is not None, "the point was never reached"
        await presser.pressing
        await world.finish()
        if rng.random() < 0.5:
            await world.press_stop()  # and hears what the first one was told, or that it has ended
        ended_as_answered(await world.check(ends=False))
    return presser.what, world.answers[0].outcome, presser.together


async def test_a_stop_raced_against_every_write_of_the_worker_is_answered_truthfully(server: Server, seed: int) -> None:
    print(f"SAGAS_SEED={seed}")
    rng = random.Random(seed)
    points = await all_points(server, STOPPED)
    everywhere = [(shape, at) for shape in STOPPED for at in range(1, len(points[shape]) + 1)]
    # The writes that a stop may beat or be beaten by are a few of the many; they get half of the races.
    close = [
        (shape, at)
        for shape, at in everywhere
        if points[shape][at - 1] in ("runs update many", GATE, "runs update: settle")
    ]
    todo = everywhere + rng.choices(everywhere, k=250) + rng.choices(close, k=600)
    raced = await at_once(is_raced(server, shape, at, rng.getrandbits(32)) for shape, at in todo)
    met = Counter((what, outcome) for what, outcome, together in raced if together)
    for (what, outcome), times in sorted(met.items()):
        print(f"{times:5}  {what}: {outcome}")
    print(f"{len(raced):5}  races, {met.total()} of them with both under way at once")
    assert met.total() > len(raced) / 2
    answers = {outcome for what, outcome, together in raced}
    assert answers == set(StopOutcome)
    for what, stop_first, write_first in (
        ("runs update many", StopOutcome.CANCELLED, StopOutcome.WILL_BE_UNDONE),  # the claim
        (GATE, StopOutcome.WILL_BE_UNDONE, StopOutcome.REFUSED),
        ("runs update: settle", StopOutcome.WILL_BE_UNDONE, StopOutcome.ALREADY_SETTLED),
    ):
        assert met[what, stop_first] > 0, f"no stop came before a worker's '{what}'"
        assert met[what, write_first] > 0, f"no worker's '{what}' came before a stop"


# ------------------------------------------------------------------------------------ dying after a stop


async def undisturbed_after(server: Server, shape: Shape, *first: Plan) -> list[str]:
    """The points of a run to which just this happens; checked like any other."""
    async with started(server, shape, *first) as world:
        process = world.process(*first)
        await process.work()
        await world.check(ends=False)
    return process.trail


async def is_stopped_and_dies(server: Server, shape: Shape, stop: Plan, death: Plan, expected: list[str]) -> str:
    """The next worker decides by the journal: before the pivot everything is undone, after it nothing is."""
    async with started(server, shape, stop, "then", death) as world:
        first = world.process(stop, death)
        await first.work()
        assert first.dead, "the point of death was never reached"
        assert first.trail[: death.at] == expected[: death.at], "it came by other points than the one that did not die"
        calls = len(world.ledger)
        await world.finish()
        run = await world.check(ends=False)
        if run.stop is not None and run.stop.decision is not Decision.REFUSED:
            forward = [call for call in world.ledger[calls:] if call.activity is not Activity.COMPENSATION]
            assert not forward, "the next worker knew of the stop, and began a step all the same"
        return ended_as_answered(run)


async def test_whoever_dies_at_any_point_after_a_stop_leaves_a_run_that_ends_as_was_answered(
    server: Server, seed: int
) -> None:
    print(f"SAGAS_SEED={seed}")
    rng = random.Random(seed)
    points = await all_points(server, STOPPED)
    stops = [
        (shape, plan)
        for shape in STOPPED
        for plan in rng.sample(list(plans(len(points[shape]), rng.choice(["stop", "stop, heard of"]))), 2)
    ]
    trails = await at_once(undisturbed_after(server, shape, stop) for shape, stop in stops)
    todo = [
        (shape, stop, death, trail)
        for (shape, stop), trail in zip(stops, trails, strict=True)
        for death in plans(len(trail), "die")
        if (death.at, death.after) > (stop.at, stop.after)
    ]
    ended = await at_once(is_stopped_and_dies(server, *one) for one in todo)
    told(ended)
    print(f"{len(todo):5}  points to die at after {len(stops)} stops")
    assert len(todo) > 800


# ------------------------------------------------------------------------------------ within a rollback


UNDOING: Final = tuple(shape for shape in STOPPED if any(part.undo is not None for part in shape.parts))


async def turned(server: Server, shape: Shape) -> tuple[Shape, tuple[Plan, ...], list[str], Counter[str]] | None:
    """How to make this shape roll back as late as may be: by itself, or by a stop just before its gate or its end.

    Returns what has to happen, the points that it then comes by, and how often each compensation was called.
    """
    trail = await undisturbed(server, shape)
    first: tuple[Plan, ...] = ()
    if "journal insert rollback_begun" not in trail:
        last = trail.index(GATE) if GATE in trail else len(trail) - 1
        first = (Plan(last + 1, after=False, fate="stop"),)
    async with started(server, shape, *first) as world:
        process = world.process(*first)
        await process.work()
        await world.check(ends=False)
        if "journal insert rollback_begun" not in process.trail:
            return None
        return shape, first, process.trail, undone(world)


def undone(world: World) -> Counter[str]:
    """How often each compensation was called."""
    return Counter(call.step for call in world.ledger if call.activity is Activity.COMPENSATION)


async def is_met_in_its_rollback(
    server: Server, shape: Shape, first: tuple[Plan, ...], fate: Plan, calls: Counter[str]
) -> None:
    """None is skipped, none is journaled twice, and, unless the worker is gone, none is torn and called again."""
    async with started(server, shape, *first, "then", fate) as world:
        process = world.process(*first, fate)
        try:
            await process.work()
        except LeaseLapsed:
            assert fate.fate == "lose"
        assert process.reached, "the point was never reached"
        await world.finish()
        await world.check(ends=False)
        journal = await world.journal()
        done = Counter(
            entry.step
            for entry in journal
            if entry.kind in (Kind.COMPENSATION_SUCCEEDED, Kind.COMPENSATION_FAILED) and entry.step
        )
        assert done == Counter(calls.keys()), f"journaled as undone: {done}; to be undone: {set(calls)}"
        if fate.fate not in ("die", "lose"):
            assert undone(world) == calls, "a compensation was torn, or called again"


@pytest.mark.parametrize("fate", ["stop", "stop, heard of", "drain", "interrupt", "lose", "die"])
async def test_whatever_happens_at_any_point_of_a_rollback_tears_skips_and_repeats_no_compensation(
    server: Server, fate: str
) -> None:
    found = [one for one in await at_once(turned(server, shape) for shape in UNDOING) if one is not None]
    todo = [
        (shape, first, plan, calls)
        for shape, first, trail, calls in found
        for plan in plans(len(trail), fate)
        if plan.at > trail.index("journal insert rollback_begun")
    ]
    await at_once(is_met_in_its_rollback(server, *one) for one in todo)
    print(f"{len(todo):5}  points of {len(found)} rollbacks to meet '{fate}' at")
    assert len(todo) > 250


# ------------------------------------------------------------------------------------ deadlines


TIMED: Final = tuple(replace(shape, deadline=True) for shape in STOPPED)


async def turned_by_its_deadline(world: World) -> str:
    """Where it ended, and whether by its deadline: never once its gate was passed, and else as if it had none."""
    run = await world.check(ends=False)
    begun = next((entry for entry in await world.journal() if entry.kind is Kind.ROLLBACK_BEGUN), None)
    by_time = begun is not None and begun.cause is Cause.DEADLINE
    assert not (by_time and run.gate_passed_at is not None), "it had passed its gate"
    assert by_time or run.state is world.shape.ends, f"it ended as {run.state}, and not because of its deadline"
    return f"{'turned by its deadline' if by_time else 'went its way'}: {run.state}"


async def is_timed_out(server: Server, shape: Shape, plan: Plan) -> str:
    async with started(server, shape, plan) as world:
        first = world.process(plan)
        await first.work()
        assert first.reached, "the point was never reached"
        await world.finish()
        return await turned_by_its_deadline(world)


async def test_a_deadline_that_passes_at_any_point_turns_the_run_before_its_gate_and_never_after(
    server: Server,
) -> None:
    points = await all_points(server, TIMED)
    fates = itertools.cycle(("deadline", "deadline, heard of", "deadline, die"))  # not even: before and after get all
    todo = [
        (shape, replace(plan, fate=next(fates))) for shape in TIMED for plan in plans(len(points[shape]), "deadline")
    ]
    ended = await at_once(is_timed_out(server, shape, plan) for shape, plan in todo)
    told(ended)
    assert {how for how in ended if "timed_out" in how} == {"turned by its deadline: timed_out"}
    assert "went its way: completed" in ended


async def is_timed_out_and_dies(server: Server, shape: Shape, over: Plan, death: Plan, expected: list[str]) -> str:
    async with started(server, shape, over, "then", death) as world:
        first = world.process(over, death)
        await first.work()
        assert first.dead, "the point of death was never reached"
        assert first.trail[: death.at] == expected[: death.at], "it came by other points than the one that did not die"
        await world.finish()
        return await turned_by_its_deadline(world)


async def test_whoever_dies_at_any_point_after_a_deadline_leaves_a_run_that_the_next_one_decides_by_its_journal(
    server: Server, seed: int
) -> None:
    print(f"SAGAS_SEED={seed}")
    rng = random.Random(seed)
    points = await all_points(server, TIMED)
    over = [(shape, rng.choice(list(plans(len(points[shape]), "deadline")))) for shape in TIMED]
    trails = await at_once(undisturbed_after(server, shape, plan) for shape, plan in over)
    todo = [
        (shape, plan, death, trail)
        for (shape, plan), trail in zip(over, trails, strict=True)
        for death in plans(len(trail), "die")
        if (death.at, death.after) > (plan.at, plan.after)
    ]
    told(await at_once(is_timed_out_and_dies(server, *one) for one in todo))
    print(f"{len(todo):5}  points to die at after {len(over)} deadlines")
    assert len(todo) > 300
