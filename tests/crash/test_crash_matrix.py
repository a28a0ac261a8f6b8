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
import os
import random
import re
import secrets
import traceback
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Iterable
from datetime import timedelta
from typing import Any, Final

import pytest

from sagas import Keyring, LocalKeyWrapper
from sagas.errors import FenceLost, StoreUnavailable
from sagas.lease import LeaseLapsed
from sagas_store import MongoStore
from sagas_store.states import State
from tests.support.changing import replace
from tests.support.crashing import Part, Plan, Process, Server, Shape, World, plans

AT_ONCE: Final = 12
"""Worlds at a time. Each has its own run, saga and participants; only the server is shared."""

LATER: Final = timedelta(minutes=30)


def abc(**change: Part) -> tuple[Part, ...]:
    """Reserve, pack, charge (the pivot), ship, mail; with some of them replaced."""
    parts = {
        "reserve": Part(name="reserve"),
        "pack": Part(name="pack"),
        "charge": Part(name="charge", pivot=True),
        "ship": Part(name="ship"),
        "mail": Part(name="mail"),
    }
    return tuple((parts | change).values())


def two(**change: Part) -> tuple[Part, ...]:
    """Reserve and charge (the pivot)."""
    return tuple(({"reserve": Part(name="reserve"), "charge": Part(name="charge", pivot=True)} | change).values())


