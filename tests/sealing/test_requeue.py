"""Letting go on what did not open: in which order, which runs, and when several people and workers act at once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from typing import Any

import pytest

from sagas import InvalidInput, Kind, Run, RunRolledBack, Start, State, StopOutcome
from sagas.operator import BulkResult
from tests.sealing.deployment import WHY, Deployment, Order, fulfil

BLOCKED: Any = {"count": 9, "since": "$$NOW", "failure": "KeyLost", "why": "gone"}
AT_ONCE = 16


async def blocked(shop: Deployment, count: int, *, tenant: str = "vinet", in_turn: bool = True) -> list[Run[Order]]:
    """Runs that do not open, oldest first: every third one is on hold still, the others are quarantined."""
    runs = await shop.client.start_many(fulfil, [Start(Order(number=n), tenant=tenant) for n in range(count)])
    for number, run in enumerate(runs):
        ago = {"$dateSubtract": {"startDate": "$$NOW", "unit": "minute", "amount": count - number}}
        steps: list[Any] = [{"$set": {"created_at": ago, "blocked": BLOCKED}}]
        if in_turn and number % 3 == 0:
            later = {"$dateAdd": {"startDate": "$$NOW", "unit": "hour", "amount": 1}}
            steps.append({"$set": {"due_at": later}})
        else:
            steps.append({"$set": {"state": State.QUARANTINED, "held": {"reason": "lost", "since": "$$NOW"}}})
            steps.append({"$unset": ["due_at"]})
        await shop.database["sagas.runs"].update_one({"_id": run.run_id}, steps)
    return runs


async def test_they_are_let_go_oldest_first_before_the_eyes_of_a_live_worker(
    shop: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = await blocked(shop, 6 * AT_ONCE)
    place = {run.run_id: number for number, run in enumerate(runs)}
    moved: list[int] = []
    move_on = shop.store.interventions.move_on

    async def note(run: Any, *arguments: Any, **more: Any) -> Any:
        done = await move_on(run, *arguments, **more)
        moved.append(place[run.run_id])
        return done

    monkeypatch.setattr(shop.store.interventions, "move_on", note)
    async with shop.working(concurrency=1):
        done = await shop.operator.requeue_quarantined(tenant="vinet", **WHY)
        assert (len(done.done), done.refused) == (len(runs), {})
        for run in runs:
            await run.result(30)
    assert [number // AT_ONCE for number in moved] == sorted(number // AT_ONCE for number in moved)
    executed = [place[key.split("/")[0]] for key in shop.shop.done if key.endswith("/reserve")]
    # What was let go together may be taken in any order, and a busy worker looks from where it has come to.
    assert max(abs(at - number) for at, number in enumerate(executed)) <= 2 * AT_ONCE, executed


async def test_of_a_limited_number_the_oldest_go_on(shop: Deployment) -> None:
    runs = await blocked(shop, 8)
    ids = [run.run_id for run in runs]
    dry = await shop.operator.requeue_quarantined(tenant="vinet", limit=4, dry_run=True, **WHY)
    assert sorted(dry.done) == sorted(ids[:4])
    for begin in (0, 3, 6):
        done = await shop.operator.requeue_quarantined(tenant="vinet", limit=3, **WHY)
        assert sorted(done.done) == sorted(ids[begin : begin + 3])


async def test_more_than_a_page_of_them_are_found_in_order(shop: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sagas_store.blocked._PAGE", 3)
    ids = [run.run_id for run in await blocked(shop, 13)]
    # Some were started in the same moment.
    await shop.database["sagas.runs"].update_many({"_id": {"$in": ids[4:8]}}, [{"$set": {"created_at": "$$NOW"}}])
    found = await shop.store.blocked_runs.oldest("vinet", limit=100)
    assert found == [*ids[:4], *ids[8:], *sorted(ids[4:8])]
    assert await shop.store.blocked_runs.oldest("vinet", limit=5) == found[:5]
    assert await shop.store.blocked_runs.oldest("hanar", limit=5) == []


async def test_one_text_is_not_several_runs(shop: Deployment) -> None:
    (run,) = await blocked(shop, 1)
    for wrong in (run.run_id, run.run_id.encode(), 5):
        with pytest.raises(InvalidInput, match="runs: must be several"):
            await shop.operator.requeue_quarantined(runs=wrong, **WHY)  # type: ignore[arg-type]
    assert (await shop.operator.requeue_quarantined(runs=[run.run_id], **WHY)).done == [run.run_id]


async def test_a_tenant_and_runs_together_mean_the_tenants_alone(shop: Deployment) -> None:
    (ours,) = await blocked(shop, 1)
    (theirs,) = await blocked(shop, 1, tenant="hanar")
    unknown = "0" * 32
    done = await shop.operator.requeue_quarantined(tenant="vinet", runs=[ours.run_id, theirs.run_id, unknown], **WHY)
    assert done.done == [ours.run_id]
    assert done.refused == {
        theirs.run_id: done.refused[unknown].replace(unknown, theirs.run_id),
        unknown: done.refused[unknown],
    }
    assert "not found" in done.refused[theirs.run_id]
    assert (await shop.info(theirs)).blocked_since is not None
    assert (await shop.client.journal(theirs.run_id)) == []


async def test_raced_against_itself_a_stop_and_a_live_worker_it_has_one_effect_and_the_loser_hears_why(
    shop: Deployment,
) -> None:
    runs = await blocked(shop, 4 * AT_ONCE)
    ids = [run.run_id for run in runs]
    rng = random.Random(7)
    told: list[BulkResult] = []

    async def requeue(**which: Any) -> None:
        told.append(await shop.operator.requeue_quarantined(**which, **WHY))

    async def stop(run: Run[Order]) -> tuple[str, StopOutcome]:
        for _ in range(rng.randrange(300)):
            await asyncio.sleep(0)
        return run.run_id, (await run.stop(**WHY)).outcome

    async with shop.working(concurrency=8):
        # Whoever fails here with an error, the driver's or another, fails the test.
        answers = await asyncio.gather(
            *(stop(run) for run in rng.sample(runs, 3 * AT_ONCE)),
            *(requeue(tenant="vinet") for _ in range(3)),
            *(requeue(runs=rng.sample(ids, len(ids))) for _ in range(2)),
        )
        await requeue(tenant="vinet")  # what was refused because a stop came in between
        ended = dict(zip(ids, await asyncio.gather(*(end_of(run) for run in runs)), strict=True))
    outcomes = dict(answer for answer in answers if answer is not None)
    moved = Counter(run_id for result in told for run_id in result.done)
    refused = [why for result in told for why in result.refused.values()]
    assert max(moved.values()) == 1, "each was let go once, by one of them"
    assert refused
    for why in refused:
        assert "quicker" in why or "not held because of its key" in why or "due already" in why, why
    for run_id in ids:
        kinds = Counter(line.kind for line in await shop.client.journal(run_id))
        assert kinds[Kind.REQUEUED] == moved[run_id]
        match outcomes.get(run_id):
            case StopOutcome.CANCELLED | StopOutcome.WILL_BE_UNDONE:
                assert ended[run_id] is State.CANCELLED
            case _:
                assert ended[run_id] is State.COMPLETED
    assert max(Counter(shop.shop.done).values()) == 1, "no step and no compensation ran twice"
    assert {StopOutcome.CANCELLED, StopOutcome.WILL_BE_UNDONE} <= set(outcomes.values())


async def end_of(run: Run[Order]) -> State:
    with contextlib.suppress(RunRolledBack):
        await run.result(30)
    return (await run.info()).state
