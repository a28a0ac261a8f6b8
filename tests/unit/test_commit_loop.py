"""What goes wrong with a whole batch is told to each who waits for it, and to each apart."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import pytest
from pymongo import errors

from sagas_store.commit import Alone, Batching, CommitLoop
from sagas_store.errors import FenceLost, StoreRefused, StoreUnavailable

COUNT = 8


class Strange(Exception):
    def __new__(cls, *_: object) -> Self:
        if cls.made:
            raise TypeError("there is only one")
        cls.made = True
        return super().__new__(cls)

    made = False


def failing_with(error: BaseException) -> CommitLoop[int, None]:
    async def flush(_: Sequence[int]) -> Sequence[None]:
        raise error from ValueError("underneath")

    return CommitLoop(flush, Batching())


async def told(loop: CommitLoop[int, None]) -> list[BaseException]:
    """What each of those who wait for one batch gets, each with a frame and a secret of his own."""

    async def submit(number: int) -> None:
        secret = f"secret {number}"
        try:
            await loop.submit(number)
        finally:
            assert secret

    done = await asyncio.gather(*(submit(number) for number in range(COUNT)), return_exceptions=True)
    assert all(isinstance(one, BaseException) for one in done)
    return [one for one in done if one is not None]


@pytest.mark.parametrize(
    "error",
    [
        StoreUnavailable("append", "NetworkTimeout"),
        StoreRefused("append", "OperationFailure, code 13"),
        FenceLost("run", "append"),
        errors.OperationFailure("no", 13, {"code": 13, "errorLabels": ["here"]}),
        errors.BulkWriteError({"writeErrors": [{"code": 11000}]}),
        OSError(2, "no such file"),
        KeyError("a"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"),
        RuntimeError(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_each_gets_an_error_of_its_own_with_nobody_elses_frames(error: Exception) -> None:
    each = await told(failing_with(error))
    assert len({id(one) for one in each}) == COUNT
    for one in each:
        assert type(one) is type(error)
        assert (one.args, vars(one), repr(one)) == (error.args, vars(error), repr(error))
        assert isinstance(one.__cause__, ValueError)
        frames = [frame.name for frame in traceback.extract_tb(one.__traceback__)]
        assert (frames.count("submit"), frames.count("flush")) == (1, 1), "the test's, and where it was"
        secrets = [frame.f_locals["secret"] for frame, _ in traceback.walk_tb(one.__traceback__) if _is_ours(frame)]
        assert len(secrets) == 1


async def test_one_that_cannot_be_made_again_is_told_to_all_the_same() -> None:
    each = await told(failing_with(Strange()))
    assert {type(one) for one in each} == {Strange}


async def test_what_goes_on_alone_gives_up_its_batchs_place_and_is_told_its_own_fate() -> None:
    gate = asyncio.Event()
    done: list[int] = []

    async def go_on(number: int) -> int:
        await gate.wait()
        done.append(number)
        if number == 2:
            raise FenceLost("run", "append")
        return number

    async def flush(items: Sequence[int]) -> Sequence[int | Alone[int]]:
        return [item if item % 2 else Alone(partial(go_on, item)) for item in items]

    loop = CommitLoop(flush, Batching(in_flight_max=1))
    first, second, third, fourth = (loop.submit(number) for number in range(4))
    assert (await second, await fourth) == (1, 3)
    assert await loop.submit(5) == 5, "the place of their batch is free"
    first.cancel()
    assert not third.done()
    gate.set()
    with pytest.raises(FenceLost):
        await third
    assert sorted(done) == [0, 2], "it was handed over: it is written although nobody waits for it any more"


def _is_ours(frame: Any) -> bool:
    return "secret" in frame.f_locals
