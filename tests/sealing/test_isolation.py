"""Whoever is bound to one tenant reads, changes and learns nothing of another: every verb there is, every state."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from sagas import (
    HELD,
    OPEN,
    SETTLED,
    Client,
    InvalidInput,
    Keyring,
    MongoStore,
    Operator,
    Run,
    RunNotFound,
    Start,
    State,
    TenantDatabases,
)
from tests.sealing.deployment import WHY, Deployment, Order, fulfil

UNKNOWN = "0" * 32


class Home:
    """Where tenants' runs are kept: in collections that they share, or in a database for each."""

    def __init__(self, handed: MongoStore | TenantDatabases, keyring: Keyring | None = None) -> None:
        self.handed = handed
        self._keyring = keyring

    @property
    def apart(self) -> bool:
        return isinstance(self.handed, TenantDatabases)

    @property
    def others(self) -> tuple[str | None, ...]:
        """Whose runs "vinet" must not reach."""
        return ("hanar", "toms") if self.apart else ("hanar", None)

    def of(self, tenant: str | None) -> MongoStore:
        return self.handed.of(tenant or "") if isinstance(self.handed, TenantDatabases) else self.handed

    async def make_keys(self, tenant: str) -> None:
        keyring = self._keyring or self.of(tenant).keyring
        assert isinstance(keyring, Keyring)
        await keyring.create(tenant)

    async def whole(self) -> dict[tuple[str, str], list[bytes]]:
        """Every byte of every database."""
        databases = {(store := self.of(tenant)).database.name: store.database for tenant in ("vinet", *self.others)}
        found: dict[tuple[str, str], list[bytes]] = {}
        for database in databases.values():
            for name in await database.list_collection_names():
                cursor: Any = database[name].find_raw_batches(sort=[("_id", 1)])
                found[database.name, name] = [batch async for batch in cursor]
        return found


Verb = Callable[["Bound", str], Awaitable[object]]


class Bound:
    """A client and an operator that are bound to a tenant."""

    def __init__(self, home: Home, tenant: str) -> None:
        self.client = Client(home.handed, tenant=tenant)
        self.operator = Operator(home.handed, tenant=tenant)

    def run(self, run_id: str) -> Run[Order]:
        return self.client.run(fulfil, run_id=run_id)


BY_ID: dict[str, Verb] = {
    "Client.get": lambda us, run_id: us.client.get(run_id),
    "Client.run": lambda us, run_id: us.run(run_id).info(),
    "Client.stop": lambda us, run_id: us.client.stop(run_id, **WHY),
    "Client.preview_stop": lambda us, run_id: us.client.preview_stop(run_id),
    "Client.context": lambda us, run_id: us.client.context(run_id),
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
    "Operator.list_blocked": lambda us, **named: us.operator.list_blocked(**named),
    "Operator.requeue_quarantined": lambda us, **named: us.operator.requeue_quarantined(**WHY, **named),
    "Operator.resume_many": lambda us, **named: us.operator.resume_many(**WHY, **named),
    "Operator.restart_many": lambda us, **named: us.operator.restart_many(**WHY, **named),
}
"""What a verb does with whatever there is, or with a tenant that is named."""

