"""SIGTERM and SIGINT reach every worker of the process, and the application's own handlers are left as they were."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from sagas.signals import _tell, draining_on_signals

BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


class Told:
    """Whoever is to be told of a signal, and how often it was."""

    def __init__(self) -> None:
        self.count = 0
        self.news = asyncio.Event()

    def tell(self, *_: object) -> None:
        self.count += 1
        self.news.set()

    async def once_more(self) -> None:
        await asyncio.wait_for(self.news.wait(), 10)
        self.news.clear()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Whatever a test leaves behind, pytest keeps its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    left = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert left == before


@BOTH
async def test_each_of_two_is_told_and_the_one_that_is_left_after_the_other_has_gone(number: signal.Signals) -> None:
    first, second = Told(), Told()
    one, other = (draining_on_signals(told.tell, enabled=True) for told in (first, second))
    one.__enter__()
    other.__enter__()
    os.kill(os.getpid(), number)
    await first.once_more()
    await second.once_more()
    one.__exit__(None, None, None)  # in the order in which they came, not the other way round
    os.kill(os.getpid(), number)
    await second.once_more()
    other.__exit__(None, None, None)
    assert (first.count, second.count) == (1, 2)


@BOTH
async def test_a_signal_that_comes_while_the_handlers_are_being_set_is_told(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, install = Told(), signal.signal

    def and_then_it_comes(which: signal.Signals, handler: Any) -> Any:
        before = install(which, handler)
        if handler is _tell and which == number:
            os.kill(os.getpid(), number)
        return before

    monkeypatch.setattr("signal.signal", and_then_it_comes)
    with draining_on_signals(told.tell, enabled=True):
        await told.once_more()


@BOTH
async def test_the_applications_own_handler_is_put_back(number: signal.Signals) -> None:
    own, ours, loop = Told(), Told(), asyncio.get_running_loop()

    def handler(*_: object) -> None:
        loop.call_soon_threadsafe(own.tell)

    before = signal.signal(number, handler)
    try:
        with draining_on_signals(ours.tell, enabled=True):
            os.kill(os.getpid(), number)
            await ours.once_more()
            assert own.count == 0
        assert signal.getsignal(number) is handler
        os.kill(os.getpid(), number)
        await own.once_more()
        assert ours.count == 1
    finally:
        signal.signal(number, before)


@BOTH
async def test_a_handler_that_the_application_gave_to_its_loop_is_there_afterwards_too(number: signal.Signals) -> None:
    own, ours = Told(), Told()
    loop = asyncio.get_running_loop()
    before = signal.getsignal(number)
    loop.add_signal_handler(number, own.tell)
    handler = signal.getsignal(number)
    try:
        with draining_on_signals(ours.tell, enabled=True):
            os.kill(os.getpid(), number)
            await ours.once_more()
        assert signal.getsignal(number) is handler
        await own.once_more()  # it was heard beside ours
        os.kill(os.getpid(), number)
        await own.once_more()
        assert ours.count == 1
    finally:
        loop.remove_signal_handler(number)
        signal.signal(number, before)


async def test_a_handler_that_the_application_sets_meanwhile_stays() -> None:
    with draining_on_signals(Told().tell, enabled=True):
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert callable(before)


async def test_not_asked_for_it_touches_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with draining_on_signals(Told().tell, enabled=False):
        assert signal.getsignal(signal.SIGTERM) is before


async def test_outside_the_main_thread_nothing_is_set() -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def work() -> object:
        with draining_on_signals(Told().tell, enabled=True):
            return signal.getsignal(signal.SIGTERM)

    assert await asyncio.to_thread(asyncio.run, work()) is before
