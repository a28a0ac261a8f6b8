"""A run is stopped, and its worker process gets every signal there is while it undoes what was done."""

from __future__ import annotations

import signal
from collections import Counter
from typing import Any

import pytest

from sagas import Client, Run, StopOutcome
from sagas.decide import Activity
from sagas_store import MongoStore
from sagas_store.entries import Kind
from sagas_store.states import State
from tests.process.app import Job, fulfil
from tests.process.fleet import Workers, check_all, inside, lapse, open_gate, until_at_rest, were_late
from tests.support.waiting import eventually

pytestmark = [pytest.mark.process, pytest.mark.slow]


async def calls(database: Any, run: Run[Job], activity: Activity, step: str) -> int:
    count: int = await database.calls.count_documents({"run": run.run_id, "activity": activity, "step": step})
    return count


async def test_no_second_stop_no_sigterm_and_no_sigkill_skips_tears_or_repeats_a_compensation(
    client: Client, store: MongoStore, database: Any, workers: Workers
) -> None:
    first = await workers.start_and_wait(lease_s=300, grace_s=0)
    runs = [await client.start(fulfil(), Job(plan="stop-pack")) for _ in range(4)]
    stops = {}
    for run in runs:

        async def under_way(run: Run[Job] = run) -> bool:
            return await calls(database, run, Activity.STEP, "pack") == 1

        await eventually(under_way, what="the second step is under way")
        stops[run.run_id] = await run.stop(by="ann", reason="the customer")
        assert stops[run.run_id].outcome is StopOutcome.WILL_BE_UNDONE
    for run in runs:
        await inside(database, run.run_id)  # its step had its grace and finished; now that is being undone

    # A second stop, and a SIGTERM with no grace at all, and one more: the compensations go on.
    for run in runs:
        again = await run.stop(by="bob", reason="me too")
        assert (again.outcome, again.by, again.asked_at) == (
            StopOutcome.WILL_BE_UNDONE,
            "ann",
            stops[run.run_id].asked_at,
        )
    first.send(signal.SIGTERM)
    await first.until_logged("worker draining")
    first.send(signal.SIGTERM)
    await open_gate(database, runs[0].run_id)
    assert await undone(store, runs[0]) == ["pack"]
    assert first.process.poll() is None, "it waits for the others"

    # A SIGKILL: what it had in hand is called again by the next worker, and what it had journaled is not.
    await first.kill()
    await lapse(database)
    second = await workers.start_and_wait(lease_s=300, grace_s=0)
    for run in runs[1:]:
        await inside(database, run.run_id, attempt=2)
    second.send(signal.SIGTERM)
    await second.until_logged("worker draining")
    await open_gate(database, *(run.run_id for run in runs[1:]))
    assert await second.until_ended() == 0, second.log()
    for run in runs[1:]:
        assert await undone(store, run) == ["pack"], "it finished what it had in hand and began nothing more"

    await workers.start_and_wait(lease_s=300)
    await until_at_rest(store, [run.run_id for run in runs])
    late = were_late(workers)
    await check_all(store, database, {run.run_id: State.CANCELLED for run in runs}, suspended=late)
    for number, run in enumerate(runs):
        kinds = Counter(entry.kind for entry in await store.journal.load(run.run_id))
        assert (kinds[Kind.ROLLBACK_BEGUN], kinds[Kind.COMPENSATION_SUCCEEDED]) == (1, 2)
        assert kinds[Kind.INTERRUPTED] == 0
        assert late or await calls(database, run, Activity.COMPENSATION, "pack") == (1 if number == 0 else 2)
        assert late or await calls(database, run, Activity.COMPENSATION, "reserve") == 1


async def undone(store: MongoStore, run: Run[Job]) -> list[str | None]:
    """The steps journaled as undone, once there is one."""

    async def look() -> list[str | None]:
        entries = await store.journal.load(run.run_id)
        return [entry.step for entry in entries if entry.kind is Kind.COMPENSATION_SUCCEEDED]

    return await eventually(look, what="a compensation is journaled")
