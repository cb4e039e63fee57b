"""Publishes from a daemon thread once a second, in every process of the server, forked ones included.

A publication does the following, in this order: nothing until the process itself has imported torch; the first time it
takes its file's name from pid and start time and removes expired files of exited processes; it reads the document, with
a new block summary where one was requested; it attaches the black box; it counts the owners of KV blocks in vLLM's
engine core, and looks at their requests; and it writes the file, in which parts that rarely change are not encoded
again. At last it looks whether a profile was requested.

The server comes first: signals are left to its threads, and no error leaves this one. A fork has only the forking
thread, so the child starts an agent of its own; the parent first waits for the lock `busy`, for `WAIT_SECONDS` at most,
since a fork during a driver call would leave the driver library locked in the child. A process that ends normally
removes its file: a file that remains is that of a killed process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from typing import Any

from . import say
from .black_box import BlackBox, LeakBox
from .block_census import Census
from .document import Document, short
from .driver import Driver
from .memory_profile import Profiler
from .process import identity
from .publication import Folder, encoded
from .request_blocks import RequestBlocks
from .schedulers import SGLANG, VLLM
from .sglang_census import SGLangCensus

PERIOD_SECONDS = 1.0
NAME = "kvdiag-agent"
REQUEST = "summary-request"
"""Touching this file in the folder requests a new summary of the allocator's blocks; its content is not read."""

SELDOM = ("ranks", "torch", "errors")
"""Parts of the document that rarely change from one second to the next."""

WAIT_SECONDS = 0.05
"""Longest wait of a fork or the process's end for a publication in progress: a driver may hang."""


class Agent:
    """This process's publisher."""

    def __init__(self, directory: str, period_seconds: float = PERIOD_SECONDS) -> None:
        """Start nothing yet."""
        self.directory = directory
        self.period_seconds = period_seconds
        self._folder = Folder(directory)
        self._document = Document(Driver())
        self._census = Census()
        self._sglang = SGLangCensus()
        self._requests = RequestBlocks()
        self._kept: dict[str, tuple[dict[str, Any], str]] = {}
        self._name: str | None = None
        self._box: BlackBox | None = None
        self._leak_box: LeakBox | None = None
        self.profiler: Profiler | None = None
        self._asked_at: int | None = None
        self._sequence = 0
        self._publish_seconds = 0.0
        self._over = False
        self._said = False
        self.busy = threading.Lock()
        """Held while this thread may be in the driver: a fork meanwhile would leave NVML locked in the child."""

    def start(self) -> None:
        """Publish from a daemon thread."""
        threading.Thread(target=self._run, name=NAME, daemon=True).start()

    def end(self) -> None:
        """Remove this process's file: a file that stays means that the process died."""
        self._over = True
        free = self.busy.acquire(timeout=WAIT_SECONDS)
        if self._name is not None:
            self._folder.drop(f"agent-{self._name}.json")
        if free:
            self.busy.release()

    def publish(self) -> None:
        """Write this process's file, as soon as it has imported torch.

        Raises:
            OSError: the folder cannot be written.
        """
        with self.busy:
            if "torch" in sys.modules and not self._over:
                began_seconds = time.perf_counter()
                self._publish()
                self._publish_seconds = time.perf_counter() - began_seconds
                self._said = True

    def _publish(self) -> None:
        asked_at = self._folder.asked_at(REQUEST)
        if self._box is None:
            who = identity()
            self._name = f"{who['pid']}-{who['start_ticks']}"
            self._box = BlackBox(self._folder, self._name)
            self._leak_box = LeakBox(self._folder, self._name, self._sglang)
            self.profiler = Profiler(self._folder, self._name)
            self._asked_at = asked_at
            self._folder.tidy()
            # A forked worker of multiprocessing ends by os._exit, which runs no atexit.
            if (forked := sys.modules.get("multiprocessing.util")) is not None:
                forked.Finalize(None, self.end, exitpriority=-100)
        summarised_at = self._document.summarised_at_seconds
        reported = self._document.read(summary=True if asked_at != self._asked_at else None)
        if self._document.summarised_at_seconds != summarised_at:
            # A request too soon after the last summary stays pending.
            self._asked_at = asked_at
        problem = self._box.attach()
        if problem is not None:
            reported["errors"]["black_box"] = problem
        if self._leak_box is not None:
            self._leak_box.attach()
        for part, counted in (("kv_blocks", self._owners), ("kv_requests", self._requests.read)):
            try:
                reported[part] = counted()
            except Exception as error:  # noqa: BLE001 - the reader is informed, and the rest is published
                reported["errors"][part] = short(error)
        self._sequence += 1
        reported.update(
            sequence=self._sequence, period_seconds=self.period_seconds, publish_seconds=self._publish_seconds
        )
        parts = {name: encoded(self._kept, name, reported.pop(name)) for name in SELDOM}
        parts["memory_stats"] = self._document.memory_stats_json
        self._folder.put(f"agent-{self._name}.json", reported, parts)
        if self.profiler is not None:
            self.profiler.poll()

    def _owners(self) -> dict[str, Any] | None:
        return self._census.read() or self._sglang.read()

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            # Leave signals to the server's threads, which may wait for them.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        due_seconds = time.monotonic() + self.period_seconds
        while not self._over:
            self._wait(due_seconds)
            # No failure of a publication may affect the server, and the next one may succeed.
            try:
                self.publish()
            except BaseException as error:  # noqa: BLE001 - as above
                # Where nothing was ever published, no publication can report the first error.
                if not self._said:
                    self._said = True
                    say(f"cannot publish in {self.directory}: {type(error).__name__}: {error}")
            due_seconds = max(due_seconds + self.period_seconds, time.monotonic())

    def _wait(self, due_seconds: float) -> None:
        """Sleep until the next publication; an SGLang scheduler's requests are noted meanwhile."""
        while (left_seconds := due_seconds - time.monotonic()) > 0:
            pause_seconds = None
            # The publication reports its errors.
            with contextlib.suppress(Exception):
                pause_seconds = self._sglang.poll() if self._said else None
            time.sleep(min(left_seconds, pause_seconds or left_seconds))


_agents: list[Agent] = []
"""This process's agent; empty before `begin`."""


def begin(directory: str) -> None:
    """Start this process's agent, and one in every process forked off from it; a second call does nothing."""
    # A second copy of this package, under another name, may be on the server's path.
    if _agents or any(thread.name == NAME for thread in threading.enumerate()):
        return
    # A server may change its working directory.
    VLLM.watch()
    SGLANG.watch()
    _agents.append(Agent(os.path.abspath(directory)))  # noqa: PTH100 - pathlib costs every Python process its import
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
    atexit.register(_end)
    _agents[0].start()


_held = threading.local()


def _before_fork() -> None:
    _held.lock = _agents[0].busy if _agents[0].busy.acquire(timeout=WAIT_SECONDS) else None


def _after_fork_in_parent() -> None:
    if _held.lock is not None:
        _held.lock.release()


def _after_fork_in_child() -> None:
    """Start an agent in the child, which has the parent's memory but none of its threads."""
    with contextlib.suppress(BaseException):
        before = _agents[0]
        VLLM.forget()
        SGLANG.forget()
        _agents[0] = Agent(before.directory, before.period_seconds)
        _agents[0].start()
        if before.profiler is not None:
            before.profiler.abandon()


def _end() -> None:
    with contextlib.suppress(Exception):
        _agents[0].end()
