"""A fleet: replicas of one version compared with one another, and versions of one model with the ones before.

`summarise` keeps a few numbers of each replica's history, which may be dropped then; `compare` judges them together.
Pure, as all of the diagnosis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from kvdiag.diagnosis import informed
from kvdiag.diagnosis.fleet.fleet_verdicts import findings
from kvdiag.diagnosis.fleet.replica import ReplicaSummary, Version, summarise
from kvdiag.diagnosis.fleet.version_comparison import (
    VersionChange,
    VersionGrowth,
    by_version,
    version_changes,
    version_growths,
)
from kvdiag.diagnosis.growth.estimator import HOUR_SECONDS
from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits
from kvdiag.diagnosis.rule import SEVERITY
from kvdiag.model import Finding, Status

__all__ = [
    "Fleet",
    "ReplicaSummary",
    "Version",
    "VersionChange",
    "VersionGrowth",
    "VersionReplicas",
    "compare",
    "summarise",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionReplicas:
    """How many replicas run a version, and how many of them have lived long enough to be compared.

    `hours` is the median replica's life after its first hour, `restarts` those of all replicas.
    """

    version: Version
    replicas: int
    compared: int
    hours: float
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The judgement of a fleet: what grows in which version, how the versions differ, and what that means."""

    worst: Status
    versions: tuple[VersionReplicas, ...]
    growths: tuple[VersionGrowth, ...]
    changes: tuple[VersionChange, ...]
    findings: tuple[Finding, ...]


def compare(summaries: Iterable[ReplicaSummary], limits: Limits = DEFAULT_LIMITS) -> Fleet:
    """Judge replicas together; their order does not matter."""
    # What is equal by version and figures is sorted by name, so that no order of arrival shows.
    versions = by_version(sorted(summaries, key=lambda one: one.replica))
    growths, changes = version_growths(versions, limits), version_changes(versions, limits)
    counted = tuple(
        VersionReplicas(
            version=version,
            replicas=len(each),
            compared=sum(bool(one.growths) for one in each),
            hours=median(one.watched_seconds for one in each) / HOUR_SECONDS,
            restarts=sum(one.restarts for one in each),
        )
        for version, each in versions.items()
    )
    found = tuple(
        informed(finding)
        for one in counted
        for finding in findings(one.version, one.replicas, one.compared, growths, changes, limits)
    )
    # A component that no replica reports counts only if nothing at all could be compared.
    seen: list[Status] = [one.status for one in found if one.status != "unknown" or one.evidence] or ["unknown"]
    worst = max(seen, key=SEVERITY.index)
    return Fleet(worst=worst, versions=counted, growths=growths, changes=changes, findings=found)
