"""The command line on a sealed database: held runs, requeues, tenants and their keys, and no key on the screen."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pymongo import AsyncMongoClient, MongoClient

from sagas import (
    Client,
    Keyring,
    KeyState,
    LocalKeyWrapper,
    MongoStore,
    RunDidNotComplete,
    RunInfo,
    State,
    Worker,
    WorkerOptions,
)
from sagas.cli import main
from sagas.wrapping import add_master_key
from sagas_store.records import Blocked
from tests.sealing.deployment import Order, Shop, fulfil

T = TypeVar("T")

REASON = "canary-4711 the auditors asked for it"
SAID = ("--by", "ann@shop", "--reason", REASON)
WHY = "the yearly rotation"
OF_KEYS = ("--by", "ann@shop", "--reason", WHY)
"""What is said of keys stays in the clear: there may be none left to seal it with."""


@dataclass
class Cli:
    """The command line, on a database of its own, with a file of master keys."""

    uri: str
    database: str
    masters: Path
    capsys: pytest.CaptureFixture[str]
    said: list[str] = field(default_factory=list)

    def __call__(self, *words: str, keyed: bool = True) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        where = ["--uri", self.uri, "--database", self.database]
        keys = ["--master-keys", str(self.masters)] if keyed else []
        try:
            code = main([*words, *where, *keys])
        except SystemExit as ended:  # argparse
            code = ended.code if isinstance(ended.code, int) else -1
        out, err = self.capsys.readouterr()
        self.said += [out, err]
        return code, out, err

    def lines(self, *words: str) -> list[dict[str, Any]]:
        code, out, _ = self(*words, "--json")
        assert code == 0
        return [json.loads(line) for line in out.splitlines()]

    @asynccontextmanager
    async def store(self) -> AsyncIterator[MongoStore]:
        async with AsyncMongoClient[Any](self.uri) as client:
            yield MongoStore(client[self.database], keyring=Keyring(LocalKeyWrapper.from_file(self.masters)))

    def do(self, work: Callable[[MongoStore], Awaitable[T]]) -> T:
        async def done() -> T:
            async with self.store() as store:
                return await work(store)

        return asyncio.run(done())

    def start(self, tenant: str | None, key: str | None = None) -> str:
        async def started(store: MongoStore) -> str:
            run = await Client(store).start(fulfil, Order(), key=key, tenant=tenant)
            return run.run_id

        return self.do(started)

    def drive(self, order: Order, key: str | None = None) -> str:
        """A run of vinet's that a worker has brought to rest."""

        async def driven(store: MongoStore) -> str:
            options = WorkerOptions(poll=timedelta(milliseconds=20), handle_signals=False)
            worker = Worker(store, [fulfil], resources=Shop(), options=options)
            working = asyncio.create_task(worker.run())
            async with Client(store) as client:
                run = await client.start(fulfil, order, key=key, tenant="vinet")
                with suppress(RunDidNotComplete):
                    await run.result(20)
            worker.stop()
            await working
            return run.run_id

        return self.do(driven)

    def block(self, quarantined: int, waiting: int = 0) -> None:
        """Let that many due runs be quarantined, and that many more wait because they do not open."""

        async def blocked(store: MongoStore) -> None:
            await store.ready()
            claimed = await store.claims.take(
                [("fulfil", 1)], token="t", worker="w", lease=timedelta(minutes=5), limit=quarantined + waiting
            )
            assert len(claimed) == quarantined + waiting
            for number, run in enumerate(claimed):
                why = Blocked(
                    count=9, since=store.clock.now(), failure="KeyLost", why="it was destroyed", key_id=run.keys[0]
                )
                quarantine = "KeyLost: it was destroyed" if number < quarantined else None
                await store.runs.block(run, why, wait=timedelta(hours=1), quarantine=quarantine)

        self.do(blocked)

    def claim_and_hold(self, state: State) -> None:
        async def held(store: MongoStore) -> None:
            await store.ready()
            claimed = await store.claims.take(
                [("fulfil", 1)], token="t", worker="w", lease=timedelta(minutes=5), limit=9
            )
            for run in claimed:
                await store.runs.hold(run, state, "held for a test")

        self.do(held)

    def age(self, key_id: str) -> None:
        """Let the time pass in which every process notices that this key is retired."""
        with MongoClient[dict[str, Any]](self.uri) as client:
            client[self.database]["sagas.keys"].update_one(
                {"_id": key_id}, [{"$set": {"retired_at": {"$subtract": ["$retired_at", 3_600_000]}}}]
            )

    def run(self, run_id: str) -> RunInfo:
        return self.do(lambda store: Client(store).get(run_id))