SHAPES: Final = (
    Shape("all-succeed", abc(), State.COMPLETED),
    Shape("one-step", (Part(name="reserve"),), State.COMPLETED),
    Shape("plain-function", (Part(name="count", undo=None), Part(name="mail", undo=None)), State.COMPLETED),
    Shape("no-pivot", (Part(name="reserve"), Part(name="pack")), State.COMPLETED),
    # A definite failure at each step.
    Shape("first-refuses", abc(reserve=Part(name="reserve", does=("refuse",))), State.COMPENSATED),
    Shape("second-refuses", abc(pack=Part(name="pack", does=("refuse",))), State.COMPENSATED),
    Shape("pivot-refuses", abc(charge=Part(name="charge", pivot=True, does=("refuse",))), State.COMPENSATED),
    Shape("refused-after-pivot", abc(ship=Part(name="ship", does=("refuse",))), State.FORWARD_INCOMPLETE),
    Shape(
        "plain-function-fails",
        (Part(name="count", undo=None), Part(name="mail", undo=None, does=("refuse",))),
        State.FAILED,
    ),
    Shape(
        "uncompensated-between",
        abc(
            pack=Part(name="pack", undo=None),
            charge=Part(name="charge", pivot=True, does=("refuse",)),
        ),
        State.COMPENSATED,
    ),
    # The pivot: failure, timeout, lost worker; with and without a probe.
    Shape(
        "pivot-silent-after-effect",
        two(charge=Part(name="charge", pivot=True, does=("hang", "ok"))),
        State.COMPLETED,
    ),
    Shape(
        "pivot-silent-for-ever",
        two(charge=Part(name="charge", pivot=True, does=("lost_after",), tries=2)),
        State.IN_DOUBT,
    ),
    Shape(
        "pivot-probed-happened",
        two(charge=Part(name="charge", pivot=True, does=("hang", "ok"), probe="truth")),
        State.COMPLETED,
    ),
    Shape(
        "pivot-probed-absent",
        two(charge=Part(name="charge", pivot=True, does=("lost", "ok"), probe="truth")),
        State.COMPLETED,
    ),
    Shape(
        "pivot-spent-probed-absent",
        two(charge=Part(name="charge", pivot=True, does=("lost",), tries=2, probe="truth")),
        State.COMPENSATED,
    ),
    Shape(
        "pivot-probe-never-answers",
        two(charge=Part(name="charge", pivot=True, does=("lost_after",), tries=2, probe="lost")),
        State.IN_DOUBT,
    ),
    Shape(
        "pivot-answers-nonsense",
        two(charge=Part(name="charge", pivot=True, does=("wrong",))),
        State.IN_DOUBT,
    ),
    # After the pivot.
    Shape("retried-after-pivot", abc(ship=Part(name="ship", does=("lost_after", "again", "ok"))), State.COMPLETED),
    Shape("parked-after-pivot", abc(ship=Part(name="ship", does=("again", "ok"), wait=LATER)), State.COMPLETED),
    Shape("spent-after-pivot", abc(ship=Part(name="ship", does=("lost_after",), tries=2)), State.FORWARD_INCOMPLETE),
    # Compensations that fail.
    Shape(
        "compensation-fails",
        abc(
            reserve=Part(name="reserve"),
            pack=Part(name="pack", undo=("refuse",)),
            charge=Part(name="charge", pivot=True, does=("refuse",)),
        ),
        State.COMPENSATION_FAILED,
    ),
    Shape(
        "both-compensations-fail",
        abc(
            reserve=Part(name="reserve", undo=("refuse",)),
            pack=Part(name="pack", undo=("lost_after",), tries=2),
            charge=Part(name="charge", pivot=True, does=("refuse",)),
        ),
        State.COMPENSATION_FAILED,
    ),
    Shape(
        "compensation-retried",
        two(
            reserve=Part(name="reserve", undo=("hang", "again", "ok"), tries=4),
            charge=Part(name="charge", pivot=True, does=("refuse",)),
        ),
        State.COMPENSATED,
    ),
    Shape(
        "compensation-parked",
        abc(
            reserve=Part(name="reserve", undo=("again", "ok"), wait=LATER),
            charge=Part(name="charge", pivot=True, does=("refuse",)),
        ),
        State.COMPENSATED,
    ),
    # Retries.
    Shape("retried", two(reserve=Part(name="reserve", does=("again", "ok"))), State.COMPLETED),
    Shape("parked", two(reserve=Part(name="reserve", does=("again", "again", "ok"), wait=LATER)), State.COMPLETED),
    Shape("tries-spent", two(reserve=Part(name="reserve", does=("again",))), State.COMPENSATED),
    Shape(
        "pivot-parked", two(charge=Part(name="charge", pivot=True, does=("again", "ok"), wait=LATER)), State.COMPLETED
    ),
    # In doubt before the pivot.
    Shape("in-doubt-then-ok", two(reserve=Part(name="reserve", does=("hang", "ok"))), State.COMPLETED),
    Shape("in-doubt-to-the-end", abc(pack=Part(name="pack", does=("lost_after",), tries=2)), State.COMPENSATED),
    Shape("in-doubt-then-refused", abc(pack=Part(name="pack", does=("lost_after", "refuse"))), State.COMPENSATED),
    Shape(
        "in-doubt-probed-happened",
        two(reserve=Part(name="reserve", does=("hang", "ok"), probe="truth")),
        State.COMPLETED,
    ),
    Shape(
        "in-doubt-probed-absent", two(reserve=Part(name="reserve", does=("lost", "ok"), probe="truth")), State.COMPLETED
    ),
    Shape(
        "in-doubt-probe-never-answers",
        two(reserve=Part(name="reserve", does=("lost_after", "ok"), probe="lost", tries=2)),
        State.COMPLETED,
    ),
    Shape("answers-nonsense", abc(pack=Part(name="pack", does=("wrong",))), State.COMPENSATED),
    # Transactional.
    Shape(
        "transactional-step",
        two(reserve=Part(name="reserve", transactional=True)),
        State.COMPLETED,
    ),
    Shape(
        "transactional-pivot",
        abc(charge=Part(name="charge", pivot=True, transactional=True)),
        State.COMPLETED,
    ),
    Shape(
        "transactional-step-undone",
        two(
            reserve=Part(name="reserve", transactional=True),
            charge=Part(name="charge", pivot=True, does=("refuse",)),
        ),
        State.COMPENSATED,
    ),
    Shape(
        "transactional-pivot-fails-late",
        two(charge=Part(name="charge", pivot=True, transactional=True, does=("fail_after",))),
        State.COMPENSATED,
    ),
    Shape(
        "transactional-pivot-times-out",
        two(charge=Part(name="charge", pivot=True, transactional=True, does=("hang", "ok"))),
        State.COMPLETED,
    ),
)


@pytest.fixture(params=["unsealed", "sealed"])
async def server(request: pytest.FixtureRequest, database: Any, store: MongoStore) -> AsyncIterator[Server]:
    """Sealed, each process has a keyring of its own, and its trips to the keys are points like all others."""
    server = Server(database, store)
    if request.param == "sealed":
        wrapper = LocalKeyWrapper({"test": bytes(32)})
        sealed = MongoStore(database, keyring=Keyring(wrapper))
        await sealed.ready()
        server = Server(database, sealed, wrapper=wrapper)
    await server.ready()
    yield server
    server.close()


@pytest.fixture(scope="module")
def seed() -> int:
    """Printed, so that a failure can be replayed with SAGAS_SEED."""
    return int(os.environ.get("SAGAS_SEED") or secrets.randbelow(2**32))


