"""The command line as a person or a script calls it: what is printed where, the exit code, and no secret anywhere."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
from pymongo import AsyncMongoClient, MongoClient

from sagas import JournalLine, RunInfo
from sagas.cli import build_parser, main
from sagas.identity import run_id_of
from sagas.payload import dump_error, dump_text
from sagas_store import MongoStore
from sagas_store.connect import connected
from sagas_store.embedded.node import free_ports
from sagas_store.entries import Kind
from sagas_store.states import State
from tests.store.making import DEFINITIONS, LEASE, entry, new_run

SECRET = "s3cret-never-to-be-seen"
ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join(str(Path(path).absolute()) for path in sys.path if path)
ENVIRONMENT = {**os.environ, "PYTHONPATH": PATHS}
"""A program finds what this process finds, whether the project is installed or not."""

Say = Callable[..., "Said"]


@dataclass(frozen=True)
class Said:
    """What a command came to."""

    code: int
    out: str
    err: str


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Iterator[Say]:
    """Run a command in this process."""

    def say(*arguments: str) -> Said:
        try:
            code = main(arguments)
        except SystemExit as ended:  # argparse
            code = ended.code if isinstance(ended.code, int) else -1
        out, err = capsys.readouterr()
        return Said(code, out, err)

    yield say
    structlog.reset_defaults()  # `sagas worker` logs to this test's stderr, which is closed by the next one


def run_program(*arguments: str, cwd: Path | None = None, **environment: str) -> Said:
    """Run `python -m sagas` as a program."""
    done = subprocess.run(
        [sys.executable, "-m", "sagas", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**ENVIRONMENT, **environment},
        timeout=60,
    )
    return Said(done.returncode, done.stdout, done.stderr)


def says_no() -> None:
    raise ValueError("the bank\nsaid \x1b[31mno")


@pytest.fixture(scope="module")
def at(mongo_uri: str) -> Iterator[list[str]]:
    """Options that lead to a database with a completed, a held and a pending run."""
    name = f"cli_{secrets.token_hex(6)}"

    async def fill() -> None:
        async with AsyncMongoClient[Any](mongo_uri) as client:
            store = MongoStore(client[name])
            await store.schema.apply()
            await store.ready()
            now = store.clock.now()
            payload = b'\x01{"card":"' + SECRET.encode() + b'"}'
            for number, run_id in enumerate(["run-completed", "run-held"]):
                created_at = now - timedelta(hours=3 - number)
                run = new_run(store, run_id=run_id, key=f"key-{number}", input=payload, created_at=created_at)
                await store.runs.insert(run)
            held, completed = sorted(
                await store.claims.take(DEFINITIONS, token="token-1", worker="worker-1", lease=LEASE, limit=2),
                key=lambda run: run.run_id == "run-completed",
            )
            await store.journal.append(entry("run-completed", 1, payload=payload, next="step:charge"))
            with pytest.raises(ValueError, match="the bank") as no:
                says_no()
            error = dump_error(no.value)
            failed = entry("run-completed", 2, kind=Kind.STEP_FAILED, step="charge", payload=error, in_doubt=True)
            await store.journal.append(failed)
            words = dump_text("the bank was down")
            resumed = entry("run-completed", 3, kind=Kind.RESUMED, step=None, payload=None, by="ops", reason=words)
            await store.journal.append(resumed)
            await store.runs.settle(completed, State.COMPLETED)
            await store.runs.hold(held, State.IN_DOUBT, "whether charge happened is unknown")
            await store.runs.insert(new_run(store, run_id="run-pending", saga="refund", input=payload))

    asyncio.run(fill())
    yield ["--uri", mongo_uri, "--database", name]
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        client.drop_database(name)


@pytest.fixture
def empty(mongo_uri: str) -> Iterator[list[str]]:
    """Options that lead to an empty database."""
    name = f"cli_{secrets.token_hex(6)}"
    yield ["--uri", mongo_uri, "--database", name]
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        client.drop_database(name)


# --- runs -------------------------------------------------------------------------------------------------------------


def test_runs_are_listed_newest_first_in_a_table(say: Say, at: list[str]) -> None:
    said = say("runs", *at)
    head, *rows = said.out.splitlines()
    assert head.split() == ["run", "saga", "tenant", "key", "state", "phase", "attempts", "created", "reason"]
    assert [row.split()[0] for row in rows] == ["run-pending", "run-held", "run-completed"]
    assert "whether charge happened is unknown" in rows[1]
    assert (said.code, said.err) == (0, "")


def test_runs_are_listed_as_one_json_object_a_line(say: Say, at: list[str]) -> None:
    said = say("runs", *at, "--json")
    runs = [json.loads(line) for line in said.out.splitlines()]
    assert [run["run_id"] for run in runs] == ["run-pending", "run-held", "run-completed"]
    assert all(run.keys() == {field.name for field in fields(RunInfo)} for run in runs)
    held = runs[1]
    assert (held["state"], held["phase"], held["attempts"], held["due_at"]) == ("in_doubt", "forward", 1, None)
    assert datetime.fromisoformat(held["held_since"]).utcoffset() == timedelta(0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--state", "held"], ["run-held"]),
        (["--state", "settled"], ["run-completed"]),
        (["--state", "open"], ["run-pending"]),
        (["--state", "completed", "--state", "held"], ["run-held", "run-completed"]),
        (["--state", "running"], []),
        (["--saga", "refund"], ["run-pending"]),
        (["--saga", "nothing"], []),
        (["--limit", "1"], ["run-pending"]),
    ],
    ids=" ".join,
)
def test_runs_can_be_narrowed_down(say: Say, at: list[str], options: list[str], expected: list[str]) -> None:
    said = say("runs", *at, *options, "--json")
    assert [json.loads(line)["run_id"] for line in said.out.splitlines()] == expected
    assert said.code == 0


def test_the_next_page_is_asked_for_with_what_the_page_before_said_on_stderr(say: Say, at: list[str]) -> None:
    first = say("runs", *at, "--limit", "2")
    more = first.err.strip()
    assert more.startswith("more: --after ")
    second = say("runs", *at, "--limit", "2", *more.removeprefix("more: ").split())
    assert [line.split()[0] for line in second.out.splitlines()[1:]] == ["run-completed"]
    assert second.err == ""


# --- show -------------------------------------------------------------------------------------------------------------


def test_a_run_is_shown_with_its_journal(say: Say, at: list[str]) -> None:
    said = say("show", *at, "run-completed")
    above, below = said.out.split("\n\n")
    shown = dict(line.split(maxsplit=1) for line in above.splitlines())
    assert (shown["run_id"], shown["key"], shown["state"], shown["worker"]) == (
        "run-completed", "key-0", "completed", "worker-1",
    )  # fmt: skip
    assert "held_reason" not in shown, "what is not there is left out"
    head, first, second, third = below.splitlines()
    assert head.split() == ["seq", "at", "kind", "step", "try", "attempt", "next", "note"]
    assert first.split()[3:] == ["step_succeeded", "reserve", "1", "1", "step:charge"]
    assert re.search(r" \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z ", first), "with its day, and in which zone"
    assert second.endswith(r"ValueError: the bank said \x1b[31mno (in doubt)"), "and nothing steers the terminal"
    assert third.endswith("by ops: the bank was down"), "who, and why, for what a person did"
    assert (said.code, said.err) == (0, "")


def test_a_run_is_shown_as_one_json_object(say: Say, at: list[str]) -> None:
    said = say("show", *at, "run-completed", "--json")
    shown = json.loads(said.out)
    assert shown.keys() == {"run", "journal"}
    assert shown["run"].keys() == {field.name for field in fields(RunInfo)}
    assert [line.keys() for line in shown["journal"]] == [{field.name for field in fields(JournalLine)}] * 3
    error = {"type": "ValueError", "message": "the bank\nsaid \x1b[31mno"}
    assert [line["error"] for line in shown["journal"]] == [None, error, None]
    assert said.code == 0


def test_a_traceback_is_shown_when_it_is_asked_for(say: Say, at: list[str]) -> None:
    said = say("show", *at, "run-completed", "--traceback")
    assert "entry 2, charge:\nTraceback (most recent call last):\n" in said.out
    assert "\x1b" not in said.out
    shown = json.loads(say("show", *at, "run-completed", "--traceback", "--json").out)
    assert "in says_no" in shown["journal"][1]["error"]["traceback"]


def test_a_run_is_shown_by_its_saga_and_key(say: Say, at: list[str], by_key: str) -> None:
    said = say("show", *at, "--saga", "order", "--key", "by-key")
    assert said.out.splitlines()[0].split() == ["run_id", by_key]
    for wrong in (["--saga", "refund", "--key", "by-key"], ["--saga", "order", "--key", "by-key", "--tenant", "vinet"]):
        said = say("show", *at, *wrong)
        assert (said.code, said.out) == (1, "")
        assert "with this key" in said.err
    for wrong in ([], ["--saga", "order"], ["--key", "by-key"], ["run-held", "--key", "by-key"], ["--tenant", "vinet"]):
        assert say("show", *at, *wrong).code == 2


@pytest.fixture
def by_key(at: list[str]) -> Iterator[str]:
    """The id of a run that was started with a key, as a client does; another run's begins alike."""
    run_id = run_id_of("order", "by-key")
    ids = [run_id, run_id[:12] + "0" * 20]

    async def start() -> None:
        async with connected(at[1], at[3]) as store:
            await store.ready()
            for one in ids:
                await store.runs.insert(new_run(store, run_id=one, key=one))

    asyncio.run(start())
    yield run_id
    with MongoClient[dict[str, Any]](at[1]) as client:
        client[at[3]]["sagas.runs"].delete_many({"_id": {"$in": ids}})


