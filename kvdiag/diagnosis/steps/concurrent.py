"""Step 3: ten requests of 2K tokens at once. Blocks in use must match what their tokens need."""

from __future__ import annotations

from kvdiag.diagnosis.blocks.step_accounting import judge_load
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.step import Step
from kvdiag.model import Facts, StepResult, Timeline, Workload

ID = "concurrent"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> StepResult:
    """Compare the peak with all requests resident with what their tokens need."""
    return judge_load(ID, timeline, facts, limits)


STEP = Step(
    id=ID,
    title="Ten concurrent requests of 2K tokens: growth must match their tokens",
    workload=Workload(requests=10, prompt_tokens=2048, max_tokens=256, hold_seconds=2.0),
    cycles=1,
    judge=judge,
)
