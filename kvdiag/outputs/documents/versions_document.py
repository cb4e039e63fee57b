"""The comparison of all replicas as plain values, for the fleet's document."""

from __future__ import annotations

import math
from typing import Any

from kvdiag.diagnosis.fleet import Fleet, Version, VersionChange, VersionGrowth, VersionReplicas
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
        "unit": one.component.unit,
        "course": one.course,
        "replicas": one.replicas,
        "hours": one.hours,
        "age_hours": one.age_hours,
        "per_hour": _interval(one.per_hour),
        "later_half_per_hour": one.later_per_hour,
        "p_value": one.p_value,
        "false_discovery_ratio": one.false_discovery_ratio,
        "load_reported": one.load_reported,
    }


def _change(one: VersionChange) -> Json:
    return {
        "older": _version(one.older),
        "newer": _version(one.newer),
        "component": one.component,
        "unit": one.component.unit,
        "faster": one.faster,
        "older_replicas": one.older_replicas,
        "newer_replicas": one.newer_replicas,
        "more_per_hour": _interval(one.per_hour),
        "later_half_more_per_hour": one.later_per_hour,
        "p_value": one.p_value,
        "false_discovery_ratio": one.false_discovery_ratio,
    }


def _interval(interval: Interval) -> Json:
    """An interval; its bounds are null if there are too few replicas."""
    low, high = (None if math.isinf(bound) else bound for bound in (interval.low, interval.high))
    return {"low": low, "median": interval.middle, "high": high}
