"""Real worker processes, and how their runs are looked at: what the tests of this folder share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sagas_store import MongoStore
from sagas_store.states import State
from tests.process.app import fulfil, ledgers, transact
from tests.support.oracle import check
from tests.support.waiting import eventually

__all__ = [
    "WorkerProcess",
    "Workers",
    "calls_made",
    "check_all",
    "inside",
    "lapse",
    "open_gate",
    "until_at_rest",
    "were_late",
]

ROOT = Path(__file__).parents[2]


@dataclass(slots=True)
class WorkerProcess:
    """One `sagas worker`, its log and its end."""

    process: subprocess.Popen[bytes]
    log_file: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def until_logged(self, event: str, *, times: int = 1) -> None:
        async def look() -> bool:
            assert self.process.poll() is None or self.log().count(event) >= times, f"it ended:\n{self.log()[-3000:]}"
            return self.log().count(event) >= times

        await eventually(look, what=f"worker {self.pid} logs {event!r}")

    async def until_ended(self, within_s: float = 20) -> int:
        """Its exit code."""

        async def look() -> bool:
            return self.process.poll() is not None

        await eventually(look, what=f"worker {self.pid} ends", within_s=within_s)
        return self.process.returncode

    async def kill(self) -> None:
        self.send(signal.SIGKILL)
        assert await self.until_ended() == -signal.SIGKILL


@dataclass(slots=True)
class Workers:
    """Starts worker processes on one database."""

    uri: str
    database: str
    folder: Path
    started: list[WorkerProcess] = field(default_factory=list)

    def start(self, **options: Any) -> WorkerProcess:
        log_file = self.folder / f"worker-{len(self.started) + 1}.log"
        environment = {
            **os.environ,
            "SAGAS_MONGODB_URI": self.uri,
            "SAGAS_DATABASE": self.database,
            "APP_OPTIONS": json.dumps(options),
        }
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "sagas", "worker", "tests.process.app:make_worker", "--log-json"],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self.started.append(WorkerProcess(process, log_file))
        return self.started[-1]

    async def start_and_wait(self, **options: Any) -> WorkerProcess:
        worker = self.start(**options)
        await worker.until_logged("worker started")
        return worker

    def logs(self) -> str:
        return "".join(worker.log() for worker in self.started)

    def end(self) -> None:
        for worker in self.started:
            if worker.process.poll() is None:
                worker.send(signal.SIGCONT)
                worker.send(signal.SIGKILL)
            worker.process.wait()


SAGAS = {"fulfil": fulfil(), "transact": transact()}


async def until_at_rest(store: MongoStore, run_ids: Iterable[str], *, within_s: float = 90) -> None:
    ids = list(run_ids)

    async def look() -> bool:
        return len(await store.runs.at_rest(ids)) == len(ids)

    await eventually(look, what="all runs settle or are held", within_s=within_s)


async def check_all(store: MongoStore, database: Any, expected: dict[str, State], *, suspended: bool) -> None:
    """The oracle's word on every run, and that each ended as its plan says."""
    ids = list(expected)
    runs, journals = await store.runs.get_many(ids), await store.journal.load_many(ids)
    seen = await ledgers(database, ids)
    wrong = []
    for run_id, state in expected.items():
        try:
            check(SAGAS[runs[run_id].saga], runs[run_id], journals[run_id], seen[run_id], suspended=suspended)
            assert runs[run_id].state is state, f"run {run_id} ended as {runs[run_id].state}, not {state}"
        except AssertionError as error:
            wrong.append(str(error))
    print(Counter(str(run.state) for run in runs.values()), sum(map(len, seen.values())), "calls")
    if wrong:
        pytest.fail(f"{len(wrong)} of {len(ids)} runs are wrong; the first of them:\n" + "\n".join(wrong[:3]))


def were_late(workers: Workers) -> bool:
    """Whether some worker lost a lease that it could have kept, because the machine was too slow for it."""
    return "the lease is lost" in workers.logs()


async def inside(database: Any, run_id: str, attempt: int = 1) -> None:
    """Return once that attempt waits at its gate."""

    async def look() -> bool:
        return await database.inside.find_one({"_id": f"{run_id}/{attempt}"}) is not None

    await eventually(look, what=f"run {run_id} waits at its gate")


async def open_gate(database: Any, *run_ids: str) -> None:
    for run_id in run_ids:
        await database.gates.insert_one({"_id": run_id})


async def lapse(database: Any) -> None:
    """Every lease is over, and every wait, by the server's clock."""
    await database["sagas.runs"].update_many(
        {"due_at": {"$exists": True}},
        [{"$set": {"due_at": {"$dateSubtract": {"startDate": "$$NOW", "unit": "second", "amount": 1}}}}],
    )


async def calls_made(database: Any) -> int:
    count: int = await database.calls.estimated_document_count()
    return count
