"""What the server may say to the two transactions about keys, a rotation and the end of a rewrap, and who hears it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from sagas import MongoStore, StoreUnavailable
from sagas_store.errors import StoreError, StoreRefused
from sagas_store.keys import KeyState, NewKey, Purpose
from tests.sealing.deployment import WHY, Deployment, Order, fulfil
from tests.support.failpoints import fail_point

Ask = Callable[[MongoStore], Awaitable[Any]]
NEW, OLD = "b" * 16, "c" * 16


@pytest.fixture
async def unlucky(mongo_uri: str, shop: Deployment) -> AsyncIterator[MongoStore]:
    """A store on a connection that fail points can tell from all others, and that waits for half a second."""
    async with AsyncMongoClient[Any](mongo_uri, appname="unlucky") as connection:
        store = MongoStore(
            connection[shop.database.name], patience=timedelta(seconds=1), reply=timedelta(milliseconds=500)
        )
        await store.ready()
        yield store


async def rotation(shop: Deployment) -> Ask:
    active = (await shop.keyring.current("vinet")).key_id
    key = NewKey(key_id=NEW, tenant="vinet", purpose=Purpose.DATA, master="m", wrapped=bytes(48))
    return lambda store: store.keys.rotate(active, key, **WHY)


async def keeping(shop: Deployment) -> Ask:
    started = await shop.client.start(fulfil, Order(), tenant="vinet")
    run = await shop.store.runs.get(started.run_id)
    assert run is not None
    return lambda store: store.resealing.keep_keys(run, [OLD], last_seq=0)


async def keys_there_are(shop: Deployment) -> list[Any]:
    """What both would change: the keys, and the keys that runs name."""
    runs = [run["keys"] async for run in shop.database["sagas.runs"].find(sort=[("_id", 1)])]
    return [*await shop.store.keys.list_of_tenant("vinet"), *runs]


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        ({"errorCode": 13}, StoreRefused),
        ({"errorCode": 50}, StoreUnavailable),  # a time limit, which the server gives no label
        ({"errorCode": 112, "errorLabels": ["TransientTransactionError"]}, StoreUnavailable),
        ({"closeConnection": True}, StoreUnavailable),
        ({"blockConnection": True, "blockTimeMS": 1500}, StoreUnavailable),
    ],
    ids=["no-right", "time-limit", "conflict", "no-answer", "silence"],
)
@pytest.mark.parametrize(("transaction", "command"), [(rotation, "update"), (keeping, "update"), (keeping, "find")])
async def test_whatever_the_server_says_it_is_told_in_an_error_of_ours_and_in_time(
    shop: Deployment,
    unlucky: MongoStore,
    transaction: Callable[[Deployment], Awaitable[Ask]],
    trouble: dict[str, Any],
    told: type[StoreError],
    command: str,
) -> None:
    ask = await transaction(shop)
    before = await keys_there_are(shop)
    async with fail_point(shop.database.client, [command], with_app_name="unlucky", **trouble) as point:
        async with asyncio.timeout(6):
            with pytest.raises(told):
                await ask(unlucky)
    assert point.hits
    assert await keys_there_are(shop) == before
    await ask(shop.store)
    after = await keys_there_are(shop)
    assert after != before
    if transaction is rotation:
        assert [key.state for key in after if getattr(key, "purpose", None) is Purpose.DATA] == [
            KeyState.RETIRED,
            KeyState.ACTIVE,
        ]


async def test_a_passing_fault_in_the_middle_is_no_news(shop: Deployment, unlucky: MongoStore) -> None:
    for transaction in (rotation, keeping):
        ask = await transaction(shop)
        async with fail_point(
            shop.database.client, ["update"], with_app_name="unlucky", times=2, errorCode=50
        ) as point:
            assert await ask(unlucky)
        assert point.hits == 2


async def test_nobody_waits_for_the_answer_to_an_abort(
    shop: Deployment, unlucky: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sagas_store.drivers._ABORT_S", 0.2)
    ask = await keeping(shop)
    assert await ask(shop.store)
    silence = {"blockConnection": True, "blockTimeMS": 3000}
    async with fail_point(shop.database.client, ["abortTransaction"], with_app_name="unlucky", **silence) as point:
        async with asyncio.timeout(2):
            assert not await ask(unlucky)
    assert point.hits
    # Else the server ends it by itself after a minute, and nobody can drop the database until then.
    await shop.database.client.admin.command("killAllSessions", [])
