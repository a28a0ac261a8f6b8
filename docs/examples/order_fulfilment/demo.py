"""The demo: some hundred orders through worker processes that get killed in the middle, while people press Stop on some
of the orders, and an audit of what is left.

scripts/demo                                                     made-up orders
scripts/demo --orders o.csv --order-lines l.csv --products p.csv   orders in the Northwind layout
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from pymongo import AsyncMongoClient, MongoClient

from sagas import (
    HELD,
    CannotOpen,
    Client,
    JournalLine,
    MongoStore,
    Operator,
    Run,
    RunDidNotComplete,
    RunHeld,
    RunInfo,
    RunRolledBack,
    SagaError,
    Start,
    State,
)
from sagas_store.embedded import EmbeddedError, EmbeddedMongo, mongodb

from .audit import Audit, audit, read_ledgers
from .keys import KeyCabinet
from .lost_key import LostKey
from .orders import BadFile, Book, Order, built_in_orders, order_key, read_orders, stock_needed
from .report import Progress, Report
from .saga import fulfil_order
from .shop import Shop
from .stops import Stops, wishes
from .worker import shop_database
from .workers import Fleet, WorkerDied, WorkerProcess

LEASE_S: Final = 3
CONCURRENCY: Final = 16
OUTAGE_PERCENT: Final = 6
DELAY_MS: Final = 20
STOP_RATE: Final = 0.05
KEY_MAX_AGE: Final = timedelta(seconds=4)
"""A lost key is to be noticed while one watches; five minutes is the default."""
STALLED_S: Final = 90
"""No order came to an end for so long: more than a lapsed lease and an open transaction explain."""
GIVE_UP_S: Final = 300
_LOOK_S: Final = 0.2
_AIM_S: Final = 0.01
_READERS: Final = 32

DONE, FOUND, USAGE, NO_DATABASE, INTERRUPTED = 0, 1, 2, 3, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns 0 when nothing was lost, doubled or half undone."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began_at = time.monotonic()
    seed = options.seed if options.seed is not None else secrets.randbelow(10_000)
    try:
        book = _book(options, seed)
    except BadFile as error:
        print(f"demo: {error}", file=sys.stderr)
        return USAGE
    print(
        f"{len(book.orders)} orders, five steps each, go through {options.workers} worker processes. {options.kills} "
        "times one of them\nis killed (SIGKILL) in the middle of a step, and on some of the orders "
        f"({options.stop_rate:.0%}) somebody presses\nStop. At the end the shop's ledgers must agree with the runs and "
        f"with what was answered:\nnothing lost, doubled or half undone. Seed: {seed}.",
        file=sys.stderr,
    )
    if options.tenants:
        print(
            "Each customer is a tenant with a key of its own, and everything in the engine's database is sealed. One\n"
            "customer's key is lost on the way, and found again.",
            file=sys.stderr,
        )
    try:
        with _database() as (uri, database), tempfile.TemporaryDirectory(prefix="sagas-demo-") as folder:
            demo = Demo(
                book,
                uri,
                database,
                Path(folder),
                seed=seed,
                workers=options.workers,
                kills=options.kills,
                stops=Stops(wishes(book.orders, rate=options.stop_rate, seed=seed)),
                tenants=options.tenants,
            )
            result = asyncio.run(demo.run())
    except EmbeddedError as error:
        print(f"demo: {error}", file=sys.stderr)
        return NO_DATABASE
    except (SagaError, WorkerDied) as error:
        print(f"demo: {error}", file=sys.stderr)
        return FOUND
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("\nInterrupted; everything it started has ended.", file=sys.stderr)
        return INTERRUPTED
    report = Report(result, len(book.orders), demo.kills_done, time.monotonic() - began_at, demo.reasons, demo.lost_key)
    clean = not (result.findings or result.unfinished)
    if options.json:
        print(json.dumps(report.as_json()))
    if not options.json or not clean:
        print(report.as_text(), file=sys.stderr if options.json else sys.stdout)
    return DONE if clean else FOUND


@contextlib.contextmanager
def _database() -> Iterator[tuple[str, str]]:
    """A server's URI and a database to use there. The server is the one SAGAS_MONGODB_URI names, else one of ours."""
    name = f"demo_{secrets.token_hex(4)}"
    if os.environ.get("SAGAS_MONGODB_URI"):
        with mongodb() as uri:
            try:
                yield uri, name
            finally:
                with MongoClient[dict[str, Any]](uri) as client:
                    for database in (name, shop_database(name)):
                        client.drop_database(database)
        return
    # A killed worker's transaction stays open until the server gives it up. By default that takes a minute, and where
    # the next worker finds it in its way, so does the takeover.
    with EmbeddedMongo.start(parameters={"transactionLifetimeLimitSeconds": str(LEASE_S)}) as mongo:
        yield mongo.uri, name