def test_who_reads_may_name_a_run_by_the_beginning_of_its_id(say: Say, at: list[str], by_key: str) -> None:
    assert say("show", *at, "run-comp").out.split()[1] == "run-completed"
    assert say("show", *at, by_key[:13]).out.split()[1] == by_key
    assert say("preview-stop", *at, by_key[:13]).code == 0
    several = say("show", *at, by_key[:12])
    assert (several.code, several.out) == (2, "")
    assert f"several: {min(by_key, by_key[:12] + '0' * 20)}, " in several.err
    for short in ("run-com", by_key[:7]):
        assert say("show", *at, short).code == 1
    acting = say("stop", *at, by_key[:13], "--by", "ann", "--reason", "a test")
    assert (acting.code, acting.out) == (1, "")
    assert "not found" in acting.err


def test_a_context_is_printed_as_json(say: Say, at: list[str]) -> None:
    said = say("context", *at, "run-completed")
    assert (said.code, json.loads(said.out), said.err) == (0, {"card": SECRET}, "")
    assert say("context", *at, "run-completed", "--json").out == json.dumps({"card": SECRET}) + "\n"


def test_a_run_that_is_not_there_is_refused(say: Say, at: list[str]) -> None:
    said = say("show", *at, "run-nowhere")
    assert (said.code, said.out) == (1, "")
    assert said.err == "sagas show: run run-nowhere: not found\n"


