"""Logs to stderr: readable on a terminal, as JSON lines elsewhere. Silent without -v."""

import contextlib
import logging
import select
import sys
from importlib import import_module
from types import ModuleType
from typing import TextIO


def import_without(unused: str, module: str) -> ModuleType:
    """Import a module as if another, which it would import, were not installed; later imports find that again.

    `None` in `sys.modules` makes an import fail (Python's reference, "The module cache").
    """
    hidden = unused not in sys.modules
    if hidden:
        sys.modules[unused] = None  # type: ignore[assignment]  # what the reference says
    try:
        return import_module(module)
    finally:
        if hidden:
            del sys.modules[unused]


# rich is 6 MiB and 60 ms for tracebacks that kvdiag never logs.
import_without("rich", "structlog")

import structlog  # noqa: E402 - after the import above


class _Stderr:
    """Writes each line to the current stderr; lines are lost if it is closed, full, or not read.

    A daemon whose log is not read must neither exit nor block.
    """

    def msg(self, line: str) -> None:
        """Write one line, or lose it."""
        with contextlib.suppress(OSError, ValueError):
            # A pipe that is ready takes 4 KiB: more at once, such as a traceback, would wait for its reader.
            for start in range(0, len(line) + 1, 1024):
                if _takes_more(sys.stderr):
                    sys.stderr.write(f"{line}\n"[start : start + 1024])
                    sys.stderr.flush()

    debug = info = warning = error = critical = msg


def _takes_more(stream: TextIO) -> bool:
    """Whether a line can be written without a wait: a pipe says so while it has room for one of 4 KiB."""
    try:
        descriptor = stream.fileno()
    except OSError:
        return True  # not a file at all
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))


LEVELS = (logging.CRITICAL, logging.INFO, logging.DEBUG)


def configure(verbose: int) -> None:
    """Log nothing but the critical (0), from info on (1), or everything (2 and more)."""
    lines = structlog.processors
    # As JSON a traceback is a text like any other, and has to be made one; on a terminal it is shown as it is.
    shown = (
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if sys.stderr.isatty()
        else [lines.format_exc_info, lines.JSONRenderer()]
    )
    structlog.configure(
        processors=[lines.add_log_level, lines.TimeStamper(fmt="iso"), *shown],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[min(verbose, len(LEVELS) - 1)]),
        logger_factory=_Stderr,
        cache_logger_on_first_use=True,
    )
