"""The page's families of the newest diagnosis, and of how each source does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from kvdiag.model import Diagnosis, Finding, GrowthFigures, Snapshot, Status
from kvdiag.outputs.metrics.families import bounded, counter, gauge

STATUSES: tuple[Status, ...] = ("ok", "suspect", "fault", "unknown")
_BADNESS: Mapping[Status, int] = {"ok": 0, "unknown": 1, "suspect": 2, "fault": 3}


def diagnosis_families(diagnosis: Diagnosis | None, at_seconds: float | None) -> Iterator[Metric]:
    """Each verdict's status, and the figures of those that a person is paged for."""
    findings = bounded(diagnosis.findings if diagnosis is not None else ())
    worst: dict[str, Status] = {}
    for finding in findings:
        known = worst.get(finding.id)
        if known is None or _BADNESS[finding.status] > _BADNESS[known]:
            worst[finding.id] = finding.status
    rows = [((verdict, status), float(status == found)) for verdict, found in worst.items() for status in STATUSES]
    yield gauge("kvdiag_finding", "1 for the status that a verdict has, 0 for the others.", ("id", "status"), rows)
    yield from _growth_families([one for one in findings if one.status in ("suspect", "fault")])
    yield from _imbalance_families([one for one in findings if one.status in ("suspect", "fault")])
    worsts = [] if diagnosis is None else [((status,), float(status == diagnosis.worst)) for status in STATUSES]
    text = "1 for what the newest diagnosis says of the whole, 0 for the others."
    yield gauge("kvdiag_diagnosis_status", text, ("status",), worsts)
    moments = [] if at_seconds is None else [((), at_seconds)]
    yield gauge("kvdiag_diagnosis_timestamp_seconds", "When the diagnosis was made, since the epoch.", (), moments)


def _growth_families(findings: list[Finding]) -> Iterator[Metric]:
    """Growth and what it leaves of the room: of a verdict found in several holders, the one that fills it first."""
    found: dict[str, Finding] = {}
    for finding in findings:
        if finding.id not in found or _hurry(finding.growth) < _hurry(found[finding.id].growth):
            found[finding.id] = finding
    for name, field, text in (
        ("growth_bytes_per_second", "bytes_per_second", "How fast what a verdict calls grows."),
        ("growth_low_bytes_per_second", "low_bytes_per_second", "The least that its growth can be."),
        ("growth_high_bytes_per_second", "high_bytes_per_second", "The most that its growth can be."),
        ("time_to_exhaustion_seconds", "exhaustion_seconds", "How long the room lasts at the growth that was found."),
        ("time_to_exhaustion_low_seconds", "exhaustion_low_seconds", "The least that the room can last."),
        (
            "time_to_exhaustion_high_seconds",
            "exhaustion_high_seconds",
            "The most that the room can last; left out where that has no end.",
        ),
    ):
        known = {verdict: getattr(one.growth, field, None) for verdict, one in found.items()}
        rows = [((verdict,), float(value)) for verdict, value in known.items() if value is not None]
        yield gauge(f"kvdiag_{name}", text, ("id",), rows)
    holders = [((one.id, one.holder), 1.0) for one in found.values() if one.holder is not None]
    yield gauge("kvdiag_finding_holder_info", "Whose memory a verdict is about; always 1.", ("id", "holder"), holders)


def _hurry(growth: GrowthFigures | None) -> tuple[float, float]:
    """How soon it needs somebody, the soonest first."""
    if growth is None:
        return math.inf, 0.0
    left = growth.exhaustion_seconds
    return math.inf if left is None else left, -growth.bytes_per_second


def _imbalance_families(findings: list[Finding]) -> Iterator[Metric]:
    seen = [finding.imbalance for finding in findings if finding.imbalance is not None]
    for name, field, text in (
        ("bytes", "excess_bytes", "What one rank holds beyond the others."),
        ("lost_tokens", "lost_tokens", "KV cache that an uneven rank costs every rank."),
    ):
        known = [value for one in seen if (value := getattr(one, field)) is not None]
        yield gauge(f"kvdiag_rank_imbalance_{name}", text, (), [((), float(max(known)))] if known else [])


def source_families(snapshot: Snapshot) -> Iterator[Metric]:
    """Whether each source is read, how often it was not, how long it takes, and when anything was last read."""
    labels, sources = ("source",), snapshot.sources
    up = [((one.source,), float(one.up)) for one in sources]
    yield gauge("kvdiag_source_up", "Whether the newest reading of a source succeeded.", labels, up)
    errors = [((one.source,), float(one.errors_total)) for one in sources]
    yield counter("kvdiag_source_errors", "Readings of a source that failed.", labels, errors)
    took = [((one.source,), one.duration_seconds) for one in sources if one.duration_seconds is not None]
    yield gauge("kvdiag_sample_duration_seconds", "How long the newest reading of a source took.", labels, took)
    for name, field, told in (
        ("kvdiag_ticks", "ticks_total", "Moments at which a source was due to be read."),
        ("kvdiag_ticks_missed", "ticks_missed_total", "Those of them at which it was not: something took too long."),
    ):
        rows = [((one.source,), float(count)) for one in sources if (count := getattr(one, field)) is not None]
        yield counter(name, told, labels, rows)
    text = "Connections to kvdiag's own port that were closed without an answer: all places were taken."
    refused = [] if snapshot.refused_total is None else [((), float(snapshot.refused_total))]
    yield counter("kvdiag_connections_refused", text, (), refused)
    text = "When the newest sample was taken, since the epoch."
    moments = [((), snapshot.newest.at_seconds)] if snapshot.newest.at_seconds else []
    yield gauge("kvdiag_sample_timestamp_seconds", text, (), moments)
