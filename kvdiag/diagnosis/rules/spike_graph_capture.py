"""spike.graph_capture: CUDA graphs do not fit beside the pool, and the server dies before its first answer.

What a timeline alone shows is that a start ended and how little was left; whether graphs were being captured then only
the engine's log tells (kvdiag/diagnosis/postmortem/transients.py). An engine that answers has its graphs.
"""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.diagnosis.server_exits import deaths
from kvdiag.diagnosis.timeline_queries import gap_reason, readable_bytes
from kvdiag.model import Facts, Finding, Timeline

ID = "spike.graph_capture"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Look for starts that ended before the engine answered."""
    starts = [death for death in deaths(timeline, facts, limits) if not death.answered_before]
    if starts:
        last = starts[-1]
        summary = (
            f"cannot tell: a start ended before the engine answered, with {readable_bytes(last.free_before_bytes)} of "
            f"GPU {last.gpu} left at the least; whether graphs were being captured its log tells (--postmortem)"
        )
        evidence = (
            number("starts_that_ended", len(starts), "starts", "engine"),
            number("gpu", last.gpu, "index", "nvml"),
            number("least_free_before", last.free_before_bytes, "bytes", "nvml"),
            number("came_free", last.came_free_bytes, "bytes", "nvml"),
        )
        return (Finding(id=ID, status="unknown", summary=summary, evidence=evidence),)
    if any(sample.engines for sample in timeline.samples):
        return (Finding(id=ID, status="ok", summary="the engine answers: what it captures at start had room"),)
    return unseen(ID, gap_reason(timeline, facts, "engine") or "no engine was seen to start")