@dataclass
class Demo:
    """One demonstration in `database` of the server at `uri`."""

    book: Book
    uri: str
    database: str
    folder: Path
    """For the workers' logs."""
    seed: int
    workers: int
    kills: int
    stops: Stops
    tenants: bool = False
    """Each customer is a tenant, and everything is sealed."""
    lost_key: LostKey | None = None
    kills_done: int = 0
    at_rest: set[int] = field(default_factory=set)
    """Orders whose runs have come to rest."""
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    """Why orders were undone."""

    async def run(self) -> Audit:
        """Start the orders, kill workers, wait until all runs have come to rest, and audit what there is."""
        this = asyncio.current_task()
        assert this is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
        connection: AsyncMongoClient[Any] = AsyncMongoClient(self.uri)
        async with connection as client:
            store = self._store(client)
            shop = Shop.on(client[shop_database(self.database)], caller="the demo")
            await store.schema.apply()
            await shop.open(stock_needed(self.book))
            if self.tenants:
                self._cabinet.issue({order.customer for order in self.book.orders})
                self.lost_key = LostKey(self._cabinet, self.book.orders)
            async with Client(store) as saga_client:
                await self._fulfil(saga_client, store, shop)
                return await self._audit(saga_client, shop)

    @property
    def _cabinet(self) -> KeyCabinet:
        return KeyCabinet(self.folder / "keys")

    def _store(self, client: AsyncMongoClient[Any]) -> MongoStore:
        keyring = self._cabinet.keyring(KEY_MAX_AGE) if self.tenants else None
        return MongoStore(client[self.database], keyring=keyring)

    async def _fulfil(self, client: Client, store: MongoStore, shop: Shop) -> None:
        """Have all orders fulfilled, or undone; gives up when nothing moves any more, and after five minutes."""
        environment = {
            "SAGAS_MONGODB_URI": self.uri,
            "SAGAS_DATABASE": self.database,
            "ORDER_WORKER_CONCURRENCY": str(CONCURRENCY),
            "ORDER_WORKER_LEASE_S": str(LEASE_S),
            "ORDER_OUTAGE_PERCENT": str(OUTAGE_PERCENT),
            "ORDER_OUTAGE_SEED": str(self.seed),
            "ORDER_DELAY_MS": str(DELAY_MS),
        }
        if self.tenants:
            environment |= {
                "ORDER_KEYS": str(self.folder / "keys"),
                "ORDER_KEY_MAX_AGE_S": str(KEY_MAX_AGE.total_seconds()),
            }
        with Fleet(self.workers, folder=self.folder, environment=environment) as fleet:
            starts = [
                Start(order, order_key(order), tenant=order.customer if self.tenants else None)
                for order in self.book.orders
            ]
            runs = await client.start_many(fulfil_order, starts)
            progress = Progress(len(runs))
            by_order = {order.number: run for order, run in zip(self.book.orders, runs, strict=True)}
            waiting = {asyncio.create_task(self._outcome(number, run)) for number, run in by_order.items()}
            killing = asyncio.create_task(self._kill_now_and_then(fleet, shop, progress))
            stopping = asyncio.create_task(self._press_stop(by_order))
            waiting.add(stopping)
            if self.lost_key is not None:
                engines_runs = store.database["sagas.runs"]
                waiting.add(
                    asyncio.create_task(
                        self.lost_key.happen(client, Operator(store), engines_runs, self.at_rest, progress)
                    )
                )
            try:
                await self._watch(waiting, killing, fleet, progress)
            finally:
                ending = {killing, *waiting}
                while ending:  # again, should a driver have lost the first cancellation
                    for task in ending:
                        task.cancel()
                    _, ending = await asyncio.wait(ending, timeout=1)

    async def _press_stop(self, runs: Mapping[int, Run[Order]]) -> None:
        """Press Stop, over connections of its own: on ours it would queue behind all who wait for their results."""
        connection: AsyncMongoClient[Any] = AsyncMongoClient(self.uri)
        async with connection as client, Client(self._store(client)) as theirs:
            handles = {number: theirs.run(fulfil_order, run_id=run.run_id) for number, run in runs.items()}
            network = Shop.on(client[shop_database(self.database)], caller="the customers").network
            await self.stops.press(handles, network, self.at_rest)

    async def _outcome(self, number: int, run: Run[Order]) -> None:
        """Wait for the end of one run and count how it ended."""
        try:
            await self._result(run)
        except RunRolledBack as undone:
            if undone.state is State.CANCELLED:
                self.outcomes["cancelled"] += 1
            else:
                self.outcomes["undone"] += 1
                self.reasons[_REASONS.get(undone.step or "", "for another reason")] += 1
        except RunDidNotComplete as other:
            self.outcomes["held" if other.state in HELD else str(other.state)] += 1
        else:
            self.outcomes["completed"] += 1
        self.at_rest.add(number)

    async def _result(self, run: Run[Order]) -> None:
        """Wait for the end of one run; where its key is lost, until it is found again."""
        try:
            await run.result()
        except (RunHeld, CannotOpen) as stuck:
            for_its_key = isinstance(stuck, CannotOpen) or stuck.state is State.QUARANTINED
            if self.lost_key is None or not for_its_key:
                raise
            await self.lost_key.back.wait()
            await run.result()

    async def _watch(
        self, waiting: set[asyncio.Task[None]], killing: asyncio.Task[None], fleet: Fleet, progress: Progress
    ) -> None:
        """Show the progress until all runs are at rest and all stops answered, or time is up.

        Raises what went wrong meanwhile.
        """
        began_at = moved_at = time.monotonic()
        pending = waiting
        while pending and (now := time.monotonic()) < min(began_at + GIVE_UP_S, moved_at + STALLED_S):
            done, pending = await asyncio.wait(pending, timeout=_LOOK_S)
            moved_at = now if done else moved_at
            for task in (*done, *([killing] if killing.done() else ())):
                task.result()
            fleet.check()
            progress.show(self.outcomes, kills=self.kills_done, stops=len(self.stops.answers))
        progress.show(self.outcomes, kills=self.kills_done, stops=len(self.stops.answers), last=True)

    # ---------------------------------------------------------------- killing

    async def _kill_now_and_then(self, fleet: Fleet, shop: Shop, progress: Progress) -> None:
        """Kill a worker each time a further part of the orders is through, and start another one in its place."""
        rng = random.Random(self.seed)
        orders = len(self.book.orders)
        for number in range(self.kills):
            # Over the first four fifths of the orders, so that others still run while a dead worker's are taken over.
            through = orders * 0.8 * (number + rng.uniform(0.3, 0.9)) / self.kills
            while self.outcomes.total() < through:
                await asyncio.sleep(_AIM_S)
            victim = await self._in_the_middle(fleet, shop, rng)
            fresh = fleet.kill(victim)
            self.kills_done += 1
            cut_off = await shop.network.unanswered(victim.name)
            progress.say(f"{victim.name} was killed with {cut_off} requests under way; {fresh.name} takes its place")

    async def _in_the_middle(self, fleet: Fleet, shop: Shop, rng: random.Random) -> WorkerProcess:
        """A worker that waits for an answer from a participant this very moment."""
        while True:
            for worker in rng.sample(fleet.workers, len(fleet.workers)):
                if await shop.network.unanswered(worker.name):
                    return worker
            await asyncio.sleep(_AIM_S)

    # ---------------------------------------------------------------- auditing

    async def _audit(self, client: Client, shop: Shop) -> Audit:
        runs = await _all_runs(client)
        at_once = asyncio.Semaphore(_READERS)

        async def journal(run: RunInfo) -> list[JournalLine]:
            async with at_once:
                return await client.journal(run.run_id)

        journals = await asyncio.gather(*(journal(run) for run in runs))
        by_run = {run.run_id: lines for run, lines in zip(runs, journals, strict=True)}
        return audit(
            self.book.orders,
            runs,
            by_run,
            await read_ledgers(shop),
            self.stops.answers,
            unanswered=self.stops.unanswered,
        )