def test_no_payload_is_printed_but_by_the_command_that_is_for_it(say: Say, at: list[str]) -> None:
    shown = ["show", "run-completed", "--traceback"]
    for command in (["runs"], ["runs", "--json"], ["held"], shown, [*shown, "--json"], ["preview-stop", "run-held"]):
        said = say(command[0], *at, *command[1:])
        assert said.code == 0
        assert SECRET not in said.out + said.err


# --- schema -----------------------------------------------------------------------------------------------------------


def test_the_schema_is_planned_checked_and_applied(say: Say, empty: list[str]) -> None:
    planned = say("schema", "plan", *empty)
    assert planned.code == 0
    assert planned.out.splitlines()[0] == "create collection sagas.runs"
    checked = say("schema", "check", *empty)
    assert (checked.code, checked.out) == (1, planned.out)
    assert "sagas schema apply" in checked.err
    applied = say("schema", "apply", *empty)
    assert (applied.code, applied.out) == (0, planned.out)
    for verb in ("plan", "apply", "check"):
        said = say("schema", verb, *empty)
        assert (said.code, said.out, said.err) == (0, "", "the schema is as it should be\n")


def test_the_schemas_steps_are_printed_as_json(say: Say, empty: list[str]) -> None:
    said = say("schema", "plan", *empty, "--json")
    assert {"step": "create collection sagas.runs"} in [json.loads(line) for line in said.out.splitlines()]


def test_reading_a_database_without_the_schema_names_the_way_out(say: Say, empty: list[str]) -> None:
    said = say("show", *empty, "run-1")
    assert (said.code, said.out) == (1, "")
    assert "schema apply" in said.err


