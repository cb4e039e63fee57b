"""Replicas for tests of a fleet: a day of each at a reading in ten minutes, on any kind of memory."""

from __future__ import annotations

from dataclasses import replace

from kvdiag.diagnosis.fleet import ReplicaSummary, summarise
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Facts, Finding, Timeline
from tests.builders import SERVER_PID, pool
from tests.series import Part, host_part, timeline, torch_part

FACTS = Facts(
    engine_name="vllm", engine_version="0.32.0", model="m", pools=(pool(),), server_pids=(SERVER_PID, SERVER_PID + 1)
)
LIVE = torch_part(live=True)


def day(
    seed: int, *, name: str = "fast noise", leak: float = 0.0, part: Part = LIVE, hours: float = 24.0, busy: bool = True
) -> Timeline:
    """One replica's readings; `leak` in MB/h."""
    return timeline(name, seed, hours=hours, tick_seconds=600.0, leak_mb_per_hour=leak, part=part, busy=busy)


def unloaded(seen: Timeline) -> Timeline:
    """The same readings where no engine is seen."""
    return Timeline(samples=tuple(replace(sample, engines=None) for sample in seen.samples))


def replica(seen: Timeline, name: str, facts: Facts = FACTS, version: str | None = None) -> ReplicaSummary:
    """The summary of a replica."""
    return summarise(seen, facts, DEFAULT_LIMITS, replica=name, version=version)


def replicas(
    count: int,
    *,
    name: str = "fast noise",
    leak: float = 0.0,
    part: Part = LIVE,
    hours: float = 24.0,
    version: str = "0.32.0",
) -> list[ReplicaSummary]:
    """So many replicas of one version, each with its own noise and load."""
    return [
        replica(day(seed, name=name, leak=leak, part=part, hours=hours), f"{version}/{seed}", version=version)
        for seed in range(count)
    ]


def of(found: tuple[Finding, ...], verdict: str) -> list[Finding]:
    """The findings of one verdict."""
    return [one for one in found if one.id == verdict]


HOST = host_part
