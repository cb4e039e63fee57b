"""The isolation probe: two tenants send the same prompts, and one's must not be answered from the other's cache.

Only where it was asked for, and alone: `kvdiag run --isolation`.
"""

from __future__ import annotations

from kvdiag.diagnosis.blocks.step_accounting import unknown
from kvdiag.diagnosis.cache_isolation import ISOLATION, probed
from kvdiag.diagnosis.isolation_verdict import timing, verdict
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.step import Step
from kvdiag.model import Facts, Probe, Quantity, StepResult, Timeline, Workload

ID = ISOLATION


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> StepResult:
    """Shares of prompts that came from the cache, by who had sent them before, and what a clock tells of it."""
    found = probed(timeline, facts)
    spans = timeline.spans(ID)
    if found is None:
        return unknown(ID, "it did not run", spans[0] if spans else None)
    status, summary = verdict(found, limits)
    told = timing(found, limits)
    shares = (("other_salt_hit_ratio", found.salted), ("other_unsalted_hit_ratio", found.unsalted))
    return StepResult(
        id=ID,
        status=status,
        summary=summary,
        expected=tuple(Quantity(name=name, value=0.0, unit="ratio") for name, _ in shares),
        measured=(
            Quantity(name="requests", value=sum(one.problem is None for one in found.answers), unit="requests"),
            Quantity(name="own_hit_ratio", value=found.own.hit_ratio, unit="ratio"),
            *(Quantity(name=name, value=arm.hit_ratio, unit="ratio") for name, arm in shares),
        ),
        notes=(*spans[0].notes, *(() if told is None else (told,))),
    )


STEP = Step(
    id=ID,
    title="Prefix isolation: the same prompts from two tenants",
    workload=Workload(requests=1, prompt_tokens=2048, max_tokens=1, probe=Probe(kind="first")),
    cycles=30,
    judge=judge,
)
