"""Logging through structlog, as the application has configured it.

Where it has configured nothing, structlog would print everything to standard output. A library has no business there:
then warnings go to standard error, and what steps log themselves from level info on.

What the engine says itself may get lost, where a disk is full or standard error is closed; that ends nothing. A step's
own lines are the step's own business.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any, Final

import structlog

__all__ = ["EngineLog", "engine_log", "get_logger"]

_PROCESSORS: Final[list[Any]] = [
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
]


def get_logger(name: str) -> Any:
    """The application's structlog logger of this name; a quiet one of ours where it has configured none."""
    if structlog.is_configured():
        return structlog.get_logger(name)
    level = logging.INFO if name == "sagas.step" else logging.WARNING
    return structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=_PROCESSORS,
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )


class EngineLog:
    """A logger that never raises: a line that cannot be written must not take leases or runs with it."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def bind(self, **values: object) -> EngineLog:
        """The same with these values in each line."""
        return EngineLog(self._logger.bind(**values))

    def info(self, event: str, **values: object) -> None:
        """What happens every day."""
        with contextlib.suppress(Exception):
            self._logger.info(event, **values)

    def warning(self, event: str, **values: object) -> None:
        """What passes by itself."""
        with contextlib.suppress(Exception):
            self._logger.warning(event, **values)

    def error(self, event: str, **values: object) -> None:
        """What somebody should look at."""
        with contextlib.suppress(Exception):
            self._logger.error(event, **values)


def engine_log(name: str) -> EngineLog:
    """For what the engine itself has to say."""
    return EngineLog(get_logger(name))
