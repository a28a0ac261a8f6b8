"""The worker: claims runs in batches, drives them, keeps their leases, and hands them back when told to drain.

One process, one event loop, any number of workers beside it; they meet only in the database. Work is found by polling;
change streams make it quick. A worker that dies says nothing: its leases lapse and others go on from the journals.

Longer than other modules: claiming, keeping leases and draining are three hands on the same runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from sagas.clock import Monotonic, monotonic, new_token
from sagas.definition import Saga
from sagas.errors import DefinitionError, FenceLost, InvalidInput, StoreError, StoreRefused, StoreUnavailable
from sagas.executor import Attempt, Executor, Parked
from sagas.keyring import ClaimRound, refuse_unkeyed
from sagas.lease import Lease, LeaseLapsed
from sagas.limits import Limits
from sagas.log import engine_log
from sagas.signals import draining_on_signals
from sagas.texts import check_text
from sagas_store import MongoStore
from sagas_store.entries import Entry
from sagas_store.inputs import check_flag, check_kind, check_several, given_or
from sagas_store.numbers import NONE, DurationField, check_count
from sagas_store.records import RunRecord
from sagas_store.runs import RENEWALS_PER_LEASE
from sagas_store.tenants import TenantDatabases

__all__ = ["WORKER_NAME_MAX", "Worker", "WorkerOptions", "served", "where", "worker_name"]

WORKER_NAME_MAX: Final = 256
"""Characters: the name stands in every entry that the worker writes."""
_AGAIN_S: Final = 1.0
"""How soon what failed is begun again: a renewal, or a helper of the worker's."""
_TRIES_PER_RENEWAL: Final = 4
"""Or sooner, where renewals are close together. The last that fails may be sent two thirds through a lease and wait a
sixth of it for its reply; the next has to be answered before nine tenths are over, when attempts give up."""
_LOOKS_PER_LEASE: Final = 20
_GATHER: Final = timedelta(milliseconds=20)
"""The longest pause after a claim that took all that was due; a change stream ends it earlier. What becomes due in the
meantime is claimed together: a claim costs the same trips for one run as for fifty."""
_LEASE_MIN: Final = timedelta(milliseconds=500)
"""A shorter lease would end before its first renewals are answered, each a write to a majority's disks, when the server
is busy for a moment: runs would be taken over, and steps run twice, without anybody having died."""
_LOOK_S: Final = 0.5
"""While draining: how often to look whether what is left ever ends."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How a worker works. The defaults suit steps that take from milliseconds to a minute.

    Times are a timedelta, or seconds.
    """

    concurrency: int = 64
    """Runs driven at once. Each holds its context and one step in memory; steps that wait cost little."""
    tenant_concurrency: int | None = None
    """Of those, at most this many of one tenant; runs without a tenant are not limited. None: no limit; tenants with
    due runs take turns all the same."""
    lease: DurationField[timedelta] = DurationField(timedelta(minutes=5), least=_LEASE_MIN)
    """How long a lost worker's runs wait for another. Renewed six times a lease, and every second while that fails, so
    the database may be away for two thirds of it, of three seconds or more. Shorter means quicker takeover and more
    steps run twice when a machine stalls; half a second is the least, since below it an ordinary write may take longer
    than the lease."""
    poll: DurationField[timedelta] = DurationField(timedelta(seconds=1))
    """The longest pause between two looks for due runs. Change streams make most looks earlier."""
    park_after: DurationField[timedelta] = DurationField(timedelta(seconds=2), least=NONE)
    """A wait for a retry that is longer than this frees the worker; shorter ones are waited out."""
    drain_grace: DurationField[timedelta] = DurationField(timedelta(seconds=20), least=NONE)
    """How long steps in hand may go on once the worker drains; then they are broken off and count as in doubt.
    Compensations are always finished. Keep it below what your supervisor waits before it kills."""
    threads: int = 32
    """Threads for steps that are plain functions."""
    limits: Limits = field(default_factory=Limits)
    """How large contexts may be."""
    handle_signals: bool = True
    """Drain on SIGTERM and SIGINT (when run in the main thread). A second signal cuts the grace short. While it runs
    this takes the place of the application's own handlers, which are put back when the last worker of the process has
    ended. False leaves them alone: then call `stop`."""

    def __post_init__(self) -> None:
        check_count("WorkerOptions.concurrency", self.concurrency)
        check_count("WorkerOptions.threads", self.threads)
        if self.tenant_concurrency is not None:
            check_count("WorkerOptions.tenant_concurrency", self.tenant_concurrency)
        check_kind("WorkerOptions.limits", self.limits, Limits, "Limits(context_bytes_max=...)")
        check_flag("WorkerOptions.handle_signals", self.handle_signals)