# --- wrong usage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["dance"],
        ["runs", "--state", "paused"],
        ["runs", "--limit", "many"],
        ["runs", "--limit", "0"],
        ["runs", "--limit", "1001"],
        ["runs", "--after", "nonsense"],
        ["runs", "--database", "a b"],
        ["runs", "--database", "a.b"],
        ["show"],
        ["schema"],
        ["schema", "drop"],
        ["worker"],
    ],
    ids=" ".join,
)
def test_wrong_words_are_wrong_usage(say: Say, mongo_uri: str, wrong: list[str]) -> None:
    uri = ["--uri", mongo_uri] if wrong and wrong[0] in ("runs", "show", "schema") else []
    said = say(*wrong, *uri)
    assert said.out == ""
    assert said.err
    assert "Traceback" not in said.err
    assert said.code == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["runs", "--state", "helf"], "invalid choice: 'helf' (choose from 'pending', 'running', 'quarantined'"),
        (["held", "--state", "open"], "invalid choice: 'open' (choose from 'quarantined', 'in_doubt'"),
        (["stop-many", "--started-before", "yesterday"], "'yesterday' is not a time with a time zone, for instance 20"),
        (["stop-many", "--started-before", "2026-01-31T00:00:00"], "is not a time with a time zone, for instance 20"),
        (["runs", "--limit", "0"], "sagas runs: --limit: must be at least 1"),
        (["keys", "create", "--no-tenant"], "sagas keys create: --keyring, --master-keys: "),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_what_is_wrong_is_said_in_the_commands_own_words(
    say: Say, at: list[str], wrong: list[str], message: str
) -> None:
    words = ["--by", "ann", "--reason", "a test"] if wrong[0] == "stop-many" else []
    said = say(*wrong, *words, *at)
    assert (said.code, said.out) == (2, "")
    assert message in said.err.replace("\n", " ")


def commands_of(parser: argparse.ArgumentParser, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                yield from commands_of(command, *words, word)


COMMANDS = {" ".join(words): parser for words, parser in commands_of(build_parser())}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_option_of_any_command_may_be_abbreviated(command: str) -> None:
    options = [one for action in COMMANDS[command]._actions for one in action.option_strings if len(one) > len("--x")]
    for option in options:
        with pytest.raises(SystemExit):
            COMMANDS[command].parse_args([option[:-1] if option[:-1] not in options else option[:-2]])
    assert not COMMANDS[command].allow_abbrev


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in ("", "keys")])
def test_no_value_of_any_command_may_be_empty(say: Say, at: list[str], command: str) -> None:
    """`--database "$NOT_SET"` must not lead to another database, nor `--tenant "$NOT_SET"` to every tenant's runs."""
    takes = [action for action in COMMANDS[command]._actions if action.nargs is None]
    assert takes
    for action in takes:
        word = action.option_strings[-1] if action.option_strings else None
        given = [word, ""] if word else [""]
        said = say(*command.split(), *given)
        named = word or str(action.metavar or action.dest)
        assert (said.code, said.out) == (2, ""), named
        assert f"argument {named}" in said.err


@pytest.mark.parametrize("verb", ["stop-many", "resume-many", "retry-now-many", "restart-many", "requeue"])
def test_every_run_there_is_has_to_be_said(say: Say, at: list[str], verb: str) -> None:
    said = say(verb, "--by", "ann", "--reason", "a test", *at)
    assert (said.code, said.out) == (2, "")
    assert "--all" in said.err
    both = say(verb, "--all", "--tenant", "vinet", "--by", "ann", "--reason", "a test", *at)
    assert (both.code, both.out) == (2, "")
    assert "not" in both.err
    everything = say(verb, "--all", "--dry-run", "--by", "ann", "--reason", "a test", *at)
    assert (everything.code, everything.err) == (0, "")
    assert "nothing done (dry run)" in everything.out


def test_a_program_says_its_version(say: Say) -> None:
    said = say("--version")
    assert (said.code, said.err) == (0, "")
    assert re.fullmatch(r"mongo-sagas [\w.()+ ]+\n", said.out)


def test_help_names_every_command(say: Say) -> None:
    said = say("--help")
    assert said.code == 0
    assert {"worker", "runs", "show", "schema"} <= set(said.out.split())
    assert build_parser().prog == "sagas"


