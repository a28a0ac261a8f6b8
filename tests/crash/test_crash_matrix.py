"""For every shape of saga and every trip to the server and every effect: die before it, and after it.

Another worker finishes, and the oracle checks the invariants. Then the same with a worker that is not dead but frozen
and thawed once its run has been finished by somebody else, with a drain that breaks off at every point, and with two
deaths in a row. The points are counted in a run to which nothing happens; a planned point that is not reached fails.

`SAGAS_SEED` replays the choice of double crashes; it is printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from datetime import timedelta

import pytest

from sagas.errors import FenceLost, StoreUnavailable
from sagas.lease import LeaseLapsed
from sagas_store.states import State
from tests.crash.matrix import SHAPES, all_points, at_once, report, started
from tests.support.changing import replace
from tests.support.crashing import Plan, Process, Server, Shape, World, plans
from tests.support.ticks import stretched

# ------------------------------------------------------------------------------------ dying


async def dies(server: Server, shape: Shape, plan: Plan, expected: list[str]) -> int:
    """Die there and let another worker finish; returns how many points that one came by."""
    async with started(server, shape, plan) as world:
        first = world.process(plan)
        await first.work()
        assert first.dead, "the point was never reached"
        assert first.trail[: plan.at] == expected[: plan.at], "it came by other points than the run without a crash"
        second = await world.finish()
        await world.check()
    return len(second.trail)


SEALED = pytest.mark.parametrize("server", ["sealed"], indirect=True)
"""With more trips to the server, so with more points than without."""


@pytest.fixture
def ticks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As commits leave, and with every batch waiting for others to join it."""
    if request.param:
        stretched(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "ticks"),
    [("unsealed", False), ("sealed", True)],
    ids=["as it is", "sealed, ticks stretched"],
    indirect=True,
)
@pytest.mark.usefixtures("ticks")
async def test_whatever_dies_at_whatever_point_another_worker_finishes_the_run(server: Server) -> None:
    points = await all_points(server)
    todo = [(shape, plan) for shape in SHAPES for plan in plans(len(points[shape]), "die")]
    await at_once(dies(server, shape, plan, points[shape]) for shape, plan in todo)
    report("points to die at", {shape: 2 * len(points[shape]) for shape in SHAPES})
    assert len(todo) > 500


async def dies_twice(server: Server, shape: Shape, first: Plan, second: Plan) -> None:
    async with started(server, shape, first, "then", second) as world:
        await world.process(first).work()
        heir = await world.finish(second)
        assert heir.dead, "the second point was never reached"
        await world.finish()
        await world.check()


@pytest.mark.slow
@SEALED
async def test_two_deaths_in_a_row_do_no_more_harm_than_one(server: Server, seed: int) -> None:
    print(f"SAGAS_SEED={seed}")
    rng = random.Random(seed)
    points = await all_points(server)
    chosen = [
        (shape, Plan(rng.randint(1, len(points[shape])), rng.random() < 0.5)) for shape in rng.choices(SHAPES, k=200)
    ]
    chosen = list(dict.fromkeys(chosen))
    heirs = await at_once(dies(server, shape, plan, points[shape]) for shape, plan in chosen)
    pairs = [
        (shape, plan, Plan(rng.randint(1, count), rng.random() < 0.5))
        for (shape, plan), count in zip(chosen, heirs, strict=True)
    ]
    await at_once(dies_twice(server, shape, first, second) for shape, first, second in pairs)
    print(f"{len(pairs):5}  pairs of points to die at")


# ------------------------------------------------------------------------------------ frozen and thawed


