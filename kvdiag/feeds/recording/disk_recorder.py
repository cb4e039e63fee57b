"""The flight recorder: what a daemon sees, written by a thread of its own.

A disk that is slow, full or gone costs recorded samples, which are counted, and no sample of the daemon's. A kill loses
half a second.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import structlog

from kvdiag.feeds.recording.restore import Before
from kvdiag.feeds.recording.segment_store import SegmentStore
from kvdiag.model import Facts, Sample

_log = structlog.get_logger()

RETRY_SECONDS = 1.0
"""After a failure, until the disk is tried again."""

MOST_WAITING = 2048
"""Orders that wait for a disk that hangs: some minutes of samples, then they are lost."""

GATHERED_SECONDS = 0.5
"""How long orders wait for others, so that the thread need not be woken for each; a kill loses them."""

LAST_SECONDS = 1.0
"""At the end, for what still waits."""


class DiskRecorder:
    """Has `SegmentStore` written by a thread; nothing here waits, and nothing raises."""

    def __init__(
        self, segments: SegmentStore, before: Before | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin the thread."""
        self._segments = segments
        self.before = before
        """What was recorded by an earlier run."""
        self._clock = clock
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._hurry = threading.Event()
        self._problem: str | None = None
        self._retry_seconds = 0.0
        self.lost_total = 0
        """Samples that came and were not written."""
        self._thread = threading.Thread(target=self._work_off, name="recorder", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str | None:
        """Why nothing can be recorded now, `None` while it can."""
        if self._orders.qsize() >= MOST_WAITING:
            return f"{self._segments.folder} cannot be written to: its disk hangs"
        return self._problem

    def begin(self, facts: Facts) -> None:
        """What comes is of these facts."""
        self._orders.put(lambda: self._segments.begin(facts))

    def add(self, sample: Sample) -> None:
        """Record one sample."""
        if self._orders.qsize() >= MOST_WAITING:
            self.lost_total += 1
        else:
            self._orders.put(lambda: self._add(sample))

    def keep(self, samples: Sequence[Sample]) -> None:
        """Keep a minute that was thinned, for the next start."""
        if samples and self._orders.qsize() < MOST_WAITING:
            self._orders.put(lambda: self._segments.keep(samples))

    def renew_history(self, samples: Sequence[Sample]) -> None:
        """Put this in place of the history that there is."""
        self._orders.put(lambda: self._segments.renew_history(samples))

    def clock_was_set(self, seconds: float) -> None:
        """Times from now on are not in one order with those before."""
        self._orders.put(lambda: self._segments.clock_was_set(seconds))

    def resize(self, max_bytes: int) -> None:
        """Have another size from now on."""
        self._orders.put(lambda: self._segments.resize(max_bytes))

    def drained(self) -> None:
        """Wait until everything so far has been written, or a second."""
        over = threading.Event()
        self._orders.put(over.set)
        self._hurry.set()
        over.wait(LAST_SECONDS)

    def close(self) -> None:
        """Write what waits, and end; a disk that hangs is left behind."""
        self._orders.put(self._segments.close)
        self._orders.put(None)
        self._hurry.set()
        self._thread.join(LAST_SECONDS)

    def _add(self, sample: Sample) -> None:
        if self._problem is not None and self._clock() < self._retry_seconds:
            self.lost_total += 1
            return
        try:
            self._segments.add(sample)
        except Exception:
            self.lost_total += 1
            raise
        if self._problem is not None:
            _log.info("recorder", state="records again", lost=self.lost_total)
            self._problem = None

    def _work_off(self) -> None:
        while (order := self._next()) is not None:
            try:
                order()
            except Exception as error:  # noqa: BLE001  whatever it is, it costs recorded samples and never the recorder
                if self._problem is None:
                    _log.warning("recorder", reason=str(error))
                self._problem = str(error)
                self._retry_seconds = self._clock() + RETRY_SECONDS
            # What it holds may be large, and the next order far away.
            del order

    def _next(self) -> Callable[[], None] | None:
        """The next order; where there is none, those of a while are waited for."""
        while True:
            with contextlib.suppress(Empty):
                return self._orders.get_nowait()
            self._hurry.wait(GATHERED_SECONDS)
            self._hurry.clear()