@pytest.mark.parametrize(
    "uri",
    [
        f"mongodb://user:{SECRET}@@nowhere/",
        f"mongodb://user:{SECRET}@[::1/",
        f"mongodb://user:{SECRET}@nowhere:port/",
        f"mongodb://user:{SECRET}@nowhere:1:2/",
        f"mongodb://user:{SECRET}%zz@nowhere/",
        f"mongodb://us er:{SECRET}/x@nowhere/",
        f"mongodb://user:{SECRET}@nowhere/?tlsCAFile=/nowhere.pem&tls=true",
        f"mongodb+srv://user:{SECRET}@nowhere:1/",
        f"mongodb+srv://user:{SECRET}@a,b/",
        f"http://user:{SECRET}@nowhere/",
    ],
)
def test_an_unusable_connection_string_is_refused_without_repeating_it(say: Say, uri: str) -> None:
    said = say("runs", "--uri", uri)
    assert said.code in (1, 2)
    assert said.out == ""
    assert "connection string" in said.err
    assert "Traceback" not in said.err
    assert SECRET not in said.err


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("http://x", "must begin with mongodb:// or mongodb+srv://"),
        (f"mongodb://user:{SECRET}%zz@nowhere/", "percent-encoded"),
        ("mongodb://nowhere/?tls=true&tlsCAFile=/nowhere.pem", "a file that it names cannot be read"),
    ],
)
def test_an_unusable_connection_string_is_told_with_the_fix(say: Say, uri: str, says: str) -> None:
    assert says in say("runs", "--uri", uri).err


def test_without_a_connection_string_it_says_where_to_put_one(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAGAS_MONGODB_URI", raising=False)
    said = say("runs")
    assert said.code in (1, 2)
    assert "--uri" in said.err
    assert "SAGAS_MONGODB_URI" in said.err


def test_a_password_that_the_server_refuses_is_not_repeated(say: Say, mongo_uri: str) -> None:
    said = say("runs", "--uri", mongo_uri.replace("mongodb://", f"mongodb://user:{SECRET}@", 1))
    assert (said.code, said.out) == (1, "")
    assert SECRET not in said.err
    assert "Traceback" not in said.err


# --- as a program -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unreachable() -> Iterator[tuple[subprocess.Popen[str], list[float]]]:
    """`sagas show` on a port where nobody listens, begun early so that nobody has to wait for it."""
    (port,) = free_ports(1)
    uri = f"mongodb://user:{SECRET}@127.0.0.1:{port}/"
    process = subprocess.Popen(
        [sys.executable, "-m", "sagas", "show", "run-1", "--uri", uri],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    begun = time.monotonic()
    took: list[float] = []

    def watch() -> None:
        process.wait()
        took.append(time.monotonic() - begun)

    watching = threading.Thread(target=watch)
    watching.start()
    yield process, took
    process.kill()
    watching.join()
    process.communicate()


def test_the_environment_says_which_database(unreachable: Any, at: list[str]) -> None:
    _, uri, _, name = at
    said = run_program("runs", "--json", SAGAS_MONGODB_URI=uri, SAGAS_DATABASE=name)
    assert (said.code, said.err) == (0, "")
    assert len(said.out.splitlines()) == 3


WORKER = """
import asyncio
from contextlib import asynccontextmanager
from datetime import timedelta
from pydantic import BaseModel
from pymongo import AsyncMongoClient
from sagas import MongoStore, Saga, Worker, WorkerOptions

class Order(BaseModel):
    paid: bool = False

class Item(BaseModel):
    name: str
    count: int = 1

saga = Saga("order", Order)

@saga.pivot
async def pay(order, step):
    return Order(paid=True)

def make(uri, name, patience=30.0):
    # One that answers quickly or not at all.
    store = MongoStore(
        AsyncMongoClient(uri)[name], patience=timedelta(seconds=patience), reply=timedelta(seconds=min(patience, 10))
    )
    return Worker(store, [saga], options=WorkerOptions(poll=timedelta(milliseconds=50)))

def blocking():
    return make({uri!r}, {name!r})

async def make_worker():
    await asyncio.sleep(0)
    return make({uri!r}, {name!r})

def far_away():
    return make("mongodb://127.0.0.1:{port}/", {name!r}, 0.3)

class Nested:
    attribute = make_worker

number = 7

def gives_a_text():
    return "a worker"

def fails():
    raise LookupError("the factory's own")

@asynccontextmanager
async def opens_in_vain():
    yield {{}}["NOT_SET"]
"""


@pytest.fixture
def shop(tmp_path: Path, empty: list[str]) -> Path:
    """A folder with a module that makes workers for an empty database."""
    _, uri, _, name = empty
    (port,) = free_ports(1)
    (tmp_path / "shop.py").write_text(WORKER.format(uri=uri, name=name, port=port))
    (tmp_path / "imports_what_is_missing.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "shopping.py").write_text("import shopp\n")
    return tmp_path


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("shop", "'shop' is not of the form module:attribute, for instance"),
        ("shop:", "not of the form module:attribute"),
        (":make_worker", "not of the form module:attribute"),
        ("no_such:make_worker", "no module 'no_such' can be imported from here"),
        ("no.such:make_worker", "no module 'no.such' can be imported from here"),
        ("shop.deeper:make_worker", "no module 'shop.deeper' can be imported from here"),
        ("shop:no_such", "module 'shop' has no 'no_such'"),
        ("shop:Nested.no_such", "module 'shop' has no 'Nested.no_such'"),
        ("shop:number", "shop:number is int, not a Worker"),
        ("shop:gives_a_text", "shop:gives_a_text is str, not a Worker"),
        ("shop:Order", "shop:Order is Order, not a Worker"),
        ("shop:Item", "shop:Item cannot be called without name; name a function that takes no arguments"),
        ("shop:make", "shop:make cannot be called without uri, name; name a function"),
    ],
)
def test_a_worker_that_is_named_wrongly_is_wrong_usage(
    say: Say, shop: Path, monkeypatch: pytest.MonkeyPatch, target: str, message: str
) -> None:
    with here(shop, monkeypatch):
        said = say("worker", target)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("sagas worker: ")
    assert message in said.err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("imports_what_is_missing:worker", "ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        ("shopping:worker", "ModuleNotFoundError: No module named 'shopp' (shopping.py, line 1)"),
        ("shop:fails", "LookupError: the factory's own (shop.py, line "),
        ("shop:opens_in_vain", "KeyError: 'NOT_SET' (shop.py, line "),
    ],
)
def test_an_error_inside_the_workers_own_module_is_said_in_a_line_and_shown_on_request(
    say: Say, shop: Path, monkeypatch: pytest.MonkeyPatch, target: str, message: str
) -> None:
    with here(shop, monkeypatch):
        said = say("worker", target)
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith(f"sagas worker: {target} raised {message}")
    assert len(said.err.splitlines()) == 1
    with here(shop, monkeypatch):
        said = say("worker", target, "--log-level", "debug")
    assert said.err.startswith("Traceback (most recent call last):")
    assert said.err.splitlines()[-1].startswith(f"sagas worker: {target} raised {message}")


