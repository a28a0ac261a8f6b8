"""Whatever is altered, moved, cut or put back among sealed payloads is refused by name, and nothing is done with it.

`SAGAS_SEED` replays the choice of what is altered where; it is printed.
"""

from __future__ import annotations

import functools
import os
import random
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Final

import pytest

from sagas import (
    HELD,
    OPEN,
    Client,
    Keyring,
    Kind,
    MongoStore,
    RunInfo,
    Start,
    State,
    Tampered,
    Unreadable,
)
from sagas.sealing import KEY_ID_BYTES, SEALED_OVERHEAD_BYTES, RunOpener, Slot, place_of_payload, place_of_reason
from sagas_store.entries import Entry
from tests.sealing.deployment import WHY, Deployment, flip
from tests.sealing.letters import Office, everything_a_user_does
from tests.sealing.parcels import Depot, Parcel, Warehouse, parcels
from tests.sealing.witness import Witness
from tests.sealing.wrapping import CountingWrapper
from tests.support.crashing import working

Place = tuple[str, Slot, int]
"""Run, slot and number."""

_HEAD: Final = 1 + KEY_ID_BYTES


@pytest.fixture
def rng() -> random.Random:
    seed = int(os.environ.get("SAGAS_SEED") or secrets.randbelow(2**32))
    print(f"SAGAS_SEED={seed}")
    return random.Random(seed)


# ------------------------------------------------------------------------------------ every bit, every other place


async def everything_sealed(database: Any) -> dict[Place, bytes]:
    """All sealed values of the database, each with the place that it was sealed for. Copies are left out."""
    found: dict[Place, bytes] = {}
    async for run in database["sagas.runs"].find():
        stored = {
            Slot.INPUT: run["input"],
            Slot.KEY: run.get("sealed_key"),
            Slot.RESTART: run.get("started_reason"),
            Slot.STOP: run.get("stop", {}).get("reason"),
        }
        found |= {(run["_id"], slot, 0): value for slot, value in stored.items() if value is not None}
    async for entry in database["sagas.journal"].find():
        run_id, seq, kind = entry["_id"]["run"], entry["_id"]["seq"], Kind(entry["kind"])
        for name, place_of in (("payload", place_of_payload), ("reason", place_of_reason)):
            if name in entry:
                found[run_id, *place_of(kind, seq)] = entry[name]
    return found


