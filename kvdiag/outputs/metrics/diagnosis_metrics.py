"""The metrics of the newest diagnosis, and of the health of each source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from kvdiag.model import Diagnosis, Finding, GrowthFigures, Snapshot, Status
from kvdiag.outputs.metrics.families import bounded, counter, gauge

STATUSES: tuple[Status, ...] = ("ok", "suspect", "fault", "unknown")
_BADNESS: Mapping[Status, int] = {"ok": 0, "unknown": 1, "suspect": 2, "fault": 3}


def diagnosis_families(diagnosis: Diagnosis | None, at_seconds: float | None) -> Iterator[Metric]:
    """Each verdict's status, and the figures that alerts are based on."""
    findings = bounded(diagnosis.findings if diagnosis is not None else ())
    worst: dict[str, Status] = {}
    for finding in findings:
        known = worst.get(finding.id)
        if known is None or _BADNESS[finding.status] > _BADNESS[known]:
            worst[finding.id] = finding.status
    rows = [((verdict, status), float(status == found)) for verdict, found in worst.items() for status in STATUSES]
    yield gauge("kvdiag_finding", "1 for a verdict's current status, 0 for the others.", ("id", "status"), rows)
    yield from _growth_families([one for one in findings if one.status in ("suspect", "fault")])
    yield from _imbalance_families([one for one in findings if one.status in ("suspect", "fault")])
    worsts = [] if diagnosis is None else [((status,), float(status == diagnosis.worst)) for status in STATUSES]
    text = "1 for the overall status of the newest diagnosis, 0 for the others."
    yield gauge("kvdiag_diagnosis_status", text, ("status",), worsts)
    moments = [] if at_seconds is None else [((), at_seconds)]
    yield gauge("kvdiag_diagnosis_timestamp_seconds", "Time of the newest diagnosis, since the epoch.", (), moments)


def _growth_families(findings: list[Finding]) -> Iterator[Metric]:
    """Growth and what it leaves of the room: of a verdict found in several holders, the one that fills it first."""
    found: dict[str, Finding] = {}
    for finding in findings:
        if finding.id not in found or _hurry(finding.growth) < _hurry(found[finding.id].growth):
            found[finding.id] = finding
    for name, field, text in (
        ("growth_bytes_per_second", "bytes_per_second", "Growth of the memory that a verdict is about."),
        ("growth_low_bytes_per_second", "low_bytes_per_second", "Lower bound of the growth."),
        ("growth_high_bytes_per_second", "high_bytes_per_second", "Upper bound of the growth."),
        ("time_to_exhaustion_seconds", "exhaustion_seconds", "Time until memory is exhausted at the growth found."),
        ("time_to_exhaustion_low_seconds", "exhaustion_low_seconds", "Lower bound of the time until exhaustion."),
        (
            "time_to_exhaustion_high_seconds",
            "exhaustion_high_seconds",
            "Upper bound of the time until exhaustion; absent if there is none.",
        ),
    ):
        known = {verdict: getattr(one.growth, field, None) for verdict, one in found.items()}
        rows = [((verdict,), float(value)) for verdict, value in known.items() if value is not None]
        yield gauge(f"kvdiag_{name}", text, ("id",), rows)
    holders = [((one.id, one.holder), 1.0) for one in found.values() if one.holder is not None]
    yield gauge(
        "kvdiag_finding_holder_info",
        "The process or device that a verdict is about; always 1.",
        ("id", "holder"),
        holders,
    )


def _hurry(growth: GrowthFigures | None) -> tuple[float, float]:
    """How soon it needs somebody, the soonest first."""
    if growth is None:
        return math.inf, 0.0
    left = growth.exhaustion_seconds
    return math.inf if left is None else left, -growth.bytes_per_second


def _imbalance_families(findings: list[Finding]) -> Iterator[Metric]:
    seen = [finding.imbalance for finding in findings if finding.imbalance is not None]
    for name, field, text in (
        ("bytes", "excess_bytes", "Bytes that one rank uses in excess of the others."),
        ("lost_tokens", "lost_tokens", "KV-cache tokens that the uneven rank costs every rank."),
    ):
        known = [value for one in seen if (value := getattr(one, field)) is not None]
        yield gauge(f"kvdiag_rank_imbalance_{name}", text, (), [((), float(max(known)))] if known else [])


def source_families(snapshot: Snapshot) -> Iterator[Metric]:
    """Whether each source is read, its failures and duration, and the time of the newest sample."""
    labels, sources = ("source",), snapshot.sources
    up = [((one.source,), float(one.up)) for one in sources]
    yield gauge("kvdiag_source_up", "Whether the newest reading of a source succeeded.", labels, up)
    errors = [((one.source,), float(one.errors_total)) for one in sources]
    yield counter("kvdiag_source_errors", "Failed readings of a source.", labels, errors)
    took = [((one.source,), one.duration_seconds) for one in sources if one.duration_seconds is not None]
    yield gauge("kvdiag_sample_duration_seconds", "Duration of the newest reading of a source.", labels, took)
    for name, field, told in (
        ("kvdiag_ticks", "ticks_total", "Times at which a source was due to be read."),
        (
            "kvdiag_ticks_missed",
            "ticks_missed_total",
            "Times at which a source was due and not read, because something took too long.",
        ),
    ):
        rows = [((one.source,), float(count)) for one in sources if (count := getattr(one, field)) is not None]
        yield counter(name, told, labels, rows)
    text = "Connections to kvdiag's own port closed without an answer because all places were taken."
    refused = [] if snapshot.refused_total is None else [((), float(snapshot.refused_total))]
    yield counter("kvdiag_connections_refused", text, (), refused)
    text = "Time of the newest sample, since the epoch."
    moments = [((), snapshot.newest.at_seconds)] if snapshot.newest.at_seconds else []
    yield gauge("kvdiag_sample_timestamp_seconds", text, (), moments)
