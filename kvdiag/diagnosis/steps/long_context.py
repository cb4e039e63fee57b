"""Step 4: one request of 16K. Growth must be linear in tokens; for windowed layers it must follow their own curve."""

from __future__ import annotations

from kvdiag.diagnosis.blocks.expected import grows_with_every_token
from kvdiag.diagnosis.blocks.step_accounting import highest_blocks, judge_load, last_span, nominal_need, refused
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.step import Step
from kvdiag.diagnosis.timeline_queries import whole_number
from kvdiag.model import Facts, Quantity, StepResult, Timeline, Workload

ID = "long_context"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> StepResult:
    """Peak against the tokens' need; and, watched all the way, never more than the finished request needs.

    A straight line through nothing and the finished request lies below its end everywhere: a duplicate or a leak on the
    way shows as an overshoot even where the end is right. Windowed layers hold a prefill chunk on top of their window,
    so only their end is judged.
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
    sentence = (
        "growth is linear" if linear else f"on the way it held {whole_number(overshoot)} blocks more than at its end"
    )
    return StepResult(
        id=ID,
        status=result.status if linear or result.status == "fault" else "suspect",
        summary=f"{result.summary}; {sentence}",
        expected=(*result.expected, Quantity(name="highest_blocks", value=most.most_blocks, unit="blocks")),
        measured=(*result.measured, Quantity(name="highest_blocks", value=highest, unit="blocks")),
        notes=result.notes,
    )


STEP = Step(
    id=ID,
    title="One request of 16K: growth must be linear",
    workload=Workload(requests=1, prompt_tokens=16384, max_tokens=128, hold_seconds=1.5),
    cycles=1,
    judge=judge,
)
