"""The timeouts of all tries: each ends its own scope, in time, and one timer serves all of one length."""

import asyncio
from typing import Any

import pytest

from sagas.timeouts import Timeouts

SHORT_S = 0.01
LONG_S = 60.0


async def waits(timeouts: Timeouts, seconds: float, *, broken_off: bool = False) -> None:
    try:
        async with asyncio.timeout(5) as guard, asyncio.timeout(None) as scope:
            timeouts.begin(scope, seconds)  # and never taken out, as by a try that swallows its cancellation
            if broken_off:
                scope.reschedule(0)
            await asyncio.Event().wait()
    finally:
        assert not guard.expired(), "it was never ended"


async def never_ends(timeouts: Timeouts, seconds: float) -> float:
    """Waits in a scope of that length; the loop's time when it was ended."""
    with pytest.raises(TimeoutError):
        await waits(timeouts, seconds)
    return asyncio.get_running_loop().time()


async def test_what_is_open_for_too_long_is_ended_and_not_before() -> None:
    timeouts = Timeouts()
    begun = asyncio.get_running_loop().time()
    ended = await asyncio.gather(*(never_ends(timeouts, seconds) for seconds in (2 * SHORT_S, SHORT_S, SHORT_S)))
    assert [at >= begun + seconds for at, seconds in zip(ended, (2 * SHORT_S, SHORT_S, SHORT_S), strict=True)]
    assert ended[0] > ended[1], "each length has its own line"


async def test_one_that_comes_later_in_the_same_line_ends_later() -> None:
    timeouts = Timeouts()
    first = asyncio.create_task(never_ends(timeouts, 2 * SHORT_S))
    await never_ends(timeouts, SHORT_S)
    second_began = asyncio.get_running_loop().time()
    second = await never_ends(timeouts, 2 * SHORT_S)
    assert await first < second
    assert second >= second_began + 2 * SHORT_S


async def test_one_that_has_ended_is_not_ended_again() -> None:
    timeouts = Timeouts()
    async with asyncio.timeout(None) as left:
        end = timeouts.begin(left, SHORT_S)
    end()
    async with asyncio.timeout(None) as goes_on:  # the one after it rings for itself alone
        end = timeouts.begin(goes_on, LONG_S)
        await never_ends(timeouts, SHORT_S)
    end()
    assert not left.expired()
    assert not goes_on.expired()


async def test_one_that_somebody_else_ended_is_left_alone() -> None:
    timeouts = Timeouts()
    loop = asyncio.get_running_loop()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, complaint: complaints.append(complaint))
    with pytest.raises(TimeoutError):
        await waits(timeouts, SHORT_S, broken_off=True)
    await never_ends(timeouts, SHORT_S)
    assert complaints == []


async def test_one_that_was_left_and_not_yet_taken_out_keeps_no_other_from_ending() -> None:
    timeouts = Timeouts()
    async with asyncio.timeout(None) as left:
        timeouts.begin(left, SHORT_S)
    await never_ends(timeouts, SHORT_S)  # in the same look
    await never_ends(timeouts, SHORT_S)  # and in a later one


async def test_a_thousand_of_one_length_need_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts, timers = Timeouts(), 0
    loop = asyncio.get_running_loop()
    call_at = loop.call_at

    def counted(*args: Any, **more: Any) -> asyncio.TimerHandle:
        nonlocal timers
        timers += 1
        return call_at(*args, **more)

    monkeypatch.setattr(loop, "call_at", counted)
    for _ in range(1_000):
        async with asyncio.timeout(None) as scope:
            end = timeouts.begin(scope, LONG_S)
        end()
    assert timers == 1
