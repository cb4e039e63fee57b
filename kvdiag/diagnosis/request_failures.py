"""Requests of our own that failed because device memory ran out, with the figures of torch's message."""

from __future__ import annotations

from dataclasses import dataclass

from kvdiag.model import Span, Timeline
from kvdiag.oom.message import ANCHORS, parse_shortage

_TORCH = tuple(pattern for kind, pattern in ANCHORS if kind in {"torch", "limit", "async"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Bytes that were requested, that the driver had free, and that torch had reserved but not allocated."""

    asked_bytes: int
    free_bytes: int | None
    unallocated_bytes: int | None

    @property
    def room_left(self) -> bool | None:
        """Whether free and unallocated bytes together would have been enough.

        `None` where a figure is missing, and where the free bytes alone were enough: then other processes released
        memory before the message was made, or another limit refused it, and fragmentation has no part in it.
        """
        if self.free_bytes is None or self.unallocated_bytes is None or self.free_bytes >= self.asked_bytes:
            return None
        return self.asked_bytes <= self.free_bytes + self.unallocated_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFailure:
    """One span whose requests ran out of memory."""

    span: Span
    failed: int
    oom: OutOfMemory


def memory_failures(timeline: Timeline) -> tuple[MemoryFailure, ...]:
    """Every span with a request that failed with an out-of-memory message, in order."""
    failures = []
    for span in timeline.spans():
        outcome = span.outcome
        ooms = [] if outcome is None else [oom for error in outcome.errors if (oom := parse_oom(error)) is not None]
        if outcome is not None and ooms:
            largest = max(ooms, key=lambda oom: oom.asked_bytes)
            failures.append(MemoryFailure(span=span, failed=outcome.failed, oom=largest))
    return tuple(failures)


def parse_oom(text: str) -> OutOfMemory | None:
    """The figures of torch's out-of-memory message in a failed response; `None` where the text has none."""
    begins = [found.start() for pattern in _TORCH if (found := pattern.search(text)) is not None]
    if not begins:
        return None
    told = parse_shortage("torch", text[min(begins) :])
    if told.asked_bytes is None:
        return None
    return OutOfMemory(
        asked_bytes=told.asked_bytes, free_bytes=told.free_bytes, unallocated_bytes=told.unallocated_bytes
    )
