"""One worker process for the databases of all tenants: a worker for each, and an eye on which there are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from sagas.definition import Saga
from sagas.errors import SagaError
from sagas.log import engine_log
from sagas.signals import draining_on_signals
from sagas.worker import WORKER_NAME_MAX, Worker, WorkerOptions, served, where, worker_name
from sagas_store.inputs import check_kind, given_or
from sagas_store.numbers import check_duration
from sagas_store.tenants import TENANT_MAX, TenantDatabases

__all__ = ["TenantWorker"]


class TenantWorker:
    """Runs the sagas of every tenant that has a database of its own. Tenants that come later are served as well.

    A tenant whose database cannot be used (its schema is older, its keys are missing, `keyring_of` raises) keeps none
    of the others waiting: it is logged and tried again.
    """

    def __init__(
        self,
        databases: TenantDatabases,
        sagas: Sequence[Saga[Any]],
        *,
        resources: object = None,
        name: str | None = None,
        options: WorkerOptions | None = None,
        look: timedelta | float = timedelta(seconds=10),
    ) -> None:
        """As for `Worker`; `options.tenant_concurrency`, else `concurrency`, is how many runs of each are driven.

        `look` (a timedelta, or seconds) is how often to see which tenants there are.
        """
        fix = "TenantWorker(TenantDatabases(client), sagas); on one database: Worker(store, sagas)"
        check_kind("databases", databases, TenantDatabases, fix)
        options = given_or("options", options, WorkerOptions)
        self._options = replace(
            options,
            concurrency=options.tenant_concurrency or options.concurrency,
            tenant_concurrency=None,
            handle_signals=False,
        )
        self._handle_signals = options.handle_signals
        self._databases = databases
        self._sagas = list(served(sagas, options.limits).values())
        self._resources = resources
        self._look_s = check_duration("look", look).total_seconds()
        self.name: Final = worker_name(name, most=WORKER_NAME_MAX - 1 - TENANT_MAX)  # each of its workers appends one
        self._workers: dict[str, Worker] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self.left_behind = 0
        """As for `Worker`: steps that do not end although they were broken off."""
        self._log = engine_log("sagas.worker").bind(worker=self.name)

    async def run(self) -> None:
        """Work until told to drain, as `Worker.run`. Raises StoreUnavailable when it cannot even begin."""
        await self._databases.tenants()
        with draining_on_signals(self.stop, enabled=self._handle_signals):
            try:
                while not self._stopping.is_set():
                    await self._look()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._look_s):
                            await self._stopping.wait()
            except asyncio.CancelledError:
                # Each hands its runs back and goes, as a worker that is cancelled does.
                for running in self._running.values():
                    running.cancel()
                raise
            finally:
                if not self._stopping.is_set():  # a second word would cut the grace short
                    self.stop()
                await asyncio.gather(*self._running.values(), return_exceptions=True)
                self.left_behind = sum(worker.left_behind for worker in self._workers.values())

    def stop(self) -> None:
        """Drain all of them. Called again it cuts the grace short."""
        self._stopping.set()
        for worker in self._workers.values():
            worker.stop()

    async def _look(self) -> None:
        """Start a worker for each tenant that has none at work."""
        try:
            tenants = await self._databases.tenants()
        except SagaError as error:
            self._log.warning("looking for tenants failed, trying again", error=str(error))
            return
        for tenant in tenants:
            if self._stopping.is_set():
                return
            if tenant not in self._running or self._running[tenant].done():
                self._running[tenant] = asyncio.create_task(self._serve(tenant), name=f"worker of {tenant}")

    async def _serve(self, tenant: str) -> None:
        """Work for one tenant. Making its store runs the application's own code: that is its own trouble, too."""
        if self._stopping.is_set():
            return
        try:
            worker = self._workers[tenant] = Worker(
                self._databases.of(tenant),
                self._sagas,
                resources=self._resources,
                name=f"{self.name}/{tenant}",
                options=self._options,
            )
            await worker.run()
        except SagaError as error:
            self._log.error("a tenant is not served, trying again", tenant=tenant, error=str(error))
        except Exception as fault:
            self._log.error("a tenant is not served after a fault, trying again", tenant=tenant, **where(fault))