STARTS: dict[str, Callable[..., Awaitable[object]]] = {
    "Client.start": lambda us, key, **named: us.client.start(fulfil, Order(), key=key, **named),
    "Client.start_many": lambda us, key, **named: us.client.start_many(fulfil, [Start(Order(), key, **named)]),
    "Client.find_id": lambda us, key, **named: us.client.find_id(fulfil.name, key=key, **named),
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


@pytest.fixture(params=["sealed", "unsealed", "a database for each"])
async def home(request: pytest.FixtureRequest, shop: Deployment) -> AsyncIterator[Home]:
    match request.param:
        case "sealed":
            yield Home(shop.store, shop.keyring)
        case "unsealed":
            yield Home(MongoStore(shop.database), shop.keyring)
        case _:
            client, prefix = shop.database.client, f"{shop.database.name}_{secrets.token_hex(3)}_"
            databases = TenantDatabases(client, prefix=prefix, keyring_of=lambda _: Keyring(shop.wrapper))
            for tenant in ("vinet", "hanar", "toms"):
                await databases.create(tenant)
            yield Home(databases)
            for tenant in await databases.tenants():
                await client.drop_database(prefix + tenant)


async def one_of_each_state(home: Home, tenant: str | None) -> dict[State, str]:
    """Runs of a tenant, one in each state that there is, written as the store would."""
    store = home.of(tenant)
    client, runs = Client(home.handed, tenant=tenant), store.database["sagas.runs"]
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
            fields["blocked"] = {"count": 1, "since": "$$NOW", "failure": "KeyLost", "why": "of theirs"}
        if state is State.RUNNING:
            fields["claim"] = {"token": "t", "worker": "w", "taken_from": "pending", "at": "$$NOW"}
        steps: list[Any] = [{"$set": fields}, *([] if state in OPEN else [{"$unset": ["due_at"]}])]
        await runs.update_one({"_id": run.run_id}, steps)
    await client.close()
    return ids


async def outcome(call: Awaitable[object]) -> str:
    """What its caller learns, but for the id that was asked for and the moment at which it was."""
    try:
        answer = await call
    except Exception as error:
        answer = f"{type(error).__name__}: {error} {sorted(vars(error))}"
    return re.sub(r"[0-9a-f]{32}", "ID", repr(answer))


async def test_another_tenants_run_is_as_unknown_as_none_to_every_verb(home: Home) -> None:
    theirs = [await one_of_each_state(home, tenant) for tenant in home.others]
    await home.make_keys("vinet")
    us = Bound(home, "vinet")
    before = await home.whole()
    for name, verb in BY_ID.items():
        unknown = await outcome(verb(us, UNKNOWN))
        assert "not found" in unknown, name
        for ids in theirs:
            for state, run_id in ids.items():
                assert await outcome(verb(us, run_id)) == unknown, (name, state)
    assert await home.whole() == before
    # Whoever is bound to them, or to nobody, does find them.
    assert "hanar" in await outcome(Bound(home, "hanar").client.get(theirs[0][State.BROKEN]))
    for name, verb in BY_ID.items():
        found = await outcome(verb(Bound(home, "hanar"), theirs[0][State.BROKEN]))
        assert "not found" not in found, (name, found)
    assert await home.whole() != before
    await us.client.close()


async def test_no_sweep_touches_or_shows_another_tenants_runs(home: Home) -> None:
    us = Bound(home, "vinet")
    if home.of("vinet").keyring is not None:  # where there are keys, a client without them starts nothing
        await home.make_keys("vinet")
    alone = {name: await outcome(sweep(us)) for name, sweep in SWEEPS.items()}
    for tenant in home.others:
        await one_of_each_state(home, tenant)
    before = await home.whole()
    for name, sweep in SWEEPS.items():
        assert await outcome(sweep(us)) == alone[name], name
        nobody = await outcome(sweep(us, tenant="nobody"))
        assert nobody.startswith(('"InvalidInput: tenant', "'InvalidInput: tenant")), nobody
        assert await outcome(sweep(us, tenant="hanar")) == nobody, name
    assert await home.whole() == before
    found = [await outcome(sweep(Bound(home, "hanar"))) for sweep in SWEEPS.values()]
    assert not set(found) & set(alone.values()), "bound to them there is something to find"


async def test_a_key_of_another_tenants_means_nothing(home: Home) -> None:
    await one_of_each_state(home, "hanar")
    await home.make_keys("vinet")
    us = Bound(home, "vinet")
    before = await home.whole()
    taken = str(State.COMPLETED)
    for name, verb in STARTS.items():
        for tenant in ("hanar", "nobody"):
            with pytest.raises(InvalidInput, match="bound to"):
                await verb(us, taken, tenant=tenant)
        if name == "Client.find":
            with pytest.raises(RunNotFound):
                await verb(us, taken)
            assert await outcome(verb(us, taken)) == await outcome(verb(us, "never used"))
    assert await home.whole() == before
    started = await us.client.start(fulfil, Order(note="ours"), key=taken)
    assert started.created, "the same key, and no conflict with theirs"
    assert (await started.info()).tenant == "vinet"
    after = await home.whole()
    database = home.of("hanar").database
    theirs = database["sagas.runs"].find_raw_batches({"tenant": "hanar"}, sort=[("_id", 1)])
    assert b"".join([batch async for batch in theirs]) == b"".join(before[database.name, "sagas.runs"])
    assert {at: kept for at, kept in after.items() if at[1] == "sagas.keys"} == {
        at: kept for at, kept in before.items() if at[1] == "sagas.keys"
    }
