"""Requests of our own that failed because device memory ran out, with the figures of torch's message.

A failed request counts as short of memory only by torch's own message in the response, never by its status. The
message's unallocated bytes separate fragmentation (alone they were enough) from lack of memory (with the free bytes
they were not); in between, and where the free bytes alone were enough, it is unknown. Live servers and post-mortems are
judged by this one rule.
"""

from dataclasses import dataclass
from typing import Literal

from kvdiag.diagnosis.limits import Limits
from kvdiag.formatting import format_bytes
from kvdiag.model import Evidence, Outcome, Span, Timeline
from kvdiag.oom.message import ANCHORS, SEGMENT_BYTES, Shortage, parse_shortage

_TORCH = tuple(pattern for kind, pattern in ANCHORS if kind in {"torch", "limit", "async"})
_FULL = tuple(pattern for kind, pattern in ANCHORS if kind == "kv_full")


def memory_failures(timeline: Timeline) -> tuple[tuple[Span, Shortage], ...]:
    """Every span with a request that failed with an out-of-memory message, in order, with its largest such request."""
    failures = []
    for span in timeline.spans():
        errors = () if span.outcome is None else span.outcome.errors
        shortages = [shortage for error in errors if (shortage := parse_oom(error)) is not None]
        if shortages:
            failures.append((span, max(shortages, key=lambda shortage: shortage.asked_bytes or 0)))
    return tuple(failures)


def oom_error(outcome: Outcome | None) -> str | None:
    """The first error of a load that says that device memory ran out, with or without figures."""
    errors = () if outcome is None else outcome.errors
    return next((error for error in errors if "out of memory" in error.lower()), None)


def pool_full(outcome: Outcome) -> bool:
    """Whether an engine that neither queues nor preempts refused requests of a load for lack of room in its KV pool."""
    return any(pattern.search(error) for error in outcome.errors for pattern in _FULL)


def parse_oom(text: str) -> Shortage | None:
    """The figures of torch's out-of-memory message in a failed response; `None` where the text has none."""
    begins = [found.start() for pattern in _TORCH if (found := pattern.search(text)) is not None]
    shortage = parse_shortage("torch", text[min(begins) :]) if begins else None
    return None if shortage is None or shortage.asked_bytes is None else shortage


SNAPSHOT = "for the next failure, install the agent: it records the largest free block (`kvdiag agent install`)"


@dataclass(frozen=True, slots=True)
class Holes:
    """Whether fragmentation explains the failure, and the figures; `slight` where the device was almost full."""

    state: Literal["confirmed", "slight", "none", "unknown"]
    reason: str
    figures: str = ""

    @property
    def explain_it(self) -> bool:
        """Whether they do, as far as the figures show."""
        return self.state in ("confirmed", "slight")


def holes_in_message(shortage: Shortage, limits: Limits) -> Holes:
    """Judge fragmentation by the figures of torch's message.

    Before torch gives up it has released every whole free segment, so what its message calls unallocated lay between
    live blocks, or waited for another stream. Free and unallocated bytes do not join to one block: only unallocated
    bytes that alone would have been enough speak for holes.
    """
    asked, free, unallocated = shortage.asked_bytes, shortage.free_bytes, shortage.unallocated_bytes
    if shortage.kind != "torch" or asked is None:
        return Holes("unknown", f"the failure has no torch figures; {SNAPSHOT}")
    if unallocated is None or free is None:
        sizes = {"free": free, "reserved-but-unallocated": unallocated}
        missing = " or ".join(name for name, size in sizes.items() if size is None)
        return Holes("unknown", f"the message has no figure for {missing} memory; {SNAPSHOT}")
    known = f"{format_bytes(asked)} requested, {format_bytes(free)} free"
    figures = f"{known}, {format_bytes(unallocated)} reserved but unallocated"
    if free >= asked:
        late = "other processes released memory before the message was written, or another limit refused it"
        return Holes("unknown", f"the free bytes alone are enough, so {late}; look for a limit on the process", figures)
    if unallocated >= asked == SEGMENT_BYTES:
        # What torch prints is the segment that it wanted, and small blocks have segments of their own.
        return Holes("unknown", f"a small allocation, which torch serves only from small blocks; {SNAPSHOT}", figures)
    if unallocated >= asked:
        slight = shortage.total_bytes is not None and unallocated < limits.holes_ratio * shortage.total_bytes
        reason = "the unallocated bytes would be enough if they were in one piece"
        return Holes("slight" if slight else "confirmed", reason, figures)
    if free + unallocated < asked:
        return Holes("none", "not enough in total, so memory ran out; it is not fragmentation", figures)
    both = "enough only if added up, and one allocation cannot use both"
    return Holes("unknown", f"{both}; {SNAPSHOT}", figures)


def shortage_evidence(shortage: Shortage) -> tuple[Evidence, ...]:
    """The figures of torch's message as evidence."""
    return (
        Evidence("requested", shortage.asked_bytes, "bytes", "torch's message"),
        Evidence("free_on_device", shortage.free_bytes, "bytes", "torch's message"),
        Evidence("reserved_but_unallocated", shortage.unallocated_bytes, "bytes", "torch's message"),
    )
