"""The metrics of the newest diagnosis, and of the health of each source."""

import math

from kvdiag.model import Diagnosis, Finding, GrowthFigures, Snapshot, Status
from kvdiag.outputs.metrics.families import Figures, Row, bounded, one_of, single
from kvdiag.outputs.presentation import ORDER, problems_of

STATUSES: tuple[Status, ...] = ("ok", "suspect", "fault", "unknown")


def diagnosis_figures(diagnosis: Diagnosis | None, at_seconds: float | None) -> Figures:
    """Each verdict's status, and the figures that alerts are based on."""
    findings = bounded(diagnosis.findings if diagnosis is not None else ())
    now = None if diagnosis is None else diagnosis.present_worst
    if diagnosis is not None and diagnosis.down_since_seconds is not None and now == "ok":
        now = "unknown"  # nothing is healthy of a server that is down
    statuses: dict[str, Status] = {}
    for finding in findings:
        statuses[finding.id] = min(statuses.get(finding.id, "ok"), finding.status, key=ORDER.index)
    rows: list[Row] = [
        ((verdict, *labels), value)
        for verdict, status in statuses.items()
        for labels, value in one_of(status, STATUSES)
    ]
    problems = problems_of(findings)
    found: dict[str, Finding] = {}  # of a verdict about several holders, the first to exhaust memory
    for finding in problems:
        if finding.id not in found or _urgency(finding.growth) < _urgency(found[finding.id].growth):
            found[finding.id] = finding
    imbalances = [finding.imbalance for finding in problems if finding.imbalance is not None]
    excess = [one.excess_bytes for one in imbalances if one.excess_bytes is not None]
    lost = [one.lost_tokens for one in imbalances if one.lost_tokens is not None]
    return {
        "finding": rows,
        "growth": [((verdict,), one.growth) for verdict, one in found.items()],
        "finding_when": [((verdict,), one) for verdict, one in found.items()],
        "finding_or_info": [((one.id, one.or_id), 1.0) for one in found.values() if one.or_id is not None],
        "finding_holder_info": [((one.id, one.holder), 1.0) for one in found.values() if one.holder is not None],
        "rank_imbalance_bytes": single(max(excess, default=None)),
        "rank_imbalance_lost_tokens": single(max(lost, default=None)),
        "diagnosis_status": one_of(now, STATUSES),
        "diagnosis_timestamp_seconds": single(at_seconds),
    }


def _urgency(growth: GrowthFigures | None) -> tuple[float, float]:
    """The sort key of growth: the first to exhaust memory first, then the fastest."""
    if growth is None:
        return math.inf, 0.0
    left = growth.exhaustion_seconds
    return math.inf if left is None else left, -growth.bytes_per_second


def source_figures(snapshot: Snapshot) -> Figures:
    """Whether each source is read, its failures and duration, and the time of the newest sample."""
    return {
        "source": [((one.source,), one) for one in snapshot.sources],
        "connections_refused": single(snapshot.refused_total),
        "otlp_push_failures": single(snapshot.push_failures_total),
        "sample_timestamp_seconds": single(snapshot.newest.at_seconds or None),
    }