class Worker:
    """Runs sagas. `await Worker(store, [fulfil_order], resources=Shop(...)).run()`."""

    def __init__(
        self,
        store: MongoStore,
        sagas: Sequence[Saga[Any]],
        *,
        resources: object = None,
        name: str | None = None,
        options: WorkerOptions | None = None,
        monotonic: Monotonic = monotonic,
    ) -> None:
        """Serves exactly these sagas and versions; due runs of others are left for a worker that knows them.

        `resources` is what steps get as `step.resources`. `name` is how the worker appears on runs and in journals;
        by default host, process id and a few random digits. Raises InvalidInput, DefinitionError.
        """
        tenants = isinstance(store, TenantDatabases)
        fix = "TenantWorker(databases, sagas)" if tenants else "Worker(MongoStore(database), sagas)"
        check_kind("store", store, MongoStore, fix)
        self.name: Final = worker_name(name)
        """How it appears on runs and in journals."""
        self.options: Final = given_or("options", options, WorkerOptions)
        self._store = store
        self._monotonic = monotonic
        self._sagas = served(sagas, self.options.limits)
        self._resources = resources
        self._attempts: dict[str, Attempt] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.left_behind = 0
        """After a drain: how many steps do not end although they were broken off. Their process should end instead."""
        self._wake = asyncio.Event()
        self._backlog = True
        """Whether more may be due than the last claim had room for, so that an attempt's end is a reason to claim."""
        self._draining = asyncio.Event()
        self._hurry = asyncio.Event()
        self._log = engine_log("sagas.worker").bind(worker=self.name)

    # ---------------------------------------------------------------- from outside

    async def run(self) -> None:
        """Work until told to drain, by `stop`, SIGTERM or SIGINT, or by being cancelled; then hand everything back.

        Raises UnsafeServer, SchemaMismatch or StoreUnavailable when it cannot begin. Once begun, no run and no outage
        of the database ends it.
        """
        await self._store.ready()
        await self._store.look_for_keys()  # a client may have made the store ready long ago
        refuse_unkeyed(self._store, "a worker without their keys could do nothing but put runs on hold")
        pool = ThreadPoolExecutor(self.options.threads, thread_name_prefix="sagas-step")
        executor = Executor(
            self._store,
            self._sagas,
            resources=self._resources,
            threads=pool,
            thread_count=self.options.threads,
            limits=self.options.limits,
            park_after=self.options.park_after,
            monotonic=self._monotonic,
        )
        work = asyncio.create_task(self._work(executor))
        with draining_on_signals(self.stop, enabled=self.options.handle_signals):
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                # Whoever cancels the worker wants it gone, not its runs torn: break off steps, hand back, then go.
                self.stop()
                self._hurry.set()
                while not work.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.shield(work)
                raise
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                self.left_behind = len(self._tasks) + len(executor.thread_calls)

    async def _work(self, executor: Executor) -> None:
        helpers = [
            asyncio.create_task(self._without_end(helper))
            for helper in (self._keep_leases, self._watch_leases, self._listen)
        ]
        self._log.info("worker started", sagas=[f"{name}@{version}" for name, version in self._sagas])
        try:
            await self._claim_until_drained(executor)
            await self._drain()
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        self._log.info("worker drained")

    async def _without_end(self, helper: Callable[[], Awaitable[None]]) -> None:
        """Whatever ends a helper, it begins again: a worker that claims and renews nothing is worse than none."""
        while True:
            try:
                await helper()
            except Exception as fault:
                self._log.error("a helper ended after a fault of the engine, beginning it again", **where(fault))
            await asyncio.sleep(_AGAIN_S)

    async def _listen(self) -> None:
        """Hear of due runs and of stops as they come."""
        sagas = sorted({name for name, _ in self._sagas})
        await self._store.hints.on_due(sagas, self._wake.set, stopped=self._notice_stop)

    def stop(self) -> None:
        """Drain: claim nothing more, give steps in hand their grace, hand the rest back. `run` returns when done.

        Called again it cuts the grace short.
        """
        if self._draining.is_set():
            self._hurry.set()
        self._draining.set()
        self._wake.set()
        for attempt in list(self._attempts.values()):
            attempt.drain()  # at once, also while the answer to a claim is waited for

    # ---------------------------------------------------------------- claiming

    @property
    def _room(self) -> int:
        return self.options.concurrency - len(self._attempts)

    @property
    def _room_worth_a_claim(self) -> int:
        """How many places must be free before an attempt's end leads to a claim, where the last had not room for all.

        The next poll claims for fewer. A claim costs three round trips, whatever its size, so a busy worker fills an
        eighth of its places at once.
        """
        return max(1, self.options.concurrency // 8)

    async def _claim_until_drained(self, executor: Executor) -> None:
        definitions = list(self._sagas)
        while not self._draining.is_set():
            self._wake.clear()
            pause = self.options.poll
            room = self._room
            claimed: int | None = None  # not known: nothing was asked, or there was no answer
            try:
                if room:
                    claimed = await self._claim(executor, definitions, room)
                    if claimed < room:
                        pause = min(pause, _GATHER if claimed else await self._until_next_due(definitions))
            except StoreError as error:
                self._log.warning("claim failed, trying again", error=str(error))
            except Exception as fault:
                self._log.error("claim failed after a fault of the engine, trying again", **where(fault))
            self._backlog = claimed is None or claimed == room
            if claimed == room > 0:
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause.total_seconds()):
                    await self._wake.wait()

    async def _claim(self, executor: Executor, definitions: list[tuple[str, int]], room: int) -> int:
        asked_at = self._monotonic()
        runs = await self._store.claims.take(
            definitions,
            token=new_token(),
            worker=self.name,
            lease=self.options.lease,
            limit=room,
            per_tenant=self.options.tenant_concurrency,
            running=self._running_of_tenants(),
            refused=self._warn_of_refused,
        )
        leases = {run.run_id: self._lease_of(run, asked_at) for run in runs}
        for run in runs:
            if run.claim is not None:
                self._store.clock.observe(run.claim.at)
        together = ClaimRound()

        def start(run: RunRecord, journal: list[Entry]) -> None:
            self._start(executor.attempt(run, journal, leases[run.run_id], together))

        again = [run for run in runs if run.attempts > 1]
        for run in runs:
            if run.attempts <= 1:  # it has no journal, so it waits for none
                start(run, [])
        try:
            journals = await self._store.journal.load_many([run.run_id for run in again]) if again else {}
        except StoreError:
            # Nobody would drive them until their leases lapse, which would look as if a worker had died with each. All
            # at once: each has the whole of the store's patience.
            await asyncio.gather(*map(self._give_back, again))
            raise
        for run in again:
            start(run, journals.get(run.run_id, []))
        return len(runs)

    def _warn_of_refused(self, error: StoreRefused) -> None:
        self._log.warning("run cannot be claimed, leaving it out for a minute", error=str(error))

    @property
    def _attempts_of_limited_tenants(self) -> bool:
        return self.options.tenant_concurrency is not None and bool(self._attempts)

    def _running_of_tenants(self) -> Counter[str]:
        if self.options.tenant_concurrency is None:
            return Counter()
        return Counter(one.run.tenant for one in self._attempts.values() if one.run.tenant is not None)

    def _lease_of(self, run: RunRecord, asked_at: float) -> Lease:
        assert run.claim is not None, run.run_id
        return Lease(run.run_id, run.claim.token, self.options.lease, asked_at=asked_at, monotonic=self._monotonic)

    async def _until_next_due(self, definitions: list[tuple[str, int]]) -> timedelta:
        due_at = await self._store.claims.next_due_at(definitions)
        if due_at is None or self._attempts_of_limited_tenants:
            return self.options.poll  # what is due may be of a tenant without room; an attempt that ends wakes us
        return max(due_at - self._store.clock.now(), timedelta(milliseconds=1))

    # ---------------------------------------------------------------- driving

    def _start(self, attempt: Attempt) -> None:
        run = attempt.run
        if (before := self._attempts.get(run.run_id)) is not None:
            before.lose()  # our own lapsed attempt, not told yet: it must not go on beside this one
        self._attempts[run.run_id] = attempt
        if self._draining.is_set():
            attempt.drain()
        task = asyncio.create_task(self._drive(attempt), name=f"run {run.run_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drive(self, attempt: Attempt) -> None:
        run = attempt.run
        log = self._log.bind(run=run.run_id, saga=run.saga, attempt=run.attempts)
        due_again = True  # as far as is known
        try:
            state = await attempt.drive()
            due_again = state is Parked
            if (blocked := attempt.blocked_by) is not None:
                log.warning("run blocked, its payload does not open", state=str(state), error=str(blocked))
            elif attempt.held_because is not None:
                log.warning("run held, an operator must act", state=str(state), reason=attempt.held_because)
            else:
                log.info("attempt ended", state=str(state))
        except FenceLost as lost:
            log.warning("attempt stopped, the lease is lost", error=str(lost))
        except LeaseLapsed as lapsed:
            log.warning("attempt stopped, the lease is lost", error=str(lapsed))
            await self._end_lease(run)
        except StoreUnavailable as away:
            log.warning("attempt abandoned, the lease will lapse", error=str(away))
        except StoreError as refused:
            log.error("attempt abandoned, the lease will lapse", error=str(refused))
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise
        except BaseException as fault:
            # A fault of the engine itself, or a signal of some library that a step let through. The run is not touched:
            # its lease lapses, and ten such attempts hold it. No other run is to suffer from it.
            log.error("attempt abandoned after a fault of the engine, the lease will lapse", **where(fault))
        finally:
            limited = self._attempts_of_limited_tenants
            self._forget(attempt)
            if due_again or limited or (self._backlog and self._room >= self._room_worth_a_claim):
                self._wake.set()

    async def _end_lease(self, run: RunRecord) -> None:
        """A renewal may have got through after the attempt gave up: then nobody would drive the run for a lease."""
        with contextlib.suppress(StoreError):  # somebody else has it, or it lapses by itself
            await self._store.runs.end_lease(run)

    async def _give_back(self, run: RunRecord) -> None:
        with contextlib.suppress(StoreError):  # somebody else has it, or its lease lapses
            await self._store.runs.give_back(run)

    # ---------------------------------------------------------------- leases

    async def _keep_leases(self) -> None:
        """Renew every lease in one trip, six times a lease; soon again where that failed."""
        interval_s = self.options.lease.total_seconds() / RENEWALS_PER_LEASE
        pause_s = interval_s
        while True:
            await asyncio.sleep(pause_s)
            pause_s = interval_s if await self._renew() else min(_AGAIN_S, interval_s / _TRIES_PER_RENEWAL)

    async def _renew(self) -> bool:
        """Renew what is held now; whether that got through."""
        held = {run_id: attempt.lease for run_id, attempt in self._attempts.items()}
        if not held:
            return True
        asked_at = self._monotonic()
        try:
            renewal = await self._store.runs.renew(
                {run_id: lease.token for run_id, lease in held.items()}, lease=self.options.lease
            )
        except StoreError as error:
            # One failed renewal is not a lost lease: attempts go on until their own clock says that it may be over.
            self._log.warning("renewal failed, trying again", error=str(error), runs=len(held))
            return False
        except Exception as fault:
            self._log.error("renewal failed after a fault of the engine, trying again", **where(fault))
            return False
        for run_id, lease in held.items():
            if run_id not in renewal.lost:
                lease.renewed(asked_at)
            elif (attempt := self._attempts.get(run_id)) is not None and attempt.lease is lease:
                attempt.lose()
        for run_id in renewal.stopped:
            self._notice_stop(run_id)
        return True

    async def _watch_leases(self) -> None:
        """Break off what goes on beyond its lease: cut off from the database, or swallowing its cancellation.

        Another worker may be running the same step by then.
        """
        while True:
            await asyncio.sleep(self.options.lease.total_seconds() / _LOOKS_PER_LEASE)
            for attempt in list(self._attempts.values()):
                if not attempt.lease.holds:
                    attempt.lose()
            self._write_off(self.options.lease)

    def _write_off(self, patience: timedelta) -> None:
        """Give up on functions that swallow their cancellation: their leases lapse, and another attempt goes on."""
        now = self._monotonic()
        for attempt in [one for one in self._attempts.values() if one.overstays(now, patience)]:
            self._log.error(
                "a step does not end although it was cancelled, its lease will lapse", run=attempt.run.run_id
            )
            attempt.lose()
            self._forget(attempt)

    def _forget(self, attempt: Attempt) -> None:
        if self._attempts.get(attempt.run.run_id) is attempt:
            del self._attempts[attempt.run.run_id]

    def _notice_stop(self, run_id: str) -> None:
        if (attempt := self._attempts.get(run_id)) is not None:
            attempt.notice_stop()

    # ---------------------------------------------------------------- draining

    async def _drain(self) -> None:
        pending = set(self._tasks)
        if pending:
            self._log.info("worker draining", runs=len(pending))
        ended = asyncio.gather(
            *pending, return_exceptions=True
        )  # never raises: an attempt's end is logged, not passed on
        ended.add_done_callback(lambda _: self._hurry.set())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.options.drain_grace.total_seconds()):
                await self._hurry.wait()
        for attempt in list(self._attempts.values()):
            attempt.interrupt()
        while not ended.done():
            await asyncio.wait({ended}, timeout=_LOOK_S)
            self._write_off(self.options.drain_grace)
            if not self._attempts:
                break  # what is left swallows its cancellation; its lease lapses


