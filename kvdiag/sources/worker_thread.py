"""Runs blocking calls that may hang on daemon threads, which are abandoned if they do.

A driver call that hangs cannot be interrupted. Its thread is a daemon, so that it never keeps the process from ending;
there is one thread per reader, so that a hung call is never repeated in parallel.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from kvdiag.formatting import format_duration

T = TypeVar("T")

MAX_THREADS = 32
"""Of an event loop. Each attempt to connect to a name looks it up on one, whether an earlier look-up hangs or not."""


class ReadTimeout(Exception):  # noqa: N818  it is a result ("not yet"), not an error
    """The read has been running for `since_seconds` and has not returned."""

    def __init__(self, name: str, since_seconds: float) -> None:
        """Keep the reader's name, and how long it has been running."""
        super().__init__(name, since_seconds)
        self.name = name
        self.since_seconds = since_seconds

    def __str__(self) -> str:
        return f"{self.name} has not answered for {format_duration(self.since_seconds)}"


class ThreadedReader(Generic[T]):
    """Calls `read` from an event loop without blocking it; for any number of tasks of one loop."""

    def __init__(self, read: Callable[..., T], name: str) -> None:
        """Start nothing yet; `name` is what `ReadTimeout` and the thread are called after."""
        self._read = read
        self._name = name
        self._call: _Call[T] | None = None
        self._thread = DaemonThreadPool(1, name)
        self._closed = False
        self.answered = False
        """Whether a read ever found something, which its caller says."""

    async def ask(self, timeout_seconds: float, **kwargs: object) -> T:
        """What `read(**kwargs)` returns or raises; `ReadTimeout` where this call or an earlier one takes longer.

        A result that arrives too late is dropped: it is as old as the call.
        """
        if self._closed:
            raise RuntimeError(f"{self._name} is closed")
        deadline_seconds = time.monotonic() + timeout_seconds
        while self._call is not None:
            await self._finish(self._call, deadline_seconds)
        call = self._call = _Call(partial(self._thread.submit, self._read, **kwargs))
        await self._finish(call, deadline_seconds)
        return call.outcome.result()

    def close(self) -> None:
        """Accept no more reads and stop the thread, now or when its current read returns."""
        self._closed = True
        self._thread.shutdown()

    async def _finish(self, call: _Call[T], deadline_seconds: float) -> None:
        if not await call.over(deadline_seconds):
            raise ReadTimeout(self._name, time.monotonic() - call.begun_seconds)
        if self._call is call:
            self._call = None


class _Call(Generic[T]):
    """One run of a read: the thread runs it, any number of tasks wait for it, each with its own timeout."""

    def __init__(self, begin: Callable[[], Future[T]]) -> None:
        self.begun_seconds = time.monotonic()
        self._wakers: set[Callable[[], None]] = set()
        self.outcome = begin()
        self.outcome.add_done_callback(self._wake)

    def _wake(self, _: Future[T]) -> None:
        for wake in self._wakers.copy():
            wake()

    async def over(self, deadline_seconds: float) -> bool:
        """Wait until the read is over, at most until the deadline; whether it is.

        asyncio.wrap_future does not work here: a wait that times out would cancel the outcome, or leave a callback for
        every call made while the read hangs.
        """
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # The loop may have ended long before the read.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(woken.set)

        # Added before the look at the outcome: a read that ends in between wakes in vain, and none is missed.
        self._wakers.add(wake)
        try:
            if not self.outcome.done():
                async with asyncio.timeout(max(deadline_seconds - time.monotonic(), 0.0)):
                    await woken.wait()
        except TimeoutError:
            pass
        finally:
            self._wakers.discard(wake)
        return self.outcome.done()


class DaemonThreadPool(ThreadPoolExecutor):
    """Runs calls, such as an event loop's name look-ups, on daemon threads: a hung call does not block exit."""

    def __init__(self, most_threads: int = MAX_THREADS, name: str = "loop") -> None:
        """Start nothing yet. Calls wait while `most_threads` are busy; `name` is what the threads are called after."""
        super().__init__(max_workers=most_threads, thread_name_prefix=name)
        self._name = name
        self._most_threads = most_threads
        self._started = self._idle = 0
        self._guard = threading.Lock()
        self._waiting: SimpleQueue[_Work | None] = SimpleQueue()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call `fn` on a thread."""
        outcome: Future[T] = Future()
        with self._guard:
            if self._idle:
                self._idle -= 1
            elif self._started < self._most_threads:
                self._started += 1
                threading.Thread(target=self._work, name=f"{self._name}-{self._started}", daemon=True).start()
        self._waiting.put((outcome, partial(fn, *args, **kwargs)))
        return outcome

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT002
        """Stop the threads, each when its call returns, without waiting for them."""
        super().shutdown(wait=False)
        for _ in range(self._started):
            self._waiting.put(None)

    def _work(self) -> None:
        while (work := self._waiting.get()) is not None:
            outcome, call = work
            del work
            if outcome.set_running_or_notify_cancel():
                try:
                    outcome.set_result(call())
                except BaseException as error:  # noqa: BLE001  every error is passed to the caller
                    outcome.set_exception(error)
            del outcome, call
            with self._guard:
                self._idle += 1


_Work = tuple[Future[Any], Callable[[], Any]]
