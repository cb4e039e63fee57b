"""The page's families of the newest diagnosis, and of how each source does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from kvdiag.model import Diagnosis, Finding, Snapshot, Status
from kvdiag.outputs.metrics.families import bounded, counter, gauge

STATUSES: tuple[Status, ...] = ("ok", "suspect", "fault", "unknown")
_BADNESS: Mapping[Status, int] = {"ok": 0, "unknown": 1, "suspect": 2, "fault": 3}

HOUR_SECONDS = 3600.0


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


def _figures(finding: Finding) -> dict[str, float]:
    return {one.name: float(one.value) for one in finding.evidence if isinstance(one.value, int | float)}


def _growth_families(findings: list[Finding]) -> Iterator[Metric]:
    """Growth and what it leaves of the room: of a verdict found in several holders, the one that fills it first."""
    found: dict[str, tuple[dict[str, float], Finding]] = {}
    for finding in findings:
        figures = _figures(finding)
        if finding.id not in found or _hurry(figures) < _hurry(found[finding.id][0]):
            found[finding.id] = (figures, finding)
    rates: dict[str, dict[str, float]] = {verdict: _rates(figures) for verdict, (figures, _) in found.items()}
    for name, text in (
        ("", "How fast what a verdict calls grows."),
        ("_low", "The least that its growth can be."),
        ("_high", "The most that its growth can be."),
    ):
        rows = [((verdict,), told[name]) for verdict, told in rates.items() if name in told]
        yield gauge(f"kvdiag_growth{name}_bytes_per_second", text, ("id",), rows)
    for name, field, text in (
        ("", "time_to_exhaustion", "How long the room lasts at the growth that was found."),
        ("_low", "time_to_exhaustion_earliest", "The least that the room can last."),
        ("_high", "time_to_exhaustion_latest", "The most that the room can last; left out where that has no end."),
    ):
        rows = [((verdict,), figures[field]) for verdict, (figures, _) in found.items() if field in figures]
        yield gauge(f"kvdiag_time_to_exhaustion{name}_seconds", text, ("id",), rows)
    holders = [
        ((verdict, one.value), 1.0)
        for verdict, (_, finding) in found.items()
        for one in finding.evidence
        if one.name in ("holder", "process") and isinstance(one.value, str)
    ]
    yield gauge("kvdiag_finding_holder_info", "Whose memory a verdict is about; always 1.", ("id", "holder"), holders)


def _hurry(figures: Mapping[str, float]) -> tuple[float, float]:
    """How soon it needs somebody, the soonest first."""
    return figures.get("time_to_exhaustion", float("inf")), -figures.get("growth_per_hour", 0.0)


def _rates(figures: Mapping[str, float]) -> dict[str, float]:
    """Growth in bytes per second; its bounds are those of the time that the room lasts."""
    if "growth_per_hour" not in figures:
        return {}
    rates = {"": figures["growth_per_hour"] / HOUR_SECONDS}
    room, earliest, latest = (
        figures.get(name) for name in ("room", "time_to_exhaustion_earliest", "time_to_exhaustion_latest")
    )
    if room and earliest:
        rates["_high"] = room / earliest
        rates["_low"] = room / latest if latest else 0.0
    return rates


def _imbalance_families(findings: list[Finding]) -> Iterator[Metric]:
    told = [_figures(finding) for finding in findings if finding.id == "imbalance.rank"]
    for name, field, text in (
        ("bytes", "excess", "What one rank holds beyond the others."),
        ("lost_tokens", "kv_tokens_lost", "KV cache that an uneven rank costs every rank."),
    ):
        largest = max((figures[field] for figures in told if field in figures), default=None)
        yield gauge(f"kvdiag_rank_imbalance_{name}", text, (), [] if largest is None else [((), largest)])


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