@pytest.fixture
def cli(
    mongo_uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cli]:
    monkeypatch.delenv("SAGAS_MASTER_KEYS", raising=False)
    name = f"cli_{secrets.token_hex(6)}"
    masters = tmp_path / "master-keys"
    add_master_key(masters, "2026-11")
    cli = Cli(mongo_uri, name, masters, capsys)
    assert main(["schema", "apply", "--uri", mongo_uri, "--database", name]) == 0
    capsys.readouterr()
    yield cli
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        secret = [
            base64.b64encode(key["wrapped"]).decode() for key in client[name]["sagas.keys"].find() if "wrapped" in key
        ]
        client.drop_database(name)
    secret += [line.partition(":")[2] for line in masters.read_text().split()]
    for words in cli.said:
        assert not [one for one in secret if one in words], "no key is ever printed, not even wrapped"
        assert REASON not in words
        assert "Traceback" not in words


# --- held and requeue -------------------------------------------------------------------------------------------------


def test_held_runs_are_counted_by_what_they_have_in_common(cli: Cli) -> None:
    for tenant in ("vinet", "vinet", "hanar"):
        cli.start(tenant)
    cli.block(3)
    code, out, _ = cli("held")
    head, first, second = out.splitlines()
    assert code == 0
    assert head.split() == ["state", "tenant", "key", "failure", "count", "since"]
    assert first.split()[:2] + first.split()[3:5] == ["quarantined", "vinet", "KeyLost", "2"]
    assert second.split()[1] == "hanar"
    (group,) = cli.lines("held", "--state", "quarantined", "--tenant", "hanar")
    assert group.keys() == {"state", "tenant", "key_id", "failure", "count", "since"}
    assert (group["tenant"], group["count"], group["failure"]) == ("hanar", 1, "KeyLost")
    assert cli.lines("held", "--state", "broken") == []
    assert cli("held", "--state", "pending")[0] == 2
    assert cli("held", keyed=False)[1] == out, "it opens nothing, so it needs no key"


def test_runs_that_wait_until_they_open_are_counted_apart_from_held_ones(cli: Cli) -> None:
    for tenant in ("vinet", "vinet", "vinet", "hanar"):
        cli.start(tenant)
    cli.block(0, waiting=4)
    cli.start("toms")
    cli.block(1)
    cli.start("toms")
    code, out, _ = cli("held", keyed=False)
    held, waiting = out.split("\n\n")
    assert (code, len(held.splitlines())) == (0, 2)
    words, _head, *rows = waiting.splitlines()
    assert words == "not held, on hold until their payloads open:"
    assert sorted((row.split()[0], row.split()[1], *row.split()[3:5]) for row in rows) == [
        ("pending", "hanar", "KeyLost", "1"), ("pending", "vinet", "KeyLost", "3"),
    ]  # fmt: skip
    assert all(row.endswith("Z") for row in rows), "since when"
    assert [group["state"] for group in cli.lines("held", "--tenant", "hanar")] == ["pending"]
    assert [group["state"] for group in cli.lines("held", "--state", "quarantined")] == ["quarantined"]