async def _all_runs(client: Client) -> list[RunInfo]:
    page = await client.runs(limit=1000, open_keys=True)
    runs = page.runs
    while page.next is not None:
        page = await client.runs(after=page.next, limit=1000, open_keys=True)
        runs += page.runs
    return runs


_REASONS: Final = {
    "reserve_stock": "out of stock",
    "authorise_payment": "over the card's limit",
    "charge_card": "with a blocked card",
}
"""What the failure of each step means."""


# ---------------------------------------------------------------------------------------- the command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Runs orders through worker processes, kills some of them in the middle of a step, presses Stop on "
        "some of the orders, and audits the shop's ledgers and the answers afterwards. Exit code 0: nothing was lost, "
        "doubled or half undone, and each answer came true.",
    )
    parser.add_argument("--orders", type=Path, metavar="CSV", help="orders in the Northwind layout")
    parser.add_argument("--order-lines", type=Path, metavar="CSV", help="their lines")
    parser.add_argument("--products", type=Path, metavar="CSV", help="the products")
    parser.add_argument("--orders-count", type=_positive, default=300, help="how many made-up orders; default: 300")
    parser.add_argument("--workers", type=_positive, default=3, help="worker processes; default: 3")
    parser.add_argument("--kills", type=_not_negative, default=4, help="how many of them get SIGKILL; default: 4")
    parser.add_argument(
        "--stop-rate",
        type=_share,
        default=STOP_RATE,
        metavar="R",
        help=f"the share of the orders on which somebody presses Stop, from 0 to 1; default: {STOP_RATE}",
    )
    parser.add_argument(
        "--tenants",
        action="store_true",
        help="each customer is a tenant with a key of its own, and one of the keys is lost on the way and found again",
    )
    parser.add_argument(
        "--seed", type=int, help="of the orders, the outages, the choice of victims and the stops; default: any"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser


def _positive(text: str) -> int:
    return _whole(text, 1)


def _not_negative(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} up")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:  # NaN is neither
        raise argparse.ArgumentTypeError("must be a number from 0 to 1")
    return share


def _book(options: argparse.Namespace, seed: int) -> Book:
    files = (options.orders, options.order_lines, options.products)
    if all(files):
        return read_orders(*files)
    if any(files):
        _parser().error("--orders, --order-lines and --products belong together")
    return built_in_orders(options.orders_count, seed=seed)


if __name__ == "__main__":
    sys.exit(main())
