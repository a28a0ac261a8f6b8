"""Keys rotated, sealed anew and destroyed under load, while workers and the rewrapping itself are killed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import random
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from sagas import Client, KeyRefused, Keyring, KeyState, LocalKeyWrapper, MongoStore, Operator, Start, State
from sagas.sealing import Opener, place_of_payload, place_of_reason
from sagas_store.embedded import EmbeddedMongo
from tests.process.app import Job, fulfil, transact
from tests.process.fleet import ROOT, SAGAS, Workers, calls_made, check_all, until_at_rest
from tests.process.test_killed import PLANS, TRANSACTIONS
from tests.sealing.deployment import WHY
from tests.support.waiting import eventually

pytestmark = [pytest.mark.process, pytest.mark.slow]

TENANTS = ("vinet", "hanar", None)
KEY_AGE = timedelta(seconds=1)
SLOWLY = """
import sys
from sagas.cli import main
from sagas_store.faults import Patience

call = Patience.call

async def telling(self, operation, *more, **named):
    if operation in ("note the key", "seal a run anew", "seal entries anew", "commit"):
        print(operation, file=sys.stderr, flush=True)  # a good moment to be killed at
    return await call(self, operation, *more, **named)

Patience.call = telling
sys.exit(main(sys.argv[1:]))
"""
"""The command line, saying before each of its writes that it is about to make it."""


@pytest.fixture(scope="module")
def mongo_uri() -> Iterator[str]:
    """A server of its own: a killed worker leaves its transaction open, and the server keeps it for a minute."""
    with EmbeddedMongo.start(parameters={"transactionLifetimeLimitSeconds": "3"}) as mongo:
        yield mongo.uri


class Rotation:
    """An operator who rotates without end, and has the rewrapping killed now and then."""

    def __init__(self, store: MongoStore, database: Any, uri: str, rng: random.Random) -> None:
        self.uri = uri
        self.keys = Operator(store).keys
        self.database = database
        self.rng = rng
        self.rotated = self.killed = self.discarded = self.payloads = self.left = 0

    async def go_on(self, enough: asyncio.Event) -> None:
        while not enough.is_set():
            for tenant in TENANTS:
                await self.keys.rotate(tenant, **WHY)
                self.rotated += 1
            await asyncio.sleep(KEY_AGE.total_seconds())  # by now every process has noticed
            for tenant in TENANTS:
                if self.rng.random() < 0.5:
                    await self.rewrap_and_die(tenant)
                done = await self.keys.rewrap(tenant)
                assert not done.lost
                self.payloads += done.payloads
                self.left += len(done.left)
                await self.discard_what_can_go(tenant)

    async def rewrap_and_die(self, tenant: str | None) -> None:
        """In a process of its own, which is killed in the middle: after some of the runs, and between two writes."""
        whose = ["--tenant", tenant] if tenant is not None else ["--no-tenant"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SLOWLY, "keys", "rewrap", *whose, stdout=DEVNULL, stderr=PIPE, cwd=ROOT,
            env={**os.environ, "SAGAS_MONGODB_URI": self.uri, "SAGAS_DATABASE": self.database.name},
        )  # fmt: skip
        assert process.stderr is not None
        for _ in range(self.rng.randint(1, 12)):
            if not await process.stderr.readline():
                break
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.communicate()
        self.killed += process.returncode == -signal.SIGKILL

    async def discard_what_can_go(self, tenant: str | None) -> None:
        for key in await self.keys.of_tenant(tenant):
            if key.state is not KeyState.RETIRED:
                continue
            # As if the two minutes had passed that a write which is under way is given.
            await self.database["sagas.keys"].update_one(
                {"_id": key.key_id}, [{"$set": {"retired_at": {"$subtract": ["$retired_at", 120_000]}}}]
            )
            try:
                await self.keys.discard(tenant, key.key_id, confirm=key.key_id, **WHY)
                self.discarded += 1
            except KeyRefused:
                continue


async def test_no_run_fails_to_open_while_keys_are_rotated_rewrapped_and_destroyed_and_workers_are_killed(
    store: MongoStore,
    database: Any,
    mongo_uri: str,
    workers: Workers,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masters = {"test": rng.randbytes(32)}
    monkeypatch.setenv("SAGAS_MASTER_KEYS", f"test:{base64.b64encode(masters['test']).decode()}")
    sealed = MongoStore(database, keyring=Keyring(LocalKeyWrapper(masters), max_age=KEY_AGE))
    rotation = Rotation(sealed, database, mongo_uri, rng)
    options = {"key_age_s": KEY_AGE.total_seconds()}
    fleet = [workers.start(**options) for _ in range(3)]
    expected: dict[str, State] = {}

    async def start_more(client: Client) -> None:
        plans = rng.choices(list(PLANS), weights=[6, 2, 2, 2, 2, 1, 1, 1], k=24)
        booked = rng.choices(list(TRANSACTIONS), weights=[3, 1], k=6)
        for saga, states, chosen in ((fulfil(), PLANS, plans), (transact(), TRANSACTIONS, booked)):
            starts = [Start(Job(plan=plan), tenant=rng.choice(TENANTS)) for plan in chosen]
            started = await client.start_many(saga, starts)
            expected.update(zip([run.run_id for run in started], [states[plan] for plan in chosen], strict=True))

    async with Client(sealed) as client:
        await start_more(client)
        enough = asyncio.Event()
        rotating = asyncio.create_task(rotation.go_on(enough))
        kills = 0
        for _ in range(8):
            # Chance is in the work done, not in the time passed: a slow machine is killed as often as a quick one.
            goal = await calls_made(database) + rng.randint(30, 90)

            async def worked(goal: int = goal) -> bool:
                at_rest = len(await store.runs.at_rest(list(expected)))
                return at_rest == len(expected) or rotating.done() or await calls_made(database) >= goal

            await eventually(worked, what=f"{goal} calls are made", within_s=150)
            victim = rng.randrange(len(fleet))
            await fleet[victim].kill()
            fleet[victim] = workers.start(**options)
            kills += 1
            await start_more(client)
        await until_at_rest(store, list(expected), within_s=200)
        enough.set()
        await rotating
        await asyncio.sleep(KEY_AGE.total_seconds())

        print(
            f"{len(expected)} runs, {kills} workers killed, {rotation.rotated} rotations, {rotation.payloads} payloads "
            f"sealed anew, {rotation.killed} rewraps killed, {rotation.left} runs left over, {rotation.discarded} keys "
            "destroyed meanwhile"
        )
        assert "does not open" not in workers.logs()
        assert "fault of the engine" not in workers.logs()
        assert rotation.payloads
        await check_all(store, database, expected, suspended=False)

        for tenant in TENANTS:
            newest = await rotation.keys.rotate(tenant, **WHY)
            last = await rotation.keys.rewrap(tenant)
            assert last.left == {}
            await asyncio.sleep(KEY_AGE.total_seconds())
            await rotation.discard_what_can_go(tenant)
            states = {key.key_id: key.state for key in await rotation.keys.of_tenant(tenant) if key.purpose == "data"}
            assert set(states.values()) == {KeyState.ACTIVE, KeyState.DESTROYED}
            assert states[newest] is KeyState.ACTIVE
        await assert_all_opens(database, masters, list(expected))


async def assert_all_opens(database: Any, masters: dict[str, bytes], run_ids: list[str]) -> None:
    """In a process that remembers no key, with all keys but the newest destroyed."""
    keyring = Keyring(LocalKeyWrapper(masters))
    store = MongoStore(database, keyring=keyring)
    runs, journals = await store.runs.get_many(run_ids, with_input=True), await store.journal.load_many(run_ids)
    for run_id, run in runs.items():
        assert run.saga in SAGAS
        entries = journals[run_id]
        stored = [run.input, *(entry.payload for entry in entries), *(entry.reason for entry in entries)]
        opener: Opener = await keyring.opener(run.tenant, run_id, stored)
        for entry in entries:
            if entry.payload is not None:
                opener.open(*place_of_payload(entry.kind, entry.seq), entry.payload)
            if entry.reason is not None:
                opener.open(*place_of_reason(entry.kind, entry.seq), entry.reason)
