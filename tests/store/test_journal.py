"""The journal: appended to in order, fenced by its numbers, never changed; alone and inside a transaction."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any, cast

import pytest
from pydantic import BaseModel
from pymongo import AsyncMongoClient
from pymongo.errors import DocumentTooLarge, DuplicateKeyError, OperationFailure

from sagas import NonRetryable, Saga, Step
from sagas.decide import Progress
from sagas.errors import JournalMisfit
from sagas_store import MongoStore
from sagas_store.clock import EPOCH
from sagas_store.entries import Cause, Entry, Kind
from sagas_store.errors import FenceLost, RecordTooLarge, StoreRefused, StoreUnavailable
from sagas_store.faults import Patience
from sagas_store.journal import Journal
from sagas_store.states import State
from tests.conftest import DRIVERS
from tests.store.making import Commands, ForgetfulNetwork, client_of, entry, transaction
from tests.support.changing import replace
from tests.support.failpoints import LOOKS_AGAIN_SOON, fail_point, look_again_at_once

pytestmark = pytest.mark.parametrize("driver", DRIVERS)

RUN = "run-a"


# --- appending --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written",
    [
        entry(RUN, 1),
        entry(RUN, 2, kind=Kind.STEP_FAILED, in_doubt=True, payload=b"\x00opaque", try_number=5, next="rollback:stop"),
        entry(RUN, 3, kind=Kind.STEP_RETRY_SCHEDULED, due_at=EPOCH + timedelta(hours=9), payload=b""),
        entry(RUN, 4, kind=Kind.ROLLBACK_BEGUN, cause=Cause.DEADLINE, step=None, try_number=None, payload=None),
        entry(RUN, 5, kind=Kind.TAKEN_OVER, taken_from=State.RUNNING, step=None, try_number=None, payload=None),
        entry(RUN, 6, kind=Kind.PROBE_SUCCEEDED, payload=None, next="step:charge"),
    ],
    ids=lambda written: written.kind.value,
)
async def test_an_entry_is_read_back_as_it_was_appended(store: MongoStore, written: Entry) -> None:
    await store.journal.append(written)
    assert await store.journal.load(RUN) == [written]


async def test_entries_come_in_the_order_of_their_numbers_and_of_their_run_alone(store: MongoStore) -> None:
    for seq in (*range(1, 13), 300, 70_000):
        await store.journal.append(entry(RUN, seq))
    for neighbour in (RUN + "0", RUN[:-1], "", RUN.upper(), RUN + "\x00"):
        await store.journal.append(entry(neighbour, 1))
    assert [found.seq for found in await store.journal.load(RUN)] == [*range(1, 13), 300, 70_000]
    assert await store.journal.load("run-b") == []


async def test_a_number_that_another_claim_has_written_is_fenced_and_nothing_is_overwritten(store: MongoStore) -> None:
    theirs = entry(RUN, 1, token="token-2", worker="worker-2", payload=b"theirs")
    await store.journal.append(theirs)
    with pytest.raises(FenceLost) as lost:
        await store.journal.append(entry(RUN, 1, payload=b"ours"))
    assert lost.value.run_id == RUN
    assert await store.journal.load(RUN) == [theirs]


async def test_an_own_entry_found_again_is_the_one_that_stands(store: MongoStore) -> None:
    first = entry(RUN, 1)
    await store.journal.append(first)
    await store.journal.append(first)
    assert await store.journal.load(RUN) == [first]


async def test_a_lost_reply_to_an_append_is_no_lost_fence(store: MongoStore) -> None:
    forgetful = ForgetfulNetwork("append")
    await forgetful.journal(store).append(entry(RUN, 1))
    assert not forgetful.to_lose
    assert await store.journal.load(RUN) == [entry(RUN, 1)]


async def test_an_entry_that_vanished_with_a_primary_is_inserted_anew(store: MongoStore) -> None:
    real = store.journal._collection
    tries = []

    class RollsBackOnce:
        """Our first insert stood on a primary alone: the number is taken, then nobody on a majority has it."""

        async def insert_one(self, document: dict[str, Any]) -> None:
            tries.append(document["_id"])
            if len(tries) == 1:
                raise DuplicateKeyError("taken on this primary", 11000)
            await real.insert_one(document)

        async def find_one(self, *arguments: Any) -> Any:
            return await real.find_one(*arguments)

    await Journal(cast("Any", RollsBackOnce()), store.journal._patience).append(entry(RUN, 1))
    assert len(tries) == 2
    assert await store.journal.load(RUN) == [entry(RUN, 1)]


async def test_of_many_who_append_at_one_number_one_wins_and_the_others_know(store: MongoStore) -> None:
    rivals = [entry(RUN, 1, token=f"token-{number}") for number in range(20)]
    outcomes = await asyncio.gather(*(store.journal.append(rival) for rival in rivals), return_exceptions=True)
    assert Counter(type(outcome) for outcome in outcomes) == {FenceLost: 19, type(None): 1}
    (winner,) = await store.journal.load(RUN)
    assert outcomes[rivals.index(winner)] is None


async def test_entries_of_many_runs_that_go_together_have_each_a_fate_of_its_own(store: MongoStore) -> None:
    taken = entry("run-taken", 1, token="token-2")
    await store.journal.append(taken)
    ours = entry("run-ours", 1)
    await store.journal.append(ours)
    wrong = entry("run-wrong", 0)  # the validator wants a number from 1 on
    large = entry("run-large", 1, payload=b"x" * (17 * 2**20))
    fine = [entry(f"run-{number}", 1) for number in range(5)]
    together = [fine[0], entry("run-taken", 1), fine[1], ours, wrong, fine[2], large, *fine[3:]]
    outcomes = await asyncio.gather(*map(store.journal.append, together), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [
        type(None), FenceLost, type(None), type(None), StoreRefused, type(None), RecordTooLarge, type(None), type(None),
    ]  # fmt: skip
    runs = [one.run_id for one in (*fine, taken, ours, wrong, large)]
    assert await store.journal.load_many(runs) == {
        **{one.run_id: [one] for one in (*fine, taken, ours)},
        "run-wrong": [],
        "run-large": [],
    }


async def test_who_is_cancelled_while_its_entry_is_under_way_takes_no_other_along(store: MongoStore) -> None:
    appends = [asyncio.create_task(store.journal.append(entry(f"run-{number}", 1))) for number in range(20)]
    await asyncio.sleep(0)
    for cancelled in appends[::3]:
        cancelled.cancel()
    outcomes = await asyncio.gather(*appends, return_exceptions=True)
    assert [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes] == [n % 3 == 0 for n in range(20)]
    journals = await store.journal.load_many([f"run-{number}" for number in range(20)])
    assert all(journals[f"run-{number}"] for number in range(20) if number % 3)


class Context(BaseModel):
    """Nothing."""


async def test_whoever_reads_a_journal_with_a_gap_refuses_it(store: MongoStore) -> None:
    # The store takes the number it is given: the executor counts on from the entry before, and refuses what does not.
    saga = Saga("order", Context)

    @saga.pivot
    async def reserve(context: Context, step: Step[None]) -> Context:
        raise NonRetryable

    await store.journal.append(entry(RUN, 2))
    (after_the_gap,) = await store.journal.load(RUN)
    with pytest.raises(JournalMisfit, match="entry 2 where 1 was expected"):
        Progress.of(saga).after(after_the_gap)


async def test_an_entry_over_the_servers_limit_is_refused_by_name(store: MongoStore) -> None:
    with pytest.raises(RecordTooLarge) as refused:
        await store.journal.append(entry(RUN, 7, payload=b"x" * (17 * 2**20)))
    assert refused.value.run_id == RUN
    assert "entry 7" in str(refused.value)
    assert await store.journal.load(RUN) == []


# --- reading ----------------------------------------------------------------------------------------------------------


async def test_many_journals_are_read_in_one_query(
    store: MongoStore, database: Any, driver: str, mongo_uri: str
) -> None:
    for run in range(30):
        for seq in range(1, run % 4 + 1):
            await store.journal.append(entry(f"run-{run}", seq))
    commands = Commands()
    async with client_of(driver, mongo_uri, event_listeners=[commands]) as client:
        watched = MongoStore(client[database.name])
        journals = await watched.journal.load_many([f"run-{run}" for run in range(30)])
    assert {run: [found.seq for found in entries] for run, entries in journals.items()} == {
        f"run-{run}": list(range(1, run % 4 + 1)) for run in range(30)
    }
    assert len(commands.of("find")) == 1
    assert not commands.of("getMore")


async def test_of_no_runs_there_are_no_journals(store: MongoStore) -> None:
    assert await store.journal.load_many([]) == {}


async def test_the_last_context_is_that_of_the_newest_success(store: MongoStore) -> None:
    assert await store.journal.last_context(RUN) is None
    await store.journal.append(entry(RUN, 1, payload=b"first"))
    await store.journal.append(entry(RUN, 2, kind=Kind.PROBE_SUCCEEDED, payload=b"probed"))
    assert await store.journal.last_context(RUN) == (2, b"probed")
    await store.journal.append(entry(RUN, 3, kind=Kind.PROBE_SUCCEEDED, payload=None))
    await store.journal.append(entry(RUN, 4, kind=Kind.STEP_FAILED, payload=b"an error"))
    await store.journal.append(entry(RUN + "0", 9, payload=b"a neighbour's"))
    assert await store.journal.last_context(RUN) == (2, b"probed")
    await store.journal.append(entry(RUN, 5, kind=Kind.VERDICT, payload=b"as an operator says"))
    assert await store.journal.last_context(RUN) == (5, b"as an operator says")


# --- inside a transaction ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("commit", [True, False])
async def test_an_entry_in_a_transaction_counts_when_that_commits(
    store: MongoStore, database: Any, driver: str, commit: bool
) -> None:
    async with transaction(database, driver, commit=commit) as session:
        await store.journal.append_in(session, entry(RUN, 1))
        assert await store.journal.load(RUN) == []
    assert await store.journal.load(RUN) == ([entry(RUN, 1)] if commit else [])


async def test_a_taken_number_fences_a_transaction_too(store: MongoStore, database: Any, driver: str) -> None:
    theirs = entry(RUN, 1, token="token-2")
    await store.journal.append(theirs)
    async with transaction(database, driver, commit=False) as session:
        with pytest.raises(FenceLost):
            await store.journal.append_in(session, entry(RUN, 1))
    assert await store.journal.load(RUN) == [theirs]


async def test_an_entry_over_the_servers_limit_is_refused_in_a_transaction(
    store: MongoStore, database: Any, driver: str
) -> None:
    async with transaction(database, driver, commit=False) as session:
        with pytest.raises((RecordTooLarge, DocumentTooLarge)):
            await store.journal.append_in(session, entry(RUN, 1, payload=b"x" * (17 * 2**20)))


# --- committing an effect and its entry together ----------------------------------------------------------------------


class Victim:
    """A store on a client of its own, which fail points can single out, and an effect that it commits with an entry."""

    def __init__(self, store: MongoStore, database: Any, app_name: str) -> None:
        self.store = store
        self.effects = database["effects"]
        self.app_name = app_name
        self.bodies = 0
        self.sessions: list[Any] = []

    async def body(self, session: Any) -> Entry | None:
        """The effect, and the entry that tells of it."""
        self.bodies += 1
        self.sessions.append(session.session_id)
        await self.effects.insert_one({"body": self.bodies}, session=session)
        return entry(RUN, 1)

    async def commit(self) -> Entry | None:
        """Both, or neither."""
        return await self.store.commit_together(self.body)


MakeVictim = Callable[..., Awaitable[Victim]]


@pytest.fixture
async def make_victim(
    store: MongoStore, database: Any, driver: str, mongo_uri: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Awaitable[Victim]]]:
    look_again_at_once(monkeypatch)
    await database["effects"].insert_one({"_id": "made before any transaction"})
    await database["effects"].delete_many({})
    app_name = f"victim-{secrets.token_hex(4)}"
    async with client_of(driver, mongo_uri, appName=app_name, **LOOKS_AGAIN_SOON) as client:
        made = None

        async def make(patience: timedelta = timedelta(seconds=20)) -> Victim:
            nonlocal made
            own = client[database.name]
            made = Victim(MongoStore(own, patience=patience), own, app_name)
            return made

        yield make
        # A commit that the fail point swallowed has left its transaction open, and its locks held for a minute.
        if made is not None and made.sessions:
            await database.client.admin.command({"killSessions": made.sessions})


@pytest.fixture
async def admin(mongo_uri: str) -> AsyncIterator[AsyncMongoClient[Any]]:
    async with AsyncMongoClient[Any](mongo_uri) as client:
        yield client


async def test_an_effect_and_its_entry_commit_together(store: MongoStore, make_victim: MakeVictim) -> None:
    victim = await make_victim()
    assert await victim.commit() == entry(RUN, 1)
    assert await store.journal.load(RUN) == [entry(RUN, 1)]
    assert await victim.effects.count_documents({}) == 1


async def test_a_body_without_an_entry_has_no_effect(store: MongoStore, make_victim: MakeVictim) -> None:
    victim = await make_victim()

    async def changes_its_mind(session: Any) -> None:
        await victim.body(session)

    assert await victim.store.commit_together(changes_its_mind) is None
    assert await victim.effects.count_documents({}) == 0
    assert await store.journal.load(RUN) == []


@pytest.mark.parametrize(
    "error",
    [RuntimeError("the body's own"), OperationFailure("the body's own", 8000), asyncio.CancelledError()],
    ids=repr,
)
async def test_what_the_body_raises_undoes_its_effect_and_passes_through(
    store: MongoStore, make_victim: MakeVictim, error: BaseException
) -> None:
    victim = await make_victim()

    async def fails(session: Any) -> Entry | None:
        await victim.body(session)
        raise error

    with pytest.raises(type(error)):
        await victim.store.commit_together(fails)
    assert victim.bodies == 1
    assert await victim.effects.count_documents({}) == 0
    assert await store.journal.load(RUN) == []


async def test_a_late_owners_effect_is_undone_with_its_fence(store: MongoStore, make_victim: MakeVictim) -> None:
    victim = await make_victim()
    theirs = entry(RUN, 1, token="token-2")
    await store.journal.append(theirs)
    with pytest.raises(FenceLost):
        await victim.commit()
    assert victim.bodies == 1
    assert await victim.effects.count_documents({}) == 0
    assert await store.journal.load(RUN) == [theirs]


async def test_an_entry_that_an_earlier_commit_of_ours_wrote_is_returned_and_nothing_happens_twice(
    store: MongoStore, make_victim: MakeVictim
) -> None:
    victim = await make_victim()
    earlier = entry(RUN, 1, payload=b"the earlier result")
    await store.journal.append(earlier)
    assert await victim.commit() == earlier
    assert await victim.effects.count_documents({}) == 0


async def test_a_write_conflict_in_the_body_runs_it_again(store: MongoStore, make_victim: MakeVictim) -> None:
    victim = await make_victim()
    await victim.effects.insert_one({"_id": "contended", "n": 0})

    async def conflicts_once(session: Any) -> Entry | None:
        first = victim.bodies == 0
        await victim.effects.find_one({"_id": "contended"}, session=session)
        if first:  # somebody else writes after our snapshot was taken
            await victim.effects.update_one({"_id": "contended"}, {"$inc": {"n": 1}})
        await victim.effects.update_one({"_id": "contended"}, {"$inc": {"n": 100}}, session=session)
        return await victim.body(session)

    async def counts(session: Any) -> Entry | None:
        calls.append(session)
        if len(calls) > 1:
            victim.bodies += 1
        return await conflicts_once(session)

    calls: list[Any] = []
    assert await victim.store.commit_together(counts) == entry(RUN, 1)
    assert len(calls) == 2
    found = await victim.effects.find_one({"_id": "contended"})
    assert found is not None
    assert found["n"] == 101
    assert await store.journal.load(RUN) == [entry(RUN, 1)]


TRANSIENT: dict[str, Any] = {"errorCode": 112, "errorLabels": ["TransientTransactionError"]}


@pytest.mark.parametrize(
    ("command", "times", "trouble"),
    [
        pytest.param("insert", 1, TRANSIENT, id="a write conflict"),
        pytest.param("insert", 5, TRANSIENT, id="five write conflicts"),
        pytest.param("insert", 1, {"closeConnection": True}, id="the connection lost while writing"),
        pytest.param("insert", 3, {"closeConnection": True}, id="the connection lost three times while writing"),
    ],
)
async def test_a_transaction_that_was_aborted_by_a_passing_fault_is_run_again_whole(
    store: MongoStore,
    make_victim: MakeVictim,
    admin: AsyncMongoClient[Any],
    command: str,
    times: int,
    trouble: dict[str, Any],
) -> None:
    victim = await make_victim()
    async with fail_point(admin, [command], with_app_name=victim.app_name, times=times, **trouble) as point:
        assert await victim.commit() == entry(RUN, 1)
    assert point.hits == times
    assert victim.bodies == times + 1
    assert await victim.effects.count_documents({}) == 1
    assert await store.journal.load(RUN) == [entry(RUN, 1)]


@pytest.mark.parametrize("times", [1, 3])
async def test_a_transaction_that_the_server_has_dropped_before_its_commit_is_run_again_whole(
    store: MongoStore, make_victim: MakeVictim, admin: AsyncMongoClient[Any], times: int
) -> None:
    victim = await make_victim()

    class Drops(Patience):
        """The server drops the transaction just before its commit, as when it was open for too long."""

        async def call(self, operation: str, attempt: Any, **more: Any) -> Any:
            if operation == "commit" and victim.bodies <= times:
                await admin.admin.command({"killSessions": [victim.sessions[-1]]})
            return await super().call(operation, attempt, **more)

    victim.store._patience = Drops(timedelta(seconds=20), timedelta(seconds=10))
    assert await victim.commit() == entry(RUN, 1)
    assert victim.bodies == times + 1
    assert await victim.effects.count_documents({}) == 1
    assert await store.journal.load(RUN) == [entry(RUN, 1)]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param({"closeConnection": True}, id="the connection lost"),
        pytest.param({"errorCode": 50}, id="time was up"),
        pytest.param({"errorCode": 10107, "errorLabels": ["RetryableWriteError"]}, id="not the primary any more"),
        pytest.param({"writeConcernError": {"code": 64, "errmsg": "no majority in time"}}, id="no majority in time"),
        pytest.param({"writeConcernError": {"code": 91, "errmsg": "shutting down"}}, id="shutting down"),
    ],
)
async def test_an_unknown_commit_is_asked_for_again_until_it_is_known(
    store: MongoStore,
    make_victim: MakeVictim,
    admin: AsyncMongoClient[Any],
    times: int,
    trouble: dict[str, Any],
) -> None:
    victim = await make_victim()
    async with fail_point(admin, ["commitTransaction"], with_app_name=victim.app_name, times=times, **trouble) as point:
        assert await victim.commit() == entry(RUN, 1)
    assert point.hits == times
    assert victim.bodies == 1, "never run again blindly"
    assert await victim.effects.count_documents({}) == 1
    assert await store.journal.load(RUN) == [entry(RUN, 1)]


async def test_a_commit_that_happened_and_stays_unknown_is_settled_by_reading_the_journal(
    store: MongoStore, make_victim: MakeVictim, admin: AsyncMongoClient[Any]
) -> None:
    victim = await make_victim(timedelta(milliseconds=100))
    happened: dict[str, Any] = {"writeConcernError": {"code": 64, "errmsg": "no majority in time"}}
    async with fail_point(admin, ["commitTransaction"], with_app_name=victim.app_name, **happened) as point:
        assert await victim.commit() == entry(RUN, 1)
    assert point.hits >= 2
    assert victim.bodies == 1
    assert await victim.effects.count_documents({}) == 1
    assert await store.journal.load(RUN) == [entry(RUN, 1)]


async def test_a_commit_that_never_gets_through_is_given_up_and_leaves_nothing(
    store: MongoStore, make_victim: MakeVictim, admin: AsyncMongoClient[Any]
) -> None:
    victim = await make_victim(timedelta(milliseconds=100))
    async with fail_point(admin, ["commitTransaction"], with_app_name=victim.app_name, errorCode=50) as point:
        with pytest.raises(StoreUnavailable):
            await victim.commit()
    assert point.hits >= 2
    assert victim.bodies == 1
    # Its transaction may still be open on the server, and keeps others from this number until it is dropped.
    await admin.admin.command({"killSessions": victim.sessions})
    assert await victim.effects.count_documents({}) == 0
    assert await store.journal.load(RUN) == []


async def test_transactions_that_are_always_aborted_end_with_the_stores_patience(
    store: MongoStore, make_victim: MakeVictim, admin: AsyncMongoClient[Any]
) -> None:
    victim = await make_victim(timedelta(milliseconds=100))
    async with fail_point(admin, ["insert"], with_app_name=victim.app_name, **TRANSIENT) as point:
        with pytest.raises(StoreUnavailable):
            await victim.commit()
    assert point.hits >= 2
    assert await store.journal.load(RUN) == []


async def test_a_reply_is_waited_for_no_longer_inside_a_transaction_than_outside(
    database: Any, make_victim: MakeVictim, admin: AsyncMongoClient[Any]
) -> None:
    victim = await make_victim()
    own = victim.effects.database
    hasty = MongoStore(own, patience=timedelta(milliseconds=400), reply=timedelta(milliseconds=200))

    async def only_an_entry(session: Any) -> Entry | None:
        return replace(entry(RUN, 1), payload=b"slow")

    slow = {"blockConnection": True, "blockTimeMS": 2_000}
    loop = asyncio.get_running_loop()
    async with fail_point(admin, ["insert"], with_app_name=victim.app_name, times=1, **slow):
        begun = loop.time()
        try:
            await hasty.commit_together(only_an_entry)
        except StoreUnavailable:
            pass
        assert loop.time() - begun < 1.5
