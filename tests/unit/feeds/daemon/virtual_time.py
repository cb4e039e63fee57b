"""An event loop whose clock jumps to the next timer instead of waiting: for what timers and tasks alone decide."""

import asyncio
import fcntl
import selectors
import struct
import termios
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

THREAD_SECONDS = 10.0
"""Longest that a thread is waited for once no timer is left."""

DELIVERY_SECONDS = 0.001
"""Bytes in flight between two sockets are waited for in steps of this: a busy kernel does not deliver them at once."""


class _Jump(selectors.DefaultSelector):
    """A selector that lets no time pass, and says how much would have."""

    passed_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            # Nothing is due: a thread, of which the loop's clock knows nothing, may still have to answer.
            ready = super().select(THREAD_SECONDS)
            assert ready, "nothing left to wait for: a deadlock"
        while not ready and timeout:
            # Checked before the selector, so that what arrives in between is not missed.
            in_flight = self._in_flight()
            ready = super().select(DELIVERY_SECONDS if in_flight else 0)
            if not in_flight:
                break
        if not ready and timeout is not None:
            self.passed_seconds += max(timeout, 0.0)
        return ready

    def _in_flight(self) -> bool:
        """Whether a connection is being made, or bytes that one of our sockets sent are not delivered yet."""
        keys = self.get_map().values()
        return any(key.events & selectors.EVENT_WRITE or _undelivered_bytes(key.fd) for key in keys)


def _undelivered_bytes(descriptor: int) -> int:
    """What a socket sent and the other side has not received (SIOCOUTQ, tcp(7)); 0 while it connects."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))[0])
    except OSError:
        return 0


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.passed_seconds

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]  # as asyncio.to_thread asks
        """Work of a thread takes none of the loop's time: it is done at once."""
        assert executor is None
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  for the task that awaits it
            future.set_exception(error)
        return future

    def spend(self, seconds: float) -> None:
        """Let time pass without anything running, as work does that does not wait."""
        self._jump.passed_seconds += seconds


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end at once, however long it waits."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(work)


def spend(seconds: float) -> None:
    """Be busy for so long, from within `run`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop)
    loop.spend(seconds)


def now_seconds() -> float:
    """Seconds since `run` began."""
    return asyncio.get_running_loop().time()
