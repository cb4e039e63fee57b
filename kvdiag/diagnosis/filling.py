"""Growth on the host under the bound of a known cache: it fills, and is no leak until it goes through its bound."""

from __future__ import annotations

from dataclasses import replace

from kvdiag.diagnosis.caps import Bound, bound_of
from kvdiag.diagnosis.history import History, Holder, Part, history
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import number
from kvdiag.diagnosis.timeline_queries import readable_bytes
from kvdiag.diagnosis.window import LEAKS
from kvdiag.model import Evidence, Facts, Finding, Status, Timeline


def under_its_bound(
    judged: Finding, holder: Holder, seen: History, part: Part, facts: Facts, limits: Limits
) -> Finding:
    """A leak's finding as it is where growth went through the bound of the process's caches, or none is known.

    Under a bound that is told it is ok, under one that is only assumed a step less certain.
    """
    bound = bound_of(holder.who, facts)
    if bound is None:
        return judged
    grown = seen.grown_bytes(part, holder)
    full = f"{readable_bytes(grown)} of {readable_bytes(bound.limit_bytes)}"
    shown = (*judged.evidence, *_evidence(grown, bound))
    if grown > limits.cap_passed_ratio * bound.limit_bytes:
        return replace(judged, evidence=shown, summary=f"{judged.summary}; through the bound of {bound.names}: {full}")
    if bound.told:
        what = "resident" if part == "resident" else "anonymous"
        summary = f"{holder.who}: {what} bytes grow under the bound of {bound.names}, {full}: it fills"
        return replace(judged, status="ok", evidence=shown, summary=summary)
    status: Status = "suspect" if judged.status == "fault" else "unknown"
    summary = f"{judged.summary}; it may be {bound.names} that fills: {full}"
    return replace(judged, status=status, evidence=shown, summary=summary)


def filling(timeline: Timeline, facts: Facts, limits: Limits, verdict: str) -> Finding | None:
    """The fullest cache of a known bound that fills while it is watched; `None` where none does."""
    seen = history(timeline, facts, limits)
    found = []
    for holder, watched in seen.watched("anonymous", limits).items():
        bound, trend = bound_of(holder.who, facts), watched.decides
        if bound is None or not bound.told or trend is None or trend.shape not in (*LEAKS, "ended"):
            continue
        grown = seen.grown_bytes("anonymous", holder)
        if grown <= limits.cap_passed_ratio * bound.limit_bytes:
            found.append((grown / bound.limit_bytes, grown, bound, holder.who))
    if not found:
        return None
    ratio, grown, bound, who = max(found, key=lambda one: (one[0], one[3]))
    summary = (
        f"{who}: {bound.names} fills: {readable_bytes(grown)} of {readable_bytes(bound.limit_bytes)} ({ratio:.0%})"
    )
    return Finding(id=verdict, status="ok", summary=summary, evidence=_evidence(grown, bound))


def _evidence(grown_bytes: int, bound: Bound) -> tuple[Evidence, ...]:
    return (
        number("grown_since_first_reading", grown_bytes, "bytes", "host"),
        number("bound_of_caches", bound.limit_bytes, "bytes", bound.names),
        number("full", grown_bytes / bound.limit_bytes, "ratio", "computed"),
    )