async def freezes(server: Server, shape: Shape, plan: Plan, *, clock_stands: bool, midway: bool) -> str:
    """Freeze there, let another worker take over, thaw: nothing of the other's may change. Returns how it ended.

    The other has finished the run by then, or (`midway`) has just announced its takeover and goes on afterwards.
    """
    async with started(server, shape, plan) as world:
        frozen = world.process(plan)
        async with frozen.working_until_suspended() as working:
            assert frozen.reached, "the point was never reached"
            await world.lapse()
            if _holds_an_entry(frozen.trail, plan):
                return await kept_out(world, frozen, working)
            # Its entry comes after the claim's three trips, the journal's, and two to the keys.
            announced = 5 if server.wrapper is None else 7
            other = world.process(Plan(announced, after=True, fate="suspend") if midway else None)
            async with other.working_until_suspended() as others:
                before, calls = (await world.run(), await world.journal()), len(world.ledger)
                frozen.late_s = 0.0 if clock_stands else 3600.0
                frozen.resumed.set()
                try:
                    await working
                except (FenceLost, LeaseLapsed):
                    ended = "refused"
                else:
                    ended = "had nothing left to write"
                after = await world.run(), await world.journal()
                assert after == before, f"the thawed worker ({ended}) changed something"
                late = world.ledger[calls:]
                assert midway or not any(call.applied for call in late), "an effect came after the end"
                other.resumed.set()
                await others
        await world.finish()
        await world.check(suspended=True)
        # By its own clock no time may have passed, so it may go on up to its next write: the participant honours keys.
        # And a transaction that the server aborted runs again before anybody looks at the clock.
        transactional = {part.name for part in shape.parts if part.transactional}
        assert len(late) <= (1 if clock_stands or {call.step for call in late} <= transactional else 0), late
        return ended


async def kept_out(world: World, frozen: Process, working: asyncio.Task[State | None]) -> str:
    """It holds an entry in an open transaction: nobody writes one with that number until it commits, or the server
    aborts it. Once it goes on, its entry counts."""
    with pytest.raises(StoreUnavailable):
        await world.process(patience=timedelta(seconds=0.3)).work()
    frozen.resumed.set()
    with contextlib.suppress(FenceLost, LeaseLapsed):
        await working
    await world.finish()
    await world.check(suspended=True)
    return "kept others out"


def _holds_an_entry(trail: list[str], plan: Plan) -> bool:
    """Frozen between writing an entry in a transaction and committing it."""
    last = trail[plan.at - 1]
    return ("in a transaction" in last and plan.after) or (last == "commit" and not plan.after)


@pytest.mark.slow
@SEALED
async def test_a_frozen_worker_that_goes_on_after_its_run_was_taken_over_changes_nothing(server: Server) -> None:
    points = await all_points(server)
    # Frozen after one point or before the next is the same to everybody else, so one of the two is enough.
    todo = [(shape, plan) for shape in SHAPES for plan in plans(len(points[shape]), "suspend") if plan.after]
    # A third of them notice by their own clock that time has passed; the others are the harder case.
    ended = await at_once(
        freezes(server, shape, plan, clock_stands=count % 3 != 0, midway=midway)
        for midway in (False, True)
        for count, (shape, plan) in enumerate(todo)
    )
    report("points to freeze at", {shape: 2 * len(points[shape]) for shape in SHAPES})
    for how in sorted(set(ended)):
        print(f"{ended.count(how):5}  {how}")
    assert ended.count("refused") > len(ended) / 2
    assert ended.count("kept others out") > 0


# ------------------------------------------------------------------------------------ told to go


async def is_told(server: Server, shape: Shape, plan: Plan) -> None:
    """Break off, drain or lose the lease at that point; what is handed back is pending at once, and finishes."""
    async with started(server, shape, plan) as world:
        first = world.process(plan)
        try:
            await first.work()
        except LeaseLapsed:
            assert plan.fate == "lose"
        assert first.reached, "the point was never reached"
        run = await world.run()
        assert plan.fate == "lose" or run.state is not State.RUNNING, "it went and left the run to nobody"
        await world.finish()
        await world.check()


@pytest.mark.slow
async def test_a_worker_told_to_go_at_any_point_leaves_a_run_that_another_finishes(server: Server) -> None:
    points = await all_points(server)
    fates = itertools.cycle(("interrupt", "drain", "lose", "interrupt", "lose"))  # not even: before and after get all
    todo = [(shape, replace(plan, fate=next(fates))) for shape in SHAPES for plan in plans(len(points[shape]), "drain")]
    await at_once(is_told(server, shape, plan) for shape, plan in todo)
    report("points to be told to go at", {shape: 2 * len(points[shape]) for shape in SHAPES})
