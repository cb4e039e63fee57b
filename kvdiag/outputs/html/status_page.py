"""The page at `/` for a person: verdict, findings, where the memory is, the last hours, how the sources do. Pure.

One document without script or network; what is not known is said, and never looks healthy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import kvdiag
from kvdiag.ledger import ledger
from kvdiag.model import Device, Finding, LedgerLine, PressureThresholds, Sample, Snapshot, Status
from kvdiag.outputs.html.markup import Html, element, joined
from kvdiag.outputs.html.status_chart import Points, Window, chart
from kvdiag.outputs.html.status_style import STYLE
from kvdiag.outputs.terminal.text import WORDS, evidence_value, problems_of, readable
from kvdiag.pressure import pressures

REFRESH_SECONDS = 15
STALE_SECONDS = 300.0
"""A diagnosis is made every 10 s, or less often where it would cost more than 0.5 % of a core."""

SILENT_SECONDS = 60.0
"""Everything is read at least once a minute where anything is read at all."""

SHOWN_SECONDS = 6 * 3600.0
LEAST_SECONDS = 300.0

MAX_DEVICES = 64
MAX_PROBLEMS = 32

LINKS = (
    ("/metrics", "for Prometheus"),
    ("/api/v1/diagnosis", "the newest diagnosis"),
    ("/api/v1/ledger", "where every byte is, now"),
    ("/api/v1/admission", "whether to admit one more request: ?prompt_tokens=N&max_tokens=N"),
    ("/-/healthy", "the daemon lives"),
    ("/-/ready", "it has seen something"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The page's first line."""

    status: Status
    sentence: str


