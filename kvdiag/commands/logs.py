"""Logs to stderr: for a person on a terminal, as JSON lines elsewhere. Silent unless asked for with -v."""

from __future__ import annotations

import logging
import sys

import structlog

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