def test_runs_are_listed_by_tenant(cli: Cli) -> None:
    ours = cli.start("vinet")
    cli.start("hanar")
    assert [run["run_id"] for run in cli.lines("runs", "--tenant", "vinet")] == [ours]


def test_what_is_back_is_requeued_by_tenant_or_by_run(cli: Cli) -> None:
    runs = [cli.start("vinet") for _ in range(3)]
    cli.block(2, waiting=1)
    code, out, _ = cli("requeue", "--tenant", "vinet", *SAID, "--dry-run")
    assert (code, out) == (0, "3 runs, nothing done (dry run)\n")
    code, out, err = cli("requeue", "--all", *SAID)
    assert (code, out) == (2, "")
    assert err.startswith("sagas requeue: --tenant, --run: name one of them")
    code, out, _ = cli("requeue", "--run", runs[0], "--run", runs[1], *SAID)
    assert (code, out) == (0, "2 runs\n")
    assert cli.run(runs[0]).state is State.PENDING
    code, out, _ = cli("requeue", "--tenant", "vinet", *SAID, "--json")
    assert (code, json.loads(out)["done"]) == (0, [runs[2]]), "the others are due already"
    assert cli("requeue", "--tenant", "vinet", "--run", runs[0], *SAID)[0] == 2
    code, out, _ = cli("requeue", "--run", runs[0], *SAID)
    assert (code, "it is due already" in out) == (1, True)
    code, out, _ = cli("requeue", "--run", cli.start("vinet"), *SAID)
    assert (code, "it is not held because of its key" in out) == (1, True)
    assert cli("requeue", "--tenant", "vinet")[0] == 2, "who and why is asked for"


def test_without_the_keys_nothing_is_requeued(cli: Cli) -> None:
    run_id = cli.start("vinet")
    cli.block(1)
    code, out, _ = cli("requeue", "--tenant", "vinet", *SAID, keyed=False)
    assert code == 1
    assert "no keyring" in out
    assert "--master-keys" in out, "what to do about it"
    assert cli.run(run_id).state is State.QUARANTINED


def test_without_the_keys_a_verb_says_where_to_give_them(cli: Cli) -> None:
    run_id = cli.start("vinet")
    cli.claim_and_hold(State.BROKEN)
    code, out, err = cli("resume", run_id, *SAID, keyed=False)
    assert (code, out) == (1, "")
    assert "--master-keys or --keyring" in err


def test_a_run_on_hold_says_in_the_list_why_it_waits(cli: Cli) -> None:
    run_id = cli.start("vinet", key="order-10248")
    cli.block(0, waiting=1)
    (line,) = [line for line in cli("runs")[1].splitlines() if line.startswith(run_id)]
    assert "vinet" in line
    assert "order-10248" in line, "with the keys at hand it is opened"
    assert "on hold, KeyLost: it was destroyed" in line
    assert "order-10248" not in cli("runs", keyed=False)[1]


def test_a_stop_that_cannot_seal_its_reason_counts_and_says_so(cli: Cli) -> None:
    run_id = cli.start("vinet")
    code, out, err = cli("stop", run_id, *SAID, keyed=False)
    assert (code, out.startswith("cancelled")) == (0, True)
    assert "without its reason" in err
    assert cli.run(run_id).state is State.CANCELLED


# --- what happened, and why -------------------------------------------------------------------------------------------


def test_what_a_step_raised_is_shown_to_whoever_has_the_keys(cli: Cli) -> None:
    run_id = cli.drive(Order(note="decline"))
    told = "NonRetryable: canary: the card was declined"
    assert told in cli("show", run_id)[1]
    (shown,) = cli.lines("show", run_id)
    (error,) = [line["error"] for line in shown["journal"] if line["error"]]
    assert error == {"type": "sagas.errors.NonRetryable", "message": "canary: the card was declined"}
    code, out, _ = cli("show", run_id, keyed=False)
    assert (code, "canary" in out) == (0, False)
    assert "is sealed, and this process has no keyring" in out
    assert told not in cli("runs")[1]


