"""The page at `/`: the verdict as of now, findings, memory, the last hours, the state of the sources. Pure.

It is built of the report's parts and refreshes itself. The verdict is that of `current_verdict`, so that an old one is
not shown as the present. Findings come from the newest diagnosis, memory from the newest sample, plots from the
history: the page judges nothing and waits for nothing. What is not known is reported as unknown; it never looks
healthy. Devices and findings are limited in number, because a page is made again every few seconds.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import kvdiag
from kvdiag.formatting import format_count, format_duration, format_ratio, format_time, plural
from kvdiag.ledger import ledger
from kvdiag.model import Facts, PressureThresholds, Sample, ServerState, Snapshot, Timeline
from kvdiag.outputs.current_verdict import as_of_now, current_verdict
from kvdiag.outputs.html import kit, report_series
from kvdiag.outputs.html.axes import shares
from kvdiag.outputs.html.downsample import pauses, runs
from kvdiag.outputs.html.markup import Html, element
from kvdiag.outputs.html.report_series import IDLE_USAGE, Readings
from kvdiag.outputs.html.svg_plots import Level, Line, Plot, extremes, figure, numbered
from kvdiag.outputs.presentation import engine_of, problems_shown, time_span, unknown_of
from kvdiag.pressure import UNKNOWN, pressures

REFRESH_SECONDS = 15

SHOWN_SECONDS = 6 * 3600.0
MIN_SECONDS = 300.0

THINNED_SECONDS = 120.0
"""Longest time between two samples of minutes that were thinned to a few samples each."""

MAX_DEVICES = 64
MAX_PROBLEMS = 32

SERVER: Mapping[ServerState, str] = {
    "starting": "has not answered yet",
    "serving": "answers",
    "lost": "no longer answers",
}


def page(snapshot: Snapshot, history: Sequence[Sample], now_seconds: float) -> str:
    """The whole document: what is known at `now_seconds`, and in the hours before it."""
    now = current_verdict(snapshot, now_seconds)
    facts = snapshot.facts
    subject = ", ".join(part for part in (facts.model, engine_of(facts), facts.url) if part) or "no server found yet"
    pages = kit.LINKS.items()
    links = [element("li", element("a", path, href=path), " ", kit.prose(text)) for path, text in pages]
    version = f"kvdiag {kvdiag.__version__}, {format_time(now_seconds)}; refreshes every {REFRESH_SECONDS} s"
    parts = (
        element("header", element("h1", "kvdiag"), element("span", subject, class_="dim")),
        kit.verdict(now.status, now.sentence, now.word),
        *_findings(snapshot),
        *_memory(snapshot),
        *_hours(history, facts, now_seconds),
        *_sources(snapshot, now_seconds),
        element("footer", element("ul", *links), element("p", version)),
    )
    refresh = element("meta", http_equiv="refresh", content=str(REFRESH_SECONDS))
    return kit.document(now.status, "kvdiag", parts, refresh, shown=now.word)


def _findings(snapshot: Snapshot) -> Iterator[Html]:
    diagnosis = as_of_now(snapshot)
    if diagnosis is None:
        return
    findings = diagnosis.findings
    yield from kit.lives_table(diagnosis)
    problems = problems_shown(diagnosis)
    yield from (kit.finding_card(one, time_span(one, diagnosis), served=True) for one in problems[:MAX_PROBLEMS])
    if len(problems) > MAX_PROBLEMS:
        yield element("p", f"and {plural(len(problems) - MAX_PROBLEMS, 'more finding')}")
    unknown = unknown_of(findings)
    healthy = [one for one in findings if one.status == "ok"]
    if unknown:
        yield element("details", element("summary", f"Unknown: {len(unknown)}"), kit.unknown_rows(unknown))
    if healthy:
        passed = element("summary", f"Checked, not found: {len(healthy)}")
        yield element("details", passed, kit.verdict_rows(healthy))


def _memory(snapshot: Snapshot) -> Iterator[Html]:
    yield element("h2", "Memory ledger")
    lines = ledger(snapshot.newest, snapshot.facts)
    devices = {device.uuid: device for device in islice(snapshot.newest.devices or (), MAX_DEVICES)}
    notes = {
        uuid: _pressure(ratio, snapshot.pressure_thresholds)
        for uuid, ratio in pressures(snapshot.newest, snapshot.facts, lines).items()
    }
    shown = [line for line in lines if line.uuid is None or line.uuid in devices]
    yield kit.ledger_cards(shown, devices, notes)
    yield from kit.owners_table(snapshot.newest.block_owners or (), snapshot.facts)


def _pressure(ratio: float | None, thresholds: PressureThresholds | None) -> Html:
    """Memory pressure, coloured if it is above a threshold; to be below them is no verdict."""
    if ratio is None:
        return element("p", f"Memory pressure {UNKNOWN}", class_="unknown")
    shown = format_ratio(ratio)
    if thresholds is None:
        return element("p", f"Memory pressure {shown}")
    if ratio > thresholds.warning_ratio:
        shown = element("b", shown, class_="fault" if ratio > thresholds.critical_ratio else "suspect")
    warning, critical = format_ratio(thresholds.warning_ratio), format_ratio(thresholds.critical_ratio)
    return element("p", "Memory pressure ", shown, f" (warning above {warning}, critical above {critical})")


def _hours(history: Sequence[Sample], facts: Facts, now_seconds: float) -> Iterator[Html]:
    recent = tuple(one for one in history if now_seconds - SHOWN_SECONDS <= one.at_seconds <= now_seconds)
    first_seconds = recent[0].at_seconds if recent else now_seconds
    start_seconds = min(first_seconds, now_seconds - MIN_SECONDS)
    yield element("h2", f"Last {format_duration(now_seconds - start_seconds)} ", element("small", "UTC"))
    timeline = Timeline(samples=recent)
    engines = report_series.engines(timeline, facts)
    titles = (("usage ", ""), (IDLE_USAGE, ", when last idle"))
    usage = {
        name: f"engine {name.removeprefix(figure)}{state}"
        for figure, state in titles
        for name in engines.figures
        if name.startswith(figure)
    }
    gpus, used = report_series.devices(timeline)
    charts = (
        chart("KV pool in use", engines, usage, start_seconds, now_seconds),
        chart(
            "Device memory used",
            used.divided({gpu.uuid: None if gpu.memory is None else gpu.memory.total_bytes for gpu in gpus}),
            {gpu.uuid: gpu.who for gpu in gpus},
            start_seconds,
            now_seconds,
        ),
    )
    yield element("div", *charts, class_="charts")


def chart(title: str, readings: Readings, names: Mapping[str, str], start_seconds: float, end_seconds: float) -> Html:
    """Ratios over time, each with its newest and its highest value in the legend; `names` are those of the figures."""
    breaks = pauses(readings.times, THINNED_SECONDS)
    found = (_line(text, readings.times, readings.figures[name], breaks) for name, text in names.items())
    lines, more = numbered([line for line in found if line.runs])
    if not lines:
        missing = kit.unobserved("Not observed in this time.")
        return element("figure", element("figcaption", title), missing, class_="chart")
    scale = shares(*extremes(lines))
    plot = Plot(
        key=title.lower().replace(" ", "-"),
        title=f"{title}{more}",
        description="Share in use over time; a gap is time without samples.",
        start_seconds=start_seconds,
        end_seconds=end_seconds,
        scale=scale,
        lines=tuple(lines),
        levels=(Level(value=1.0, label="full"),) if scale.high == 1.0 else (),
    )
    return figure(plot)


def _line(text: str, times: Sequence[float], values: Sequence[float | None], breaks: Sequence[int]) -> Line:
    now = "not observed now" if values[-1] is None else format_ratio(values[-1])
    highest = max((value for value in values if value is not None), default=None)
    most = "" if highest is None else f", at most {format_ratio(highest)}"
    return Line(name=f"{text}: {now}{most}", runs=runs(times, values, breaks))


def _sources(snapshot: Snapshot, now_seconds: float) -> Iterator[Html]:
    yield element("h2", "Sources")
    ages = [f"The server {SERVER[snapshot.state]}."]
    for what, at_seconds in (("sample", snapshot.newest.at_seconds or None), ("diagnosis", snapshot.diagnosed_seconds)):
        if at_seconds is not None:
            ages.append(f"Last {what} {format_duration(max(now_seconds - at_seconds, 0.0))} ago.")
    yield element("p", " ".join(ages))
    rows = [
        kit.row(
            one.source,
            ("up", "ok") if one.up else ("down", "unknown"),
            (format_count(one.errors_total), "number"),
            ("" if one.duration_seconds is None else format_duration(one.duration_seconds), "number"),
        )
        for one in snapshot.sources
    ]
    titles = (("source", ""), ("state", ""), ("errors", "number"), ("last read took", "number"))
    yield kit.table(titles, rows, "sources") if rows else kit.unobserved("No source has been read yet.")
    if snapshot.newest.gaps:
        yield kit.gap_rows(snapshot.newest.gaps)
