"""A worker whose wall clock is an hour off, either way, steals and loses nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sagas import Client, MongoStore, State
from tests.process.app import Job, fulfil
from tests.process.fleet import SAGAS, Workers, check_all, inside, open_gate, until_at_rest

pytestmark = pytest.mark.process

# Python runs this before anything else: every way to ask for the wall clock is off from then on.
WRONG_CLOCK = """
import datetime, os, time
off = float(os.environ["WALL_CLOCK_OFF_S"])
real_time, real_ns, real_datetime = time.time, time.time_ns, datetime.datetime
time.time = lambda: real_time() + off
time.time_ns = lambda: real_ns() + int(off * 1e9)

class WrongDatetime(real_datetime):
    @classmethod
    def now(cls, tz=None):
        return real_datetime.now(tz) + datetime.timedelta(seconds=off)

    @classmethod
    def utcnow(cls):
        return real_datetime.utcnow() + datetime.timedelta(seconds=off)

datetime.datetime = WrongDatetime
"""


@pytest.mark.parametrize("off_s", [3600, -3600], ids=["an hour ahead", "an hour behind"])
@pytest.mark.parametrize("whose", ["the holder's", "the other's"])
async def test_a_wall_clock_an_hour_off_steals_and_loses_nothing(
    client: Client,
    store: MongoStore,
    database: Any,
    workers: Workers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    off_s: int,
    whose: str,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WRONG_CLOCK)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"

    async def start(*, wrong: bool) -> None:
        with monkeypatch.context() as patch:
            if wrong:
                patch.setenv("PYTHONPATH", path)
                patch.setenv("WALL_CLOCK_OFF_S", str(off_s))
            await workers.start_and_wait(lease_s=6, poll_s=0.05)

    saga = fulfil()
    await start(wrong=whose == "the holder's")
    waiting = await client.start(saga, Job(plan="wait"))
    await inside(database, waiting.run_id)
    holder = (await waiting.info()).worker
    await start(wrong=whose == "the other's")
    # The other one is at work and looks for due runs all the while: these are proof of it, and take their turns.
    others = [await client.start(saga, Job()) for _ in range(30)]
    await until_at_rest(store, [run.run_id for run in others])
    assert (await waiting.info()).worker == holder, "it was stolen"
    await open_gate(database, waiting.run_id)
    await until_at_rest(store, [waiting.run_id])
    info = await waiting.info()
    assert (info.worker, info.attempts) == (holder, 1), "it was lost"
    for line in await waiting.journal():
        assert abs((line.at - store.clock.now()).total_seconds()) < 600, "an entry is dated by the worker's wall clock"
    await check_all(store, database, {run.run_id: State.COMPLETED for run in [waiting, *others]}, suspended=False)
    assert saga.name in SAGAS
