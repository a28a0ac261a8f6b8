"""Logging through structlog, as the application has configured it.

Where it has configured nothing, structlog would print everything to standard output. A library has no business there:
then warnings go to standard error, and what steps log themselves from level info on.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Final

import structlog

__all__ = ["get_logger"]

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
