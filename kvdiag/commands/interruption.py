"""Signals that end a command as Ctrl-C does, so that what it began elsewhere is ended too: SIGTERM and SIGHUP.

A supervisor sends SIGTERM, a terminal that closes SIGHUP. They cannot be passed on as SIGINT, which background jobs of
a shell ignore. A signal that is ignored already, such as SIGHUP under nohup, stays ignored.
"""

import asyncio
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signal handler's form
    """Act on a signal as on Ctrl-C."""
    raise KeyboardInterrupt


def end_on_signals() -> None:
    """Let both signals raise KeyboardInterrupt from now on."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)


def interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, or until Ctrl-C or one of the signals, which cancel the work: it then withdraws what it began.

    Raises:
        KeyboardInterrupt: it was cancelled.
    """
    try:
        return asyncio.run(_until_signalled(work))
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error


async def _until_signalled(work: Coroutine[Any, Any, T]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def cancel(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signal handler's form
        if task is not None:
            loop.call_soon_threadsafe(task.cancel)

    before = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, cancel)
    try:
        return await work
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
