"""Other executors on the same saga, each in an environment that is made for the occasion and deleted afterwards.

What is compared is durable after every step on all sides: majority and journaled on MongoDB, synchronous_commit on
PostgreSQL.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts._bench.figures import Figure, Row, drive
from scripts._bench.plan import Plan
from scripts._bench.server import Server

__all__ = ["PEERS", "figure"]

HERE = Path(__file__).parent
DBOS = "dbos==3.4.0"
FORZE = "forze[mongo]==0.16.2"
START_S = 30


@dataclass(frozen=True, slots=True)
class Peer:
    """Another executor."""

    setup: str
    """What it is durable on, and what of a run is counted."""
    measure: Callable[[Server, Plan], dict[int, float]]
    """Runs in flight -> seconds that the plan's number of runs took."""


def figure(names: list[str]) -> Figure:
    """Ours and these peers, in turn; each at the best of a few numbers of runs in flight."""

    async def measure(server: Server, plan: Plan) -> list[Row]:
        in_flight = max(plan.runs_at)
        ours = await drive(server, plan.runs_at[in_flight], in_flight=in_flight)
        rows: list[Row] = [{"what": "ours", "in_flight": in_flight, "sagas_per_s": ours["sagas_per_s"]}]
        for name in names:
            took = await asyncio.to_thread(PEERS[name].measure, server, plan)
            in_flight = min(took, key=lambda one: took[one])
            rate = plan.peer_runs / took[in_flight]
            times = ours["sagas_per_s"] / rate
            rows.append({"what": name, "in_flight": in_flight, "sagas_per_s": rate, "ours_is_times": times})
        return rows

    return Figure(
        "Beside other executors",
        "five steps that cost nothing, contexts of 300 bytes; ours: majority and journaled, without starts; "
        f"{'; '.join(PEERS[name].setup for name in names)}; the best of a few numbers in flight",
        measure,
    )


def dbos(_: Server, plan: Plan) -> dict[int, float]:
    with environment(sys.executable, DBOS) as python, postgres() as url:
        return _seconds(python, "peer_dbos.py", url, plan)


def forze(server: Server, plan: Plan) -> dict[int, float]:
    with environment(python_for_forze(), FORZE) as python:
        return _seconds(python, "peer_forze.py", server.uri, plan)


PEERS: dict[str, Peer] = {
    "dbos": Peer(
        f"{DBOS} on a PostgreSQL of its own with synchronous_commit on, async workflows, starts included", dbos
    ),
    "forze": Peer(
        f"{FORZE}, its durable saga executor, on the same MongoDB as ours, majority and journaled, without starts",
        forze,
    ),
}


def _seconds(python: Path, script: str, url: str, plan: Plan) -> dict[int, float]:
    """What the script prints, for each number of runs in flight."""
    return {
        in_flight: json.loads(run([python, "-P", HERE / script, url, plan.peer_runs, in_flight]))["seconds"]
        for in_flight in plan.peer_in_flight
    }


def run(command: list[str | int | Path]) -> str:
    """What it printed. If it fails, what it said of that is the message, and there is no traceback of ours below it."""
    ran = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode:
        sys.exit(f"{ran.stdout}{shlex.join(map(str, command))}\nended with {ran.returncode}; why, it says above")
    return ran.stdout


@contextmanager
def environment(python: str, *packages: str) -> Iterator[Path]:
    """The Python of a fresh virtual environment with these packages, made with this one."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        run([python, "-m", "venv", folder])
        made = Path(folder, "bin/python")
        run([made, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *packages])
        yield made


def python_for_forze() -> str:
    """This one if it is new enough, else the first on PATH that is and runs (pyenv leaves names that lead nowhere)."""
    if sys.version_info >= (3, 13):
        return sys.executable
    for name in ("python3.14", "python3.13"):
        for folder in os.get_exec_path():
            found = shutil.which(name, path=folder)
            if found and not subprocess.run([found, "--version"], capture_output=True, check=False).returncode:
                return found
    sys.exit(f"{FORZE} needs Python 3.13 or newer; neither python3.14 nor python3.13 was found on PATH and runs")


@contextmanager
def postgres() -> Iterator[str]:
    """The address of a fresh PostgreSQL on a socket of its own, ended afterwards."""
    tools = {name: _find(name) for name in ("initdb", "postgres", "pg_isready", "createdb")}
    # It refuses to run as root; packages bring a user for it.
    owner: dict[str, Any] = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        if owner:
            shutil.chown(folder, "postgres")
        quiet: dict[str, Any] = {"cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        data = Path(folder, "data")
        subprocess.run([tools["initdb"], "-D", data, "-A", "trust", "-U", "bench"], check=True, **quiet, **owner)
        options = ["-c", "listen_addresses=", "-c", "synchronous_commit=on", "-c", "max_connections=300"]
        server = subprocess.Popen([tools["postgres"], "-D", data, "-k", folder, *options], **quiet, **owner)
        try:
            give_up_at = time.monotonic() + START_S
            while subprocess.run([tools["pg_isready"], "-h", folder], check=False, **quiet).returncode:
                if server.poll() is not None or time.monotonic() > give_up_at:
                    sys.exit("PostgreSQL did not start")
                time.sleep(0.1)
            subprocess.run([tools["createdb"], "-h", folder, "-U", "bench", "bench"], check=True, **quiet)
            yield f"postgresql://bench@/bench?host={folder}"
        finally:
            server.terminate()
            server.wait()


def _find(tool: str) -> str:
    folders = os.pathsep.join([os.environ["PATH"], *map(str, Path("/usr/lib/postgresql").glob("*/bin"))])
    if (found := shutil.which(tool, path=folders)) is None:
        sys.exit(f"{tool} was not found; this peer needs a PostgreSQL (Debian: apt-get install postgresql)")
    return found
