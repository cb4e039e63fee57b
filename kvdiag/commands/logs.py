"""Logs to stderr: for a person on a terminal, as JSON lines elsewhere. Silent unless asked for with -v."""

from __future__ import annotations

import logging
import sys
from types import ModuleType


def _without_rich() -> ModuleType:
    """Structlog, which imports rich wherever that is there: 6 MiB and 60 ms for tracebacks that kvdiag never logs.

    A module that stands as `None` among the imported ones is one that there is not (Python's reference, "The import
    system"); who needs rich imports it afterwards as ever.
    """
    hidden = "rich" not in sys.modules
    if hidden:
        sys.modules["rich"] = None  # type: ignore[assignment]  # what the reference says
    try:
        import structlog  # noqa: PLC0415 - in here alone is rich hidden
    finally:
        if hidden:
            del sys.modules["rich"]
    return structlog


structlog = _without_rich()

LEVELS = (logging.CRITICAL, logging.INFO, logging.DEBUG)


def configure(verbose: int) -> None:
    """Log nothing but the critical (0), from info on (1), or everything (2 and more)."""
    renderer = structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[min(verbose, len(LEVELS) - 1)]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
