"""The figures. Each is measured once per call and gives rows; what is compared in a row was measured in turn."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import psutil

from sagas import Client, Start
from sagas.clock import new_token
from sagas_store.records import RunRecord
from sagas_store.states import SETTLED, State
from scripts._bench.child import Child, children
from scripts._bench.plan import Plan
from scripts._bench.sagas import fulfil, order, wait
from scripts._bench.server import Database, Server
from scripts._bench.timing import Meter, percentile
from scripts._bench.work import STORES

__all__ = ["FIGURES", "Figure", "Row"]

Row = dict[str, Any]
"""Columns by name. Texts and whole numbers say which row it is, fractions are what was measured."""

STEPS = 5
LOOK_S = 0.01
ARRIVALS_TOGETHER_S = 0.01
"""What arrives within this time is started together: who starts it is not what is measured, and shares the cores."""
VARIANTS = ("plain", "sealed")
"""The stores (`work.STORES`) that throughput is measured on."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Something that is measured."""

    title: str
    setup: str
    measure: Callable[[Server, Plan], Awaitable[list[Row]]]


# ------------------------------------------------------------------------------------------------- driving a backlog


async def start(database: Database, count: int, *, saga: Any = fulfil, store: str = "plain", **size: int) -> None:
    async with Client(STORES[store](database.raw)) as client:
        for begin in range(0, count, 1000):
            numbers = range(begin, min(begin + 1000, count))
            await client.start_many(saga, [Start(order(number, **size)) for number in numbers])


async def until_none_is_open(database: Database, saga: Any = fulfil) -> None:
    """Looks from the end of the claim index, where what is still open stands, not at what was left behind."""
    open_ = {"saga": saga.name, "version": 1, "due_at": {"$exists": True}}
    runs = database.raw["sagas.runs"]
    while await runs.find_one(open_, {"_id": 1}, sort=[("due_at", -1)], hint="claim") is not None:
        await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def measured(server: Server, workers: list[Child]) -> AsyncIterator[Meter]:
    meter = Meter(python=[one.pid for one in workers], mongod=[server.pid])
    for one in workers:
        one.go()
    yield meter


async def drive(
    server: Server, count: int, *, workers: int = 1, in_flight: int, store: str = "plain", **size: int
) -> Row:
    """Sagas a second while worker processes drive a backlog that was there before they began."""
    async with server.database() as database:
        await start(database, count, store=store, **size)
        made = children(workers, "work", server.uri, database.name, in_flight=in_flight, store=store)
        async with made as processes, measured(server, processes) as meter:
            await until_none_is_open(database)
            seconds, cpu = meter.seconds(), meter.cpu_us_per(count)
    return _speed(count, seconds, cpu)


def _speed(count: int, seconds: float, cpu: dict[str, float]) -> Row:
    return {
        "sagas_per_s": count / seconds,
        "steps_per_s": STEPS * count / seconds,
        "python_us_per_saga": cpu["python"],
        "mongod_us_per_saga": cpu["mongod"],
    }


async def floor(server: Server, plan: Plan) -> Row:
    """The best of several ways to batch the bare writes."""
    rows: list[Row] = []
    for waves, batch in plan.floor_ways:
        async with server.database() as database:
            await start(database, plan.floor_sagas)
            made = children(1, "floor", server.uri, database.name, waves=waves, batch=batch)
            async with made as processes, measured(server, processes) as meter:
                assert await processes[0].line() == "done"
                seconds, cpu = meter.seconds(), meter.cpu_us_per(plan.floor_sagas)
        rows.append(_speed(plan.floor_sagas, seconds, cpu))
    return max(rows, key=lambda row: float(row["sagas_per_s"]))


