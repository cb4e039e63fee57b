"""The flight recorder: writes the daemon's samples on a thread of its own.

A disk that is slow, full or missing costs recorded samples, which are counted, and none of the daemon's own. A kill
loses half a second.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVarTuple

import structlog

from kvdiag.feeds.recording.restore import Before
from kvdiag.feeds.recording.segment_store import SegmentStore
from kvdiag.model import Sample

_log = structlog.get_logger()

Arguments = TypeVarTuple("Arguments")

RETRY_SECONDS = 1.0
"""After a failure, until the disk is tried again."""

MAX_WAITING = 2048
"""Queue length while the disk hangs: some minutes of samples; later ones are lost."""

GATHERED_SECONDS = 0.5
"""How long orders are batched, so that the thread is not woken for each; a kill loses them."""

LAST_SECONDS = 1.0
"""At the end, to write what is still queued."""


class DiskRecorder:
    """Writes a `SegmentStore` on a thread of its own; no method waits for the disk or raises."""

    def __init__(
        self, segments: SegmentStore, before: Before | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin the thread."""
        self._segments = segments
        self.before = before
        """What was recorded by an earlier run, until it is restored."""
        self._clock = clock
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._hurry = threading.Event()
        self._problem: str | None = None
        self._retry_seconds = 0.0
        self.lost_total = 0
        """Samples that were not written."""
        self._thread = threading.Thread(target=self._work_off, name="recorder", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str | None:
        """Why nothing can be recorded now, `None` if it can."""
        if self._orders.qsize() >= MAX_WAITING:
            return f"{self._segments.folder} cannot be written to: its disk hangs"
        return self._problem

    def order(self, write: Callable[[SegmentStore, *Arguments], None], *arguments: *Arguments) -> None:
        """Have the thread call a method of the store, after all that was ordered before."""
        self._orders.put(lambda: write(self._segments, *arguments))

    def add(self, sample: Sample) -> None:
        """Record one sample."""
        if self._orders.qsize() >= MAX_WAITING:
            self.lost_total += 1
        else:
            self._orders.put(lambda: self._add(sample))

    def keep(self, samples: Sequence[Sample]) -> None:
        """Record a thinned minute, for the next start; while the disk hangs it is dropped, and not counted as lost."""
        if samples and self._orders.qsize() < MAX_WAITING:
            self.order(SegmentStore.keep, samples)

    def drained(self) -> None:
        """Wait until everything so far has been written, or a second."""
        over = threading.Event()
        self._orders.put(over.set)
        self._hurry.set()
        over.wait(LAST_SECONDS)

    def close(self) -> None:
        """Write what is queued, and end; do not wait for a disk that hangs."""
        self.order(SegmentStore.close)
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
            except Exception as error:  # noqa: BLE001  any error costs recorded samples and never the recorder
                if self._problem is None:
                    _log.warning("recorder", reason=str(error))
                self._problem = str(error)
                self._retry_seconds = self._clock() + RETRY_SECONDS
            # It may hold large samples until the next order.
            del order

    def _next(self) -> Callable[[], None] | None:
        """The next order; if there is none, wait for a batch."""
        while True:
            with contextlib.suppress(Empty):
                return self._orders.get_nowait()
            self._hurry.wait(GATHERED_SECONDS)
            self._hurry.clear()