class here:  # noqa: N801 - reads as a word
    """In that folder, with nothing of it left behind among the imported modules."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch

    def __enter__(self) -> None:
        self.modules, self.path = set(sys.modules), list(sys.path)
        self.monkeypatch.chdir(self.folder)

    def __exit__(self, *_: object) -> None:
        for name in set(sys.modules) - self.modules:
            del sys.modules[name]
        sys.path[:] = self.path


@pytest.mark.process
@pytest.mark.parametrize("target", ["shop:make_worker", "shop:blocking", "shop:Nested.attribute"])
def test_a_worker_works_until_sigterm_and_exits_with_0(shop: Path, empty: list[str], target: str) -> None:
    assert main(["schema", "apply", *empty]) == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "sagas", "worker", target, "--log-json"],
        cwd=shop,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        assert process.stderr is not None
        started = json.loads(process.stderr.readline())
        assert (started["event"], started["sagas"], started["level"]) == ("worker started", ["order@1"], "info")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out) == (0, "")
    assert [json.loads(line)["event"] for line in err.splitlines()] == ["worker drained"]


@pytest.mark.process
def test_a_worker_that_cannot_begin_says_why(shop: Path) -> None:
    unapplied = run_program("worker", "shop:make_worker", cwd=shop)
    assert (unapplied.code, unapplied.out) == (1, "")
    assert "schema apply" in unapplied.err
    away = run_program("worker", "shop:far_away", cwd=shop)
    assert (away.code, away.out) == (3, "")
    assert away.err.startswith("sagas worker: ")
    assert "Traceback" not in unapplied.err + away.err


def test_a_database_that_cannot_be_reached_is_said_so_soon_and_without_its_password(
    unreachable: tuple[subprocess.Popen[str], list[float]],
) -> None:
    process, took = unreachable
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (3, "")
    assert err.startswith("sagas show: ")
    assert SECRET not in err
    assert "Traceback" not in err
    assert took[0] < 12, "a person waits for this; the store's patience here is five seconds"
