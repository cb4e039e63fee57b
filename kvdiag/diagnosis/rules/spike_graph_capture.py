"""spike.graph_capture: CUDA graphs do not fit next to the pool, and the server exits before its first answer.

A timeline alone shows that a start failed and how little memory was free; whether graphs were being captured at that
time stands only in the engine's log (kvdiag/diagnosis/postmortem/transients.py). An engine that serves has its graphs.
"""

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import unknown
from kvdiag.diagnosis.server_exits import server_exits
from kvdiag.diagnosis.timeline_queries import gap_reason
from kvdiag.formatting import format_bytes
from kvdiag.model import Evidence, Facts, Finding, Timeline

ID = "spike.graph_capture"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Look for starts that ended before the engine answered."""
    starts = [one for one in server_exits(timeline, facts, limits) if not one.answered_before]
    if starts:
        last = starts[-1]
        summary = (
            f"the server exited while starting; before that, at least {format_bytes(last.free_before_bytes)} of GPU "
            f"{last.gpu} was free; pass its log to `kvdiag diagnose --postmortem` to see if it was capturing graphs"
        )
        evidence = (
            Evidence("failed_starts", len(starts), "starts", "engine"),
            Evidence("gpu", last.gpu, "index", "nvml"),
            Evidence("min_free_before_exit", last.free_before_bytes, "bytes", "nvml"),
            Evidence("freed_by_exit", last.came_free_bytes, "bytes", "nvml"),
        )
        return (Finding(ID, "unknown", summary, evidence),)
    if any(sample.engines for sample in timeline.samples):
        return (Finding(ID, "ok", "the engine has served, so graph capture succeeded"),)
    unseen = "no engine start was observed; restart the engine while `kvdiag serve` runs"
    return unknown(ID, gap_reason(timeline, facts, "engine") or unseen)
