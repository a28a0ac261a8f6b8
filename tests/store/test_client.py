"""The client's verbs against a real database: starting once, reading, waiting for results."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta, timezone
from itertools import cycle
from typing import Any, cast

import pymongo
import pytest
from pydantic import BaseModel, ConfigDict
from pymongo import AsyncMongoClient

from sagas import (
    HELD,
    Client,
    ClientClosed,
    InvalidInput,
    JournalLine,
    KeyConflict,
    Limits,
    Operator,
    OperatorRefused,
    PayloadTooLarge,
    ResultTimeout,
    Run,
    RunDidNotComplete,
    RunFailed,
    RunHeld,
    RunNotFound,
    RunRolledBack,
    Saga,
    Start,
    State,
    Step,
)
from sagas.identity import run_id_of
from sagas.payload import dump_error
from sagas.restwatch import rest_watch_of
from sagas_store import MongoStore
from sagas_store.entries import Cause, Kind
from sagas_store.records import RunRecord
from tests.conftest import DRIVERS
from tests.store.making import Commands, claim, client_of, entry, new_run, stored, transaction
from tests.support.failpoints import fail_point
from tests.support.waiting import eventually

pytestmark = pytest.mark.parametrize("driver", DRIVERS)

HOUR = timedelta(hours=1)
SOON_S = 15.0


class Order(BaseModel):
    number: str
    lines: int = 1
    weights: dict[str, float] = {}


def saga_of(name: str, version: int = 1) -> Saga[Order]:
    saga = Saga(name, Order, version=version)

    @saga.step
    async def reserve(order: Order, step: Step[None]) -> Order:
        return order

    @reserve.compensation
    async def release(order: Order, step: Step[None]) -> None:
        return None

    @saga.pivot
    async def charge(order: Order, step: Step[None]) -> Order:
        return order

    return saga


ORDER = saga_of("order")
REFUND = saga_of("refund")
A, B = Order(number="a"), Order(number="b")


@pytest.fixture
async def client(store: MongoStore) -> AsyncIterator[Client]:
    async with Client(store) as client:
        yield client


async def count(database: Any) -> int:
    return int(await database["sagas.runs"].count_documents({}))


# --- starting one -----------------------------------------------------------------------------------------------------


async def test_a_started_run_is_due_now_and_as_it_was_asked_for(client: Client, database: Any) -> None:
    run = await client.start(ORDER, A, key="order-1")
    info = await run.info()
    assert (info.saga, info.version, info.key, info.state) == ("order", 1, "order-1", State.PENDING)
    assert (info.phase, info.attempts, info.worker, info.settled_at) == ("forward", 0, None, None)
    assert info.due_at == info.created_at
    assert run.created
    document = await stored(database, run.run_id)
    assert document["fingerprint"] == "reserve:c charge:p"
    assert document["input"] == b'\x01{"number":"a","lines":1,"weights":{}}'


async def test_a_key_starts_one_run_however_often_it_is_used(client: Client, database: Any) -> None:
    first = await client.start(ORDER, A, key="order-1")
    again = await client.start(ORDER, A, key="order-1")
    assert (first.created, again.created) == (True, False)
    assert first.run_id == again.run_id == run_id_of("order", "order-1")
    assert await count(database) == 1


async def test_the_same_key_means_another_run_for_another_saga(client: Client, database: Any) -> None:
    runs = [await client.start(saga, A, key="order-1") for saga in (ORDER, REFUND)]
    assert len({run.run_id for run in runs}) == 2
    assert all(run.created for run in runs)


async def test_without_a_key_each_start_is_a_run_of_its_own(client: Client, database: Any) -> None:
    runs = [await client.start(ORDER, A) for _ in range(3)]
    assert len({run.run_id for run in runs}) == await count(database) == 3


async def test_the_same_key_with_another_input_is_a_conflict_and_the_stored_one_stands(
    client: Client, database: Any
) -> None:
    first = await client.start(ORDER, A, key="order-1")
    before = await stored(database, first.run_id)
    with pytest.raises(KeyConflict) as conflict:
        await client.start(ORDER, B, key="order-1")
    assert (conflict.value.saga, conflict.value.key, conflict.value.run_id) == ("order", "order-1", first.run_id)
    assert await stored(database, first.run_id) == before


def made_by_hand(number: Any) -> Order:
    """A context that no validation has seen."""
    made: Order = cast("Any", Order).model_construct(number=number)
    return made


@pytest.mark.parametrize(
    "spelling",
    [
        b'\x01{"lines": 2, "number": "a", "weights": {"y": 2.0, "x": 1}}',
        b'\x01{"number":"\\u0061","lines":2.0,"weights":{"x":1.0,"y":2e0}}',
        b'\x01{\n"number":"a","lines":2,"weights":{"x":1,"y":2},"of_a_newer_version":null}',
    ],
)
async def test_equal_input_in_another_spelling_is_the_same_input(
    client: Client, store: MongoStore, spelling: bytes
) -> None:
    await store.runs.insert(new_run(store, run_id=run_id_of("order", "order-1"), key="order-1", input=spelling))
    run = await client.start(ORDER, Order(number="a", lines=2, weights={"x": 1, "y": 2}), key="order-1")
    assert not run.created
    with pytest.raises(KeyConflict):
        await client.start(ORDER, Order(number="a", lines=3, weights={"x": 1, "y": 2}), key="order-1")


@pytest.mark.parametrize("unreadable", [b"", b"\x03newer", b"\x01[]", b"\x01{}"])
async def test_a_stored_input_that_cannot_be_read_is_not_the_same_input(
    client: Client, store: MongoStore, unreadable: bytes
) -> None:
    await store.runs.insert(new_run(store, run_id=run_id_of("order", "order-1"), input=unreadable))
    with pytest.raises(KeyConflict):
        await client.start(ORDER, A, key="order-1")


async def test_a_hundred_starts_at_once_with_one_key_make_one_run(client: Client, database: Any) -> None:
    runs = await asyncio.gather(*(client.start(ORDER, A, key="order-1") for _ in range(100)))
    assert len({run.run_id for run in runs}) == await count(database) == 1
    assert Counter(run.created for run in runs) == {True: 1, False: 99}


async def test_of_two_inputs_that_race_for_a_key_one_wins_and_all_others_conflict(
    client: Client, database: Any
) -> None:
    outcomes = await asyncio.gather(
        *(client.start(ORDER, Order(number=str(turn % 2)), key="order-1") for turn in range(40)), return_exceptions=True
    )
    kinds = Counter(type(outcome) for outcome in outcomes)
    assert kinds == {Run: 20, KeyConflict: 20}
    assert await count(database) == 1


async def test_a_start_whose_reply_was_lost_is_the_same_start(
    client: Client, database: Any, driver: str, mongo_uri: str
) -> None:
    name = f"victim-{secrets.token_hex(4)}"
    happened = {"writeConcernError": {"code": 64, "errmsg": "no majority in time"}}
    async with (
        AsyncMongoClient[Any](mongo_uri) as admin,
        client_of(driver, mongo_uri, appName=name) as connection,
        Client(MongoStore(connection[database.name])) as victim,
    ):
        async with fail_point(admin, ["insert"], with_app_name=name, times=2, **happened) as point:
            run = await victim.start(ORDER, A, key="order-1")
        assert point.hits == 2
    assert (await client.start(ORDER, A, key="order-1")).run_id == run.run_id
    assert await count(database) == 1


# --- when it is due ---------------------------------------------------------------------------------------------------


async def test_a_run_may_begin_later(client: Client, store: MongoStore) -> None:
    delayed = await client.start(ORDER, A, delay=HOUR)
    info = await delayed.info()
    assert info.due_at is not None
    assert info.due_at - info.created_at == HOUR
    at = datetime(2031, 5, 6, 7, 8, 9, tzinfo=timezone(timedelta(hours=2)))
    assert (await (await client.start(ORDER, A, due_at=at)).info()).due_at == datetime(2031, 5, 6, 5, 8, 9, tzinfo=UTC)
    assert await claim(store, limit=10) == []


async def test_a_run_that_should_have_begun_begins_at_once(client: Client, store: MongoStore) -> None:
    run = await client.start(ORDER, A, due_at=datetime(2020, 1, 1, tzinfo=UTC))
    assert [claimed.run_id for claimed in await claim(store)] == [run.run_id]


# --- what is refused --------------------------------------------------------------------------------------------------


class Circle(BaseModel):
    inner: Any = None


async def test_an_argument_that_is_wrong_is_named_and_nothing_is_stored(client: Client, database: Any) -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("saga", {"saga": "order"}),
        ("context", {"context": {"number": "a"}}),
        ("context", {"context": None}),
        ("context", {"context": Circle()}),
        ("context", {"context": Order(number="\ud800")}),
        ("context", {"context": Order(number="a", weights={"x": float("nan")})}),
        ("context", {"context": made_by_hand(7)}),
        ("key", {"key": ""}),
        ("key", {"key": "x" * 513}),
        ("key", {"key": 7}),
        ("key", {"key": b"order-1"}),
        ("key", {"key": "\ud800"}),
        ("due_at, delay", {"due_at": datetime(2030, 1, 1, tzinfo=UTC), "delay": HOUR}),
        ("due_at", {"due_at": datetime(2030, 1, 1)}),
        ("due_at", {"due_at": "2030-01-01"}),
        ("delay", {"delay": -HOUR}),
        ("delay", {"delay": "60"}),
        ("deadline", {"deadline": "60"}),
        ("deadline", {"deadline": -60}),
        ("delay", {"delay": timedelta.max}),
    ]
    unnamed = []
    for field, arguments in wrong:
        start: dict[str, Any] = {"saga": ORDER, "context": A, **arguments}
        saga, context = start.pop("saga"), start.pop("context")
        for verb in ("start", "start_many"):
            try:
                if verb == "start":
                    await client.start(saga, context, **start)
                else:
                    await client.start_many(saga, [Start(A), Start(context, **start)])
                unnamed.append((verb, arguments, "not refused"))
            except InvalidInput as refused:
                assert refused.field == field
            except Exception as error:
                unnamed.append((verb, arguments, repr(error)))
    assert not unnamed, "\n".join(map(str, unnamed))
    assert await count(database) == 0


async def test_a_list_that_is_asked_for_wrongly_names_what_is_wrong(client: Client) -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("limit", {"limit": 0}),
        ("limit", {"limit": 1001}),
        ("limit", {"limit": -1}),
        ("state", {"state": "paused"}),
        ("state", {"state": ["pending", "paused"]}),
        ("after", {"after": ""}),
        ("after", {"after": "%%%"}),
        ("after", {"after": "\ud800"}),
        ("after", {"after": "W10="}),
        ("after", {"after": "WyIyMDMwLTAxLTAxIiwgImEiXQ=="}),
        ("after", {"after": "bnVsbA=="}),
    ]
    for field, arguments in wrong:
        with pytest.raises(InvalidInput) as refused:
            await client.runs(**arguments)
        assert refused.value.field == field


async def test_a_run_is_found_by_its_key_and_a_handle_on_an_id_asks_nothing_yet(client: Client) -> None:
    with pytest.raises(
        RunNotFound, match=r"^saga 'order': a run without a tenant with this key: not found$"
    ) as unknown:
        await client.find(ORDER, key="order-1")
    assert (unknown.value.run_id, unknown.value.key) == (run_id_of("order", "order-1"), "order-1")
    with pytest.raises(RunNotFound, match=r"^saga 'order': a run of tenant 'vinet' with this key"):
        await client.find(ORDER, key="order-1", tenant="vinet")
    run = await client.start(ORDER, Order(number="1"), key="order-1")
    assert (await client.find(ORDER, key="order-1")).run_id == run.run_id == run_id_of("order", "order-1")
    with pytest.raises(InvalidInput, match="key"):
        await client.find(ORDER, key="")
    assert client.run(ORDER, run_id="abc").run_id == "abc"


async def test_the_same_start_is_the_same_although_its_context_is_not_equal_to_itself(client: Client) -> None:
    class Measured(BaseModel):
        model_config = ConfigDict(ser_json_inf_nan="constants")

        weight: float

    saga = Saga("measure", Measured)
    saga.step(name="weigh", no_compensation=True)(nothing)
    context = Measured(weight=float("nan"))
    first = await client.start(saga, context, key="one")
    again = await client.start(saga, context, key="one")
    many = await client.start_many(saga, [Start(context, key="one"), Start(context, key="one")])
    assert {run.run_id for run in (again, *many)} == {first.run_id}
    with pytest.raises(KeyConflict):
        await client.start(saga, Measured(weight=1), key="one")


async def test_a_context_over_the_limit_is_refused_with_its_size(store: MongoStore, database: Any) -> None:
    async with Client(store, limits=Limits(context_bytes_max=1000)) as client:
        with pytest.raises(PayloadTooLarge) as refused:
            await client.start(ORDER, Order(number="x" * 2000))
        assert (refused.value.limit_bytes, refused.value.size_bytes > 2000) == (1000, True)
        with pytest.raises(PayloadTooLarge):
            await client.start_many(ORDER, [Start(A), Start(Order(number="x" * 2000))])
    assert await count(database) == 0


async def test_a_start_whose_pivot_could_never_begin_is_refused(store: MongoStore, database: Any) -> None:
    saga = Saga("ends-with-two", Order)
    saga.pivot(name="charge")(nothing)
    saga.step(name="ship")(nothing)
    async with Client(store, limits=Limits(context_bytes_max=1000, run_bytes_max=1999)) as client:
        with pytest.raises(
            InvalidInput, match=r"Limits\.run_bytes_max: is 1,999, and saga 'ends-with-two' needs 2,000"
        ):
            await client.start(saga, A)
    assert await count(database) == 0


async def nothing(context: Any, step: Step[None]) -> Any:
    return context


async def test_a_limit_that_no_document_can_hold_is_refused(driver: str) -> None:
    # A run whose context fills a document has no room for its claim, and a result that does not fit one could only be
    # found out after the step had run, again and again.
    with pytest.raises(InvalidInput):
        Limits(context_bytes_max=16 * 2**20)


# --- starting inside the caller's transaction -------------------------------------------------------------------------


@pytest.mark.parametrize("commit", [True, False])
async def test_a_start_joins_the_callers_transaction(client: Client, database: Any, driver: str, commit: bool) -> None:
    await database["shop"].insert_one({"_id": "before"})
    async with transaction(database, driver, commit=commit) as session:
        await database["shop"].insert_one({"_id": "order-1"}, session=session)
        run = await client.start(ORDER, A, key="order-1", session=session)
        assert run.created
        with pytest.raises(RunNotFound):
            await run.info()
    assert await count(database) == await database["shop"].count_documents({"_id": "order-1"}) == int(commit)


async def test_a_session_without_a_transaction_joins_none_and_is_refused(
    client: Client, database: Any, driver: str
) -> None:
    starting: Any = database.client.start_session()
    async with starting if driver == "pymongo" else await starting as session:
        with pytest.raises(InvalidInput, match="session: must have a transaction under way"):
            await client.start(ORDER, A, key="order-1", session=session)
    assert await count(database) == 0


async def test_a_run_that_exists_is_found_inside_a_transaction_too(client: Client, database: Any, driver: str) -> None:
    await client.start(ORDER, A, key="order-1")
    async with transaction(database, driver, commit=True) as session:
        assert not (await client.start(ORDER, A, key="order-1", session=session)).created
        with pytest.raises(KeyConflict):
            await client.start(ORDER, B, key="order-1", session=session)
        assert (await client.start(ORDER, B, key="order-2", session=session)).created
    assert await count(database) == 2


async def test_what_the_same_transaction_has_started_counts_as_started(
    client: Client, database: Any, driver: str
) -> None:
    async with transaction(database, driver, commit=True) as session:
        first = await client.start(ORDER, A, key="order-1", session=session)
        again = await client.start(ORDER, A, key="order-1", session=session)
        assert (first.created, again.created) == (True, False)
        with pytest.raises(KeyConflict):
            await client.start(ORDER, B, key="order-1", session=session)
    assert await count(database) == 1


# --- starting many ----------------------------------------------------------------------------------------------------


async def test_thousands_are_started_in_a_few_writes_and_in_order(
    store: MongoStore, database: Any, driver: str, mongo_uri: str
) -> None:
    commands = Commands()
    async with (
        client_of(driver, mongo_uri, event_listeners=[commands]) as connection,
        Client(MongoStore(connection[database.name])) as client,
    ):
        starts = [Start(Order(number=str(number)), key=f"order-{number}") for number in range(2_500)]
        runs = await client.start_many(ORDER, starts)
        assert [run.run_id for run in runs] == [run_id_of("order", f"order-{number}") for number in range(2_500)]
        assert all(run.created for run in runs)
        assert len(commands.of("insert")) == 20, "sealed by the thousand, sent by as many as a batch takes"
        assert await count(database) == 2_500
        again = await client.start_many(ORDER, starts[:20])
        assert not any(run.created for run in again)
        assert await count(database) == 2_500


async def test_of_nothing_nothing_is_started(client: Client) -> None:
    assert await client.start_many(ORDER, []) == []


async def test_starting_thousands_again_asks_for_what_exists_in_bulk(
    store: MongoStore, database: Any, driver: str, mongo_uri: str
) -> None:
    commands = Commands()
    async with (
        client_of(driver, mongo_uri, event_listeners=[commands]) as connection,
        Client(MongoStore(connection[database.name])) as client,
    ):
        starts = [Start(Order(number=str(number)), key=f"order-{number}") for number in range(300)]
        await client.start_many(ORDER, starts)
        await client.start_many(ORDER, starts)
    assert len(commands.of("find")) < 30, "not a question per run"


async def test_a_key_twice_in_one_call_is_one_run_that_this_call_has_created(client: Client, database: Any) -> None:
    runs = await client.start_many(ORDER, [Start(A, key="x"), Start(B, key="y"), Start(A, key="x")])
    assert runs[0].run_id == runs[2].run_id
    assert await count(database) == 2
    assert [run.created for run in runs][:2] == [True, True]


async def test_a_key_twice_in_one_call_far_apart_is_one_run_that_this_call_has_created(
    client: Client, database: Any
) -> None:
    starts = [Start(A, key="x"), *(Start(B) for _ in range(1_000)), Start(A, key="x")]
    runs = await client.start_many(ORDER, starts)
    assert runs[0].run_id == runs[-1].run_id
    assert await count(database) == 1_001
    assert runs[0].created, "nobody else has started it"


async def test_a_key_twice_in_one_call_with_two_inputs_is_a_conflict_before_anything_is_stored(
    client: Client, database: Any
) -> None:
    with pytest.raises(KeyConflict) as conflict:
        await client.start_many(ORDER, [Start(A, key="x"), Start(B, key="x"), Start(B, key="y")])
    assert conflict.value.key == "x"
    assert await count(database) == 0


async def test_a_conflict_among_many_is_raised_once_all_the_others_are_started(client: Client, database: Any) -> None:
    await client.start(ORDER, A, key="order-1")
    starts = [Start(B, key=f"order-{number}") for number in range(4)]
    with pytest.raises(KeyConflict) as conflict:
        await client.start_many(ORDER, starts)
    assert conflict.value.key == "order-1"
    assert await count(database) == 4
    del starts[1]
    again = await client.start_many(ORDER, starts)
    assert not any(run.created for run in again)


# --- reading ----------------------------------------------------------------------------------------------------------


async def test_an_unknown_run_is_not_found_by_any_verb(client: Client) -> None:
    handle = client.run(ORDER, run_id="unknown")
    for asking in (
        client.get("unknown"),
        client.journal("unknown"),
        handle.info(),
        handle.journal(),
        handle.result(1),
    ):
        with pytest.raises(RunNotFound) as missing:
            await asking
        assert missing.value.run_id == "unknown"


async def test_a_list_pages_through_everything_once(client: Client) -> None:
    started = [run.run_id for run in await client.start_many(ORDER, [Start(A) for _ in range(7)])]
    listed: list[str] = []
    after = None
    sizes = []
    while True:
        page = await client.runs(limit=3, after=after)
        sizes.append(len(page.runs))
        listed += [run.run_id for run in page.runs]
        if page.next is None:
            break
        after = page.next
        await client.start(REFUND, A)
    assert sizes == [3, 3, 1]
    assert sorted(listed) == sorted(started)


async def test_a_page_that_is_exactly_full_is_the_last_one(client: Client) -> None:
    await client.start_many(ORDER, [Start(A) for _ in range(3)])
    assert (await client.runs(limit=3)).next is None


async def test_a_list_keeps_to_what_was_asked_for(client: Client, store: MongoStore) -> None:
    held, pending = await client.start(ORDER, A), await client.start(REFUND, A)
    (claimed,) = await claim(store)
    assert claimed.run_id == held.run_id
    await store.runs.hold(claimed, State.BROKEN, "unfit")

    async def listed(**arguments: Any) -> list[str]:
        return [run.run_id for run in (await client.runs(**arguments)).runs]

    assert await listed(state=HELD) == await listed(state="broken") == await listed(saga="order") == [held.run_id]
    assert await listed(state=[State.PENDING, "running"]) == await listed(state=State.PENDING) == [pending.run_id]
    assert await listed(state=[]) == []
    (info,) = (await client.runs(state=HELD)).runs
    assert (info.held_reason, info.worker, info.due_at) == ("unfit", "worker-1", None)
    assert info.held_since is not None


async def test_a_journal_is_read_as_lines_with_the_errors_of_steps_and_no_context(
    client: Client, store: MongoStore
) -> None:
    run = await client.start(ORDER, A)
    error = dump_error(ValueError("declined"))
    await store.journal.append(entry(run.run_id, 1, next="step:charge"))
    due_at = datetime(2031, 1, 1, tzinfo=UTC)
    again = entry(run.run_id, 2, kind=Kind.STEP_RETRY_SCHEDULED, step="charge", payload=error, due_at=due_at)
    await store.journal.append(again)
    first, second = await run.journal()
    assert isinstance(first, JournalLine)
    assert (first.seq, first.kind, first.step, first.next, first.error) == (
        1, Kind.STEP_SUCCEEDED, "reserve", "step:charge", None,
    )  # fmt: skip
    assert (second.seq, second.due_at, second.in_doubt, second.worker) == (2, due_at, False, "worker-1")
    assert second.error is not None
    assert (second.error.type, second.error.message) == ("ValueError", "declined")


# --- results ----------------------------------------------------------------------------------------------------------


async def claimed(client: Client, store: MongoStore) -> tuple[Run[Order], RunRecord]:
    run = await client.start(ORDER, A)
    (record,) = await claim(store)
    assert record.run_id == run.run_id
    return run, record


RESULT = b'\x01{"number":"a","lines":9}'


async def complete(store: MongoStore, run: RunRecord) -> None:
    await store.journal.append(entry(run.run_id, 1))
    await store.journal.append(entry(run.run_id, 2, step="charge", payload=RESULT))
    await store.runs.settle(run, State.COMPLETED)


async def roll_back(store: MongoStore, run: RunRecord, state: State, cause: Cause, step: str | None = None) -> None:
    seq = 1
    if step is not None:
        for message in ("first", "declined"):  # an earlier failure of the step is not the one that counts
            error = dump_error(ValueError(message))
            kind = Kind.STEP_FAILED if message == "declined" else Kind.STEP_RETRY_SCHEDULED
            await store.journal.append(entry(run.run_id, seq, kind=kind, step=step, payload=error))
            seq += 1
    begun = entry(run.run_id, seq, kind=Kind.ROLLBACK_BEGUN, cause=cause, step=step, payload=None, try_number=None)
    await store.journal.append(begun)
    await store.runs.settle(run, state)


async def test_the_result_of_a_completed_run_is_its_last_context(client: Client, store: MongoStore) -> None:
    run, record = await claimed(client, store)
    waiting = asyncio.create_task(run.result(SOON_S))
    await complete(store, record)
    assert await waiting == Order(number="a", lines=9)
    assert await run.result(0) == Order(number="a", lines=9)
    assert await client.run(ORDER, run_id=run.run_id).result() == Order(number="a", lines=9)


@pytest.mark.parametrize(
    ("state", "cause", "step", "kind", "message"),
    [
        (State.COMPENSATED, Cause.STEP_FAILED, "charge", RunRolledBack, "step charge failed with ValueError"),
        (State.FAILED, Cause.STEP_FAILED, "charge", RunFailed, "step charge failed with ValueError"),
        (State.CANCELLED, Cause.STOP, None, RunRolledBack, "a stop was honoured"),
        (State.TIMED_OUT, Cause.DEADLINE, None, RunRolledBack, "the deadline passed"),
    ],
)
async def test_a_run_that_did_not_complete_says_how_and_where(
    client: Client,
    store: MongoStore,
    state: State,
    cause: Cause,
    step: str | None,
    kind: type[RunDidNotComplete],
    message: str,
) -> None:
    run, record = await claimed(client, store)
    await roll_back(store, record, state, cause, step)
    with pytest.raises(kind, match=message) as ended:
        await run.result(SOON_S)
    assert (ended.value.run_id, ended.value.state, ended.value.step) == (run.run_id, state, step)
    assert "declined" not in str(ended.value), "what a step's exception said may quote a payload"
    if step is not None:
        assert ended.value.error is not None
        assert ended.value.error.message == "declined"


async def test_a_run_that_was_cancelled_before_anything_ran_says_so(
    client: Client, store: MongoStore, database: Any
) -> None:
    # The table allows it: pending -> cancelled, a stop before anything ran. Its journal is empty.
    run = await client.start(ORDER, A)
    await database["sagas.runs"].update_one(
        {"_id": run.run_id}, [{"$set": {"state": "cancelled", "settled_at": "$$NOW"}}, {"$unset": "due_at"}]
    )
    with pytest.raises(RunRolledBack) as ended:
        await run.result(SOON_S)
    assert ended.value.state is State.CANCELLED


@pytest.mark.parametrize("state", sorted(HELD))
async def test_a_held_run_says_why_and_since_when(client: Client, store: MongoStore, state: State) -> None:
    run, record = await claimed(client, store)
    waiting = asyncio.create_task(run.result(SOON_S))
    await store.runs.hold(record, state, "the reason")
    with pytest.raises(RunHeld, match="the reason") as held:
        await waiting
    assert (held.value.state, held.value.since) == (state, (await run.info()).held_since)


async def test_a_run_that_is_requeued_while_its_result_is_read_is_waited_for_on(
    client: Client, store: MongoStore, database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, record = await claimed(client, store)
    at_rest = store.runs.at_rest
    requeued = asyncio.Event()

    async def then_requeued(run_ids: Any) -> list[str]:
        if not requeued.is_set():
            await store.runs.hold(record, State.BROKEN, "unfit")
        found = await at_rest(run_ids)
        if not requeued.is_set():
            await database["sagas.runs"].update_one(
                {"_id": run.run_id}, [{"$set": {"state": "pending", "due_at": "$$NOW"}}, {"$unset": "held"}]
            )
            requeued.set()
        return found

    monkeypatch.setattr(store.runs, "at_rest", then_requeued)
    waiting = asyncio.create_task(run.result(SOON_S))
    await requeued.wait()
    (again,) = await claim(store, token="token-2")
    await complete(store, again)
    assert await waiting == Order(number="a", lines=9)


@pytest.mark.parametrize("timeout", [0, 0.05, timedelta(milliseconds=50)])
async def test_a_result_that_takes_too_long_times_out_and_the_run_goes_on(
    client: Client, store: MongoStore, timeout: float | timedelta
) -> None:
    run, record = await claimed(client, store)
    with pytest.raises(ResultTimeout) as late:
        await run.result(timeout)
    assert isinstance(late.value, TimeoutError)
    assert (late.value.run_id, late.value.state) == (run.run_id, State.RUNNING)
    await complete(store, record)
    assert await run.result(SOON_S) == Order(number="a", lines=9)


@pytest.mark.parametrize(
    ("timeout", "says"),
    [
        ("1", "seconds, not str"),
        (-1, "not be negative"),
        (float("inf"), "can hold"),
        (True, "not bool"),
        (b"1", "bytes"),
    ],
)
async def test_a_timeout_that_is_none_is_refused(client: Client, timeout: Any, says: str) -> None:
    run = await client.start(ORDER, A)
    with pytest.raises(InvalidInput, match=f"^timeout: .*{says}"):
        await asyncio.wait_for(run.result(timeout), 5)


async def test_a_result_is_not_handed_on_as_another_sagas(client: Client, store: MongoStore) -> None:
    run, record = await claimed(client, store)
    await complete(store, record)
    with pytest.raises(InvalidInput, match=f"^saga: run {run.run_id} is of saga 'order', not of 'refund'") as refused:
        await client.run(REFUND, run_id=run.run_id).result(SOON_S)
    assert refused.value.field == "saga"
    other_version = saga_of("order", version=2)
    assert await client.run(other_version, run_id=run.run_id).result() == Order(number="a", lines=9)


async def test_a_waiter_that_gives_up_does_not_take_the_others_along(client: Client, store: MongoStore) -> None:
    run, record = await claimed(client, store)
    impatient, patient = asyncio.create_task(run.result(SOON_S)), asyncio.create_task(run.result(SOON_S))
    await waited_for(client, {run.run_id: 2})
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    await waited_for(client, {run.run_id: 1})
    await complete(store, record)
    assert await patient == Order(number="a", lines=9)


async def waited_for(client: Client, counts: dict[str, int]) -> None:
    async def registered() -> bool:
        awaited = rest_watch_of(client._store)._awaited
        return {run_id: len(one.waiters) for run_id, one in awaited.items()} == counts

    await eventually(registered, what="all who wait have said so")


async def test_a_waiter_with_the_drivers_own_timeout_does_not_leave_it_to_the_others(
    client: Client, store: MongoStore, database: Any, driver: str, mongo_uri: str
) -> None:
    # `pymongo.timeout` is inherited by tasks. Whoever happens to wait first must not set a deadline for the stream and
    # the poll that everybody shares: once it has passed, they would never ask the server anything again.
    run, record = await claimed(client, store)
    name = f"victim-{secrets.token_hex(4)}"
    async with (
        AsyncMongoClient[Any](mongo_uri) as admin,
        # Without a change stream, so that the shared poll has to do it.
        fail_point(admin, ["aggregate"], with_app_name=name, errorCode=13),
        client_of(driver, mongo_uri, appName=name) as connection,
        Client(MongoStore(connection[database.name])) as shared,
    ):
        with pymongo.timeout(1.5), pytest.raises(ResultTimeout):
            await shared.run(ORDER, run_id=run.run_id).result(0.1)
        waiting = asyncio.create_task(shared.run(ORDER, run_id=run.run_id).result(8))
        deadline_passed = asyncio.get_running_loop().time() + 1.6

        async def passed() -> bool:
            return asyncio.get_running_loop().time() > deadline_passed

        await eventually(passed, what="the first waiter's deadline passes")
        await complete(store, record)
        begun = asyncio.get_running_loop().time()
        assert await waiting == Order(number="a", lines=9)
        assert asyncio.get_running_loop().time() - begun < 5, "the poll noticed, not the waiter's own timeout"


async def test_whoever_waits_is_not_left_waiting_when_the_client_is_closed(store: MongoStore) -> None:
    async with Client(store) as client:
        run, _ = await claimed(client, store)
        waiting = asyncio.create_task(run.result())
        await waited_for(client, {run.run_id: 1})
    done, _ = await asyncio.wait([waiting], timeout=3)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert done, "it would have waited for ever"


async def test_a_client_without_change_streams_learns_of_results_by_its_first_poll(
    store: MongoStore, database: Any, driver: str, mongo_uri: str
) -> None:
    name = f"victim-{secrets.token_hex(4)}"
    loop = asyncio.get_running_loop()
    async with (
        AsyncMongoClient[Any](mongo_uri) as admin,
        fail_point(admin, ["aggregate"], with_app_name=name, errorCode=13),
        client_of(driver, mongo_uri, appName=name) as connection,
        Client(MongoStore(connection[database.name])) as client,
    ):
        run, record = await claimed(client, store)
        await complete(store, record)
        begun = loop.time()
        assert await run.result(SOON_S) == Order(number="a", lines=9)
        assert loop.time() - begun < 0.8, "it was at rest when it was asked for"


async def test_a_client_that_is_closed_takes_no_other_along(store: MongoStore) -> None:
    async with Client(store) as staying:
        async with Client(store) as leaving:
            run, record = await claimed(staying, store)
            mine = asyncio.create_task(run.result(SOON_S))
            theirs = asyncio.create_task(leaving.run(ORDER, run_id=run.run_id).result())
            await waited_for(staying, {run.run_id: 2})
        with pytest.raises(ClientClosed):
            await theirs
        with pytest.raises(ClientClosed):
            await leaving.run(ORDER, run_id=run.run_id).result()
        await complete(store, record)
        assert await mine == Order(number="a", lines=9)


async def test_clients_that_come_and_go_leave_the_stream_to_one_that_stays(
    client: Client, store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen, opened = store.hints.on_rest, []

    async def counted(*asked: Any) -> None:
        opened.append(asked)
        await listen(*asked)

    monkeypatch.setattr(store.hints, "on_rest", counted)
    mine, my_record = await claimed(client, store)
    waiting = asyncio.create_task(mine.result(SOON_S))
    await waited_for(client, {mine.run_id: 1})
    await complete(store, my_record)
    await waiting
    for _ in range(5):
        async with Client(store) as passing:
            theirs, record = await claimed(passing, store)
            result = asyncio.create_task(theirs.result(SOON_S))
            await waited_for(passing, {theirs.run_id: 1})
            await complete(store, record)
            await result
    assert len(opened) == 1


async def test_the_result_of_a_run_that_has_ended_is_read_and_not_waited_for(
    store: MongoStore, database: Any, driver: str, mongo_uri: str
) -> None:
    commands = Commands()
    async with (
        client_of(driver, mongo_uri, event_listeners=[commands]) as connection,
        Client(MongoStore(connection[database.name])) as client,
    ):
        run, record = await claimed(client, store)
        await complete(store, record)
        before = len(commands.of("find"))
        assert await run.result() == Order(number="a", lines=9)
        assert len(commands.of("find")) - before == 2, "the run, and its last context"
        assert not commands.of("aggregate"), "no change stream"


async def test_the_poll_asks_ever_less_often_for_a_run_however_many_others_come(
    client: Client, store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_rest, asked = store.runs.at_rest, Counter[str]()
    loop = asyncio.get_running_loop()

    async def counted(run_ids: Sequence[str]) -> list[str]:
        asked.update(run_ids)
        return await at_rest(run_ids)

    monkeypatch.setattr(store.runs, "at_rest", counted)
    first, _ = await claimed(client, store)
    waiting = [asyncio.create_task(first.result(60))]
    until = loop.time() + 3

    async def joined() -> bool:
        run = await client.start(ORDER, A)
        waiting.append(asyncio.create_task(run.result(60)))
        return loop.time() > until

    await eventually(joined, what="newcomers for three seconds")
    assert len(waiting) > 20
    assert asked[first.run_id] <= 2 + 4, "for itself at first; then after 0.25, 0.75, 1.75 and 3.75 s"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_five_hundred_waiters_share_one_stream_and_one_poll(
    store: MongoStore, database: Any, driver: str, mongo_uri: str
) -> None:
    """Of fifty clients: an application may well make one for each request."""
    commands = Commands()
    loop = asyncio.get_running_loop()
    async with client_of(driver, mongo_uri, event_listeners=[commands]) as connection, AsyncExitStack() as clients:
        same_store = MongoStore(connection[database.name])
        many = [await clients.enter_async_context(Client(same_store)) for _ in range(50)]
        client = many[0]
        ids = {run.run_id for run in await client.start_many(ORDER, [Start(A) for _ in range(500)])}
        runs = [one.run(ORDER, run_id=run_id) for one, run_id in zip(cycle(many), ids, strict=False)]
        waiting = [asyncio.create_task(run.result(60)) for run in runs]
        await waited_for(client, dict.fromkeys(ids, 1))

        def looks() -> list[set[str]]:
            asked = (find["filter"] for find in commands.of("find"))
            return [set(one["_id"]["$in"]) for one in asked if one.get("due_at") == {"$exists": False}]

        async def own_looks_done() -> bool:
            return len(looks()) >= 500

        await eventually(own_looks_done, what="each has looked for itself once")
        before, begun = len(looks()), loop.time()

        async def polled_for_all() -> bool:
            return ids <= set().union(*looks()[before:])

        await eventually(polled_for_all, what="the poll has asked for all")
        polls = [asked for asked in looks()[before:] if len(asked) > 1]
        assert len(polls) <= 4 * (loop.time() - begun) + 2
        assert len(commands.of("aggregate")) == 1, "one stream"
        asked = len(commands.of("find"))
        await database["sagas.journal"].insert_many([finished(run_id) for run_id in ids])
        await database["sagas.runs"].update_many(
            {}, [{"$set": {"state": "completed", "settled_at": "$$NOW"}}, {"$unset": "due_at"}]
        )
        assert {result.number for result in await asyncio.gather(*waiting)} == {"a"}
        assert len(commands.of("find")) - asked <= 2 * len(runs) + 20, "each reads its run and its result, no more"


def finished(run_id: str) -> dict[str, Any]:
    now = datetime.now(UTC)
    return {
        "_id": {"run": run_id, "seq": 1},
        "kind": "step_succeeded",
        "at": now,
        "attempt": 1,
        "worker": "w",
        "token": "t",
        "payload": RESULT,
    }


# --- what is not read -------------------------------------------------------------------------------------------------


async def test_no_verb_reads_an_input_that_it_does_not_use(
    store: MongoStore, database: Any, driver: str, mongo_uri: str
) -> None:
    commands = Commands()
    async with client_of(driver, mongo_uri, event_listeners=[commands]) as connection:
        watched = MongoStore(connection[database.name])
        client, operator = Client(watched), Operator(watched)

        async def reads(asked: Awaitable[object]) -> bool:
            seen = len(commands.inputs)
            with contextlib.suppress(RunRolledBack, OperatorRefused):
                await asked
            return sum(commands.inputs[seen:]) > 0

        run = await client.start(ORDER, A, key="order-1")
        run_id = run.run_id
        why: dict[str, Any] = {"by": "shop", "reason": "changed their mind"}
        for asked in (
            run.info(),
            run.journal(),
            run.preview_stop(),
            client.find(ORDER, key="order-1"),
            client.runs(),
            operator.resume(run_id, **why),
            operator.retry_now(run_id, **why),
            operator.verdict(ORDER, run_id, happened=False, **why),
            operator.requeue_quarantined(runs=[run_id], **why),
            run.stop(**why),
            run.stop(**why),
            run.result(timeout=SOON_S),
        ):
            assert not await reads(asked), asked
        assert (await run.info()).state is State.CANCELLED
        assert await reads(client.start(ORDER, A, key="order-1")), "compared with what is there"
        assert await reads(operator.restart_as_new(run_id, **why))
        await client.close()
    record = await store.runs.get(run_id)
    assert record is not None
    with pytest.raises(RuntimeError, match="without its input"):
        record.input  # noqa: B018 - not read is not the same as not there
