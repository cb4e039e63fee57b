"""Judge growth of host memory by the size limits of the process's caches: it fills one, or is beyond all of them."""

from __future__ import annotations

from dataclasses import replace

from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.growth.host_caches import Bound, bound_of
from kvdiag.diagnosis.growth.memory_series import MemoryOwner, MemorySeries, memory_series
from kvdiag.diagnosis.limits import Limits
from kvdiag.formatting import format_bytes
from kvdiag.model import Evidence, Facts, Finding, Status, Timeline


def within_its_limit(
    judged: Finding, owner: MemoryOwner, seen: MemorySeries, part: MemoryComponent, facts: Facts, limits: Limits
) -> Finding:
    """A leak's finding as it is where growth exceeds the limits of the process's caches, or none is known.

    Within a limit that is set it is ok, within one that is only assumed a step less certain.
    """
    bound = bound_of(owner.who, facts)
    if bound is None:
        return judged
    grown = seen.grown_bytes(part, owner)
    full = f"{format_bytes(grown)} of {format_bytes(bound.limit_bytes)}"
    shown = (*judged.evidence, *_evidence(grown, bound))
    if grown > limits.growth.cache_passed_ratio * bound.limit_bytes:
        summary = f"{judged.summary}; beyond the size limit of {bound.names} ({full})"
        return replace(judged, evidence=shown, summary=summary)
    if bound.told:
        summary = f"{owner.who}: {part.label} grows within the size limit of {bound.names} ({full}): still filling"
        return replace(judged, status="ok", evidence=shown, summary=summary)
    status: Status = "suspect" if judged.status == "fault" else "unknown"
    summary = f"{judged.summary}; it may be {bound.names} filling ({full})"
    return replace(judged, status=status, evidence=shown, summary=summary)


def filling(timeline: Timeline, facts: Facts, limits: Limits, verdict: str) -> Finding | None:
    """The fullest cache of a known size limit that fills while it is watched; `None` where none does."""
    seen = memory_series(timeline, facts, limits)
    part, found = MemoryComponent.HOST_ANONYMOUS, []
    for owner, assessed in seen.assessed(part, limits.growth).items():
        bound, growth = bound_of(owner.who, facts), assessed.decides
        if bound is None or not bound.told or growth is None:
            continue
        if not growth.grows and growth.reason not in ("ended", "slowing"):
            continue
        grown = seen.grown_bytes(part, owner)
        if grown <= limits.growth.cache_passed_ratio * bound.limit_bytes:
            found.append((grown / bound.limit_bytes, grown, bound, owner.who))
    if not found:
        return None
    ratio, grown, bound, who = max(found, key=lambda one: (one[0], one[3]))
    full = f"{format_bytes(grown)} of {format_bytes(bound.limit_bytes)}, {ratio:.0%}"
    summary = f"{who}: {bound.names} is still filling ({full})"
    return Finding(id=verdict, status="ok", summary=summary, evidence=_evidence(grown, bound))


def _evidence(grown_bytes: int, bound: Bound) -> tuple[Evidence, ...]:
    return (
        Evidence("grown_since_first_sample", grown_bytes, "bytes", "host"),
        Evidence("cache_size_limit", bound.limit_bytes, "bytes", bound.names),
        Evidence("full", grown_bytes / bound.limit_bytes, "ratio", "computed"),
    )