@contextlib.asynccontextmanager
async def started(server: Server, shape: Shape, *told: object) -> AsyncIterator[World]:
    """A world with its run started; what goes wrong in it is told with its name."""
    world = World(server, shape)
    try:
        await world.start()
        yield world
    except Exception as error:
        error.add_note(f"in {shape}: {' '.join(map(str, told))}")
        error.add_note("\n".join(f"{one.name}: {list(enumerate(one.trail, 1))}" for one in world.processes))
        raise


async def undisturbed(server: Server, shape: Shape) -> list[str]:
    """The points of a run to which nothing happens; checked like any other."""
    async with started(server, shape) as world:
        process = world.process()
        await process.work()
        await world.check()
    return process.trail


async def all_points(server: Server, shapes: Iterable[Shape] = SHAPES) -> dict[Shape, list[str]]:
    shapes = list(shapes)
    return dict(zip(shapes, await at_once(undisturbed(server, shape) for shape in shapes), strict=True))


async def at_once(worlds: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await them all, some at a time; every failure is told, not only the first."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(world: Awaitable[Any]) -> Any:
        async with limit:
            return await world

    done = await asyncio.gather(*map(one, worlds), return_exceptions=True)
    failed: dict[str, list[BaseException]] = defaultdict(list)
    for error in done:
        if isinstance(error, BaseException):
            failed[re.sub(r"\d+", "#", str(error).partition("\n")[0])].append(error)
    if failed:
        count = sum(map(len, failed.values()))
        stories = [
            f"== {len(errors)} times: " + "".join(traceback.format_exception_only(errors[0])).strip()
            for errors in sorted(failed.values(), key=len, reverse=True)
        ]
        pytest.fail(f"{count} of {len(done)} points failed\n\n" + "\n\n".join(stories[:5]), pytrace=False)
    return done


def report(what: str, counted: dict[Shape, int]) -> None:
    for shape, points in counted.items():
        print(f"{points:5}  {shape}")
    print(f"{sum(counted.values()):5}  {what} in all")


# ------------------------------------------------------------------------------------ dying


async def dies(server: Server, shape: Shape, plan: Plan, expected: list[str]) -> int:
    """Die there and let another worker finish; returns how many points that one came by."""
    async with started(server, shape, plan) as world:
        first = world.process(plan)
        await first.work()
        assert first.dead, "the point was never reached"
        assert first.trail == expected[: plan.at], "it came by other points than the run without a crash"
        second = await world.finish()
        await world.check()
    return len(second.trail)


@pytest.mark.slow
async def test_whatever_dies_at_whatever_point_another_worker_finishes_the_run(server: Server) -> None:
    points = await all_points(server)
    todo = [(shape, plan) for shape in SHAPES for plan in plans(len(points[shape]), "die")]
    await at_once(dies(server, shape, plan, points[shape]) for shape, plan in todo)
    report("points to die at", {shape: 2 * len(points[shape]) for shape in SHAPES})
    assert len(todo) > 500


async def dies_twice(server: Server, shape: Shape, first: Plan, second: Plan) -> None:
    async with started(server, shape, first, "then", second) as world:
        await world.process(first).work()
        heir = await world.finish(plan=second)
        assert heir.dead, "the second point was never reached"
        await world.finish()
        await world.check()


@pytest.mark.slow
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
            announced = (
                5 if server.wrapper is None else 7
            )  # its entry, after three trips, the journal's, and to the keys
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


# ------------------------------------------------------------------------------------ stopped by a person


async def is_stopped(server: Server, shape: Shape, plan: Plan) -> str:
    """Press Stop at that point: what was answered then is how it ends, whoever brings it there."""
    async with started(server, shape, plan) as world:
        first = world.process(plan)
        await first.work()
        assert first.reached, "the point was never reached"
        await world.finish()
        run = await world.check(ends=False)
        return f"{run.stop.decision if run.stop else 'settled before'}: {run.state}"


@pytest.mark.slow
async def test_a_stop_pressed_at_any_point_ends_as_it_was_answered(server: Server) -> None:
    points = await all_points(server)
    fates = itertools.cycle(("stop, heard of", "stop", "stop, die"))
    todo = [(shape, replace(plan, fate=next(fates))) for shape in SHAPES for plan in plans(len(points[shape]), "stop")]
    ended = await at_once(is_stopped(server, shape, plan) for shape, plan in todo)
    report("points to press stop at", {shape: 2 * len(points[shape]) for shape in SHAPES})
    for how in sorted(set(ended)):
        print(f"{ended.count(how):5}  {how}")
