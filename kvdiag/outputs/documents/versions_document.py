"""What a fleet shows, as plain values: the part of a fleet's document that is of all replicas together."""

from __future__ import annotations

import math
from typing import Any

from kvdiag.diagnosis.fleet import Fleet, Version, VersionChange, VersionGrowth, VersionReplicas
from kvdiag.diagnosis.fleet.components import BY_NAME
from kvdiag.outputs.documents.diagnosis_document import finding_values
from kvdiag.stats import Interval

Json = dict[str, Any]


def values(fleet: Fleet) -> Json:
    """Versions, how each component grows in each, how each differs from the one before, and what that means."""
    return {
        "worst": fleet.worst,
        "versions": [_replicas(one) for one in fleet.versions],
        "growths": [_growth(one) for one in fleet.growths],
        "changes": [_change(one) for one in fleet.changes],
        "findings": [finding_values(finding) for finding in fleet.findings],
    }


def _version(version: Version) -> Json:
    return {"engine": version.engine, "version": version.version, "model": version.model}


def _replicas(one: VersionReplicas) -> Json:
    return {
        **_version(one.version),
        "replicas": one.replicas,
        "compared": one.compared,
        "hours": one.hours,
        "restarts": one.restarts,
    }


def _growth(one: VersionGrowth) -> Json:
    return {
        **_version(one.version),
        "component": one.component,
        "unit": BY_NAME[one.component].unit,
        "course": one.course,
        "replicas": one.replicas,
        "hours": one.hours,
        "age_hours": one.age_hours,
        "per_hour": _interval(one.per_hour),
        "per_hour_of_later_half": one.later_per_hour,
        "chance_without_growth": one.chance,
        "false_discoveries": one.false_ratio,
        "load_told": one.beside_load,
    }


def _change(one: VersionChange) -> Json:
    return {
        "older": _version(one.older),
        "newer": _version(one.newer),
        "component": one.component,
        "unit": BY_NAME[one.component].unit,
        "faster": one.faster,
        "older_replicas": one.older_replicas,
        "newer_replicas": one.newer_replicas,
        "more_per_hour": _interval(one.per_hour),
        "more_per_hour_of_later_half": one.later_per_hour,
        "chance_of_the_difference": one.chance,
        "false_discoveries": one.false_ratio,
    }


def _interval(interval: Interval) -> Json:
    """Bounds that too few replicas leave open are null."""
    low, high = (None if math.isinf(bound) else bound for bound in (interval.low, interval.high))
    return {"low": low, "middle": interval.middle, "high": high}
