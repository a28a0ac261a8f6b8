"""Whoever is bound to one tenant reads, changes and learns nothing of another: every verb there is, every state."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sagas import HELD, OPEN, SETTLED, Client, InvalidInput, MongoStore, Operator, Run, RunNotFound, Start, State
from tests.sealing.deployment import WHY, Deployment, Order, fulfil

UNKNOWN = "0" * 32
Verb = Callable[["Bound", str], Awaitable[object]]


class Bound:
    """A client and an operator that are bound to a tenant."""

    def __init__(self, store: MongoStore, tenant: str) -> None:
        self.client = Client(store, tenant=tenant)
        self.operator = Operator(store, tenant=tenant)

    def run(self, run_id: str) -> Run[Order]:
        return self.client.run(fulfil, run_id=run_id)


BY_ID: dict[str, Verb] = {
    "Client.get": lambda us, run_id: us.client.get(run_id),
    "Client.run": lambda us, run_id: us.run(run_id).info(),
    "Client.stop": lambda us, run_id: us.client.stop(run_id, **WHY),
    "Client.preview_stop": lambda us, run_id: us.client.preview_stop(run_id),
    "Client.journal": lambda us, run_id: us.client.journal(run_id),
    "Run.result": lambda us, run_id: us.run(run_id).result(1),
    "Run.stop": lambda us, run_id: us.run(run_id).stop(**WHY),
    "Run.preview_stop": lambda us, run_id: us.run(run_id).preview_stop(),
    "Run.info": lambda us, run_id: us.run(run_id).info(),
    "Run.journal": lambda us, run_id: us.run(run_id).journal(),
    "Operator.resume": lambda us, run_id: us.operator.resume(run_id, **WHY),
    "Operator.verdict": lambda us, run_id: us.operator.verdict(fulfil, run_id, happened=False, **WHY),
    "Operator.retry_now": lambda us, run_id: us.operator.retry_now(run_id, **WHY),
    "Operator.restart_as_new": lambda us, run_id: us.operator.restart_as_new(run_id, **WHY),
    "Operator.requeue_quarantined": lambda us, run_id: us.operator.requeue_quarantined(runs=[run_id], **WHY),
}
"""What a verb does with the id of a run; another tenant's must do the same as one that nobody has."""

SWEEPS: dict[str, Callable[..., Awaitable[object]]] = {
    "Client.runs": lambda us, **named: us.client.runs(**named),
    # Before the stops: those cut the wait of what is parked short, too.
    "Operator.retry_now_many": lambda us, **named: us.operator.retry_now_many(**WHY, **named),
    "Client.stop_many": lambda us, **named: us.client.stop_many(**WHY, **named),
    "Operator.list_held": lambda us, **named: us.operator.list_held(**named),
    "Operator.requeue_quarantined": lambda us, **named: us.operator.requeue_quarantined(**WHY, **named),
    "Operator.resume_many": lambda us, **named: us.operator.resume_many(**WHY, **named),
    "Operator.restart_many": lambda us, **named: us.operator.restart_many(**WHY, **named),
}
"""What a verb does with whatever there is, or with a tenant that is named."""

STARTS: dict[str, Callable[..., Awaitable[object]]] = {
    "Client.start": lambda us, key, **named: us.client.start(fulfil, Order(), key=key, **named),
    "Client.start_many": lambda us, key, **named: us.client.start_many(fulfil, [Start(Order(), key, **named)]),
    "Client.find": lambda us, key, **named: us.client.find(fulfil, key=key, **named),
}

OF_NO_RUN = {"Client.close"}


def test_every_verb_has_its_case_here() -> None:
    verbs = {
        f"{kind.__name__}.{name}"
        for kind in (Client, Run, Operator)
        for name in vars(kind)
        if not name.startswith("_") and callable(getattr(kind, name))
    }
    assert verbs == {*BY_ID, *SWEEPS, *STARTS, *OF_NO_RUN}


@pytest.fixture(params=["sealed", "unsealed"])
def store(request: pytest.FixtureRequest, shop: Deployment) -> MongoStore:
    return shop.store if request.param == "sealed" else MongoStore(shop.database)