def test_an_undone_run_is_not_shown_as_rolling_back(cli: Cli) -> None:
    run_id = cli.drive(Order(note="decline"))
    assert "rolling_back" not in cli("show", run_id)[1]
    (listed,) = cli.lines("runs")
    assert (listed["state"], listed["phase"]) == ("compensated", None)


def test_who_pressed_stop_and_who_started_anew_is_shown_with_the_reason(cli: Cli) -> None:
    run_id = cli.start("vinet")
    assert cli("stop", run_id, "--by", "ann@shop", "--reason", "changed their mind")[0] == 0
    (restarted,) = cli.lines("restart", run_id, "--by", "bob@shop", "--reason", "and back again")
    (stopped,), (anew,) = cli.lines("show", run_id), cli.lines("show", restarted["run"])
    assert (stopped["run"]["stop_by"], stopped["run"]["stop_reason"]) == ("ann@shop", "changed their mind")
    assert (anew["run"]["started_by"], anew["run"]["started_reason"]) == ("bob@shop", "and back again")
    assert (stopped["run"]["unopened"], anew["run"]["unopened"]) == (None, None)
    assert "changed their mind" in cli("show", run_id)[1]
    code, out, _ = cli("show", restarted["run"], keyed=False)
    assert (code, "bob@shop" in out, "and back again" in out) == (0, True, False)
    assert "restart is sealed, and this process has no keyring" in out


def test_a_sealed_run_is_found_by_its_key(cli: Cli) -> None:
    run_id = cli.start("vinet", key="order-10248")
    by_key = ("show", "--saga", "fulfil", "--key", "order-10248")
    assert cli(*by_key, "--tenant", "vinet")[1].split()[:2] == ["run_id", run_id]
    code, _, err = cli(*by_key)
    assert (code, "without a tenant" in err) == (1, True)
    code, _, err = cli(*by_key, "--tenant", "vinet", keyed=False)
    assert (code, "--master-keys" in err) == (2, True)
    assert "order-10248" not in err
    cli("show", "--saga", "fulfil", "--key", "order-10248", "--tenant", "nobody")
    assert cli.lines("keys", "list", "--tenant", "nobody") == []


# --- the verdict ------------------------------------------------------------------------------------------------------

SAGA = ("--saga", "tests.sealing.deployment:fulfil")