def page(snapshot: Snapshot, history: Sequence[Sample], now_seconds: float) -> str:
    """The whole document: what is known at `now_seconds`, and of the hours before it."""
    verdict = headline(snapshot, now_seconds)
    facts = snapshot.facts
    engine = " ".join(part for part in (facts.engine_name, facts.engine_version) if part)
    subject = ", ".join(part for part in (facts.model, engine, facts.url) if part) or "no server has been seen yet"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="refresh", content=str(REFRESH_SECONDS)),
        element("title", f"{WORDS[verdict.status]} - kvdiag"),
        element("style", STYLE),
    )
    body = element(
        "body",
        element("header", element("h1", "kvdiag"), element("p", subject)),
        element(
            "section",
            element("h2", WORDS[verdict.status]),
            element("p", verdict.sentence),
            class_=f"verdict {verdict.status}",
        ),
        *_findings(snapshot),
        *_memory(snapshot),
        *_hours(history, now_seconds),
        _sources(snapshot, now_seconds),
        _footer(now_seconds),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def headline(snapshot: Snapshot, now_seconds: float) -> Headline:
    """The verdict as of now: a diagnosis that is old, or of a server that is not there any more, is not healthy."""
    diagnosis, at_seconds = snapshot.diagnosis, snapshot.diagnosed_seconds
    read_seconds = snapshot.newest.at_seconds
    if not read_seconds or now_seconds - read_seconds > SILENT_SECONDS:
        ago = f"since {_ago(now_seconds - read_seconds)}" if read_seconds else "yet"
        return Headline(status="unknown", sentence=f"Nothing has been read {ago}.")
    if diagnosis is None or at_seconds is None:
        return Headline(status="unknown", sentence="There is no diagnosis yet.")
    problems = problems_of(diagnosis.findings)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    found = f"{problems[0].id}: {problems[0].summary}{more}" if problems else ""
    if now_seconds - at_seconds > STALE_SECONDS:
        said = f"The newest diagnosis was made {_ago(now_seconds - at_seconds)}"
        return Headline(status="unknown", sentence=f"{said}. It found {found}" if found else f"{said}.")
    if problems:
        return Headline(status=diagnosis.worst, sentence=found)
    if snapshot.state != "serving":
        reason = "The server has not answered yet." if snapshot.state == "starting" else "The server does not answer."
        return Headline(status="unknown", sentence=reason)
    if diagnosis.worst != "ok":
        return Headline(status=diagnosis.worst, sentence="Not enough was seen to judge.")
    unseen = "" if snapshot.newest.devices else "; device memory was not seen"
    return Headline(status="ok", sentence=f"No fault found in what could be seen{unseen}.")


def _findings(snapshot: Snapshot) -> Iterable[Html]:
    if snapshot.diagnosis is None:
        return
    findings = snapshot.diagnosis.findings
    problems = problems_of(findings)
    for one in problems[:MAX_PROBLEMS]:
        yield _problem(one)
    if len(problems) > MAX_PROBLEMS:
        yield element("p", f"and {len(problems) - MAX_PROBLEMS} more findings")
    for status, title in (("unknown", "Could not tell"), ("ok", "Looked at and not found")):
        rest = [one for one in findings if one.status == status]
        if rest:
            items = [element("li", element("b", one.id, class_=status), f" {one.summary}") for one in rest]
            summary = element("summary", f"{title}: {len(rest)}")
            yield element("details", summary, element("ul", *items))


def _problem(finding: Finding) -> Html:
    rows = [
        element("tr", element("th", one.name.replace("_", " ")), element("td", evidence_value(one)))
        for one in finding.evidence
    ]
    advice = [
        element("p", element("b", name), f" {text}")
        for name, text in (
            ("Likely cause", finding.likely_cause),
            ("Confirm", finding.confirm),
            ("Remedy", finding.remedy),
            ("Runbook", finding.runbook),
        )
        if text
    ]
    title = element("h3", element("span", WORDS[finding.status], class_=f"badge {finding.status}"), f" {finding.id}")
    return element("section", title, element("p", finding.summary), element("table", *rows), *advice, class_="card")


def _memory(snapshot: Snapshot) -> Iterable[Html]:
    yield element("h2", "Where the memory is")
    lines = ledger(snapshot.newest, snapshot.facts)
    devices = snapshot.newest.devices or ()
    full = {
        uuid: _pressure(ratio, snapshot.pressure_thresholds)
        for uuid, ratio in pressures(snapshot.newest, snapshot.facts, lines).items()
    }
    for device in devices[:MAX_DEVICES]:
        own = [line for line in lines if line.uuid == device.uuid]
        yield _device(device, own, full.get(device.uuid, Html("")))
    pool = [line for line in lines if line.uuid is None]
    if not devices:
        yield element("p", "Device memory is not seen.", class_="unknown")
    if pool:
        title = element("h3", "KV pool, as the engine tells it")
        yield element("section", title, full.get(None, Html("")), *_bar(pool, None), class_="card")


def _pressure(ratio: float, thresholds: PressureThresholds | None) -> Html:
    """How full it really is. Coloured where that asks for something; to be below the thresholds is no verdict."""
    shown = f"{ratio:.0%}"
    if thresholds is None:
        return element("p", f"Memory pressure {shown}")
    if ratio > thresholds.warning_ratio:
        shown = element("b", shown, class_="fault" if ratio > thresholds.critical_ratio else "suspect")
    told = f" (warning above {thresholds.warning_ratio:.0%}, critical above {thresholds.critical_ratio:.0%})"
    return element("p", "Memory pressure ", shown, told)


def _device(device: Device, lines: Sequence[LedgerLine], pressure: Html) -> Html:
    title = element("h3", f"GPU {device.index} ", element("small", device.name))
    memory = device.memory
    if memory is None:
        return element("section", title, element("p", "Its memory cannot be read.", class_="unknown"), class_="card")
    used = f"{readable(memory.used_bytes)} of {readable(memory.total_bytes)} taken ({memory.occupied_ratio:.0%})"
    return element("section", title, element("p", used), pressure, *_bar(lines, memory.total_bytes), class_="card")


def _bar(lines: Sequence[LedgerLine], total_bytes: int | None) -> Iterable[Html]:
    """The parts beside one another to scale, and each with its size; what nobody has is left empty."""
    sizes: dict[str, int] = {}
    for line in lines:
        sizes[line.component] = sizes.get(line.component, 0) + line.bytes
    whole = total_bytes or sum(max(size, 0) for size in sizes.values()) or 1
    left = 0.0
    parts = []
    for name, size in sizes.items():
        share = min(max(size, 0) / whole, 1.0) * 100
        if share:
            told_by_mouse = element("title", f"{name} {readable(size)}")
            parts.append(
                element(
                    "g",
                    told_by_mouse,
                    element("rect", x=f"{left:.3f}%", width=f"{share:.3f}%", height="100%", class_=f"part {name}"),
                )
            )
        left += share
    yield element("svg", *parts, class_="bar", role="img", aria_label="the parts of the memory")
    yield element(
        "ul",
        *(
            element("li", element("i", class_=f"swatch {name}"), f"{name.replace('_', ' ')} {readable(size)}")
            for name, size in sizes.items()
            if size
        ),
        class_="legend",
    )


def _hours(history: Sequence[Sample], now_seconds: float) -> Iterable[Html]:
    recent = [sample for sample in history if now_seconds - SHOWN_SECONDS <= sample.at_seconds <= now_seconds]
    first_seconds = recent[0].at_seconds if recent else now_seconds
    window = Window(start_seconds=min(first_seconds, now_seconds - LEAST_SECONDS), end_seconds=now_seconds)
    hours = f"{window.seconds / 3600:.1f} h" if window.seconds >= 3600 else f"{window.seconds / 60:.0f} min"  # noqa: PLR2004
    for title, lines in (("KV pool in use", _occupancy(recent)), ("Device memory taken", _taken(recent))):
        yield element("h2", title, element("small", f" last {hours}, UTC"))
        yield element("section", chart(title, lines, window), class_="card chart")


def _occupancy(samples: Iterable[Sample]) -> dict[str, Points]:
    lines: dict[str, list[tuple[float, float | None]]] = {}
    for sample in samples:
        if any(gap.source == "engine" for gap in sample.gaps):
            for points in lines.values():
                points.append((sample.at_seconds, None))
        for engine in sample.engines or ():
            points = lines.setdefault(f"engine {engine.engine}", [])
            points.append((sample.at_seconds, engine.kv_usage_ratio))
    return dict(lines)


def _taken(samples: Iterable[Sample]) -> dict[str, Points]:
    lines: dict[str, list[tuple[float, float | None]]] = {}
    for sample in samples:
        if any(gap.source == "nvml" and gap.kind == "failed" for gap in sample.gaps):
            for points in lines.values():
                points.append((sample.at_seconds, None))
        for device in sample.devices or ():
            ratio = None if device.memory is None else device.memory.occupied_ratio
            slice_of = f" {device.uuid}" if device.mig_parent_uuid else ""
            points = lines.setdefault(f"GPU {device.index}{slice_of}", [])
            points.append((sample.at_seconds, ratio))
    return dict(lines)


def _sources(snapshot: Snapshot, now_seconds: float) -> Html:
    rows = [
        element(
            "tr",
            element("th", one.source),
            element("td", "read" if one.up else "not read", class_="ok" if one.up else "unknown"),
            element("td", f"{one.errors_total:,} errors"),
            element("td", "" if one.duration_seconds is None else f"{one.duration_seconds * 1000:.1f} ms"),
        )
        for one in snapshot.sources
    ]
    gaps = [element("li", f"{gap.source}, {gap.kind}: {gap.reason}") for gap in snapshot.newest.gaps]
    server = {"starting": "has not answered yet", "serving": "answers", "lost": "does not answer any more"}
    ages = [f"The server {server[snapshot.state]}."]
    if snapshot.newest.at_seconds:
        ages.append(f"Last read {_ago(now_seconds - snapshot.newest.at_seconds)}.")
    if snapshot.diagnosed_seconds is not None:
        ages.append(f"Last diagnosed {_ago(now_seconds - snapshot.diagnosed_seconds)}.")
    content = joined(
        element("p", " ".join(ages)),
        element("table", *rows) if rows else element("p", "No source has been read yet.", class_="unknown"),
        element("ul", *gaps) if gaps else "",
    )
    return joined(element("h2", "What it sees"), element("section", content, class_="card"))


def _footer(now_seconds: float) -> Html:
    made = datetime.fromtimestamp(now_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    links = [element("li", element("a", path, href=path), f" {text}") for path, text in LINKS]
    version = f"kvdiag {kvdiag.__version__}, {made}; renewed every {REFRESH_SECONDS} s"
    return element("footer", element("ul", *links), element("p", version))


def _ago(seconds: float) -> str:
    """A time that has passed; a clock that was set back makes none negative."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