async def one_of_each_state(store: MongoStore, tenant: str | None) -> dict[State, str]:
    """Runs of a tenant, one in each state that there is, written as the store would."""
    client, runs = Client(store), store.database["sagas.runs"]
    ids = {}
    for state in State:
        run = await client.start(fulfil, Order(note=f"{tenant} {state}"), key=str(state), tenant=tenant)
        ids[state] = run.run_id
        fields: Any = {"state": state, "attempts": 1}
        if state in HELD:
            fields["held"] = {"reason": "of theirs", "since": "$$NOW"}
        if state in SETTLED:
            fields["settled_at"] = "$$NOW"
        if state is State.PENDING:  # parked: what is due already has no wait to cut short
            fields["due_at"] = {"$dateAdd": {"startDate": "$$NOW", "unit": "hour", "amount": 1}}
        if state is State.RUNNING:
            fields["claim"] = {"token": "t", "worker": "w", "taken_from": "pending", "at": "$$NOW"}
        steps: list[Any] = [{"$set": fields}, *([] if state in OPEN else [{"$unset": ["due_at"]}])]
        await runs.update_one({"_id": run.run_id}, steps)
    await client.close()
    return ids


async def whole(store: MongoStore) -> dict[str, list[bytes]]:
    """Every byte of the database."""
    found: dict[str, list[bytes]] = {}
    for name in await store.database.list_collection_names():
        cursor: Any = store.database[name].find_raw_batches(sort=[("_id", 1)])
        found[name] = [batch async for batch in cursor]
    return found


async def outcome(call: Awaitable[object]) -> str:
    """What its caller learns, but for the id that was asked for and the moment at which it was."""
    try:
        answer = await call
    except Exception as error:
        answer = f"{type(error).__name__}: {error} {sorted(vars(error))}"
    return re.sub(r"[0-9a-f]{32}", "ID", repr(answer))


async def test_another_tenants_run_is_as_unknown_as_none_to_every_verb(shop: Deployment, store: MongoStore) -> None:
    theirs = [await one_of_each_state(store, tenant) for tenant in ("hanar", None)]
    await shop.keyring.create("vinet")
    us = Bound(store, "vinet")
    before = await whole(store)
    for name, verb in BY_ID.items():
        unknown = await outcome(verb(us, UNKNOWN))
        assert "not found" in unknown, name
        for ids in theirs:
            for state, run_id in ids.items():
                assert await outcome(verb(us, run_id)) == unknown, (name, state)
    assert await whole(store) == before
    # Whoever is bound to them, or to nobody, does find them.
    assert "hanar" in await outcome(Bound(store, "hanar").client.get(theirs[0][State.BROKEN]))
    for name, verb in BY_ID.items():
        found = await outcome(verb(Bound(store, "hanar"), theirs[0][State.BROKEN]))
        assert "not found" not in found, (name, found)
    assert await whole(store) != before
    await us.client.close()


async def test_no_sweep_touches_or_shows_another_tenants_runs(shop: Deployment, store: MongoStore) -> None:
    us = Bound(store, "vinet")
    if store is shop.store:  # where there are keys, a client without them starts nothing
        await shop.keyring.create("vinet")
    alone = {name: await outcome(sweep(us)) for name, sweep in SWEEPS.items()}
    for tenant in ("hanar", None):
        await one_of_each_state(store, tenant)
    before = await whole(store)
    for name, sweep in SWEEPS.items():
        assert await outcome(sweep(us)) == alone[name], name
        nobody = await outcome(sweep(us, tenant="nobody"))
        assert nobody.startswith(('"InvalidInput: tenant', "'InvalidInput: tenant")), nobody
        assert await outcome(sweep(us, tenant="hanar")) == nobody, name
    assert await whole(store) == before
    found = [await outcome(sweep(Bound(store, "hanar"))) for sweep in SWEEPS.values()]
    assert not set(found) & set(alone.values()), "bound to them there is something to find"


async def test_a_key_of_another_tenants_means_nothing(shop: Deployment, store: MongoStore) -> None:
    await one_of_each_state(store, "hanar")
    await shop.keyring.create("vinet")
    us = Bound(store, "vinet")
    before = await whole(store)
    taken = str(State.COMPLETED)
    for name, verb in STARTS.items():
        for tenant in ("hanar", "nobody"):
            with pytest.raises(InvalidInput, match="bound to"):
                await verb(us, taken, tenant=tenant)
        if name == "Client.find":
            with pytest.raises(RunNotFound):
                await verb(us, taken)
            assert await outcome(verb(us, taken)) == await outcome(verb(us, "never used"))
    assert await whole(store) == before
    started = await us.client.start(fulfil, Order(note="ours"), key=taken)
    assert started.created, "the same key, and no conflict with theirs"
    assert (await started.info()).tenant == "vinet"
    after = await whole(store)
    theirs = store.database["sagas.runs"].find_raw_batches({"tenant": "hanar"}, sort=[("_id", 1)])
    assert b"".join([batch async for batch in theirs]) == b"".join(before["sagas.runs"])
    assert after["sagas.keys"] == before["sagas.keys"]
