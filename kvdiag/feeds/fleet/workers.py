"""Spreads pure work over the machine's cores, or over another executor with the same few methods.

Work is a function of a module and its arguments; results are the same in any process. Workers are new interpreters
(spawn), because a daemon has threads, which a fork would not survive. They leave Ctrl-C to the process that waits for
them, and exit with it, however it ends. What a killed worker left is done again by new workers, once; after that it is
an error, because work that kills its process twice would do so forever.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

from kvdiag.errors import KvdiagError

T = TypeVar("T")
R = TypeVar("R")

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class Executor(Protocol):
    """Does work somewhere else, as `concurrent.futures` does, several pieces at a time."""

    lost: str
    """What to say when workers were lost twice."""

    has_files: bool
    """Whether its work can use the files of this machine."""

    @property
    def count(self) -> int:
        """Pieces that are done at the same time."""

    def submit(self, work: Callable[..., R], /, *arguments: object) -> Future[R]:
        """Begin the work, or queue it."""

    def restart(self) -> None:
        """Replace workers that were killed."""

    def kill(self) -> None:
        """Kill the workers, from any thread: what they had fails with BrokenExecutor."""

    def __enter__(self) -> Self:
        """Use it."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all work at once, finished or not."""


class InProcess:
    """Does all work in this process, when it is submitted."""

    count = 1
    lost = ""
    has_files = True

    def submit(self, work: Callable[..., R], /, *arguments: object) -> Future[R]:
        """Do it."""
        future: Future[R] = Future()
        try:
            future.set_result(work(*arguments))
        except Exception as error:  # noqa: BLE001 - the result is asked for later
            future.set_exception(error)
        return future

    def restart(self) -> None:
        """Nothing is killed here."""

    def kill(self) -> None:
        """Nor can it be."""

    def __enter__(self) -> Self:
        """Use it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""


class Processes:
    """Worker processes of this machine."""

    lost = "a worker process was killed twice: is there too little memory? lower --workers"
    has_files = True

    def __init__(self, count: int) -> None:
        """Start no process before there is work."""
        self.count = count
        self._pool = self._new()

    def _new(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self.count, mp_context=multiprocessing.get_context("spawn"), initializer=begin_worker
        )

    def submit(self, work: Callable[..., R], /, *arguments: object) -> Future[R]:
        """Queue the work; BrokenExecutor if a worker was killed."""
        # A worker that this starts has Ctrl-C blocked until it ignores it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._pool.submit(work, *arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def restart(self) -> None:
        """Replace all workers."""
        self._end()
        self._pool = self._new()

    def kill(self) -> None:
        """Terminate the workers; `restart` and the end wait for them."""
        # The pool would wait for work in progress; its processes are known by no public name.
        for process in list((self._pool._processes or {}).values()):  # noqa: SLF001
            process.terminate()

    def _end(self) -> None:
        self.kill()
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        """Use it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Terminate the workers."""
        self._end()


def executor(count: int | None, tasks: int, ray: str | None = None) -> Executor:
    """The Ray cluster at an address; or as many workers as asked for, by default one a core, none more than tasks.

    Raises:
        KvdiagError: Ray cannot be used.
    """
    if ray is not None:
        from kvdiag.feeds.fleet.ray_cluster import RayCluster  # noqa: PLC0415 - only where a cluster is asked for

        return RayCluster(ray)
    count = min(cores() if count is None else count, tasks)
    return Processes(count) if count > 1 else InProcess()


def results(pool: Executor, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R]:
    """The result of each task, in the order in which they are done; few tasks are submitted at a time.

    Raises:
        KvdiagError: workers were killed twice.
    """
    left = list(reversed(tasks))
    submitted: dict[Future[R], T] = {}
    restarted = False
    while left or submitted:
        try:
            # One more than there are workers, so that none waits for its next piece.
            while left and len(submitted) < pool.count + (pool.count > 1):
                future = pool.submit(work, left[-1])
                submitted[future] = left.pop()
            done, _ = wait(submitted, return_when=FIRST_COMPLETED)
            for future in done:
                result = future.result()
                del submitted[future]
                yield result
        except BrokenExecutor as error:
            if restarted:
                raise KvdiagError(pool.lost) from error
            restarted = True
            left += submitted.values()
            submitted.clear()
            pool.restart()


def cores(quota: Path = CPU_QUOTA) -> int:
    """The processors that this process may use: those of its affinity, and no more than its container's CPU limit."""
    allowed = len(os.sched_getaffinity(0))
    try:
        most, _, period = quota.read_text(encoding="ascii").partition(" ")
        return max(min(allowed, int(most) // int(period)), 1)
    except (OSError, ValueError, ZeroDivisionError):
        # No limit is `max`.
        return allowed


def begin_worker() -> None:
    """Leave Ctrl-C to the parent, and exit with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        wait_for([parent.sentinel])
        os._exit(1)
