"""The scripts and the lock keep their promises."""

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SWEPT = [sys.executable, "-I", str(ROOT / "scripts/_swept.py")]
STRAY = "import subprocess, sys; print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid, flush=True)"


def locked() -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ;\\]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))


def test_the_lock_has_every_package_the_project_asks_for_in_a_version_it_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    versions = locked()
    for requirement in map(Requirement, wanted):
        assert versions[requirement.name] in requirement.specifier, f"{requirement}: run scripts/lock"


def test_the_lock_says_what_to_install_and_not_where_from() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text
    assert text.count("--hash=") >= len(locked())


@pytest.mark.parametrize("name", ["scripts/test", "scripts/check", "scripts/lock", "scripts/bench", ".ci/run"])
def test_a_script_is_executable_and_parses(name: str) -> None:
    script = ROOT / name
    if not script.exists():
        pytest.skip("not part of a release")
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.process
def test_what_a_swept_command_leaves_behind_is_ended_and_named() -> None:
    swept = subprocess.run([*SWEPT, sys.executable, "-c", STRAY], capture_output=True, text=True, check=True)
    assert not is_running(int(swept.stdout))
    assert "Left running, now killed: sleep" in swept.stderr


@pytest.mark.process
def test_a_swept_command_hears_of_sigterm_as_ctrl_c_and_its_exit_code_is_passed_on() -> None:
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(3))\n"
        "print('ready', flush=True)\n"
        "time.sleep(100)"
    )
    swept = subprocess.Popen([*SWEPT, sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert swept.stdout is not None
    with swept.stdout:
        assert swept.stdout.readline() == b"ready\n"
        swept.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert swept.wait(30) == 3
    assert time.monotonic() - started < 10
