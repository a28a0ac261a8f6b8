"""`sagas worker`: run a worker until it is told to drain."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import sys
from contextlib import AbstractAsyncContextManager
from typing import Any

import structlog

from sagas.cli.opening import called, code_of
from sagas.cli.printing import DONE
from sagas.cli.words import Commands, Usage
from sagas.tenant_worker import TenantWorker
from sagas.worker import Worker

__all__ = ["add", "spare_collector"]


def add(commands: Commands) -> None:
    """The command that runs a worker."""
    worker = commands.add_parser("worker", help="run a worker until SIGTERM or SIGINT")
    worker.add_argument(
        "target",
        metavar="MODULE:ATTRIBUTE",
        help="a Worker or TenantWorker; or a function, async or not, that returns one; or an async context manager",
    )
    worker.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="default: info; debug shows tracebacks of the target's own code",
    )
    worker.add_argument("--log-json", action="store_true", help="one JSON object per log line")
    worker.set_defaults(act=_worker)


async def _worker(options: argparse.Namespace) -> int:
    _configure_logs(options.log_level, as_json=options.log_json)
    made = await called(options.target)
    async with contextlib.AsyncExitStack() as stack:
        with code_of(options.target):
            worker = await stack.enter_async_context(made) if isinstance(made, AbstractAsyncContextManager) else made
        if not isinstance(worker, Worker | TenantWorker):
            raise Usage(f"{options.target} is {type(worker).__name__}, not a Worker")
        spare_collector()
        await worker.run()
        if worker.left_behind:
            # A step that swallows its cancellation, or a thread, would keep the process for ever. Its run's lease
            # lapses, and whatever it still does is in doubt already.
            print(f"sagas worker: leaving {worker.left_behind} steps that do not end", file=sys.stderr, flush=True)
            os._exit(DONE)
    return DONE


def spare_collector() -> None:
    """Let Python's cycle collector look less often, and never again at what was imported; for a worker's own process.

    A worker makes many objects that live for a step and hardly any cycles, while hundreds of runs in flight are much
    to look through: it is a tenth of the engine's time otherwise.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def _configure_logs(level: str, *, as_json: bool) -> None:
    last: Any = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
