"""Exits of earlier lives of the server, as part of what the present one shows: a restart explains no death.

A single exit may be an operator's restart, and so is any after which the server had been idle longer than ever before:
who restarts a server on purpose takes its traffic away first. From `LifeLimits.unexplained_exits` others on, the server
keeps dying, and where no life has a fault or suspect that says why, that is observed and not explained: unknown, with
the count, and never healthy.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from kvdiag.diagnosis.engine_columns import engine_columns
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.lives import Lifetime
from kvdiag.formatting import plural
from kvdiag.model import Evidence, Finding, Life, Timeline

ID = "spike.activation"


def with_earlier_exits(
    findings: tuple[Finding, ...], ended: Iterable[tuple[Lifetime, Life]], limits: Limits
) -> tuple[Finding, ...]:
    """The findings of the present life, its spike unknown where the server exited too often before it.

    Args:
        findings: those of the present life.
        ended: the lives before it, as they were observed, and judged.
        limits: `lives.unexplained_exits` is how many exits count.

    Returns:
        The same findings where there were fewer exits, or one of the lives has a fault or suspect.
    """
    lives = tuple(ended)
    # Another process follows each of these lives: one that was only unreachable has exited as well.
    exited = [life for observed, life in lives if life.end != "restarted" and not _drained(observed.timeline, limits)]
    if len(exited) < limits.lives.unexplained_exits or any(life.findings for _, life in lives):
        return findings
    detail = f"; the last time: {exited[-1].end_detail}" if exited[-1].end_detail else ""
    summary = (
        f"the server exited {plural(len(exited), 'time')} and was restarted{detail}; pass its log or the agent's black "
        "box to `kvdiag diagnose --postmortem`"
    )
    count = Evidence("earlier_exits", len(exited), "times", "engine")
    return tuple(
        replace(one, status="unknown", summary=summary, evidence=(*one.evidence, count))
        if one.id == ID and one.status in ("ok", "unknown")
        else one
        for one in findings
    )


def _drained(timeline: Timeline, limits: Limits) -> bool:
    """Whether the server was idle for its last minute, and longer than ever since its first request."""
    columns = engine_columns(timeline)
    busy = [place for place, idle in enumerate(columns.idle) if not idle]
    if not busy:
        return False
    times = columns.times_seconds
    last = len(times) - 1 - busy[-1]
    if last < limits.idle_samples or times[-1] - times[-last] < limits.lives.drained_idle_seconds:
        return False
    return all(later - earlier <= last for earlier, later in pairwise(busy))
