"""The metrics of the newest diagnosis, and of the health of each source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from kvdiag.model import Diagnosis, Finding, GrowthFigures, Snapshot, Status
from kvdiag.outputs.metrics.families import Row, bounded, family, field_family, one_of, single
from kvdiag.outputs.presentation import ORDER, problems_of

STATUSES: tuple[Status, ...] = ("ok", "suspect", "fault", "unknown")
GROWTH_FIELDS = {
    "growth_bytes_per_second": "bytes_per_second",
    "growth_low_bytes_per_second": "low_bytes_per_second",
    "growth_high_bytes_per_second": "high_bytes_per_second",
    "time_to_exhaustion_seconds": "exhaustion_seconds",
    "time_to_exhaustion_low_seconds": "exhaustion_low_seconds",
    "time_to_exhaustion_high_seconds": "exhaustion_high_seconds",
}
"""Metrics and their fields of a verdict's growth."""


def diagnosis_families(diagnosis: Diagnosis | None, at_seconds: float | None) -> Iterator[Metric]:
    """Each verdict's status, and the figures that alerts are based on."""
    findings = bounded(diagnosis.findings if diagnosis is not None else ())
    statuses: dict[str, Status] = {}
    for finding in findings:
        statuses[finding.id] = min(statuses.get(finding.id, "ok"), finding.status, key=ORDER.index)
    rows: list[Row] = [
        ((verdict, *labels), value)
        for verdict, status in statuses.items()
        for labels, value in one_of(status, STATUSES)
    ]
    yield family("finding", rows)
    problems = problems_of(findings)
    yield from _growth_families(problems)
    imbalances = [finding.imbalance for finding in problems if finding.imbalance is not None]
    for name, field in (("bytes", "excess_bytes"), ("lost_tokens", "lost_tokens")):
        known = [value for one in imbalances if (value := getattr(one, field)) is not None]
        yield family(f"rank_imbalance_{name}", single(max(known, default=None)))
    yield family("diagnosis_status", one_of(None if diagnosis is None else diagnosis.worst, STATUSES))
    yield family("diagnosis_timestamp_seconds", single(at_seconds))


def _growth_families(findings: Sequence[Finding]) -> Iterator[Metric]:
    """Growth and the time until exhaustion; of a verdict about several holders, the first to exhaust memory."""
    found: dict[str, Finding] = {}
    for finding in findings:
        if finding.id not in found or _urgency(finding.growth) < _urgency(found[finding.id].growth):
            found[finding.id] = finding
    growths = [((verdict,), one.growth) for verdict, one in found.items()]
    for name, field in GROWTH_FIELDS.items():
        yield field_family(name, field, growths)
    holders = [((one.id, one.holder), 1.0) for one in found.values() if one.holder is not None]
    yield family("finding_holder_info", holders)


def _urgency(growth: GrowthFigures | None) -> tuple[float, float]:
    """The sort key of growth: the first to exhaust memory first, then the fastest."""
    if growth is None:
        return math.inf, 0.0
    left = growth.exhaustion_seconds
    return math.inf if left is None else left, -growth.bytes_per_second


def source_families(snapshot: Snapshot) -> Iterator[Metric]:
    """Whether each source is read, its failures and duration, and the time of the newest sample."""
    sources = [((one.source,), one) for one in snapshot.sources]
    for name, field in (
        ("source_up", "up"),
        ("source_errors", "errors_total"),
        ("sample_duration_seconds", "duration_seconds"),
        ("ticks", "ticks_total"),
        ("ticks_missed", "ticks_missed_total"),
    ):
        yield field_family(name, field, sources)
    yield family("connections_refused", single(snapshot.refused_total))
    yield family("sample_timestamp_seconds", single(snapshot.newest.at_seconds or None))
