"""The page at `/`: the verdict as of now, findings, memory, the last hours, the state of the sources. Pure.

It is built of the report's parts. What is not known is reported as unknown; it never looks healthy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import kvdiag
from kvdiag.formatting import format_duration, format_ratio, format_time, plural
from kvdiag.ledger import ledger
from kvdiag.model import Gap, PressureThresholds, Sample, ServerState, Snapshot
from kvdiag.outputs.current_verdict import current_verdict
from kvdiag.outputs.html.axes import shares
from kvdiag.outputs.html.downsample import pauses, runs
from kvdiag.outputs.html.kit import (
    document,
    finding_card,
    gap_rows,
    ledger_cards,
    row,
    table,
    unknown_rows,
    unobserved,
    verdict,
    verdict_rows,
)
from kvdiag.outputs.html.markup import Html, element, joined
from kvdiag.outputs.html.svg_plots import Line, Plot, figure
from kvdiag.outputs.presentation import engine_of, problems_of
from kvdiag.pressure import pressures

REFRESH_SECONDS = 15

SHOWN_SECONDS = 6 * 3600.0
LEAST_SECONDS = 300.0

MAX_DEVICES = 64
MAX_PROBLEMS = 32
MAX_LINES = 8

LINKS = (
    ("/metrics", "metrics for Prometheus"),
    ("/api/v1/diagnosis", "the newest diagnosis"),
    ("/api/v1/ledger", "the memory ledger now"),
    ("/api/v1/snapshot", "everything that `kvdiag top` shows of this daemon"),
    ("/api/v1/admission", "whether to admit one more request: ?prompt_tokens=N&max_tokens=N"),
    ("/-/healthy", "liveness"),
    ("/-/ready", "readiness: a first sample has been read"),
)

SERVER: Mapping[ServerState, str] = {
    "starting": "has not answered yet",
    "serving": "answers",
    "lost": "no longer answers",
}

Points = Sequence[tuple[float, float | None]]
"""Times in ascending order with their ratios; `None` where a reading failed."""


def page(snapshot: Snapshot, history: Sequence[Sample], now_seconds: float) -> str:
    """The whole document: what is known at `now_seconds`, and in the hours before it."""
    now = current_verdict(snapshot, now_seconds)
    facts = snapshot.facts
    subject = ", ".join(part for part in (facts.model, engine_of(facts), facts.url) if part) or "no server found yet"
    parts = (
        element("header", element("h1", "kvdiag"), element("span", subject, class_="dim")),
        verdict(now.status, now.sentence),
        *_findings(snapshot),
        *_memory(snapshot),
        *_hours(history, now_seconds),
        *_sources(snapshot, now_seconds),
        _footer(now_seconds),
    )
    return document(now.status, "kvdiag", parts, element("meta", http_equiv="refresh", content=str(REFRESH_SECONDS)))


def _findings(snapshot: Snapshot) -> Iterator[Html]:
    if snapshot.diagnosis is None:
        return
    findings = snapshot.diagnosis.findings
    problems = problems_of(findings)
    yield from map(finding_card, problems[:MAX_PROBLEMS])
    if len(problems) > MAX_PROBLEMS:
        yield element("p", f"and {plural(len(problems) - MAX_PROBLEMS, 'more finding')}")
    unknown = [one for one in findings if one.status == "unknown"]
    healthy = [one for one in findings if one.status == "ok"]
    if unknown:
        yield element("details", element("summary", f"Unknown: {len(unknown)}"), unknown_rows(unknown))
    if healthy:
        yield element("details", element("summary", f"Checked, not found: {len(healthy)}"), verdict_rows(healthy))


def _memory(snapshot: Snapshot) -> Iterator[Html]:
    yield element("h2", "Memory ledger")
    lines = ledger(snapshot.newest, snapshot.facts)
    devices = {device.uuid: device for device in islice(snapshot.newest.devices or (), MAX_DEVICES)}
    notes = {
        uuid: _pressure(ratio, snapshot.pressure_thresholds)
        for uuid, ratio in pressures(snapshot.newest, snapshot.facts, lines).items()
    }
    yield ledger_cards([line for line in lines if line.uuid is None or line.uuid in devices], devices, notes)


def _pressure(ratio: float, thresholds: PressureThresholds | None) -> Html:
    """Memory pressure, coloured if it is above a threshold; to be below them is no verdict."""
    shown = format_ratio(ratio)
    if thresholds is None:
        return element("p", f"Memory pressure {shown}")
    if ratio > thresholds.warning_ratio:
        shown = element("b", shown, class_="fault" if ratio > thresholds.critical_ratio else "suspect")
    warning, critical = format_ratio(thresholds.warning_ratio), format_ratio(thresholds.critical_ratio)
    return element("p", "Memory pressure ", shown, f" (warning above {warning}, critical above {critical})")


def _hours(history: Sequence[Sample], now_seconds: float) -> Iterator[Html]:
    recent = [sample for sample in history if now_seconds - SHOWN_SECONDS <= sample.at_seconds <= now_seconds]
    first_seconds = recent[0].at_seconds if recent else now_seconds
    start_seconds = min(first_seconds, now_seconds - LEAST_SECONDS)
    yield element("h2", f"Last {format_duration(now_seconds - start_seconds)} ", element("small", "UTC"))
    charts = [
        chart(title, lines, start_seconds, now_seconds)
        for title, lines in (("KV pool in use", _usage(recent)), ("Device memory used", _used(recent)))
    ]
    yield element("div", *charts, class_="charts")


def _usage(samples: Iterable[Sample]) -> Mapping[str, Points]:
    return _lines(
        samples,
        lambda gap: gap.source == "engine",
        lambda sample: [(f"engine {one.engine}", one.kv_usage_ratio) for one in sample.engines or ()],
    )


def _used(samples: Iterable[Sample]) -> Mapping[str, Points]:
    return _lines(
        samples,
        lambda gap: gap.source == "nvml" and gap.kind == "failed",
        lambda sample: [
            (
                f"GPU {one.index}" + (f" {one.uuid}" if one.mig_parent_uuid else ""),
                None if one.memory is None else one.memory.occupied_ratio,
            )
            for one in sample.devices or ()
        ],
    )


def _lines(
    samples: Iterable[Sample],
    failed: Callable[[Gap], bool],
    ratios: Callable[[Sample], Iterable[tuple[str, float | None]]],
) -> Mapping[str, Points]:
    """Ratios over time by name; a failed reading ends every line."""
    lines: dict[str, list[tuple[float, float | None]]] = {}
    for sample in samples:
        if any(map(failed, sample.gaps)):
            for points in lines.values():
                points.append((sample.at_seconds, None))
        for name, ratio in ratios(sample):
            lines.setdefault(name, []).append((sample.at_seconds, ratio))
    return lines


def chart(title: str, lines: Mapping[str, Points], start_seconds: float, end_seconds: float) -> Html:
    """Ratios over time, each with its newest and its highest value in the legend."""
    within = {
        name: [point for point in points if start_seconds <= point[0] <= end_seconds]
        for name, points in islice(lines.items(), MAX_LINES)
    }
    if not any(value is not None for points in within.values() for _, value in points):
        return element("figure", element("figcaption", title), unobserved("Not observed in this time."), class_="chart")
    plot = Plot(
        key=title.lower().replace(" ", "-"),
        title=title,
        description="Share in use over time; a gap is time without samples.",
        start_seconds=start_seconds,
        end_seconds=end_seconds,
        scale=shares(),
        lines=tuple(_line(number, name, points) for number, (name, points) in enumerate(within.items())),
    )
    more = [element("p", f"and {len(lines) - MAX_LINES:,} more")] if len(lines) > MAX_LINES else []
    return figure(plot, *more)


def _line(number: int, name: str, points: Points) -> Line:
    times = [moment for moment, _ in points]
    values = [value for _, value in points]
    newest = values[-1] if values else None
    now = "not observed now" if newest is None else format_ratio(newest)
    known = [value for value in values if value is not None]
    most = f", at most {format_ratio(max(known))}" if known else ""
    return Line(name=f"{name}: {now}{most}", runs=runs(times, values, pauses(times)), style=f"s{number}")


def _sources(snapshot: Snapshot, now_seconds: float) -> Iterator[Html]:
    yield element("h2", "Sources")
    ages = [f"The server {SERVER[snapshot.state]}."]
    for what, at_seconds in (("sample", snapshot.newest.at_seconds or None), ("diagnosis", snapshot.diagnosed_seconds)):
        if at_seconds is not None:
            ages.append(f"Last {what} {format_duration(max(now_seconds - at_seconds, 0.0))} ago.")
    yield element("p", " ".join(ages))
    rows = [
        row(
            one.source,
            ("up", "ok") if one.up else ("down", "unknown"),
            (f"{one.errors_total:,}", "number"),
            ("" if one.duration_seconds is None else format_duration(one.duration_seconds), "number"),
        )
        for one in snapshot.sources
    ]
    titles = (("source", ""), ("state", ""), ("errors", "number"), ("last read took", "number"))
    yield table(titles, rows, "sources") if rows else unobserved("No source has been read yet.")
    if snapshot.newest.gaps:
        yield gap_rows(snapshot.newest.gaps)


def _footer(now_seconds: float) -> Html:
    links = [element("li", element("a", path, href=path), f" {text}") for path, text in LINKS]
    version = f"kvdiag {kvdiag.__version__}, {format_time(now_seconds)}; refreshes every {REFRESH_SECONDS} s"
    return element("footer", element("ul", *links), element("p", joined(version)))
