"""The runs collection: starting, claiming, holding, letting go, listing; on both drivers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo.errors import AutoReconnect, InvalidOperation, OperationFailure

import sagas_store.claims
from sagas_store import MongoStore
from sagas_store.claims import Claims
from sagas_store.clock import EPOCH
from sagas_store.errors import (
    FenceLost,
    IllegalTransition,
    RecordTooLarge,
    RunExists,
    StoreRefused,
    StoreUnavailable,
    UnreadableRun,
)
from sagas_store.faults import Patience
from sagas_store.records import RunFilter, RunPosition, RunRecord
from sagas_store.runs import Runs
from sagas_store.states import HELD, OPEN, SETTLED, TRANSITIONS, Phase, State, check_move
from tests.conftest import DRIVERS
from tests.store.making import (
    DEFINITIONS,
    LEASE,
    Commands,
    ForgetfulNetwork,
    claim,
    client_of,
    lapse,
    new_run,
    started_and_claimed,
    stored,
    transaction,
)
from tests.support.changing import replace

pytestmark = pytest.mark.parametrize("driver", DRIVERS)

HOUR = timedelta(hours=1)
Verb = Callable[[Runs, RunRecord], Awaitable[None]]


@asynccontextmanager
async def newer_schema(store: MongoStore, database: Any) -> AsyncIterator[None]:
    """The database as a newer version needs it: its validator lets through what this one does not know."""
    await database.command("collMod", "sagas.runs", validator={})
    try:
        yield
    finally:
        await store.schema.apply()


VERBS: dict[str, Verb] = {
    "pass the gate": lambda runs, run: runs.pass_gate(run),
    "show rolling back": lambda runs, run: runs.show_rolling_back(run),
    "park": lambda runs, run: runs.park(run, wait=timedelta(seconds=30)),
    "give back": lambda runs, run: runs.give_back(run),
    "settle": lambda runs, run: runs.settle(run, State.COMPLETED),
    "hold": lambda runs, run: runs.hold(run, State.BROKEN, "the reason"),
}
LETTING_GO = {"park", "settle", "hold"}
every_verb = pytest.mark.parametrize("verb", VERBS)


def with_token(run: RunRecord, token: str) -> RunRecord:
    assert run.claim is not None
    return replace(run, claim=replace(run.claim, token=token))


# --- starting ---------------------------------------------------------------------------------------------------------


async def test_a_started_run_is_read_back_as_it_was_given(store: MongoStore) -> None:
    run = new_run(store, key="order-10248", input=b"\x01\x00opaque")
    await store.runs.insert(run)
    found = await store.runs.get(run.run_id, with_input=True)
    assert found == RunRecord(
        run_id=run.run_id,
        saga=run.saga,
        version=run.version,
        fingerprint=run.fingerprint,
        key="order-10248",
        state=State.PENDING,
        phase=Phase.FORWARD,
        attempts=0,
        created_at=run.created_at,
        due_at=run.due_at,
        settled_at=None,
        gate_passed_at=None,
        claim=None,
        held=None,
        input_read=b"\x01\x00opaque",
    )
    assert found.created_at.tzinfo is UTC


async def test_a_run_is_started_once(store: MongoStore, database: Any) -> None:
    run = new_run(store)
    await store.runs.insert(run)
    with pytest.raises(RunExists) as refused:
        await store.runs.insert(replace(run, input=b"other"))
    assert refused.value.run_id == run.run_id
    assert (await stored(database, run.run_id))["input"] == run.input


async def test_a_start_whose_reply_was_lost_is_found_to_exist(store: MongoStore) -> None:
    run = new_run(store)
    await ForgetfulNetwork("start").runs(store).insert(run)
    assert await store.runs.get(run.run_id) is not None


async def test_starting_many_names_those_that_existed_and_stores_the_others(store: MongoStore) -> None:
    runs = [new_run(store) for _ in range(10)]
    await store.runs.insert(runs[3])
    await store.runs.insert(runs[7])
    assert await store.runs.insert_many(runs) == {runs[3].run_id, runs[7].run_id}
    assert (await store.runs.get_many([run.run_id for run in runs])).keys() == {run.run_id for run in runs}


async def test_starting_many_again_after_a_lost_reply_stores_each_once(store: MongoStore, database: Any) -> None:
    runs = [new_run(store) for _ in range(10)]
    assert await ForgetfulNetwork("start many").runs(store).insert_many(runs) == set()
    assert await database["sagas.runs"].count_documents({}) == 10


async def test_a_run_over_the_servers_limit_is_refused_by_name(store: MongoStore) -> None:
    run = new_run(store, input=b"x" * (17 * 2**20))
    with pytest.raises(RecordTooLarge) as refused:
        await store.runs.insert(run)
    assert refused.value.run_id == run.run_id


async def test_a_run_over_the_servers_limit_among_many_is_refused_by_name(store: MongoStore) -> None:
    with pytest.raises(RecordTooLarge):
        await store.runs.insert_many([new_run(store), new_run(store, input=b"x" * (17 * 2**20))])


async def test_a_run_that_the_validator_refuses_is_named_without_its_payload(store: MongoStore) -> None:
    wrong = new_run(store, version=0, input=b"the-secret-payload")
    with pytest.raises(StoreRefused) as refused:
        await store.runs.insert(wrong)
    assert "secret" not in str(refused.value)
    with pytest.raises(StoreRefused) as refused:
        await store.runs.insert_many([new_run(store), wrong])
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("commit", [True, False])
async def test_a_run_started_in_a_transaction_exists_if_that_commits(
    store: MongoStore, database: Any, driver: str, commit: bool
) -> None:
    await database["shop"].insert_one({"_id": "before"})  # collections made in a transaction would need more rights
    run = new_run(store)
    async with transaction(database, driver, commit=commit) as session:
        await database["shop"].insert_one({"_id": "order"}, session=session)
        await store.runs.insert_in(session, run)
        assert await store.runs.get(run.run_id) is None, "nobody sees it before the commit"
    assert (await store.runs.get(run.run_id) is not None) is commit
    assert await database["shop"].count_documents({"_id": "order"}) == int(commit)


async def test_a_duplicate_is_told_before_it_spoils_the_transaction(
    store: MongoStore, database: Any, driver: str
) -> None:
    run, other = new_run(store), new_run(store)
    await store.runs.insert(run)
    async with transaction(database, driver, commit=True) as session:
        with pytest.raises(RunExists):
            await store.runs.insert_in(session, run)
        await store.runs.insert_in(session, other)
        with pytest.raises(RunExists):
            await store.runs.insert_in(session, other)
    assert (await store.runs.get_many([run.run_id, other.run_id])).keys() == {run.run_id, other.run_id}


async def test_two_transactions_that_start_the_same_run_conflict_in_the_drivers_own_words(
    store: MongoStore, database: Any, driver: str
) -> None:
    run = new_run(store)
    async with transaction(database, driver, commit=True) as first:
        await store.runs.insert_in(first, run)
        async with transaction(database, driver, commit=False) as second:
            with pytest.raises(OperationFailure) as conflict:
                await store.runs.insert_in(second, run)
            assert conflict.value.has_error_label("TransientTransactionError"), "so the application's retry sees it"


# --- claiming ---------------------------------------------------------------------------------------------------------


async def test_the_longest_due_runs_are_claimed_first(store: MongoStore) -> None:
    runs = [new_run(store, due_in=-timedelta(seconds=age)) for age in (3, 9, 1, 7, 5)]
    await store.runs.insert_many(runs)
    assert {run.run_id for run in await claim(store, limit=2)} == {runs[1].run_id, runs[3].run_id}
    assert {run.run_id for run in await claim(store, token="token-2", limit=1)} == {runs[4].run_id}
    assert {run.run_id for run in await claim(store, token="token-3", limit=9)} == {runs[0].run_id, runs[2].run_id}


async def test_a_batch_is_handed_over_longest_due_first(store: MongoStore) -> None:
    runs = [new_run(store, due_in=-timedelta(seconds=age)) for age in (3, 9, 1, 7, 5)]
    await store.runs.insert_many(runs)
    claimed = await claim(store, limit=5)
    assert [run.run_id for run in claimed] == [runs[place].run_id for place in (1, 3, 4, 0, 2)]


async def test_a_claim_says_all_that_its_holder_needs(store: MongoStore) -> None:
    started = new_run(store, input=b"payload")
    await store.runs.insert(started)
    (run,) = await claim(store, token="token-1")
    assert (run.state, run.attempts, run.input) == (State.RUNNING, 1, b"payload")
    assert run.claim is not None
    assert (run.claim.token, run.claim.worker, run.claim.attempt) == ("token-1", "worker-1", 1)
    assert run.claim.taken_from is State.PENDING
    assert run.due_at == run.claim.at + LEASE, "a lease ends at the server's time plus its length"


async def test_only_served_definitions_and_versions_are_claimed(store: MongoStore) -> None:
    served = new_run(store)
    newer, other = new_run(store, version=2), new_run(store, saga="refund")
    await store.runs.insert_many([newer, other, served])
    assert [run.run_id for run in await claim(store, limit=10)] == [served.run_id]
    untouched = await store.runs.get_many([newer.run_id, other.run_id])
    assert {(run.state, run.attempts, run.due_at) for run in untouched.values()} == {
        (State.PENDING, 0, newer.due_at),
        (State.PENDING, 0, other.due_at),
    }
    both = await store.claims.take(
        [("order", 2), ("refund", 1)], token="token-2", worker="worker-2", lease=LEASE, limit=10
    )
    assert {run.run_id for run in both} == {newer.run_id, other.run_id}


async def test_runs_that_are_not_due_are_not_claimed(store: MongoStore) -> None:
    await store.runs.insert(new_run(store, due_in=HOUR))
    assert await claim(store) == []


async def test_held_and_settled_runs_are_not_claimed(store: MongoStore) -> None:
    await store.runs.settle(await started_and_claimed(store), State.COMPLETED)
    await store.runs.hold(await started_and_claimed(store), State.IN_DOUBT, "unknown")
    assert await claim(store, token="token-2", limit=10) == []


async def test_a_leased_run_is_nobody_elses_until_its_lease_has_lapsed(store: MongoStore, database: Any) -> None:
    held = await started_and_claimed(store, token="token-1")
    assert await claim(store, token="token-2") == []
    assert await lapse(database) == 1
    (taken,) = await claim(store, token="token-2")
    assert taken.run_id == held.run_id
    assert taken.claim is not None
    assert (taken.attempts, taken.claim.taken_from, taken.claim.token) == (2, State.RUNNING, "token-2")


async def test_a_parked_run_is_claimed_again_as_parked(store: MongoStore) -> None:
    await store.runs.park(await started_and_claimed(store), wait=timedelta(0))
    (again,) = await claim(store, token="token-2")
    assert again.claim is not None
    assert (again.attempts, again.claim.taken_from) == (2, State.PENDING)


async def test_twenty_claimers_share_five_hundred_runs_and_none_is_claimed_twice(
    store: MongoStore, database: Any
) -> None:
    runs = [new_run(store, due_in=-timedelta(milliseconds=number)) for number in range(500)]
    await store.runs.insert_many(runs)
    claimed: Counter[str] = Counter()

    async def claimer(name: str) -> None:
        turn = 0
        while sum(claimed.values()) < len(runs):
            turn += 1
            token = f"{name}:{turn}"
            batch = await store.claims.take(DEFINITIONS, token=token, worker=name, lease=LEASE, limit=7)
            assert len(batch) <= 7
            assert all(run.claim is not None and run.claim.token == token for run in batch)
            claimed.update(run.run_id for run in batch)

    async with asyncio.timeout(60):
        await asyncio.gather(*(claimer(f"worker-{number}") for number in range(20)))
    assert claimed == Counter(run.run_id for run in runs)
    assert await database["sagas.runs"].count_documents({"state": "running", "attempts": 1}) == 500


async def test_who_loses_all_candidates_to_another_looks_for_further_ones(store: MongoStore) -> None:
    runs = [new_run(store, due_in=-timedelta(seconds=60 - number)) for number in range(4)]
    await store.runs.insert_many(runs)
    due = store.claims._due

    class Slow(Claims):
        async def _due(self, definitions: Any, limit: int, since: datetime | None = None) -> list[dict[str, Any]]:
            found = await due(definitions, limit, since)
            if runs[0].run_id in {
                one["_id"] for one in found
            }:  # between our look and our stamp another worker takes them
                await claim(store, token="thief", limit=2)
            return found

    late = Slow(store.claims._collection, store.claims._patience)
    claimed = await late.take(DEFINITIONS, token="late", worker="late", lease=LEASE, limit=2)
    assert [run.run_id for run in claimed] == [runs[2].run_id, runs[3].run_id]


@pytest.mark.parametrize("lost", ["find due runs", "claim", "read claimed runs"])
async def test_a_claim_survives_the_loss_of_any_of_its_replies(store: MongoStore, database: Any, lost: str) -> None:
    runs = [new_run(store) for _ in range(3)]
    await store.runs.insert_many(runs)
    forgetful = ForgetfulNetwork(lost)
    claimed = await forgetful.claims(store).take(DEFINITIONS, token="t", worker="w", lease=LEASE, limit=3)
    assert {run.run_id for run in claimed} == {run.run_id for run in runs}
    assert {run.attempts for run in claimed} == {1}, "stamping again did not count a second attempt"
    assert not forgetful.to_lose


async def test_a_busy_workers_next_look_goes_on_where_the_last_one_ended(
    store: MongoStore, database: Any, driver: str, mongo_uri: str
) -> None:
    runs = [new_run(store, due_in=-timedelta(seconds=60 - number)) for number in range(5)]
    await store.runs.insert_many(runs)
    commands = Commands()
    async with client_of(driver, mongo_uri, event_listeners=[commands]) as client:
        watched = MongoStore(client[database.name]).claims
        for number in range(3):
            batch = await watched.take(DEFINITIONS, token=f"t{number}", worker="w", lease=LEASE, limit=2)
            assert [run.run_id for run in batch] == [run.run_id for run in runs[2 * number : 2 * number + 2]]
        assert await watched.take(DEFINITIONS, token="t", worker="w", lease=LEASE, limit=2) == []
    by_age = [find for find in commands.of("find") if list(find.get("sort", ())) == ["due_at"]]
    looks = [find["filter"]["$or"][0]["due_at"] for find in by_age]
    assert looks == [
        {"$exists": True},
        {"$gte": runs[1].due_at},
        {"$gte": runs[3].due_at},  # finds one, which is less than was asked for, so ...
        {"$exists": True},  # ... what may have become due before that is looked for
        {"$exists": True},  # and an idle worker asks once
    ]


async def test_runs_that_are_due_at_one_moment_are_all_found(store: MongoStore) -> None:
    first = new_run(store, due_in=-HOUR)
    runs = [first, *(new_run(store, due_at=first.due_at) for _ in range(6))]
    await store.runs.insert_many(runs)
    claimed = [run for number in range(4) for run in await claim(store, token=f"token-{number}", limit=2)]
    assert Counter(run.run_id for run in claimed) == Counter(run.run_id for run in runs)


async def test_a_run_that_becomes_due_behind_the_looks_is_found_by_the_seventeenth_claim(store: MongoStore) -> None:
    backlog = [new_run(store, due_in=-timedelta(seconds=60 - number)) for number in range(40)]
    await store.runs.insert_many(backlog)
    await claim(store, token="token-0", limit=2)
    earlier = new_run(store, due_in=-HOUR)  # a start whose due time is in the past, or that was long on its way
    await store.runs.insert(earlier)
    for number in range(1, 18):
        claimed = await claim(store, token=f"token-{number}", limit=2)
        assert len(claimed) == 2
        if earlier.run_id in {run.run_id for run in claimed}:
            return
    raise AssertionError("more was due than was taken each time, and it was never its turn")


async def test_no_claim_comes_back_with_less_than_it_could_have_had(store: MongoStore, database: Any) -> None:
    dice = random.Random(10248)
    due: set[str] = set()
    for turn in range(60):
        runs = [new_run(store, due_in=-timedelta(seconds=dice.randrange(10_000))) for _ in range(dice.randrange(7))]
        if runs:
            await store.runs.insert_many(runs)
        due |= {run.run_id for run in runs}
        limit = dice.randrange(1, 6)
        claimed = await claim(store, token=f"token-{turn}", limit=limit)
        assert len(claimed) == min(limit, len(due)), turn
        due -= {run.run_id for run in claimed}
        if claimed and dice.random() < 0.3:  # handed back: due from now on
            await store.runs.park(claimed[0], wait=timedelta(0))
            due.add(claimed[0].run_id)
        if dice.random() < 0.1:
            due |= await lapsed(database)
    while due:
        due -= {run.run_id for run in await claim(store, token=f"last-{len(due)}", limit=5)}


async def lapsed(database: Any) -> set[str]:
    """Every lease is over since long ago; the runs."""
    held = await database["sagas.runs"].find({"state": "running"}, {"_id": 1}).to_list(None)
    await database["sagas.runs"].update_many(
        {"state": "running"}, [{"$set": {"due_at": {"$subtract": ["$$NOW", 50_000_000]}}}]
    )
    return {found["_id"] for found in held}


async def test_what_was_found_and_could_not_be_stamped_is_found_again(store: MongoStore) -> None:
    runs = [new_run(store, due_in=-timedelta(seconds=60 - number)) for number in range(6)]
    await store.runs.insert_many(runs)
    await claim(store, token="token-0", limit=2)
    stamp, store.claims._stamp = store.claims._stamp, away  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreUnavailable):
        await claim(store, token="token-1", limit=2)
    store.claims._stamp = stamp  # type: ignore[method-assign]
    assert [run.run_id for run in await claim(store, token="token-2", limit=2)] == [runs[2].run_id, runs[3].run_id]


async def away(*_: Any) -> list[RunRecord]:
    raise StoreUnavailable("claim", "the primary is gone")


async def test_a_claim_of_nothing_claims_nothing(store: MongoStore) -> None:
    await store.runs.insert(new_run(store))
    assert await claim(store, limit=0) == []


async def test_a_run_that_nearly_fills_a_document_does_not_keep_others_from_being_claimed(store: MongoStore) -> None:
    # It could be stored and has no room left for its claim.
    full = new_run(store, due_in=-HOUR, input=b"x" * (16 * 2**20 - 240))
    other = new_run(store)
    try:
        await store.runs.insert(full)
    except RecordTooLarge:
        return  # refused at the start, by name: nothing is due that cannot be claimed
    await store.runs.insert(other)
    assert other.run_id in {run.run_id for run in await claim(store, limit=10)}


# --- the next due run -------------------------------------------------------------------------------------------------


FULLY_BLOCKED = {"count": 1, "since": EPOCH, "failure": "KeyLost", "why": "gone"}
ODD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a phase of a newer version": ({"phase": "halfway"}, ("phase",)),
    "an answer of a newer version": (
        {"stop": {"decision": "postponed", "by": "shop", "asked_at": EPOCH}, "phase": "halfway"},
        ("phase", "stop"),
    ),
    "less than there should be": ({"blocked": {"count": 1}}, ("blocked",)),
    "something else than there should be": ({"held": 7}, ("held",)),
    "more than this version knows": ({"blocked": {**FULLY_BLOCKED, "newer": 1}, "newer": {"by": 2}}, ()),
}


@pytest.mark.parametrize("odd", ODD)
async def test_a_run_that_this_version_cannot_read_harms_none_that_is_read_along_with_it(
    store: MongoStore, database: Any, odd: str
) -> None:
    change, unreadable = ODD[odd]
    key = f"{3:016x}"
    runs = [new_run(store, keys=(key,), due_in=-HOUR) for _ in range(11)]
    await store.runs.insert_many(runs)
    strange = runs[5].run_id
    async with newer_schema(store, database):
        await database["sagas.runs"].update_one({"_id": strange}, {"$set": change})
        claimed = await claim(store, limit=20)
        listed = await store.runs.page(RunFilter(states=OPEN), after=None, limit=20)
        of_key = await store.runs.needing_key(key, limit=20)
        for found in (claimed, listed, of_key):
            assert {run.run_id: run.unreadable for run in found} == {
                run.run_id: unreadable if run.run_id == strange else () for run in runs
            }
            assert all(run.state is State.RUNNING and run.attempts == 1 for run in found)
        if not unreadable:
            found_again = await store.runs.get(strange)
            assert found_again is not None
            assert (found_again.blocked is not None, found_again.attempts) == (True, 1)
            return
        for reading in (store.runs.get(strange), store.runs.get_many([run.run_id for run in runs])):
            with pytest.raises(UnreadableRun, match=f"run {strange}: .* {', '.join(unreadable)}: ") as told:
                await reading
            assert told.value.fields == unreadable
            assert not any(value in str(told.value) for value in ("halfway", "postponed"))
        assert await store.runs.get(runs[0].run_id) is not None
        odd_one = next(run for run in claimed if run.run_id == strange)
        await store.runs.hold(odd_one, State.BROKEN, "unfit", stop_known=True)
        assert (await stored(database, strange))["state"] == State.BROKEN


async def test_a_state_that_this_version_does_not_know_counts_as_held(store: MongoStore, database: Any) -> None:
    key = f"{3:016x}"
    runs = [new_run(store, keys=(key,)) for _ in range(3)]
    await store.runs.insert_many(runs)
    async with newer_schema(store, database):
        await database["sagas.runs"].update_one({"_id": runs[1].run_id}, {"$set": {"state": "paused"}})
        assert await store.runs.count_needing_key(key) == {State.PENDING: 2, State.BROKEN: 1}
        assert {run.run_id: run.state for run in await store.runs.needing_key(key, limit=3)} == {
            run.run_id: State.BROKEN if run is runs[1] else State.PENDING for run in runs
        }


@pytest.mark.parametrize("place", [0, 5, 10])
async def test_a_run_that_nobody_may_write_to_keeps_no_other_from_being_claimed(
    store: MongoStore, database: Any, place: int
) -> None:
    runs = [new_run(store, due_in=-HOUR) for _ in range(11)]
    await store.runs.insert_many(runs)
    damaged = sorted(run.run_id for run in runs)[place]
    await damage(database, damaged)
    claimed = await claim(store, limit=20)
    assert {run.run_id for run in claimed} == {run.run_id for run in runs} - {damaged}
    assert all(run.attempts == 1 for run in claimed)


async def damage(database: Any, *run_ids: str) -> None:
    """From now on the validator lets nobody write to these."""
    change = {"q": {"_id": {"$in": list(run_ids)}}, "u": {"$set": {"phase": "halfway"}}, "multi": True}
    await database.command("update", "sagas.runs", updates=[change], bypassDocumentValidation=True)


async def test_runs_that_nobody_may_write_to_are_left_out_for_a_minute(
    store: MongoStore, database: Any, mongo_uri: str, driver: str
) -> None:
    """Due longest, they are found first by every claim. Where they took all its room no other would ever be claimed."""
    runs = [new_run(store, due_in=-HOUR * (9 - n), tenant="acme") for n in range(6)]
    await store.runs.insert_many(runs)
    ids = [run.run_id for run in runs]
    await damage(database, *ids[:2])
    now, commands, told = 0.0, Commands(), []

    def note(error: StoreRefused) -> None:
        told.append(error.operation.removeprefix("claim run "))

    async with client_of(driver, mongo_uri, event_listeners=[commands]) as client:
        claims = MongoStore(client[database.name], monotonic=lambda: now).claims

        async def take(token: str, limit: int) -> list[str]:
            taken = await claims.take(
                DEFINITIONS, token=token, worker="w", lease=LEASE, limit=limit, per_tenant=9, refused=note
            )
            return [run.run_id for run in taken]

        assert (await take("a", 1), told) == ([ids[2]], ids[:2])
        assert len(commands.of("update")) == 5  # for each of the two one more than for the third
        commands.sent.clear()
        assert (await take("b", 2), told) == (ids[3:5], ids[:2])
        assert len(commands.of("update")) == 1
        assert await claims.next_due_at(DEFINITIONS) == runs[5].due_at
        assert await take("c", 9) == ids[5:]
        commands.sent.clear()
        assert await take("d", 9) == []
        assert commands.of("update") == []
        now = 61.0
        assert (await take("e", 9), told) == ([], [*ids[:2], *ids[:2]])
        await database["sagas.runs"].update_many({}, {"$set": {"phase": "forward"}})
        now = 122.0
        assert await take("f", 9) == ids[:2]


async def test_where_all_is_refused_a_claim_fails_and_leaves_no_more_out_than_a_query_can_bear(
    store: MongoStore, database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sagas_store.claims, "_REFUSED_MAX", 2)
    runs = [new_run(store, due_in=-HOUR) for _ in range(4)]
    await store.runs.insert_many(runs)
    await damage(database, *(run.run_id for run in runs[1:]))
    (claimed,) = await claim(store, limit=9)
    assert claimed.run_id == runs[0].run_id
    assert len(store.claims._refused) == 2
    with pytest.raises(StoreRefused, match="claim run"):
        await claim(store, token="token-2", limit=9)


async def test_nothing_is_ever_due_where_all_is_held_settled_or_anothers(store: MongoStore) -> None:
    await store.runs.settle(await started_and_claimed(store), State.COMPLETED)
    await store.runs.hold(await started_and_claimed(store), State.BROKEN, "unfit")
    await store.runs.insert(new_run(store, saga="refund"))
    assert await store.claims.next_due_at(DEFINITIONS) is None


async def test_the_next_due_run_may_be_delayed_leased_or_long_due(store: MongoStore) -> None:
    delayed = new_run(store, due_in=HOUR)
    await store.runs.insert(delayed)
    assert await store.claims.next_due_at(DEFINITIONS) == delayed.due_at
    leased = await started_and_claimed(store)
    assert await store.claims.next_due_at(DEFINITIONS) == leased.due_at
    overdue = new_run(store, due_in=-HOUR)
    await store.runs.insert(overdue)
    assert await store.claims.next_due_at([*DEFINITIONS, ("refund", 1)]) == overdue.due_at


# --- renewing ---------------------------------------------------------------------------------------------------------


async def test_a_renewal_pushes_the_end_of_every_lease(store: MongoStore, database: Any) -> None:
    runs = [await started_and_claimed(store) for _ in range(3)]
    await lapse(database)
    assert (await store.runs.renew({run.run_id: "token-1" for run in runs}, lease=LEASE)).lost == set()
    for run in runs:
        assert run.due_at is not None
        assert (await stored(database, run.run_id))["due_at"].replace(tzinfo=UTC) >= run.due_at
    assert await claim(store, token="token-2", limit=10) == []


async def test_a_renewal_names_the_runs_that_are_lost_and_leaves_those_alone(store: MongoStore, database: Any) -> None:
    taken = await started_and_claimed(store, token="token-1")
    await lapse(database)
    (taken,) = await claim(store, token="token-2")
    kept = await started_and_claimed(store, token="token-1")
    settled, held, parked = [await started_and_claimed(store, token="token-1") for _ in range(3)]
    await store.runs.settle(settled, State.COMPLETED)
    await store.runs.hold(held, State.BROKEN, "unfit")
    await store.runs.park(parked, wait=HOUR)
    lost = [taken, settled, held, parked]
    before = [await stored(database, run.run_id) for run in lost]
    renewal = await store.runs.renew(
        {**{run.run_id: "token-1" for run in [kept, *lost]}, "never-there": "token-1"}, lease=LEASE
    )
    assert renewal.lost == {"never-there", *(run.run_id for run in lost)}
    assert [await stored(database, run.run_id) for run in lost] == before


async def test_a_run_held_under_another_of_ones_own_tokens_is_lost_under_this_one(store: MongoStore) -> None:
    first = await started_and_claimed(store, token="token-1")
    second = await started_and_claimed(store, token="token-2")
    assert (await store.runs.renew({first.run_id: "token-2", second.run_id: "token-2"}, lease=LEASE)).lost == {
        first.run_id
    }
    # The two counts agree here, and yet one of them is not ours.
    swapped = {first.run_id: "token-2", second.run_id: "token-1"}
    assert (await store.runs.renew(swapped, lease=LEASE)).lost == {first.run_id, second.run_id}


@pytest.mark.parametrize("lost", ["renew", "read renewed"])
async def test_a_renewal_survives_the_loss_of_its_reply(store: MongoStore, lost: str) -> None:
    run = await started_and_claimed(store)
    forgetful = ForgetfulNetwork(lost)
    assert (await forgetful.runs(store).renew({run.run_id: "token-1", "gone": "token-1"}, lease=LEASE)).lost == {"gone"}
    assert not forgetful.to_lose


async def test_a_renewal_that_arrives_after_the_lease_was_ended_does_not_lease_the_run_again(
    store: MongoStore, database: Any
) -> None:
    run = await started_and_claimed(store)
    await store.runs.end_lease(run)
    before = await stored(database, run.run_id)
    assert (await store.runs.renew({run.run_id: "token-1"}, lease=LEASE)).lost == {run.run_id}
    assert await stored(database, run.run_id) == before
    (again,) = await claim(store, token="token-2")
    assert again.run_id == run.run_id


async def test_a_renewal_is_not_repeated_for_as_long_as_other_operations(store: MongoStore) -> None:
    """By then other runs are held, and it must be asked for those."""

    class Away:
        def __getattr__(self, _: str) -> Any:
            raise AutoReconnect("the test says so")

    runs = Runs(Away(), Patience(HOUR, timedelta(seconds=0.05)))  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(runs.renew({"a": "token-1"}, lease=LEASE), 20)


# --- what only the holder may do --------------------------------------------------------------------------------------


async def test_the_gate_is_passed_once_and_keeps_its_time(store: MongoStore, database: Any) -> None:
    run = await started_and_claimed(store)
    await store.runs.pass_gate(run)
    first = await stored(database, run.run_id)
    assert (first["phase"], first["state"]) == ("past_gate", "running")
    assert run.claim is not None
    assert first["gate_passed_at"].replace(tzinfo=UTC) >= run.claim.at
    await store.runs.pass_gate(run)
    assert await stored(database, run.run_id) == first


async def test_a_run_rolling_back_is_shown_so(store: MongoStore, database: Any) -> None:
    run = await started_and_claimed(store)
    await store.runs.show_rolling_back(run)
    assert (await stored(database, run.run_id))["phase"] == "rolling_back"


async def test_a_parked_run_is_pending_and_due_after_its_wait(store: MongoStore, database: Any) -> None:
    run = await started_and_claimed(store)
    await store.runs.park(run, wait=timedelta(seconds=30))
    parked = await store.runs.get(run.run_id)
    assert parked is not None
    assert parked.state is State.PENDING
    assert run.claim is not None
    assert parked.due_at is not None
    assert timedelta(seconds=30) <= parked.due_at - run.claim.at < timedelta(seconds=50)


@pytest.mark.parametrize("state", sorted(SETTLED))
async def test_a_settled_run_has_its_time_and_is_never_due(store: MongoStore, state: State) -> None:
    run = await started_and_claimed(store)
    await store.runs.settle(run, state)
    settled = await store.runs.get(run.run_id)
    assert settled is not None
    assert settled.settled_at is not None
    assert (settled.state, settled.due_at) == (state, None)


@pytest.mark.parametrize("state", sorted(HELD))
async def test_a_held_run_has_its_reason_and_is_never_due(store: MongoStore, state: State) -> None:
    run = await started_and_claimed(store)
    await store.runs.hold(run, state, "$because of {braces} and $$NOW")
    held = await store.runs.get(run.run_id)
    assert held is not None
    assert held.held is not None
    assert (held.state, held.due_at, held.held.reason) == (state, None, "$because of {braces} and $$NOW")


@every_verb
async def test_a_holder_that_has_lost_its_claim_changes_nothing(store: MongoStore, database: Any, verb: str) -> None:
    late = await started_and_claimed(store, token="token-1")
    await lapse(database)
    (_,) = await claim(store, token="token-2")
    before = await stored(database, late.run_id)
    with pytest.raises(FenceLost) as lost:
        await VERBS[verb](store.runs, late)
    assert lost.value.run_id == late.run_id
    assert await stored(database, late.run_id) == before


@every_verb
async def test_a_run_that_is_not_there_can_be_held_by_nobody(store: MongoStore, database: Any, verb: str) -> None:
    run = await started_and_claimed(store)
    await database["sagas.runs"].delete_one({"_id": run.run_id})
    with pytest.raises(FenceLost):
        await VERBS[verb](store.runs, run)
    assert await database["sagas.runs"].count_documents({}) == 0


@every_verb
async def test_doing_it_again_changes_nothing_and_is_no_error(store: MongoStore, database: Any, verb: str) -> None:
    run = await started_and_claimed(store)
    await VERBS[verb](store.runs, run)
    once = await stored(database, run.run_id)
    await VERBS[verb](store.runs, run)
    assert await stored(database, run.run_id) == once


OPERATION = {
    "pass the gate": "pass the gate",
    "show rolling back": "show rolling back",
    "park": "move to pending",
    "give back": "move to pending",
    "settle": "move to completed",
    "hold": "move to broken",
}


@every_verb
async def test_a_lost_reply_is_no_lost_fence(store: MongoStore, database: Any, verb: str) -> None:
    run = await started_and_claimed(store)
    forgetful = ForgetfulNetwork(OPERATION[verb])
    await VERBS[verb](forgetful.runs(store), run)
    assert not forgetful.to_lose
    assert (await stored(database, run.run_id))["attempts"] == (0 if verb == "give back" else 1)


async def test_a_run_that_is_given_back_was_not_attempted_unless_the_lease_before_had_lapsed(
    store: MongoStore, database: Any
) -> None:
    parked, lapsed = [await started_and_claimed(store) for _ in range(2)]
    await store.runs.park(parked, wait=timedelta(0))
    await lapse(database)
    blocked = {"count": 1, "since": EPOCH, "failure": "KeyLost", "why": "gone"}
    await database["sagas.runs"].update_many({}, {"$set": {"blocked": blocked}})
    for run in await claim(store, token="token-2", limit=2):
        assert run.attempts == 2
        await store.runs.give_back(run)
    for run, attempts in ((parked, 1), (lapsed, 2)):
        back = await stored(database, run.run_id)
        assert (back["state"], back["attempts"], back["blocked"]["why"]) == ("pending", attempts, "gone")
    assert {run.run_id for run in await claim(store, token="token-3", limit=2)} == {parked.run_id, lapsed.run_id}


@every_verb
@pytest.mark.parametrize("gone", sorted(LETTING_GO))
async def test_who_has_let_go_of_a_run_moves_it_no_more(store: MongoStore, database: Any, gone: str, verb: str) -> None:
    run = await started_and_claimed(store)
    await VERBS[gone](store.runs, run)
    before = await stored(database, run.run_id)
    if OPERATION[verb] == OPERATION[gone]:
        await VERBS[verb](store.runs, run)  # its own work, recognised
    else:
        with pytest.raises(FenceLost):
            await VERBS[verb](store.runs, run)
    assert await stored(database, run.run_id) == before


async def test_a_parked_run_that_another_worker_has_taken_is_lost_to_its_old_holder(
    store: MongoStore, database: Any
) -> None:
    old = await started_and_claimed(store, token="token-1")
    await store.runs.park(old, wait=timedelta(0))
    (_,) = await claim(store, token="token-2")
    before = await stored(database, old.run_id)
    with pytest.raises(FenceLost):
        await store.runs.park(old, wait=timedelta(0))
    assert await stored(database, old.run_id) == before


async def test_a_run_that_was_never_claimed_has_no_holder(store: MongoStore) -> None:
    run = new_run(store)
    await store.runs.insert(run)
    unclaimed = await store.runs.get(run.run_id)
    assert unclaimed is not None
    for verb in VERBS.values():
        with pytest.raises(ValueError, match=run.run_id):
            await verb(store.runs, unclaimed)


async def test_moves_of_many_runs_that_go_together_have_each_a_fate_of_its_own(
    store: MongoStore, database: Any
) -> None:
    lost = await started_and_claimed(store, token="token-0")
    await lapse(database)
    (_,) = await claim(store, token="thief")
    done, passes, settles, parks, holds, again = [await started_and_claimed(store) for _ in range(6)]
    await store.runs.settle(again, State.COMPLETED)
    moves = [
        store.runs.settle(lost, State.COMPLETED),
        store.runs.settle(done, State.COMPLETED),
        store.runs.pass_gate(passes),
        store.runs.settle(settles, State.FAILED),
        store.runs.park(parks, wait=HOUR),
        store.runs.hold(holds, State.BROKEN, "unfit"),
        store.runs.settle(again, State.COMPLETED),
    ]
    outcomes = await asyncio.gather(*moves, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [FenceLost, *[type(None)] * 6]
    runs = await store.runs.get_many([run.run_id for run in (lost, done, passes, settles, parks, holds, again)])
    assert {run.state for run in runs.values()} == {
        State.RUNNING, State.COMPLETED, State.FAILED, State.PENDING, State.BROKEN,
    }  # fmt: skip
    assert runs[passes.run_id].gate_passed_at is not None


async def test_a_move_that_the_validator_refuses_takes_no_other_along(store: MongoStore) -> None:
    good, bad, other = [await started_and_claimed(store) for _ in range(3)]
    moves = [
        store.runs.settle(good, State.COMPLETED),
        store.runs.settle(bad, State.PENDING),  # pending and never due
        store.runs.park(other, wait=HOUR),
    ]
    outcomes = await asyncio.gather(*moves, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), StoreRefused, type(None)]
    runs = await store.runs.get_many([run.run_id for run in (good, bad, other)])
    assert [runs[run.run_id].state for run in (good, bad, other)] == [State.COMPLETED, State.RUNNING, State.PENDING]


async def test_starts_that_go_together_have_each_a_fate_of_its_own(store: MongoStore) -> None:
    there, twice = new_run(store), new_run(store)
    await store.runs.insert(there)
    fine = [new_run(store) for _ in range(3)]
    together = [fine[0], there, twice, new_run(store, version=0), twice, fine[1], new_run(store, input=b"x" * 2**24)]
    outcomes = await asyncio.gather(*map(store.runs.insert, [*together, fine[2]]), return_exceptions=True)
    kinds = [type(outcome) for outcome in outcomes]
    assert Counter((kinds[2], kinds[4])) == {type(None): 1, RunExists: 1}
    del kinds[4], kinds[2]
    assert kinds == [type(None), RunExists, StoreRefused, type(None), RecordTooLarge, type(None)]
    assert (await store.runs.get_many([run.run_id for run in fine])).keys() == {run.run_id for run in fine}


# --- the state table --------------------------------------------------------------------------------------------------


async def test_only_the_moves_of_the_table_are_moves(driver: str) -> None:
    held_to_pending = {(state, State.PENDING) for state in HELD}
    from_running = {(State.RUNNING, state) for state in State}
    allowed = (
        {(State.PENDING, State.RUNNING), (State.PENDING, State.CANCELLED), (State.FAILED, State.PENDING)}
        | held_to_pending
        | from_running
    )
    refused = 0
    for origin in State:
        for target in State:
            if (origin, target) in allowed:
                check_move(origin, target)
                continue
            refused += 1
            with pytest.raises(IllegalTransition) as error:
                check_move(origin, target)
            assert (error.value.origin, error.value.target) == (origin, target)
    assert refused == len(State) ** 2 - len(allowed)
    assert OPEN | HELD | SETTLED == set(State) == set(TRANSITIONS)


@pytest.mark.parametrize("state", sorted(State))
async def test_no_verb_leaves_a_run_in_a_state_without_what_belongs_to_it(
    store: MongoStore, database: Any, state: State
) -> None:
    run = await started_and_claimed(store)
    before = await stored(database, run.run_id)
    if state not in SETTLED:
        with pytest.raises(StoreRefused):
            await store.runs.settle(run, state)
        assert await stored(database, run.run_id) == before
    if state not in HELD:
        with pytest.raises(StoreRefused):
            await store.runs.hold(run, state, "a reason")
        assert await stored(database, run.run_id) == before


# --- reading ----------------------------------------------------------------------------------------------------------


async def test_what_is_asked_for_is_found_and_the_rest_left_out(store: MongoStore) -> None:
    runs = [new_run(store) for _ in range(3)]
    await store.runs.insert_many(runs)
    found = await store.runs.get_many([runs[0].run_id, runs[2].run_id, "unknown"])
    assert found.keys() == {runs[0].run_id, runs[2].run_id}
    assert await store.runs.get("unknown") is None
    assert await store.runs.get_many([]) == {}


async def test_at_rest_are_held_and_settled_runs_alone(store: MongoStore) -> None:
    settled = await started_and_claimed(store)
    await store.runs.settle(settled, State.FAILED)
    held = await started_and_claimed(store)
    await store.runs.hold(held, State.QUARANTINED, "no key")
    parked = await started_and_claimed(store)
    await store.runs.park(parked, wait=HOUR)
    running = await started_and_claimed(store)
    ids = [run.run_id for run in (settled, held, parked, running)]
    assert set(await store.runs.at_rest([*ids, "unknown"])) == {settled.run_id, held.run_id}
    assert await store.runs.at_rest([]) == []


async def pages(store: MongoStore, states: set[State], *, limit: int, saga: str | None = None) -> list[list[RunRecord]]:
    found: list[list[RunRecord]] = []
    after = None
    while page := await store.runs.page(RunFilter(states=frozenset(states), saga=saga), after=after, limit=limit):
        found.append(page)
        after = RunPosition(page[-1].created_at, page[-1].run_id)
    return found


async def test_a_list_is_newest_first_and_its_pages_are_a_whole(store: MongoStore) -> None:
    now = new_run(store).created_at
    # Several of one moment: the id decides among them, or a page's end could fall between two that look alike.
    runs = [new_run(store, created_at=now - timedelta(seconds=number // 4)) for number in range(23)]
    await store.runs.insert_many(runs)
    found = await pages(store, set(State), limit=5)
    assert [len(page) for page in found] == [5, 5, 5, 5, 3]
    listed = [(run.created_at, run.run_id) for page in found for run in page]
    assert listed == sorted(((run.created_at, run.run_id) for run in runs), reverse=True)
    assert all(run.input_read is None for page in found for run in page), "a list reads no payload"


async def test_runs_started_meanwhile_neither_repeat_nor_hide_a_run(store: MongoStore) -> None:
    now = new_run(store).created_at
    runs = [new_run(store, created_at=now - timedelta(seconds=number)) for number in range(12)]
    await store.runs.insert_many(runs)
    listed: list[str] = []
    after = None
    for round_ in range(4):
        page = await store.runs.page(RunFilter(states=frozenset(State)), after=after, limit=3)
        listed += [run.run_id for run in page]
        after = RunPosition(page[-1].created_at, page[-1].run_id)
        await store.runs.insert(new_run(store, created_at=now + timedelta(seconds=round_ + 1)))
    assert listed == [run.run_id for run in runs]


async def test_a_list_keeps_to_its_states_and_its_saga(store: MongoStore) -> None:
    settled, held, running = [await started_and_claimed(store) for _ in range(3)]
    await store.runs.settle(settled, State.COMPLETED)
    await store.runs.hold(held, State.BROKEN, "unfit")
    refund, pending = new_run(store, saga="refund"), new_run(store)
    await store.runs.insert_many([refund, pending])

    async def listed(states: Any, saga: str | None = None) -> set[str]:
        chosen = RunFilter(states=frozenset(states), saga=saga)
        return {run.run_id for run in await store.runs.page(chosen, after=None, limit=50)}

    assert await listed(HELD) == {held.run_id}
    assert await listed(SETTLED) == {settled.run_id}
    assert await listed(OPEN) == {running.run_id, refund.run_id, pending.run_id}
    assert await listed(State, "refund") == {refund.run_id}
    assert await listed({State.PENDING}, "order") == {pending.run_id}
    assert await listed(set()) == set()
    found = await store.runs.page(RunFilter(states=HELD), after=None, limit=1)
    assert found[0].held is not None
    assert found[0].held.reason == "unfit"


async def test_a_session_of_another_client_is_an_error_and_starts_nothing(
    store: MongoStore, database: Any, driver: str, mongo_uri: str
) -> None:
    run = new_run(store)
    async with client_of(driver, mongo_uri) as other, transaction(other[database.name], driver, commit=False) as alien:
        with pytest.raises(InvalidOperation):
            await store.runs.insert_in(alien, run)
    assert await store.runs.get(run.run_id) is None