def test_a_verdict_begins_with_the_context_that_the_run_has(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = cli.drive(Order(number=10248, note="doubt"))
    assert cli("context", run_id, keyed=False)[0] == 1
    code, out, _ = cli("context", run_id)
    context = json.loads(out)
    assert (code, context) == (0, {"number": 10248, "note": "doubt", "done": ["reserve"]})
    file = tmp_path / "context.json"
    file.write_text(json.dumps({**context, "done": ["reserve", "charge"]}))
    verdict = ("verdict", run_id, *SAGA, "--happened", str(file), *SAID)

    code, out, err = cli(*verdict, "--dry-run")
    assert (code, out) == (0, "")
    assert "before the pivot: done. It cannot be taken back" in err
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, _, err = cli(*verdict)
    assert (code, "say --yes" in err) == (1, True)
    on_a_terminal(monkeypatch, "no\n")
    code, _, err = cli(*verdict)
    assert (code, err.endswith("nothing was done\n")) == (1, True)
    assert cli.run(run_id).state is State.IN_DOUBT
    on_a_terminal(monkeypatch, "yes\n")
    code, out, _ = cli(*verdict)
    assert (code, out) == (0, f"run {run_id} goes on\n")
    assert json.loads(cli("context", run_id)[1])["done"] == ["reserve", "charge"]
    assert cli(*verdict, "--yes")[0] == 1, "it is pending now"


def test_a_context_of_another_order_stands_out(cli: Cli, tmp_path: Path) -> None:
    run_id = cli.drive(Order(number=10248, note="doubt"))
    file = tmp_path / "context.json"
    file.write_text(json.dumps({"number": 10249, "note": "another", "done": ["reserve", "charge"]}))
    code, _, err = cli("verdict", run_id, *SAGA, "--happened", str(file), *SAID, "--dry-run")
    assert code == 0
    assert "number, note, done. No field is as it was: is it this run's?" in err
    assert "10249" not in err


def test_that_it_did_not_happen_is_confirmed_too(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = cli.drive(Order(note="doubt"))
    verdict = ("verdict", run_id, *SAGA, "--did-not-happen", *SAID)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, _, err = cli(*verdict)
    assert (code, "everything before it is undone" in err) == (1, True)
    assert cli(*verdict, "--yes", "--json")[1] == json.dumps({"run": run_id, "state": "pending"}) + "\n"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        ("", "is not JSON: Expecting value, line 1, column 1"),
        ('{"number": 7,\n "note": canary}', "is not JSON: Expecting value, line 2, column 10"),
        ('{"number": "canary", "done": 5}', "does not validate as Order: number (int_parsing), done (tuple_type)"),
        ('["canary"]', "does not validate as Order: the whole (model_type)"),
    ],
)
def test_a_context_that_is_none_is_refused_with_the_place_and_the_kind(
    cli: Cli, tmp_path: Path, written: str | None, message: str
) -> None:
    file = tmp_path / "context.json"
    if written is not None:
        file.write_text(written)
    code, out, err = cli("verdict", "0" * 32, *SAGA, "--happened", str(file), *SAID, "--yes")
    assert (code, out) == (2, "")
    assert err.startswith(f"sagas verdict: --happened: {file}")
    assert message in err
    assert "canary" not in err


# --- where keys come from ---------------------------------------------------------------------------------------------