def worker_name(given: str | None, *, most: int = WORKER_NAME_MAX) -> str:
    """The name given, or host, process id and a few random digits. Raises InvalidInput where it could not be stored."""
    if given is not None:
        return check_text("name", given, least=1, most=most)
    host = socket.gethostname().encode(errors="replace").decode()  # some systems let it be any bytes
    return f"{host}:{os.getpid()}:{new_token()[:6]}"


def served(sagas: Iterable[Saga[Any]], limits: Limits) -> dict[tuple[str, int], Saga[Any]]:
    """The sagas by name and version. Raises InvalidInput, DefinitionError: now, rather than at the first run."""
    by_version: dict[tuple[str, int], Saga[Any]] = {}
    for saga in check_several("sagas", sagas, "Saga objects", "[saga]"):
        check_kind("sagas", saga, Saga, "[saga]")
        if (saga.name, saga.version) in by_version:
            raise DefinitionError(saga.name, None, f"the worker was given version {saga.version} twice")
        _ = saga.fingerprint  # refuses a wrong definition
        limits.check_room(saga)
        by_version[saga.name, saga.version] = saga
    if not by_version:
        raise InvalidInput("sagas", "a worker needs at least one saga to serve")
    return by_version


def where(fault: BaseException) -> dict[str, str]:
    """An unforeseen exception for the log: its type and place, never its text or variables, which may be a payload."""
    return {"error": type(fault).__name__, "where": "".join(traceback.format_tb(fault.__traceback__))}
