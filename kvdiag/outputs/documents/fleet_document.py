"""The JSON document of many replicas, `schema_version` 2. Its schema is `fleet.schema.json`."""

import math

from kvdiag.diagnosis.fleet import Fleet, VersionChange, VersionGrowth, VersionReplicas
from kvdiag.outputs.documents import Json, diagnosis_document, fields_of, plain
from kvdiag.outputs.documents.diagnosis_document import SCHEMA_VERSION
from kvdiag.outputs.fleet_results import FleetDiagnosis, Judged
from kvdiag.stats import Interval


def document(result: FleetDiagnosis) -> Json:
    """The whole document: the replicas with the worst first, each in the form of a document of its own."""
    times = {"start": "start_seconds", "end": "end_seconds", "join_tolerance_seconds": "join_seconds"}
    return {
        "schema_version": SCHEMA_VERSION,
        "worst": result.worst,
        "source": None if result.source is None else fields_of(result.source, "url", "match", **times),
        "replicas": [_replica(one) for one in result.judged],
        "fleet": {"replicas": len(result.judged), "by_worst": dict(result.by_worst), **compared(result.fleet)},
        "gaps": plain(result.gaps),
    }


def _replica(one: Judged) -> Json:
    own = diagnosis_document.document(one.diagnosis)
    kept = {
        name: own[name] for name in ("worst", "down_since_seconds", "window", "lives", "findings", "ledger", "gaps")
    }
    return {"subject": dict(one.subject), "server": own["subject"], **kept}


def compared(fleet: Fleet) -> Json:
    """Versions, how each component grows in each, how each differs from the one before, and what that means."""
    return {
        "worst": fleet.worst,
        "versions": [_replicas(one) for one in fleet.versions],
        "growths": [_growth(one) for one in fleet.growths],
        "changes": [_change(one) for one in fleet.changes],
        "findings": plain(fleet.findings),
    }


def _replicas(one: VersionReplicas) -> Json:
    return {**plain(one.version), **fields_of(one, "replicas", "compared", "hours", "restarts", "worst")}


def _growth(one: VersionGrowth) -> Json:
    names = ("component", "course", "replicas", "hours", "age_hours", "load_reported")
    figures = fields_of(one, *names, later_half_per_hour="later_per_hour")
    return {**plain(one.version), **figures, **_tested(one), "per_hour": _interval(one.per_hour)}


def _change(one: VersionChange) -> Json:
    names = ("older", "newer", "component", "faster", "older_replicas", "newer_replicas")
    figures = fields_of(one, *names, later_half_more_per_hour="later_per_hour")
    return figures | _tested(one) | {"more_per_hour": _interval(one.per_hour)}


def _tested(one: VersionGrowth | VersionChange) -> Json:
    return {"unit": one.component.unit, **fields_of(one, "p_value", "false_discovery_ratio")}


def _interval(interval: Interval) -> Json:
    """An interval; its bounds are null if there are too few replicas."""
    low, high = (None if math.isinf(bound) else bound for bound in (interval.low, interval.high))
    return {"low": low, "median": interval.estimate, "high": high}