def test_an_idempotency_key_is_shown_where_the_master_keys_are(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = cli.start("vinet", key="order-10248")
    assert "order-10248" not in cli("show", run_id, keyed=False)[1]
    assert "order-10248" in cli("show", run_id)[1]
    monkeypatch.setenv("SAGAS_MASTER_KEYS", cli.masters.read_text())
    assert "order-10248" in cli("show", run_id, keyed=False)[1]


def test_a_keyring_is_named_as_a_worker_is(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = cli.start("vinet", key="order-10248")
    module = f"ring_{secrets.token_hex(4)}"
    (tmp_path / f"{module}.py").write_text(
        "from sagas import Keyring, LocalKeyWrapper\n"
        f"def make(): return Keyring(LocalKeyWrapper.from_file({str(cli.masters)!r}))\n"
        "keyring = make()\n"
        "async def later(): return make()\n"
        "number = 7\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("make", "keyring", "later"):
        code, out, _ = cli("show", run_id, "--keyring", f"{module}:{name}", keyed=False)
        assert (code, "order-10248" in out) == (0, True)
    code, _, err = cli("show", run_id, "--keyring", f"{module}:number", keyed=False)
    assert (code, "not a Keyring" in err) == (2, True)
    assert cli("show", run_id, "--keyring", f"{module}:make")[0] == 2, "one or the other"
    missing = main(["show", run_id, "--uri", cli.uri, "--database", cli.database, "--master-keys", "nowhere"])
    assert missing == 2


def test_no_tenants_keys_are_made_by_accident(cli: Cli) -> None:
    run_id = asyncio.run(_started_unsealed(cli))
    code, out, err = cli("stop", run_id, *SAID)
    assert code == 0, (out, err)
    assert cli.lines("keys", "list") == []


async def _started_unsealed(cli: Cli) -> str:
    async with AsyncMongoClient[Any](cli.uri) as client:
        return (await Client(MongoStore(client[cli.database])).start(fulfil, Order(), tenant="vinet")).run_id


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_lives_from_create_to_discard(cli: Cli) -> None:
    code, out, _ = cli("keys", "create", "--tenant", "vinet")
    assert code == 0
    first = out.split()[1]
    (again,) = cli.lines("keys", "create", "--tenant", "vinet")
    assert again == {"tenant": "vinet", "key_id": first}
    run_id = cli.start("vinet")
    (second,) = cli.lines("keys", "rotate", "--tenant", "vinet", *OF_KEYS)
    assert second["key_id"] != first
    code, out, err = cli("keys", "discard", first, "--tenant", "vinet", "--confirm", first, *OF_KEYS)
    assert (code, out) == (1, "")
    assert "may not have noticed" in err
    cli.age(first)
    code, out, _ = cli("keys", "usage", first, "--tenant", "vinet", "--runs")
    assert code == 0
    assert out.splitlines()[0] == f"key {first} is retired, needed by"
    assert [line.split() for line in out.splitlines()[1:5]] == [
        ["group", "runs"], ["open", "1"], ["held", "0"], ["settled", "0"],
    ]  # fmt: skip
    assert "it may not be discarded: 1 run may still need it" in out
    assert out.splitlines()[-1].split() == [run_id, "pending"]
    assert cli("keys", "discard", first, "--tenant", "vinet", "--confirm", first, *OF_KEYS)[0] == 1
    code, out, err = cli("keys", "rewrap", "--tenant", "vinet")
    assert (code, out) == (0, f"on key {second['key_id']} alone: 1 run; sealed anew: 1 payload\n")
    assert err == "1 of 1 run, 1 payload, 0 left over\n"
    (usage,) = cli.lines("keys", "usage", first, "--tenant", "vinet", "--runs")
    assert (usage["discardable"], usage["open"], usage["runs"]) == (True, 0, [])
    assert cli("keys", "discard", first, "--tenant", "vinet", "--confirm", "vinet", *OF_KEYS)[0] == 2
    code, out, _ = cli("keys", "discard", first, "--tenant", "vinet", "--confirm", first, *OF_KEYS)
    assert (code, out) == (0, "destroyed\n")
    states = {key["key_id"]: key["state"] for key in cli.lines("keys", "list", "--tenant", "vinet")}
    assert states[first] == KeyState.DESTROYED
    assert states[second["key_id"]] == KeyState.ACTIVE
    (gone,) = [key for key in cli.lines("keys", "list", "--tenant", "vinet") if key["key_id"] == first]
    assert (gone["retired_by"], gone["retired_reason"]) == ("ann@shop", WHY)
    assert (gone["destroyed_by"], gone["destroyed_reason"]) == ("ann@shop", WHY)
    assert f"ann@shop: {WHY}" in cli("keys", "list", "--tenant", "vinet")[1]


def test_what_a_rewrap_leaves_over_is_named(cli: Cli) -> None:
    run_id = cli.start("vinet")

    async def claimed(store: MongoStore) -> None:
        await store.ready()
        await store.claims.take([("fulfil", 1)], token="t", worker="w", lease=timedelta(minutes=5), limit=1)

    cli.do(claimed)
    cli("keys", "rotate", "--tenant", "vinet", *OF_KEYS)
    code, out, _ = cli("keys", "rewrap", "--tenant", "vinet")
    assert (code, out.splitlines()[-1]) == (1, f"left over {run_id}: it is running")
    code, out, _ = cli("keys", "rewrap", "--tenant", "vinet", "--json")
    assert (code, json.loads(out)["left"], json.loads(out)["complete"]) == (1, {run_id: "it is running"}, False)


def test_keys_are_listed_for_one_or_for_all(cli: Cli) -> None:
    cli.start("vinet")
    cli.start(None)
    code, out, _ = cli("keys", "list")
    assert code == 0
    assert out.splitlines()[0].split() == [
        "tenant", "key", "purpose", "state", "created", "retired", "destroyed", "master", "by", "and", "why",
    ]  # fmt: skip
    assert len(cli.lines("keys", "list")) == 4, "a lookup key and a data key each"
    assert {key["tenant"] for key in cli.lines("keys", "list", "--tenant", "vinet")} == {"vinet"}
    (nobodys, *_) = cli.lines("keys", "list", "--no-tenant")
    assert nobodys.keys() == {
        "key_id", "tenant", "purpose", "state", "created_at", "retired_at", "retired_by", "retired_reason",
        "destroyed_at", "destroyed_by", "destroyed_reason", "master",
    }  # fmt: skip
    assert (nobodys["tenant"], nobodys["master"]) == (None, "2026-11")


def test_master_keys_are_rewrapped(cli: Cli) -> None:
    cli.start("vinet")
    add_master_key(cli.masters, "2027-02")
    code, out, _ = cli("keys", "rewrap-master")
    assert (code, out) == (0, "2 keys are wrapped by the newest master key\n")
    assert {key["master"] for key in cli.lines("keys", "list")} == {"2027-02"}
    cli.masters.unlink()
    add_master_key(cli.masters, "2027-05")
    code, out, _ = cli("keys", "rewrap-master")
    assert (code, "2027-02" in out) == (1, True)


def test_whose_keys_has_to_be_said(cli: Cli) -> None:
    for words in (
        ("create",), ("rotate", *OF_KEYS), ("rewrap",), ("usage", "0" * 16),
        ("discard", "0" * 16, "--confirm", "0" * 16, *OF_KEYS),
        ("destroy", "--confirm", "vinet", *OF_KEYS), ("rotate", "--tenant", "vinet", "--no-tenant", *OF_KEYS), (),
        ("destroy", "--tenant", "vinet", *OF_KEYS), ("rotate", "--tenant", "vinet"),
        ("destroy", "--tenant", "vinet", "--confirm", "vinet", "--by", "ann@shop"),
    ):  # fmt: skip
        assert cli("keys", *words)[0] == 2, words
    code, _, err = cli("keys", "usage", "0" * 16, "--tenant", "vinet")
    assert (code, "no key of that id" in err) == (1, True)
    code, _, err = cli("keys", "rotate", "--tenant", "vinet", *OF_KEYS, keyed=False)
    assert (code, "keyring" in err) == (2, True)
    code, _, err = cli("keys", "rotate", "--tenant", "vinet", *OF_KEYS)
    assert (code, "make one" in err) == (1, True)


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    stdin = io.StringIO(typed)
    stdin.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", stdin)


def test_a_destruction_is_asked_for_twice(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = cli.start("vinet", key="order-10248")
    code, _, err = cli("keys", "destroy", "--tenant", "vinet", "--confirm", "hanar", *OF_KEYS)
    assert (code, "confirm" in err) == (2, True)
    for typed in ("no\n", "", "hanar\n"):
        on_a_terminal(monkeypatch, typed)
        code, out, err = cli("keys", "destroy", "--tenant", "vinet", "--confirm", "vinet", *OF_KEYS)
        assert (code, out) == (1, "")
        assert "nothing was destroyed" in err
    assert cli.run(run_id).key == "order-10248"
    on_a_terminal(monkeypatch, "vinet\n")
    code, out, err = cli("keys", "destroy", "--tenant", "vinet", "--confirm", "vinet", *OF_KEYS)
    assert (code, out) == (0, "2 keys are destroyed\n")
    assert "Type vinet to go on" in err
    assert cli.run(run_id).key is None, "listed, and sealed for good"


def test_a_script_that_says_it_twice_is_not_asked_again(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.start(None)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, out, _ = cli("keys", "destroy", "--no-tenant", "--confirm", "no tenant", "--json", *OF_KEYS)
    assert (code, len(json.loads(out)["destroyed"])) == (0, 2)
    assert {key["state"] for key in cli.lines("keys", "list")} == {KeyState.DESTROYED}
