"""What runs are chosen by: said in every way that is documented, and refused by name in every other.

Nothing that a caller gives reaches the server as a question of its own, and no answer is in Python's or the driver's
words.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from sagas import (
    HELD,
    Client,
    InvalidInput,
    Keyring,
    LocalKeyWrapper,
    MongoStore,
    Operator,
    SchemaMismatch,
    Start,
    State,
)
from sagas.operator import BulkResult
from tests.stop.shop import WHY, Order, Shop, fulfil, held

ID = "0" * 32
LITTLE = timedelta(milliseconds=100)
NO_TEXT: tuple[Any, ...] = ({"$gt": ""}, 5, None, b"ab", ["ab"], "\ud800", "x" * 513, fulfil)
Verb = Callable[[Client, Operator, Any], Any]

OF_ONE_RUN: dict[str, Verb] = {
    "get": lambda client, _, run_id: client.get(run_id),
    "stop": lambda client, _, run_id: client.stop(run_id, **WHY),
    "preview_stop": lambda client, _, run_id: client.preview_stop(run_id),
    "journal": lambda client, _, run_id: client.journal(run_id),
    "run": lambda client, _, run_id: client.run(fulfil, run_id=run_id).info(),
    "resume": lambda _, operator, run_id: operator.resume(run_id, **WHY),
    "retry_now": lambda _, operator, run_id: operator.retry_now(run_id, **WHY),
    "restart_as_new": lambda _, operator, run_id: operator.restart_as_new(run_id, **WHY),
    "verdict": lambda _, operator, run_id: operator.verdict(fulfil, run_id, happened=False, **WHY),
}
BULK: dict[str, Callable[..., Any]] = {
    "stop_many": lambda client, _, **chosen: client.stop_many(**WHY, **chosen),
    "resume_many": lambda _, operator, **chosen: operator.resume_many(**WHY, **chosen),
    "retry_now_many": lambda _, operator, **chosen: operator.retry_now_many(**WHY, **chosen),
    "restart_many": lambda _, operator, **chosen: operator.restart_many(**WHY, **chosen),
}
LISTS: dict[str, Callable[..., Any]] = {"runs": lambda client, _, **chosen: client.runs(**chosen)}
KEYS: dict[str, Callable[..., Any]] = {
    "usage": lambda operator, key_id: operator.keys.usage(None, key_id),
    "runs_needing": lambda operator, key_id: operator.keys.runs_needing(None, key_id),
    "discard": lambda operator, key_id: operator.keys.discard(None, key_id, confirm=key_id, **WHY),
}


@pytest.fixture
def operator(store: MongoStore) -> Operator:
    return Operator(store)


async def refused(field: str, verb: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    with pytest.raises(InvalidInput) as told:
        await verb(*arguments, **named)
    assert told.value.field == field, told.value
    return str(told.value)


@pytest.mark.parametrize("verb", OF_ONE_RUN)
async def test_the_id_of_a_run_is_a_text(client: Client, operator: Operator, verb: str) -> None:
    run = await client.start(fulfil, Order())
    before = await run.info()
    for wrong in NO_TEXT:
        await refused("run_id", OF_ONE_RUN[verb], client, operator, wrong)
    assert await run.info() == before


async def test_the_ids_of_several_runs_are_texts(operator: Operator) -> None:
    for wrong in NO_TEXT:
        if wrong is not None:
            await refused("runs", operator.requeue_quarantined, runs=[ID, wrong], **WHY)


@pytest.mark.parametrize("verb", KEYS)
async def test_the_id_of_a_key_is_a_text(operator: Operator, verb: str) -> None:
    for wrong in NO_TEXT:
        await refused("key_id", KEYS[verb], operator, wrong)


@pytest.mark.parametrize("verb", [*BULK, *LISTS])
async def test_a_saga_is_given_by_name_and_a_number_is_a_number(client: Client, operator: Operator, verb: str) -> None:
    ask = {**BULK, **LISTS}[verb]
    await client.start(fulfil, Order(), key="a")
    for wrong in NO_TEXT:
        if wrong is not None:
            said = await refused("saga", ask, client, operator, saga=wrong)
            assert wrong is not fulfil or ".name" in said
    for number in (0, -1, True, "5", 2.5, None):
        await refused("limit", ask, client, operator, limit=number)
    await ask(client, operator, saga=fulfil.name, limit=1)


@pytest.mark.parametrize("verb", BULK)
async def test_a_prefix_is_a_text_and_a_time_has_a_zone(client: Client, operator: Operator, verb: str) -> None:
    run = await client.start(fulfil, Order(), key="a")
    for wrong in NO_TEXT:
        if wrong is not None:
            await refused("key_prefix", BULK[verb], client, operator, key_prefix=wrong)
    for moment in (datetime(2026, 1, 1), "2026-01-01", 5, {"$gt": 0}):
        said = await refused("started_before", BULK[verb], client, operator, started_before=moment)
        assert "tzinfo" in said
    assert (await run.info()).state is State.PENDING
    await BULK[verb](client, operator, key_prefix="b", started_before=datetime(2020, 1, 1, tzinfo=UTC))
    assert (await run.info()).state is State.PENDING


async def test_states_are_given_one_or_several_as_members_or_by_name(
    client: Client, store: MongoStore, shop: Shop, operator: Operator
) -> None:
    run_id = await held(client, store, shop, "ship fails")
    ways: tuple[Any, ...] = (
        *(State.FORWARD_INCOMPLETE, "forward_incomplete"),
        *([State.FORWARD_INCOMPLETE, "broken"], {"forward_incomplete"}, iter(["forward_incomplete"])),
    )
    for states in ways[:-1]:
        (group,) = await operator.list_held(status=states)
        assert (group.state, group.count) == (State.FORWARD_INCOMPLETE, 1)
        assert (await operator.resume_many(states=states, dry_run=True, **WHY)).done == [run_id]
        assert [info.run_id for info in (await client.runs(state=states)).runs] == [run_id]
    assert (await operator.resume_many(states=ways[-1], dry_run=True, **WHY)).done == [run_id]
    assert await operator.list_held(status="quarantined") == []
    assert (await operator.resume_many(states="broken", **WHY)) == BulkResult(dry_run=False)


async def test_a_state_that_there_is_not_or_that_a_verb_does_nothing_with_is_refused(
    client: Client, operator: Operator
) -> None:
    for wrong in ("helt", "", 5, None, ["broken", "brokn"], [5], [["broken"]], b"broken"):
        if wrong is not None:
            await refused("state", client.runs, state=wrong)
        await refused("status", operator.list_held, status=wrong)
        await refused("states", operator.resume_many, states=wrong, **WHY)
        await refused("states", operator.restart_many, states=wrong, **WHY)
        if wrong is not None:
            await refused("states", operator.keys.runs_needing, None, ID, states=wrong)
    said = await refused("states", operator.resume_many, states={State.IN_DOUBT, State.BROKEN}, **WHY)
    assert "in_doubt: does not apply" in said
    assert "forward_incomplete" in said
    await refused("states", operator.restart_many, states=State.COMPLETED, **WHY)
    for state in (*State, "open", "settled"):
        if state not in HELD:
            await refused("status", operator.list_held, status=state)


async def test_a_groups_name_stands_for_its_states_and_is_told_where_it_may(
    client: Client, store: MongoStore, shop: Shop, operator: Operator
) -> None:
    run_id = await held(client, store, shop, "ship fails")
    fresh = (await client.start(fulfil, Order())).run_id
    found = {
        name: {info.run_id for info in (await client.runs(state=name)).runs} for name in ("held", "open", "settled")
    }
    assert found == {"held": {run_id}, "open": {fresh}, "settled": set()}
    assert {info.run_id for info in (await client.runs(state=["held", State.PENDING])).runs} == {run_id, fresh}
    assert [group.count for group in await operator.list_held(status="held")] == [1]
    assert "held, open, settled" in await refused("state", client.runs, state="helt")
    assert (await refused("status", operator.list_held, status="helt")).endswith("at once held")
    said = await refused("states", operator.resume_many, states="held", **WHY)
    assert "in_doubt, quarantined: does not apply here" in said
    assert "at once" not in said, "no group may be resumed whole"


BY_A_PERSON: dict[str, Verb] = {
    "stop": lambda client, _, words: client.stop(ID, **words),
    "stop_many": lambda client, _, words: client.stop_many(**words),
    "resume": lambda _, operator, words: operator.resume(ID, **words),
    "retry_now": lambda _, operator, words: operator.retry_now(ID, **words),
    "restart_as_new": lambda _, operator, words: operator.restart_as_new(ID, **words),
    "verdict": lambda _, operator, words: operator.verdict(fulfil, ID, happened=False, **words),
    "requeue_quarantined": lambda _, operator, words: operator.requeue_quarantined(**words),
    "resume_many": lambda _, operator, words: operator.resume_many(**words),
    "retry_now_many": lambda _, operator, words: operator.retry_now_many(**words),
    "restart_many": lambda _, operator, words: operator.restart_many(**words),
}


@pytest.mark.parametrize("verb", BY_A_PERSON)
async def test_what_a_person_gave_is_looked_at_before_the_database_is(verb: str) -> None:
    async with AsyncMongoClient[Any]("mongodb://127.0.0.1:1/", connect=False) as nowhere:
        store = MongoStore(nowhere["nowhere"], patience=LITTLE, reply=LITTLE)
        client, operator = Client(store), Operator(store)
        for field, words in (("by", {**WHY, "by": ""}), ("reason", {**WHY, "reason": " "})):
            await refused(field, BY_A_PERSON[verb], client, operator, words)
        if verb.endswith("many") or verb == "requeue_quarantined":
            await refused("dry_run", BY_A_PERSON[verb], client, operator, {**WHY, "dry_run": "no"})


async def test_what_was_given_for_a_verdict_or_a_key_is_looked_at_before_the_database_is() -> None:
    async with AsyncMongoClient[Any]("mongodb://127.0.0.1:1/", connect=False) as nowhere:
        store = MongoStore(nowhere["nowhere"], patience=LITTLE, reply=LITTLE)
        client, operator = Client(store), Operator(store)
        bound = Operator(store, tenant="vinet").keys
        wrong: Any = 5
        await refused("context", operator.verdict, fulfil, ID, happened=True, **WHY)
        await refused("context", operator.verdict, fulfil, ID, happened=True, context=wrong, **WHY)
        await refused("context", client.start, fulfil, wrong)
        await refused("starts", client.start_many, fulfil, [Order()])
        await refused("starts", client.start_many, fulfil, Start(Order()))
        await refused("session", client.start, fulfil, Order(), session="x")
        await refused("open_keys", client.runs, open_keys="no")
        for verb in (bound.of_tenant, bound.create, bound.rewrap):
            await refused("tenant", verb, "hanar")
        await refused("tenant", bound.rotate, "hanar", **WHY)
        await refused("tenant", bound.rewrap_master)
        await refused("confirm", bound.destroy, confirm="hanar", **WHY)
        await refused("at_once", operator.keys.rewrap, at_once=0)
        await refused("progress", operator.keys.rewrap, progress="x")


async def test_a_tenant_is_no_question_to_the_server_when_a_keyring_is_asked() -> None:
    keyring = Keyring(LocalKeyWrapper({"m": bytes(32)}))
    everybody: Any = {"$gt": ""}
    await refused("tenant", keyring.keys, everybody)
    await refused("tenant", keyring.create, everybody)
    await refused("tenant", keyring.rotate, everybody, **WHY)
    await refused("tenant", keyring.destroy, everybody, confirm=everybody, **WHY)


async def test_a_verdict_is_yes_or_no_and_about_a_saga(client: Client, operator: Operator) -> None:
    await refused("happened", operator.verdict, fulfil, ID, happened="no", **WHY)
    wrong: Any
    for wrong in (None, "fulfil", 5):
        await refused("saga", operator.verdict, wrong, ID, happened=False, **WHY)
        await refused("saga", client.find, wrong, key="a")
        with pytest.raises(InvalidInput, match="saga"):
            client.run(wrong, run_id=ID)


async def test_a_list_continues_only_where_an_earlier_page_has_ended(client: Client) -> None:
    wrong: Any
    for wrong in (5, {"$gt": ""}, "x", b"x", "\ud800"):
        await refused("after", client.runs, after=wrong)


async def test_a_list_from_a_database_without_the_schema_says_so(database: Any) -> None:
    with pytest.raises(SchemaMismatch):
        await Client(MongoStore(database)).runs()
