"""The shapes of saga that the matrices go through, and how many worlds are looked at together."""

from __future__ import annotations

import asyncio
import contextlib
import re
import traceback
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Iterable
from datetime import timedelta
from typing import Any, Final

import pytest

from sagas_store.states import State
from tests.support.crashing import Part, Server, Shape, World

__all__ = ["LATER", "SHAPES", "abc", "all_points", "at_once", "report", "started", "two", "undisturbed"]

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
