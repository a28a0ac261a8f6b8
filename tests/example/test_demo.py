"""The demo as a person starts it: what it prints, how it ends, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sagas import StopOutcome
from tests.support.northwind import northwind

NOTHING_WRONG = dict.fromkeys(("held", "unfinished", "untrue_answers", "double_effects", "missing_effects"), 0)
ROOT = Path(__file__).resolve().parents[2]
MARK = "SAGAS_TEST_DEMO"
FIELDS = [
    "orders", "completed", "compensated", "cancelled", "held", "unfinished", "worker_kills", "stops_asked",
    "stops_cancelled", "stops_will_be_undone", "stops_refused", "stops_already_settled", "untrue_answers", "steps_run",
    "steps_replayed", "double_effects", "missing_effects", "seconds",
]  # fmt: skip

pytestmark = pytest.mark.process


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Temporary files in a folder of the test's own, and a mark by which whatever is left running can be found."""
    paths = [str(ROOT / "docs/examples"), str(ROOT), str(ROOT / "store"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TMPDIR": str(tmp_path),
        MARK: secrets.token_hex(8),
    }


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "order_fulfilment.demo", *arguments]


def demo(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=environment, capture_output=True, text=True, timeout=330, check=False
    )


def check(numbers: dict[str, float], *, orders: int, stop_rate: float) -> None:
    """Everything came to its end, nothing is wrong, and the numbers add up."""
    assert list(numbers) == FIELDS
    assert {name: numbers[name] for name in NOTHING_WRONG} == NOTHING_WRONG
    assert numbers["orders"] == orders == numbers["completed"] + numbers["compensated"] + numbers["cancelled"]
    answers = [numbers[f"stops_{outcome}"] for outcome in StopOutcome]
    assert numbers["stops_asked"] == sum(answers) == round(stop_rate * orders)
    undone = numbers["stops_cancelled"] + numbers["stops_will_be_undone"]
    assert numbers["stops_cancelled"] <= numbers["cancelled"] <= undone


def left_of(environment: dict[str, str]) -> Iterator[psutil.Process]:
    """What still runs of a demo. Its server is not in here: it does not inherit the environment."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == environment[MARK] and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (psutil.Error, OSError):
            continue


def test_orders_survive_killed_workers_and_the_numbers_come_as_one_json_object(
    environment: dict[str, str], tmp_path: Path
) -> None:
    done = demo(environment, "--orders-count", "60", "--workers", "2", "--kills", "2", "--seed", "3", "--json")

    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    check(numbers, orders=60, stop_rate=0.05)
    assert numbers["worker_kills"] == 2
    assert numbers["steps_run"] > 60 * 4
    assert numbers["steps_replayed"] > 0
    assert "Seed: 3" in done.stderr
    assert re.search(r"worker \d was killed with [1-9]\d* requests under way; worker 3 takes its place", done.stderr)
    assert not list(left_of(environment))
    assert not list(tmp_path.iterdir())


def test_interrupted_it_leaves_nothing_running_and_no_files(environment: dict[str, str], tmp_path: Path) -> None:
    with subprocess.Popen(
        command("--orders-count", "500"), env=environment, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        said = ""
        while "was killed" not in said:
            said = running.stderr.readline()
            assert said, "it ended before it was interrupted"
        running.send_signal(signal.SIGINT)
        _, rest = running.communicate(timeout=60)

    assert running.returncode == 130
    assert "everything it started has ended" in rest
    assert not list(left_of(environment))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--orders", "o.csv"], "--orders, --order-lines and --products belong together"),
        (["--orders", "o.csv", "--order-lines", "l.csv", "--products", "p.csv"], "No such file"),
        (["--orders-count", "0"], "must be a whole number from 1 up"),
        (["--orders-count", "x"], "must be a whole number from 1 up"),
        (["--kills", "-1"], "must be a whole number from 0 up"),
        (["--stop-rate", "1.1"], "must be a number from 0 to 1"),
        (["--stop-rate", "-0.1"], "must be a number from 0 to 1"),
        (["--stop-rate", "nan"], "must be a number from 0 to 1"),
        (["--stop-rate", "some"], "must be a number from 0 to 1"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    environment: dict[str, str], arguments: list[str], says: str
) -> None:
    refused = demo(environment, *arguments)

    assert refused.returncode == 2
    assert says in refused.stderr
    assert refused.stdout == ""


def test_without_a_stop_rate_above_zero_nobody_presses_stop(environment: dict[str, str]) -> None:
    done = demo(environment, "--orders-count", "12", "--workers", "1", "--kills", "0", "--stop-rate", "0", "--json")

    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout), orders=12, stop_rate=0)


def test_stop_may_be_pressed_on_every_order(environment: dict[str, str]) -> None:
    done = demo(environment, "--orders-count", "40", "--workers", "2", "--kills", "1", "--stop-rate", "1", "--json")

    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout), orders=40, stop_rate=1)


def from_northwind() -> list[str]:
    """The arguments that read its files; skips the test where they are not there."""
    files = northwind()
    return ["--orders", str(files.orders), "--order-lines", str(files.order_lines), "--products", str(files.products)]


@pytest.mark.slow
def test_every_answer_comes_true_where_stop_is_pressed_on_three_of_ten_northwind_orders_and_workers_are_killed(
    environment: dict[str, str],
) -> None:
    done = demo(environment, *from_northwind(), "--stop-rate", "0.3", "--kills", "6", "--json")

    print(done.stderr)  # the seed, and who was killed
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    check(numbers, orders=830, stop_rate=0.3)
    assert numbers["worker_kills"] == 6
    assert all(numbers[f"stops_{outcome}"] > 0 for outcome in StopOutcome), numbers


@pytest.mark.slow
def test_each_northwind_customer_is_a_tenant_and_one_whose_key_is_lost_waits_for_it_alone(
    environment: dict[str, str],
) -> None:
    done = demo(environment, *from_northwind(), "--tenants", "--stop-rate", "0.1", "--json")

    print(done.stderr)  # the seed, whose key was lost, and who was killed
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert numbers.pop("quarantined") == numbers.pop("requeued") > 0
    check(numbers, orders=830, stop_rate=0.1)
