"""A fleet: replicas of one version compared with one another, and versions of one model with the ones before.

In this order: `summarise` keeps a few numbers of each replica's history, which may be dropped then; `compare` groups
them by version, tests each component's growth over all replicas of a version, then one version against the one before,
and makes verdicts of both. Replicas are independent of one another, which samples of one replica are not: growth too
small to show in one is certain in all. Pure, as all of the diagnosis.
"""

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
from kvdiag.diagnosis.growth.growth_evidence import HOUR_SECONDS
from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits
from kvdiag.diagnosis.rule import SEVERITY
from kvdiag.model import Finding, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionReplicas:
    """How many replicas run a version, how many of them have lived long enough to be compared, and what that found.

    `hours` is the median replica's life after its first hour, `restarts` those of all replicas.
    """

    version: Version
    replicas: int
    compared: int
    hours: float
    restarts: int
    findings: tuple[Finding, ...]

    @property
    def worst(self) -> Status:
        """The worst verdict on the version; `unknown` ones count only if there are no others."""
        found: set[Status] = {one.status for one in self.findings} - {"unknown"}
        return max(found, key=SEVERITY.index, default="unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The judgement of a fleet: what grows in which version, how the versions differ, and what that means."""

    worst: Status
    versions: tuple[VersionReplicas, ...]
    growths: tuple[VersionGrowth, ...]
    changes: tuple[VersionChange, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings on all versions."""
        return tuple(finding for one in self.versions for finding in one.findings)


def compare(summaries: Iterable[ReplicaSummary], limits: Limits = DEFAULT_LIMITS) -> Fleet:
    """Judge replicas together; their order does not matter."""
    # What is equal by version and figures is sorted by name, so that no order of arrival shows.
    versions = by_version(sorted(summaries, key=lambda one: one.replica))
    growths, changes = version_growths(versions, limits), version_changes(versions, limits)
    counted = tuple(
        VersionReplicas(
            version=version,
            replicas=len(each),
            compared=compared,
            hours=median(one.watched_seconds for one in each) / HOUR_SECONDS,
            restarts=sum(one.restarts for one in each),
            findings=tuple(map(informed, findings(version, compared, growths, changes, limits))),
        )
        for version, each in versions.items()
        for compared in [sum(bool(one.growths) for one in each)]
    )
    found = [finding for one in counted for finding in one.findings]
    # A component that no replica reports counts only if nothing at all could be compared.
    seen: list[Status] = [one.status for one in found if one.status != "unknown" or one.evidence] or ["unknown"]
    return Fleet(worst=max(seen, key=SEVERITY.index), versions=counted, growths=growths, changes=changes)
