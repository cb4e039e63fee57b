"""Requests of our own that failed because device memory ran out, with the figures of torch's message."""

from __future__ import annotations

from kvdiag.model import Evidence, Span, Timeline
from kvdiag.oom.message import ANCHORS, Shortage, parse_shortage

_TORCH = tuple(pattern for kind, pattern in ANCHORS if kind in {"torch", "limit", "async"})


def memory_failures(timeline: Timeline) -> tuple[tuple[Span, Shortage], ...]:
    """Every span with a request that failed with an out-of-memory message, in order, with its largest such request."""
    failures = []
    for span in timeline.spans():
        errors = () if span.outcome is None else span.outcome.errors
        shortages = [shortage for error in errors if (shortage := parse_oom(error)) is not None]
        if shortages:
            failures.append((span, max(shortages, key=lambda shortage: shortage.asked_bytes or 0)))
    return tuple(failures)


def parse_oom(text: str) -> Shortage | None:
    """The figures of torch's out-of-memory message in a failed response; `None` where the text has none."""
    begins = [found.start() for pattern in _TORCH if (found := pattern.search(text)) is not None]
    shortage = parse_shortage("torch", text[min(begins) :]) if begins else None
    return None if shortage is None or shortage.asked_bytes is None else shortage


def enough_room(shortage: Shortage) -> bool | None:
    """Whether free and unallocated bytes together were enough for the request that failed.

    `None` where a figure is missing, and where the free bytes alone were enough: then other processes released memory
    before the message was made, or another limit refused it, and fragmentation has no part in it.
    """
    asked, free, unallocated = shortage.asked_bytes, shortage.free_bytes, shortage.unallocated_bytes
    if asked is None or free is None or unallocated is None or free >= asked:
        return None
    return asked <= free + unallocated


def shortage_evidence(shortage: Shortage) -> tuple[Evidence, ...]:
    """The figures of torch's message as evidence."""
    return (
        Evidence("requested", shortage.asked_bytes, "bytes", "torch's message"),
        Evidence("free_on_device", shortage.free_bytes, "bytes", "torch's message"),
        Evidence("reserved_but_unallocated", shortage.unallocated_bytes, "bytes", "torch's message"),
    )
