"""`scripts/bench` measures what it says, and leaves nothing behind. How fast anything is, no test can say."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts._bench import peers
from scripts._bench.figures import FIGURES
from scripts._bench.plan import FULL, QUICK
from scripts._bench.report import medians, table

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "SAGAS_VENV": sys.prefix}


@pytest.mark.slow
@pytest.mark.process
def test_every_figure_is_measured_and_reported_with_its_setup() -> None:
    ran = subprocess.run(
        [ROOT / "scripts/bench", "--quick", "--json"], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert "Left running" not in ran.stderr
    report = json.loads(ran.stdout)
    assert set(report["figures"]) == set(FIGURES)
    assert report["setup"]["sizes"] == "quick"
    for name, figure in report["figures"].items():
        for row in figure["rows"]:
            measured = [value for value in row.values() if isinstance(value, float)]
            assert measured, (name, row)
            assert all(value >= 0 for value in measured), (name, row)
        assert FIGURES[name].title in table(report)


def test_a_figure_that_there_is_not_is_refused() -> None:
    command = [str(ROOT / "scripts/bench"), "--only", "height"]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "no such figure: height" in ran.stderr


def test_every_peer_is_named_with_what_it_is_durable_on() -> None:
    setup = peers.figure(list(peers.PEERS)).setup
    assert f"{peers.DBOS} on a PostgreSQL of its own with synchronous_commit on" in setup
    assert f"{peers.FORZE}, its durable saga executor, on the same MongoDB as ours, majority and journaled" in setup


def test_a_python_on_the_path_that_does_not_run_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "sys", SimpleNamespace(version_info=(3, 11), exit=sys.exit))
    for folder, answer in (("shims", 127), ("bin", 0)):
        program = tmp_path / folder / "python3.13"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\nexit {answer}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "shims"), str(tmp_path / "bin")]))
    assert peers.python_for_forze() == str(tmp_path / "bin/python3.13")
    monkeypatch.setenv("PATH", str(tmp_path / "shims"))
    with pytest.raises(SystemExit, match=r"forze\[mongo\].* needs Python 3.13 or newer"):
        peers.python_for_forze()


def test_a_peer_that_fails_is_told_by_what_was_run() -> None:
    with pytest.raises(SystemExit, match=r"(?s)half.*exit\(3\).*ended with 3"):
        peers.run([sys.executable, "-c", "print('half'); exit(3)"])


def test_of_several_runs_the_median_is_given_and_how_far_they_lie_apart() -> None:
    runs = [[{"what": "plain", "workers": 1, "per_s": value}] for value in (90.0, 100.0, 120.0)]
    (row,) = medians(runs)
    assert row == {"what": "plain", "workers": 1, "per_s": 100.0, "spread": {"per_s": 0.3}}
    assert "100 ±15%" in table({"setup": {}, "figures": {"payloads": {"title": "", "setup": "", "rows": [row]}}})


def test_the_quick_plan_has_everything_that_the_full_one_has() -> None:
    for name in FULL.__slots__:
        full, quick = getattr(FULL, name), getattr(QUICK, name)
        assert type(full) is type(quick) or {type(full), type(quick)} == {int, float}, name
        assert bool(full) == bool(quick), name