async def throughput(server: Server, plan: Plan) -> list[Row]:
    largest = max(plan.runs_at)
    await drive(server, plan.runs_at[largest] // 10, in_flight=largest)  # warms the server up; not counted
    bare = await floor(server, plan)
    rows: list[Row] = [{"what": "floor", "workers": 1, **bare}]
    alone = await drive(server, plan.runs_one_by_one, in_flight=largest, store="one by one")
    for in_flight, count in plan.runs_at.items():
        for workers in (1, 2):
            plain = 0.0
            for variant in VARIANTS:  # beside each other, so that what else the machine does at the moment meets both
                row = await drive(server, count, workers=workers, in_flight=in_flight, store=variant)
                row["of_floor"] = row["sagas_per_s"] / bare["sagas_per_s"]
                if variant == "plain":
                    plain = row["sagas_per_s"]
                else:
                    row["of_plain"] = row["sagas_per_s"] / plain
                if variant == "plain" and in_flight == largest and workers == 1:
                    alone["group_commit_gains"] = row["sagas_per_s"] / alone["sagas_per_s"]
                rows.append({"what": variant, "workers": workers, "in_flight": in_flight, **row})
    rows.append({"what": "one by one", "workers": 1, "in_flight": largest, **alone})
    return rows


async def payloads(server: Server, plan: Plan) -> list[Row]:
    rows = []
    for size, count in plan.payloads.items():
        row = await drive(server, count, in_flight=64, size=size)
        rows.append({"context_bytes": size, **row, "mb_per_s": row["steps_per_s"] * size / 1e6})
    return rows


# ------------------------------------------------------------------------------------------------- one run, and many


async def latency(server: Server, plan: Plan) -> list[Row]:
    first: list[float] = []
    result: list[float] = []
    bare: list[float] = []
    async with server.database() as database, AsyncExitStack() as stack:
        (worker,) = await stack.enter_async_context(children(1, "work", server.uri, database.name, in_flight=64))
        (writer,) = await stack.enter_async_context(children(1, "bare", server.uri, database.name))
        worker.go()
        writer.go()
        client = await stack.enter_async_context(Client(database.store))
        for number in range(-max(3, plan.latency_samples // 20), plan.latency_samples):
            begun = time.monotonic()
            done = await (await client.start(fulfil, order(number))).result(timeout=30)
            ended = time.monotonic()
            writer.go()
            alone = float(await writer.line())
            if number >= 0:  # the first ones open connections and change streams
                first.append(done.first_step_at - begun)
                result.append(ended - begun)
                bare.append(alone)
    rows: list[Row] = []
    for share, name in ((0.5, "p50"), (0.99, "p99")):
        needed = percentile(bare, share)
        rows.append(
            {
                "what": name,
                "start_to_first_step_ms": percentile(first, share) * 1e3,
                "start_to_result_ms": percentile(result, share) * 1e3,
                "nine_bare_writes_ms": needed * 1e3,
                "of_bare": percentile(result, share) / needed,
            }
        )
    return rows


async def arrivals(server: Server, plan: Plan) -> list[Row]:
    dice = random.Random(5)
    async with server.database() as database:
        made = children(1, "work", server.uri, database.name, in_flight=512, time_commits=True)
        async with made as processes, measured(server, processes) as meter, Client(database.store) as client:
            begun, count, starts = time.monotonic(), 0, set()
            due = dice.expovariate(plan.arrivals_per_s)
            for tick in range(int(plan.arrivals_s / ARRIVALS_TOGETHER_S)):
                ends_at = (tick + 1) * ARRIVALS_TOGETHER_S
                together: list[Start[Any]] = []
                while due < ends_at:
                    together.append(Start(order(count + len(together))))
                    due += dice.expovariate(plan.arrivals_per_s)
                if (left := begun + ends_at - time.monotonic()) > 0:
                    await asyncio.sleep(left)
                if together:
                    starts.add(asyncio.create_task(client.start_many(fulfil, together)))
                count += len(together)
            await asyncio.gather(*starts)
            await until_none_is_open(database)
            seconds = meter.seconds()
            commits = await processes[0].end()
    return [
        {
            "asked_per_s": plan.arrivals_per_s,
            "sagas_per_s": count / seconds,
            "commit_p50_ms": commits["p50_ms"],
            "commit_p99_ms": commits["p99_ms"],
        }
    ]


# ------------------------------------------------------------------------------------------------- claims


async def fill(database: Database, *, settled: int, delayed: int) -> None:
    """What a claim must not look at; written past the store, which would take an hour."""
    now = database.store.clock.now()
    common = {"saga": fulfil.name, "version": 1, "fingerprint": fulfil.fingerprint, "phase": "forward"}
    common |= {"attempts": 1, "input": b"\x01" + b"x" * 100}
    states = sorted(SETTLED)

    def documents(begin: int, end: int) -> list[dict[str, Any]]:
        made = []
        for number in range(begin, end):
            at = now - timedelta(seconds=number)
            document = {"_id": f"filling-{number}", "created_at": at, **common}
            if number < settled:
                made.append({**document, "state": states[number % len(states)], "settled_at": at})
            else:
                made.append({**document, "state": State.PENDING, "due_at": now + timedelta(days=1, seconds=number)})
        return made

    runs = database.raw["sagas.runs"]
    for begin in range(0, settled + delayed, 10_000):
        batch = documents(begin, min(begin + 10_000, settled + delayed))
        await runs.insert_many(batch, ordered=False, bypass_document_validation=True)


async def claims(server: Server, plan: Plan) -> list[Row]:
    """In turn: claim a batch and look in vain, beside nothing and beside much."""
    beside = [(0, 0), *((settled, plan.delayed) for settled in plan.settled)]
    claim_ms: list[list[float]] = [[] for _ in beside]
    idle_ms: list[list[float]] = [[] for _ in beside]
    definitions = [(fulfil.name, 1)]

    async def claim(database: Database) -> list[RunRecord]:
        return await database.store.claims.take(
            definitions, token=new_token(), worker="bench", lease=timedelta(hours=1), limit=plan.claim_batch
        )

    async with AsyncExitStack() as stack:
        databases = [await stack.enter_async_context(server.database()) for _ in beside]
        for database, (settled, delayed) in zip(databases, beside, strict=True):
            await fill(database, settled=settled, delayed=delayed)
        for turn in range(-2, plan.claim_samples):
            for place, database in enumerate(databases):
                await start(database, plan.claim_batch)
                runs = database.store.runs
                begun = time.perf_counter()
                found = await claim(database)
                claimed = time.perf_counter()
                assert len(found) == plan.claim_batch
                await asyncio.gather(*(runs.settle(run, State.COMPLETED) for run in found))
                looked = time.perf_counter()
                assert not await claim(database)
                await database.store.claims.next_due_at(definitions)
                ended = time.perf_counter()
                if turn >= 0:
                    claim_ms[place].append((claimed - begun) * 1e3)
                    idle_ms[place].append((ended - looked) * 1e3)
    return [
        {
            "settled": settled,
            "delayed": delayed,
            "claim_ms": (took := percentile(claim_ms[place], 0.5)),
            "claim_of_empty": took / percentile(claim_ms[0], 0.5),
            "idle_poll_ms": (idle := percentile(idle_ms[place], 0.5)),
            "idle_of_empty": idle / percentile(idle_ms[0], 0.5),
        }
        for place, (settled, delayed) in enumerate(beside)
    ]


async def backlog(server: Server, plan: Plan) -> list[Row]:
    rows: list[Row] = []
    for claimers in (1, plan.claimers):
        async with server.database() as database:
            await start(database, plan.backlog)
            made = children(claimers, "claim", server.uri, database.name, batch=plan.claim_batch)
            async with made as processes, measured(server, processes) as meter:
                for one in processes:
                    assert await one.line() == "done"
                seconds = meter.seconds()
                counted = [await one.end() for one in processes]
            # Where several work at once, one that lost every race thrice may leave while the last runs are taken.
            claimed = sum(one["claimed"] for one in counted)
            assert claimed == plan.backlog, f"{claimed} of {plan.backlog} were claimed"
        rows.append(
            {
                "what": "claims alone",
                "workers": claimers,
                "runs_per_s": plan.backlog / seconds,
                "runs_per_claim": claimed / sum(one["claims"] for one in counted),
            }
        )
    for workers in (1, plan.claimers):
        row = await drive(server, plan.backlog, workers=workers, in_flight=64)
        rows.append({"what": "driven to their end", "workers": workers, "runs_per_s": row["sagas_per_s"]})
    return rows


# ------------------------------------------------------------------------------------------------- loss, memory


async def until_attempted(database: Database, count: int, *, times: int) -> None:
    runs = database.raw["sagas.runs"]
    while await runs.count_documents({"saga": wait.name, "attempts": {"$gte": times}}) < count:
        await asyncio.sleep(LOOK_S)


async def takeover(server: Server, plan: Plan) -> list[Row]:
    """Their worker is killed; another one, idle so far, goes on."""
    async with server.database() as database, AsyncExitStack() as stack:
        options = {"in_flight": plan.lost, "lease_s": plan.lost_lease_s}
        (lost,) = await stack.enter_async_context(children(1, "work", server.uri, database.name, **options))
        (heir,) = await stack.enter_async_context(children(1, "work", server.uri, database.name, **options))
        await start(database, plan.lost, saga=wait)
        lost.go()
        await until_attempted(database, plan.lost, times=1)
        lost.kill()
        heir.go()
        running = database.raw["sagas.runs"].find({"state": "running"}, {"due_at": 1})
        leases_end: datetime = max([one["due_at"] async for one in running])
        await until_attempted(database, plan.lost, times=2)
        # What a run's own document says of its second attempt, by the clock that also ended the leases.
        claimed = [one["claim"]["at"] async for one in database.raw["sagas.runs"].find({}, {"claim.at": 1})]
        await until_none_is_open(database, wait)
        settled = [one["settled_at"] async for one in database.raw["sagas.runs"].find({}, {"settled_at": 1})]
    return [
        {
            "runs": plan.lost,
            "lease_s": plan.lost_lease_s,
            "last_claimed_after_s": max(0.0, (max(claimed) - leases_end).total_seconds()),
            "last_settled_after_s": max(0.0, (max(settled) - leases_end).total_seconds()),
        }
    ]


async def memory(server: Server, plan: Plan) -> list[Row]:
    rows: list[Row] = []
    for live in plan.live:
        async with server.database() as database:
            made = children(1, "work", server.uri, database.name, in_flight=live)
            async with made as processes, measured(server, processes):
                await asyncio.sleep(0.3)  # its threads and change streams are there now
                process = psutil.Process(processes[0].pid)
                before = process.memory_info().rss
                await start(database, live, saga=wait)
                await until_attempted(database, live, times=1)
                await asyncio.sleep(0.3)
                grown = process.memory_info().rss - before
        rows.append({"live_runs": live, "idle_mib": before / 2**20, "mib_per_1000_runs": grown / 2**20 * 1000 / live})
    return rows


FIGURES: dict[str, Figure] = {
    "throughput": Figure(
        "Sagas a second",
        "five steps that cost nothing, contexts of 300 bytes; a backlog that stands before the workers begin; `floor` "
        "is the bare writes such a saga needs, batched by a loop that does nothing else, the best of three ways to "
        "batch; `one by one` is the same executor with group commit off",
        throughput,
    ),
    "latency": Figure(
        "One run on an idle worker",
        "client, worker and server are three processes; in turn with the nine majority writes that the run needs, one "
        "after another: start, claim, five entries, gate, settling; a result is waited for through a change stream",
        latency,
    ),
    "arrivals": Figure(
        "A steady arrival",
        "Poisson arrivals from another process, started every 10 ms; one worker, up to 512 in flight; how long a "
        "step's entry takes to be durable, as the worker waits for it",
        arrivals,
    ),
    "claims": Figure(
        "Claims beside settled and delayed runs",
        "one batch claimed, then an idle poll (look for due runs, and when the next one is due); in turn on databases "
        "that differ in what else they hold; medians",
        claims,
    ),
    "backlog": Figure(
        "Several workers on one backlog",
        "claims alone, in batches of 50, and whole workers with 64 runs in flight each",
        backlog,
    ),
    "takeover": Figure(
        "The runs of a killed worker",
        "SIGKILL; from the end of the last lease until another worker has claimed, and then settled, the last of them",
        takeover,
    ),
    "memory": Figure(
        "Memory of live runs",
        "runs in the middle of a step, contexts of 300 bytes; growth of the worker's resident memory",
        memory,
    ),
    "payloads": Figure("Large contexts", "as throughput, one worker, 64 in flight", payloads),
}
