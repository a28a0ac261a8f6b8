"""A canary in every field that a user can set is found nowhere: not in the database, the logs or any error."""

from __future__ import annotations

import base64
import functools
from datetime import timedelta
from typing import Any, Final

import pytest

from sagas import (
    CannotOpen,
    InvalidInput,
    KeyConflict,
    KeyLost,
    KeyUnavailable,
    MongoStore,
    PayloadTooLarge,
    RunInfo,
    RunNotFound,
    Start,
    State,
    StopOutcome,
    Tampered,
)
from sagas.wrapping import KeyName
from sagas_store.schema import SCHEMA
from tests.sealing.deployment import flip
from tests.sealing.letters import Letter, Office, everything_a_user_does, letters
from tests.sealing.witness import Witness, forms
from tests.sealing.wrapping import CountingWrapper


async def everything_a_caller_gets_wrong(office: Office) -> None:
    """Every argument that can be wrong, with the canary in it."""
    told, canary = office.witness.told, office.canary
    start = office.client.start
    unfit: list[Any] = [
        Letter(text=canary).model_copy(update={"text": f"rude {canary}"}),
        Letter(text=canary).model_copy(update={"labels": {canary: canary}}),
        Letter(text=canary).model_copy(update={"text": object()}),
        canary,
    ]
    for context in unfit:
        await told(start(letters, context, tenant=office.tenant), InvalidInput)
    await told(start(letters, Letter(text=canary * 500), tenant=office.tenant), PayloadTooLarge)
    for key in (canary * 40, canary + "\ud800", ""):
        await told(start(letters, office.letter(), key=key, tenant=office.tenant), InvalidInput)
    other, key = Letter(text=f"another {canary}"), f"{canary} "
    await told(start(letters, other, key=key, tenant=office.tenant), KeyConflict)
    await told(office.client.start_many(letters, [Start(other, key, tenant=office.tenant)]), KeyConflict)
    many = [Start(one, f"{canary} 2", tenant=office.tenant) for one in (other, office.letter())]
    await told(office.client.start_many(letters, many), KeyConflict)
    async with office.database.client.start_session() as session, await session.start_transaction():
        await told(start(letters, other, key=key, tenant=office.tenant, session=session), KeyConflict)
        await start(letters, other, key=f"{canary} in a transaction", tenant=office.tenant, session=session)
        await session.abort_transaction()
    await told(office.client.find(letters, key=f"{canary} unknown", tenant=office.tenant), RunNotFound)
    for reason in (canary * 500, canary + "\ud800", " "):
        done = (await office.client.runs(limit=1)).runs[0].run_id
        await told(office.client.stop(done, by=office.who, reason=reason), InvalidInput)
        await told(office.operator.restart_as_new(done, by=office.who, reason=reason), InvalidInput)
    await told(office.client.runs(after=canary), InvalidInput)


async def everything_that_happens_to_keys(office: Office) -> None:
    """Payloads that were tampered with, and keys that are away or lost."""
    assert office.wrapper is not None
    told, words = office.witness.told, office.words
    tampered = await office.start("tampered", delay=timedelta(hours=1))
    lost = await office.start("lost", delay=timedelta(hours=1))
    runs = office.database["sagas.runs"]
    found = await runs.find_one({"_id": tampered.run_id})
    await runs.update_one({"_id": tampered.run_id}, {"$set": {"input": flip(found["input"], -1)}})
    async with office.working():
        done = await office.start("for its result")
        await office.ends(done, State.COMPLETED)
        await office.make_due(tampered)
        await office.until(lambda info: info.blocked_by == "Tampered", tampered, "it is blocked")
        await told(office.start("tampered"), Tampered)

    for kind in (KeyUnavailable, KeyLost):
        office.wrapper.failing = functools.partial(_fails, kind)
        away = office.anew()
        if kind is KeyLost:
            await runs.update_one({"_id": lost.run_id}, {"$set": {"blocked.count": 8}})
        async with away.working():
            await office.make_due(lost)
            await office.until(functools.partial(_is_blocked_by, kind), lost, "it is blocked")
        await told(away.start("no key"), kind)
        await told(away.client.run(letters, run_id=done.run_id).result(5), kind)
        await away.client.journal(done.run_id)
        refused = await away.operator.requeue_quarantined(runs=[lost.run_id], **words)
        office.witness.seen["exceptions"] += [why.encode() for why in refused.refused.values()]
        await away.client.close()
    await office.ends(lost, State.QUARANTINED)
    assert (await office.anew().client.stop(lost.run_id, **words)).outcome is StopOutcome.WILL_BE_UNDONE
    await office.witness.look()
    office.wrapper.failing = None
    assert (await office.operator.requeue_quarantined(runs=[lost.run_id], **words)).done == [lost.run_id]
    async with office.working():
        await office.ends(lost, State.CANCELLED)


def _fails(kind: type[CannotOpen], name: KeyName) -> Exception:
    return kind(name.tenant, name.key_id, "gone")


def _is_blocked_by(kind: type[CannotOpen], info: RunInfo) -> bool:
    return info.blocked_by == kind.__name__


DATABASE: Final = {"documents of sagas.runs", "documents of sagas.journal", "change stream", "oplog"}
PRINTED: Final = {"exceptions", "log", "output"}


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
async def test_what_a_user_gave_is_in_no_document_index_stream_oplog_log_or_error(
    database: Any,
    sealed: bool,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await MongoStore(database).schema.apply()
    witness = Witness(database)
    await witness.begin()
    with witness.hearing(caplog, monkeypatch):
        office = Office(database, witness, CountingWrapper() if sealed else None)
        await everything_a_user_does(office)
        await everything_a_caller_gets_wrong(office)
        if sealed:
            await everything_that_happens_to_keys(office)
        await witness.look()
        await witness.end()
        await office.client.close()
    out, err = capfd.readouterr()
    witness.seen["output"] = [out.encode(), err.encode()]

    # What may be seen is seen, in every place where the canary is looked for: so it would be seen there, too.
    assert {"documents of sagas.runs", "keys of list_of_tenant on runs"} <= witness.where(office.tenant)
    assert {*DATABASE, "driver's log"} <= witness.where(office.who)
    assert {"exceptions", "log", "documents of sagas.runs"} <= witness.where("letters")
    indexes = {f"keys of {index.name} on {spec.name}" for spec in SCHEMA for index in spec.indexes}
    if sealed:
        assert indexes <= set(witness.seen)
        assert witness.where(office.canary) == set()
    else:
        assert witness.where(office.canary) == {*DATABASE, "driver's log"}
        assert not witness.where(office.canary) & PRINTED


def test_the_witness_knows_a_word_in_every_form() -> None:
    witness = Witness(None)
    word = "canary0123456789abcdef"
    for count, form in enumerate(forms(word)):
        witness.seen[str(count)].append(b"..." + form + b"...")
    witness.seen["nowhere"].append(b"nothing of it")
    assert witness.where(word) == set("012345")
    for before in range(3):
        coded = base64.b64encode(b"x" * before + word.encode() + b"yz")
        assert any(form in coded for form in forms(word)[3:]), before