async def test_every_bit_and_every_place_of_everything_sealed_is_authenticated(
    database: Any, rng: random.Random
) -> None:
    await MongoStore(database).schema.apply()
    office = Office(database, Witness(database), CountingWrapper())
    await everything_a_user_does(office)
    await office.client.close()
    values = await everything_sealed(database)
    slots = Counter(slot for _, slot, _ in values)
    assert set(slots) == set(Slot), slots
    keyring = office.store.keyring
    assert isinstance(keyring, Keyring)
    key = await keyring.current(office.tenant)
    openers = {run_id: RunOpener(office.tenant, run_id, [key]) for run_id, _, _ in values}

    def refuses(place: Place, stored: bytes) -> bool:
        run_id, slot, seq = place
        try:
            openers[run_id].open(slot, seq, stored)
        except Tampered:
            return True
        except Unreadable:
            return stored[:1] != b"\x02"
        except Exception as error:  # a key that is not at hand; asked for, it is not there: see below
            return stored[1:_HEAD].hex() != key.key_id and type(error).__name__ == "KeyUnavailable"
        return False

    tried: Counter[str] = Counter()
    chosen = {slot: rng.sample([place for place in values if place[1] is slot], min(3, slots[slot])) for slot in Slot}
    for place in (place for places in chosen.values() for place in places):
        stored = values[place]
        assert openers[place[0]].open(place[1], place[2], stored)
        bits = list(range(8 * len(stored)))
        ends = 8 * SEALED_OVERHEAD_BYTES
        if len(bits) > 4000:  # a traceback: its ends, and a sample of what is between
            bits = bits[:ends] + rng.sample(bits[ends:-ends], 1000) + bits[-ends:]
        for at in bits:
            tried["bits flipped"] += 1
            assert refuses(place, flip(stored, at // 8, at % 8)), (place, at)
        for length in range(min(len(stored), 200)):
            tried["lengths"] += 1
            assert refuses(place, stored[:length]), (place, length)
            assert refuses(place, stored + secrets.token_bytes(length + 1)), (place, length)
    for place, other in permutations(values, 2):
        tried["moves"] += 1
        assert refuses(place, values[other]), (place, other)
    print(dict(tried))
    assert tried["bits flipped"] > 5000


# ------------------------------------------------------------------------------------ what a worker makes of it


@dataclass
class Case:
    """One sealed value of one run, and what is put in its place."""

    run_id: str
    tenant: str
    way: str
    where: str
    """The field: `input`, `sealed_key`, `stop.reason`, or `payload` or `reason` of an entry."""
    seq: int | None
    executed: bool
    """Whether it is what the run is executed from: its newest context."""
    before: bytes
    how: str = ""
    after: bytes = b""

    def __str__(self) -> str:
        return f"{self.way} run {self.run_id}: {self.where} of entry {self.seq} {self.how}"

    @property
    def has_form(self) -> bool:
        """Whether it still looks like a sealed payload."""
        return self.after[:1] == b"\x02"


def cases_of(run: Any, entries: list[Any], way: str) -> Iterator[Case]:
    """All that could be altered of one run."""
    contexts = [one["_id"]["seq"] for one in entries if "payload" in one and place(one)[0] is Slot.CONTEXT]
    newest = max(contexts, default=None)
    fixed: Any = {"run_id": run["_id"], "tenant": run["tenant"], "way": way}
    yield Case(**fixed, where="input", seq=None, executed=newest is None, before=run["input"])
    yield Case(**fixed, where="sealed_key", seq=None, executed=False, before=run["sealed_key"])
    if "stop" in run:
        yield Case(**fixed, where="stop.reason", seq=None, executed=False, before=run["stop"]["reason"])
    for entry in entries:
        seq = entry["_id"]["seq"]
        for name in ("payload", "reason"):
            if name in entry:
                executed = name == "payload" and seq == newest
                yield Case(**fixed, where=name, seq=seq, executed=executed, before=entry[name])


def place(entry: Any) -> tuple[Slot, int]:
    return place_of_payload(Kind(entry["kind"]), entry["_id"]["seq"])


def chosen_of(cases: list[Case], rng: random.Random) -> bytes:
    return rng.choice(cases).before


def alter(case: Case, all_of_it: list[Case], rng: random.Random) -> None:
    """Choose what is put in its place."""
    others: dict[str, Callable[[Case], bool]] = {
        "is another run's": lambda it: it.run_id != case.run_id and it.tenant == case.tenant and it.where == case.where,
        "is another tenant's": lambda it: it.tenant != case.tenant and it.where == case.where,
        "is another place's": lambda it: it.run_id == case.run_id and (it.where, it.seq) != (case.where, case.seq),
        "is an older one": lambda it: it.run_id == case.run_id and (it.seq or 0) < (case.seq or 0),
    }
    candidates = {how: list(filter(fits, all_of_it)) for how, fits in others.items()}
    size = len(case.before)
    altered: dict[str, Callable[[], bytes]] = {
        "flipped": lambda: flip(case.before, rng.randrange(size), rng.randrange(8)),
        "flipped in its head": lambda: flip(case.before, rng.randrange(_HEAD), rng.randrange(8)),
        "cut": lambda: case.before[: rng.randrange(size)],
        "in the clear": lambda: b'\x01{"number": 0, "way": "fresh"}',
        "extended": lambda: case.before + rng.randbytes(rng.randint(1, 100)),
        **{how: functools.partial(chosen_of, found, rng) for how, found in candidates.items() if found},
    }
    case.how = rng.choice(sorted(altered))
    case.after = altered[case.how]()


async def put(database: Any, case: Case) -> None:
    if case.seq is None:
        chosen: Any = database["sagas.runs"], {"_id": case.run_id}
    else:
        chosen = database["sagas.journal"], {"_id": {"run": case.run_id, "seq": case.seq}}
    collection, which = chosen
    done = await collection.update_one(which, {"$set": {case.where: case.after}})
    assert done.matched_count == 1, case


async def choose_cases(warehouse: Warehouse, rng: random.Random) -> list[Case]:
    """One case for most runs, and what it alters."""
    journals: dict[str, list[Any]] = {run_id: [] for run_id in warehouse.ways}
    async for entry in warehouse.shop.database["sagas.journal"].find().sort("_id"):
        journals[entry["_id"]["run"]].append(entry)
    runs = await warehouse.shop.database["sagas.runs"].find().to_list(None)
    by_run = {run["_id"]: list(cases_of(run, journals[run["_id"]], warehouse.ways[run["_id"]])) for run in runs}
    all_of_it = [case for cases in by_run.values() for case in cases]
    chosen = []
    for cases in by_run.values():
        executed = [case for case in cases if case.executed]
        draw = rng.random()
        if draw > 0.15:
            chosen.append(rng.choice(executed if draw < 0.6 else cases))
            alter(chosen[-1], all_of_it, rng)
    return chosen


@pytest.mark.slow
async def test_a_run_is_never_executed_from_what_was_tampered_with_and_no_other_run_suffers(
    shop: Deployment, rng: random.Random
) -> None:
    warehouse = Warehouse(shop, each=50)
    await warehouse.prepare()
    cases = await choose_cases(warehouse, rng)
    for case in cases:
        await put(shop.database, case)
    calls = warehouse.depot.calls.copy()
    before = {case.run_id: await shop.store.journal.load(case.run_id) for case in cases if case.executed}

    await warehouse.work()

    tampered = {case.run_id for case in cases if case.executed}
    counted: Counter[str] = Counter()
    for case in cases:
        info = await shop.client.get(case.run_id)
        counted[f"{'executed' if case.executed else 'read'}, {case.how}"] += 1
        if case.executed:
            assert_refused(case, info)
            assert warehouse.depot.calls[case.run_id] == calls[case.run_id], f"{case}: executed"
            assert await shop.store.journal.load(case.run_id) == before[case.run_id], f"{case}: journaled"
        else:
            await assert_hidden(shop.client, case, info)
    await warehouse.assert_all_ended(but=tampered)
    print(len(cases), "cases", dict(counted))
    assert len(tampered) > 100

    # Put back as it was, everything ends as it would have.
    for case in cases:
        case.after = case.before
        await put(shop.database, case)
    await warehouse.make_due()
    await shop.operator.resume_many(states=[State.BROKEN], **WHY)
    await warehouse.work()
    await warehouse.assert_all_ended(but=set())


def assert_refused(case: Case, info: RunInfo) -> None:
    """What a run is executed from was altered: an operator sees that, and nothing else has happened."""
    if case.has_form:
        assert (info.state, info.blocked_by) == (State.PENDING, "Tampered"), f"{case}: {info}"
        assert info.blocked_count == 1
    else:  # nothing that could be opened; it waits for an operator at once
        assert info.state is State.BROKEN, f"{case}: {info}"
        assert any(why in (info.held_reason or "") for why in ("payload form", "not sealed", "empty")), info


async def assert_hidden(client: Client, case: Case, info: RunInfo) -> None:
    """What is only for reading was altered: it is not shown, the line says so, and every other line is shown."""
    assert info.state not in OPEN | HELD, f"{case}: {info}"
    if case.where == "sealed_key":
        assert info.key is None, case
    else:
        assert info.key is not None, case
    lines = await client.journal(case.run_id)
    shown = {line.seq: line for line in lines}
    if case.seq is not None and (shown[case.seq].kind.endswith(("failed", "scheduled")) or case.where == "reason"):
        hidden = {case.seq}
        assert (shown[case.seq].error, shown[case.seq].reason) == (None, None), case
    elif case.where == "stop.reason":
        hidden = {line.seq for line in lines if line.kind is Kind.ROLLBACK_BEGUN}
        assert (await client.stop(case.run_id, **WHY)).reason is None, case
    else:
        hidden = set()
    assert {line.seq for line in lines if line.unopened is not None} == hidden, f"{case}: {lines}"


async def test_a_result_that_was_tampered_with_is_refused_by_name(shop: Deployment) -> None:
    async with working(shop.store, parcels, resources=Depot()):
        starts = [Start(Parcel(number=n, way="fresh"), tenant="vinet") for n in range(2)]
        run, other = await shop.client.start_many(parcels, starts)
        assert ((await run.result(20)).number, (await other.result(20)).number) == (0, 1)
    last = await shop.store.journal.last_context(run.run_id)
    assert last is not None
    journal = shop.database["sagas.journal"]
    older: Entry = next(entry for entry in await shop.store.journal.load(run.run_id) if entry.payload)
    theirs = await journal.find_one({"_id": {"run": other.run_id, "seq": last[0]}})
    for altered in (flip(last[1], -1), last[1][:20], last[1] + b"\0", older.payload, theirs["payload"]):
        await journal.update_one({"_id": {"run": run.run_id, "seq": last[0]}}, {"$set": {"payload": altered}})
        with pytest.raises(Tampered):
            await run.result(20)
    await journal.update_one({"_id": {"run": run.run_id, "seq": last[0]}}, {"$set": {"payload": b"\x01{}"}})
    with pytest.raises(Unreadable, match="not sealed"):
        await run.result(20)
