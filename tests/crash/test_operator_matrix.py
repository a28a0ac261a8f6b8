"""What is held is let go on, and somebody dies of it: the operator at each store call, then the worker at each point.

An operator's verb and its entry commit together, so whoever dies leaves both or neither, and whoever tries again is
told or obeyed accordingly. A resumed run does what remains and nothing else, however often its worker dies.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import pytest

from sagas import Operator, OperatorRefused
from sagas.decide import Activity
from sagas_store.entries import Kind
from sagas_store.states import OPEN, State
from tests.crash.matrix import abc, at_once, report, started, two
from tests.support.crashing import Died, Order, Part, Plan, Process, Server, Shape, World, plans

WHY: Final[dict[str, Any]] = {"by": "olga@shop", "reason": "mended"}

REFUSED: Final = Part(name="charge", pivot=True, does=("refuse",))


@dataclass(frozen=True, slots=True)
class Move:
    """A run that is held, what an operator does to it, and what that leads to."""

    shape: Shape
    held_as: State
    remains: tuple[str, ...]
    """What is called after the move, in order."""
    verdict: bool | None = None
    """None: it is resumed."""

    def __str__(self) -> str:
        return self.shape.name

    async def make(self, process: Process) -> None:
        operator, world = Operator(process.store), process.world
        if self.verdict is None:
            await operator.resume(world.name, **WHY)
            return
        context = Order(trail=("reserve", "charge")) if self.verdict else None
        await operator.verdict(world.saga, world.name, happened=self.verdict, context=context, **WHY)

    @property
    def kind(self) -> Kind:
        return Kind.RESUMED if self.verdict is None else Kind.VERDICT


MOVES: Final = (
    Move(
        Shape("ship-mended", abc(ship=Part(name="ship", does=("refuse", "ok"))), State.COMPLETED),
        State.FORWARD_INCOMPLETE,
        ("step ship", "step mail"),
    ),
    Move(
        Shape(
            "last-undo-mended", abc(pack=Part(name="pack", undo=("refuse", "ok")), charge=REFUSED), State.COMPENSATED
        ),
        State.COMPENSATION_FAILED,
        ("compensation pack",),
    ),
    Move(
        Shape(
            "first-undo-mended",
            abc(reserve=Part(name="reserve", undo=("refuse", "ok")), charge=REFUSED),
            State.COMPENSATED,
        ),
        State.COMPENSATION_FAILED,
        ("compensation reserve",),
    ),
    Move(
        Shape(
            "both-undos-mended",
            abc(
                reserve=Part(name="reserve", undo=("lost_after", "lost_after", "ok"), tries=2),
                pack=Part(name="pack", undo=("refuse", "ok")),
                charge=REFUSED,
            ),
            State.COMPENSATED,
        ),
        State.COMPENSATION_FAILED,
        ("compensation pack", "compensation reserve"),
    ),
    Move(
        Shape(
            "undo-fails-again",
            abc(reserve=Part(name="reserve", undo=("refuse",)), charge=REFUSED),
            State.COMPENSATION_FAILED,
        ),
        State.COMPENSATION_FAILED,
        ("compensation reserve",),
    ),
    Move(
        Shape(
            "plain-function-mended",
            (Part(name="count", undo=None), Part(name="mail", undo=None, does=("refuse", "ok"))),
            State.COMPLETED,
        ),
        State.FAILED,
        ("step mail",),
    ),
    Move(
        Shape(
            "it-happened", two(charge=Part(name="charge", pivot=True, does=("lost_after",), tries=2)), State.COMPLETED
        ),
        State.IN_DOUBT,
        (),
        verdict=True,
    ),
    Move(
        Shape(
            "it-happened-and-goes-on",
            (
                *two(charge=Part(name="charge", pivot=True, does=("lost_after",), tries=2, probe="lost")),
                Part(name="ship"),
            ),
            State.COMPLETED,
        ),
        State.IN_DOUBT,
        ("step ship",),
        verdict=True,
    ),
    Move(
        Shape("it-did-not", two(charge=Part(name="charge", pivot=True, does=("lost",), tries=2)), State.COMPENSATED),
        State.IN_DOUBT,
        ("compensation reserve",),
        verdict=False,
    ),
)


async def hold(world: World, move: Move) -> int:
    """Drive it to where it is held; returns how many calls that took."""
    await world.process().work()
    run = await world.run()
    assert run.state is move.held_as
    return len(world.ledger)


def since(world: World, calls: int) -> tuple[str, ...]:
    return tuple(f"{call.activity} {call.step}" for call in world.ledger[calls:])


async def moved(server: Server, move: Move) -> tuple[list[str], list[str]]:
    """The points of the operator and of the worker after it, where nobody dies; only what remains is done."""
    async with started(server, move.shape) as world:
        calls = await hold(world, move)
        operator = world.process()
        await move.make(operator)
        worker = world.process()
        await worker.work()
        assert since(world, calls) == move.remains
        await world.check()
        return operator.trail, worker.trail


async def all_moved(server: Server) -> dict[Move, tuple[list[str], list[str]]]:
    return dict(zip(MOVES, await at_once(moved(server, move) for move in MOVES), strict=True))


async def operator_dies(server: Server, move: Move, plan: Plan) -> bool:
    """Returns whether the dead operator had been obeyed."""
    async with started(server, move.shape, plan) as world:
        calls = await hold(world, move)
        first = world.process(plan)
        with contextlib.suppress(Died):
            await move.make(first)
        assert first.dead, "the point was never reached"
        obeyed = [entry.kind for entry in await world.journal()].count(move.kind)
        run = await world.run()
        assert (run.state in OPEN, run.due_at is not None) == (obeyed == 1, obeyed == 1), "half of it stands"
        if obeyed:
            with pytest.raises(OperatorRefused):
                await move.make(world.process())
        else:
            await move.make(world.process())
        await world.finish()
        assert since(world, calls) == move.remains
        await world.check()
        assert [entry.kind for entry in await world.journal()].count(move.kind) == 1
        return obeyed == 1


@pytest.mark.slow
async def test_an_operator_who_dies_at_any_store_call_was_obeyed_entirely_or_not_at_all(server: Server) -> None:
    points = await all_moved(server)
    todo = [(move, plan) for move, (trail, _) in points.items() for plan in plans(len(trail), "die")]
    obeyed = await at_once(operator_dies(server, move, plan) for move, plan in todo)
    report("points for an operator to die at", {move.shape: 2 * len(trail) for move, (trail, _) in points.items()})
    print(f"{sum(obeyed):5}  of them obeyed all the same")
    assert 0 < sum(obeyed) < len(obeyed)


async def worker_dies(server: Server, move: Move, plan: Plan) -> None:
    async with started(server, move.shape, plan) as world:
        calls = await hold(world, move)
        await move.make(world.process())
        worker = world.process(plan)
        await worker.work()
        assert worker.reached, "the point was never reached"
        await world.finish()
        await world.check()
        # Whatever was in hand may have been called again; nothing else was.
        assert set(since(world, calls)) == set(move.remains)
        assert without_repeats(since(world, calls)) == move.remains


def without_repeats(calls: Iterable[str]) -> tuple[str, ...]:
    return tuple(Counter(calls))


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["die", "stop, die", "stop, heard of", "interrupt"])
async def test_a_resumed_run_does_what_remains_and_nothing_else_whatever_happens_to_its_worker(
    server: Server, fate: str
) -> None:
    points = await all_moved(server)
    todo = [(move, plan) for move, (_, trail) in points.items() for plan in plans(len(trail), fate)]
    if fate.startswith("stop"):
        # There is no pivot whose gate it could find passed, so a stop turns a plain function back, if it is in time.
        todo = [(move, plan) for move, plan in todo if move.held_as is not State.FAILED]
    await at_once(worker_dies(server, move, plan) for move, plan in todo)
    print(f"{len(todo):5}  points of resumed runs to meet '{fate}' at")


async def test_no_operator_and_no_stop_leads_a_run_forward_that_has_turned_back(server: Server) -> None:
    """Resumed again and again, with a stop in between: it is undone in the end, and never completed."""
    undo = ("refuse", "refuse", "refuse", "ok")
    shape = Shape("again-and-again", abc(pack=Part(name="pack", undo=undo), charge=REFUSED), State.COMPENSATED)
    async with started(server, shape) as world:
        operator = Operator(world.process().store)
        await world.process().work()
        for _ in range(3):
            assert (await world.check(ends=False)).state is State.COMPENSATION_FAILED
            await world.press_stop()
            await operator.resume(world.name, **WHY)
            await world.finish()
        await world.check()
        with pytest.raises(OperatorRefused, match="started anew"):
            await operator.resume(world.name, **WHY)
        with pytest.raises(OperatorRefused, match="not waiting"):
            await operator.retry_now(world.name, **WHY)
        forward = [call for call in world.ledger if call.activity is Activity.STEP]
        assert [call.step for call in forward] == ["reserve", "pack", "charge"]
