"""The isolation step: two tenants send the same prompts; neither may be answered from the other's cache.

Runs alone, and only with `kvdiag run --isolation`; judged in kvdiag/diagnosis/cache_isolation.py.
"""

from __future__ import annotations

from kvdiag.diagnosis.blocks.step_accounting import unknown
from kvdiag.diagnosis.cache_isolation import ISOLATION, probed, timing, verdict
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.step import Step
from kvdiag.model import Facts, Probe, Quantity, StepResult, Timeline, Workload

ID = ISOLATION


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> StepResult:
    """Hit ratios by who had sent the prompts before, and what time to first token reveals."""
    found = probed(timeline, facts)
    spans = timeline.spans(ID)
    if found is None:
        return unknown(ID, "it did not run", spans[0] if spans else None)
    status, summary = verdict(found, limits)
    note = timing(found, limits)
    shares = (("other_salt_hit_ratio", found.salted), ("other_unsalted_hit_ratio", found.unsalted))
    return StepResult(
        ID,
        status,
        summary,
        expected=tuple(Quantity(name, 0.0, "ratio") for name, _ in shares),
        measured=(
            Quantity("requests", sum(one.problem is None for one in found.answers), "requests"),
            Quantity("own_hit_ratio", found.own.hit_ratio, "ratio"),
            *(Quantity(name, arm.hit_ratio, "ratio") for name, arm in shares),
        ),
        notes=(*spans[0].notes, *(() if note is None else (note,))),
    )


STEP = Step(
    id=ID,
    title="Prefix isolation: the same prompts from two tenants",
    workload=Workload(requests=1, prompt_tokens=2048, max_tokens=1, probe=Probe(kind="first")),
    cycles=30,
    judge=judge,
)
