"""Step 4: one request of 16K tokens. Usage must grow linearly; for windowed layers it must follow their own curve."""

from __future__ import annotations

from dataclasses import replace

from kvdiag.diagnosis.blocks.expected import grows_with_every_token
from kvdiag.diagnosis.blocks.step_accounting import highest_blocks, judge_load, last_span, nominal_need, refused
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.step import Step
from kvdiag.formatting import plural
from kvdiag.model import Facts, Quantity, StepResult, Timeline, Workload

ID = "long_context"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> StepResult:
    """Compare the peak with what the tokens need, and usage at any time with what the finished request needs.

    Linear growth never exceeds its end: a duplicate or a leak on the way shows as an overshoot even where the end is
    right. Windowed layers hold a prefill chunk on top of their window, so only their end is judged.
    """
    result = judge_load(ID, timeline, facts, limits)
    span = last_span(timeline, ID)
    if result.status == "unknown" or span is None or refused(span) is not None:
        return result
    highest, most = highest_blocks(timeline, facts, span, limits), nominal_need(facts, span)
    if highest is None or most is None or not grows_with_every_token(facts):
        return result
    overshoot = highest - most.most_blocks
    linear = overshoot <= limits.blocks_per_request_tolerance
    sentence = "growth is linear" if linear else f"usage peaked {plural(overshoot, 'block')} higher during prefill"
    return replace(
        result,
        status=result.status if linear or result.status == "fault" else "suspect",
        summary=f"{result.summary}; {sentence}",
        expected=(*result.expected, Quantity("highest_blocks", most.most_blocks, "blocks")),
        measured=(*result.measured, Quantity("highest_blocks", highest, "blocks")),
    )


STEP = Step(
    id=ID,
    title="One request of 16K: growth must be linear",
    workload=Workload(requests=1, prompt_tokens=16384, max_tokens=128, hold_seconds=1.5),
    cycles=1,
    judge=judge,
)
