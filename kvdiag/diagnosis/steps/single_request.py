"""Step 2: one request, several times. Its blocks must match its tokens and all be released.

Judged on the later cycles: the first cycles load kernels and workspaces lazily that are never released, so comparing
memory before and after a single request is wrong for 47 to 100 % of healthy servers.
"""

from __future__ import annotations

from kvdiag.diagnosis.blocks.step_accounting import (
    blind_spot,
    compare,
    fill_quantity,
    floor_after,
    floor_before,
    measure,
    quantities,
    unknown,
)
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.step import Step
from kvdiag.formatting import format_count, plural
from kvdiag.model import Facts, Quantity, StepResult, Timeline, Workload

ID = "single_request"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> StepResult:
    """Compare the peak with the blocks that the tokens need, and count unreleased blocks, after the first cycle."""
    spans = timeline.spans(ID)
    later = spans[1:] if len(spans) > 1 else spans
    problems = [blind_spot(timeline, facts, span, limits) for span in later]
    judged = [span for span, problem in zip(later, problems, strict=True) if problem is None]
    if not judged:
        return unknown(ID, next(filter(None, problems), "it did not run"), spans[-1] if spans else None)
    first, last = floor_before(timeline, facts, judged[0], limits), floor_after(timeline, facts, judged[-1], limits)
    peaks = [
        growth
        for span in judged
        if (floor := floor_before(timeline, facts, span, limits)) is not None
        and (growth := measure(timeline, facts, span, floor)) is not None
    ]
    if first is None or last is None or not peaks:
        return unknown(ID, "the pool did not settle between the requests", judged[-1])
    worst = max(peaks, key=lambda growth: abs(growth.excess_blocks))
    status, sentence = compare(worst, limits)
    kept = last - first
    # Cycles in between whose load was not observed may have leaked as well: their requests count.
    between = later[later.index(judged[0]) : later.index(judged[-1]) + 1]
    requests = sum(span.outcome.completed for span in between if span.outcome)
    loads = plural(requests, "request")
    if kept > 0:
        status = "fault"
        sentence = f"{plural(kept, 'block')} not released after {loads}; {sentence}"
    elif kept < 0:
        # Blocks in use before the step were released: other requests held them.
        sentence = f"all blocks released, and {format_count(-kept)} that were in use before; {sentence}"
    else:
        sentence = f"all blocks released (detection limit 1 block over {loads}); {sentence}"
    expected = quantities(facts, worst, worst.need.most_blocks, Quantity("blocks_kept", 0, "blocks"))
    measured = quantities(
        facts,
        worst,
        worst.held_blocks,
        Quantity("blocks_kept", kept, "blocks"),
        fill_quantity(worst),
        Quantity("cycles_judged", len(judged), "cycles"),
        # Detection limit: one block over all requests.
        Quantity("smallest_detectable_leak", round(1 / max(requests, 1), 3), "blocks per request"),
    )
    return StepResult(ID, status, sentence, expected=expected, measured=measured, notes=judged[-1].notes)


STEP = Step(
    id=ID,
    title="One request, several times: memory must be released",
    workload=Workload(requests=1, prompt_tokens=512, max_tokens=128, hold_seconds=0.5),
    cycles=8,
    judge=judge,
)
