"""Requests of our own that failed for want of device memory, with the figures of the message."""

from __future__ import annotations

from dataclasses import dataclass

from kvdiag.diagnosis.request_failures_text import OutOfMemory, parse_oom
from kvdiag.model import Span, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFailure:
    """One span whose requests ran out of memory."""

    span: Span
    failed: int
    oom: OutOfMemory


def memory_failures(timeline: Timeline) -> tuple[MemoryFailure, ...]:
    """Every span that had a request fail with an out-of-memory message, in order."""
    failures = []
    for span in timeline.spans():
        outcome = span.outcome
        ooms = [] if outcome is None else [oom for error in outcome.errors if (oom := parse_oom(error)) is not None]
        if outcome is not None and ooms:
            failures.append(
                MemoryFailure(span=span, failed=outcome.failed, oom=max(ooms, key=lambda oom: oom.asked_bytes))
            )
    return tuple(failures)
