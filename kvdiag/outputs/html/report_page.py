"""The report: a Diagnosis and its Timeline as one HTML file that needs nothing else, to be kept and passed on. Pure.

The verdict comes first, what to do about it next, then the steps, the memory, the plots, what was not found, what could
not be told, and in what surroundings. No script; nothing is fetched, which its content security policy says besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvdiag.kv.calibration.running_server import pool_bytes
from kvdiag.model import Device, Diagnosis, Evidence, Finding, Quantity, Status, StepResult, Timeline
from kvdiag.outputs.html.markup import Html, element, joined
from kvdiag.outputs.html.report_ledger import memory
from kvdiag.outputs.html.report_plots import draw
from kvdiag.outputs.html.report_style import HATCHED, STYLE
from kvdiag.outputs.html.svg_plots import date
from kvdiag.outputs.terminal.text import WORDS, evidence_value, explained_of, problems_of, readable, sentence

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_DISC = "M8 0a8 8 0 1 0 0 16A8 8 0 0 0 8 0z"

ICONS: dict[Status, str] = {
    "ok": f"{_DISC}M6.9 11.6 3.4 8.1l1.3-1.3 2.2 2.2 4.5-4.6 1.3 1.3z",
    "suspect": "M8 .8 16 15H0zM7.1 5.8v4.7h1.8V5.8zm0 5.8v1.8h1.8v-1.8z",
    "fault": (
        "M4.7 0h6.6L16 4.7v6.6L11.3 16H4.7L0 11.3V4.7z"
        "M5.4 4 4 5.4 6.6 8 4 10.6 5.4 12 8 9.4l2.6 2.6 1.4-1.4L9.4 8 12 5.4 10.6 4 8 6.6z"
    ),
    "unknown": (
        f"{_DISC}M7.1 11.2h1.8V13H7.1zM8 3.2c2 0 3.2 1.1 3.2 2.7 0 1.9-2.3 2-2.3 3.9H7.1"
        "c0-2.4 2.2-2.5 2.2-3.8 0-.7-.5-1.2-1.3-1.2s-1.4.5-1.4 1.4H4.8C4.8 4.4 6 3.2 8 3.2z"
    ),
}
"""A shape of its own for each status: colour alone tells nobody anything."""


LENGTHS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """Where a report comes from: the program, what it was called with, and when it wrote this."""

    version: str
    command: str
    made_seconds: float


def render(diagnosis: Diagnosis, timeline: Timeline, making: Making) -> str:
    """The whole document."""
    return document(
        diagnosis.worst,
        sentence(diagnosis),
        diagnosis.facts.model or diagnosis.facts.url or "no server",
        making,
        *body(diagnosis, timeline),
    )


def document(worst: Status, told: str, subject: str, making: Making, *content: Html) -> str:
    """A page with its verdict, its content, and where it comes from."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="referrer", content="no-referrer"),
        element("meta", name="generator", content=f"kvdiag {making.version}"),
        element("title", f"{WORDS[worst]}: {subject} - kvdiag report"),
        element("style", STYLE),
    )
    page = element(
        "body",
        _stripes(),
        element(
            "header",
            element("h1", "kvdiag report"),
            element("span", f"{subject}, {date(making.made_seconds)}", class_="dim"),
        ),
        element("section", mark(worst), element("p", told), class_=f"verdict {worst}"),
        element("main", *content),
        element(
            "footer",
            element("p", f"kvdiag {making.version}, ", element("code", making.command)),
            element("p", f"Written {date(making.made_seconds)}. All times are UTC."),
        ),
    )
    return f"<!DOCTYPE html>\n{element('html', head, page, lang='en')}\n"


def mark(status: Status) -> Html:
    """A status as a word with its sign."""
    icon = element(
        "svg", element("path", d=ICONS[status], fill_rule="evenodd"), viewBox="0 0 16 16", aria_hidden="true"
    )
    return element("span", icon, WORDS[status], class_=f"status {status}")


def body(diagnosis: Diagnosis, timeline: Timeline) -> Iterator[Html]:
    """Everything that a diagnosis says, below its verdict."""
    yield _about(diagnosis, timeline)
    problems = problems_of(diagnosis.findings)
    if problems:
        yield element("h2", "Found")
        yield from map(problem, problems)
    if diagnosis.steps:
        yield element("h2", "Test steps")
        yield _steps(diagnosis.steps)
    yield element("h2", "Where the memory is")
    yield memory(diagnosis, timeline)
    yield element("h2", "Over time ", element("small", "UTC; a break in a line is time in which nothing was read"))
    yield from draw(diagnosis, timeline)
    yield from rest(diagnosis)


def rest(diagnosis: Diagnosis) -> Iterator[Html]:
    """What is no accusation: explained, not found, not told, not seen."""
    explained = explained_of(diagnosis)
    healthy = [one for one in diagnosis.findings if one.status == "ok" and one not in explained]
    if explained:
        yield element("h2", "Explained")
        yield _verdicts(explained)
    unknown = [one for one in diagnosis.findings if one.status == "unknown"]
    if unknown:
        yield element("h2", "Could not tell")
        yield unknowns(unknown)
    if diagnosis.gaps:
        yield element("h2", "Not seen")
        rows = [([gap.source], f"{gap.kind}: {gap.reason}") for gap in diagnosis.gaps]
        yield _rows(rows)
    if healthy:
        yield element("h2", "Looked at and not found")
        yield _verdicts(healthy)


def _stripes() -> Html:
    """The fills of what is striped."""
    patterns = [
        element(
            "pattern",
            element("rect", width=8, height=8, style="fill:var(--surface)"),
            element("path", d="M-2 2 2-2M0 8 8 0M6 10 10 6", style=f"stroke:var(--p-{name});stroke-width:3.6"),
            id=f"stripes-{name}",
            width=8,
            height=8,
            patternUnits="userSpaceOnUse",
        )
        for name in HATCHED
    ]
    return element("svg", *patterns, width=0, height=0, style="position:absolute", aria_hidden="true")


def _about(diagnosis: Diagnosis, timeline: Timeline) -> Html:
    """Who was looked at, when, and on what machine."""
    facts = diagnosis.facts
    engine = " ".join(part for part in (facts.engine_name, facts.engine_version) if part)
    parallel = [
        f"{ranks} {name}"
        for ranks, name in ((facts.tensor_parallel, "tensor"), (facts.pipeline_parallel, "pipeline"))
        if ranks
    ]
    pools = []
    for pool in facts.pools:
        size = pool_bytes(facts, pool)
        pools.append(
            f"{pool.usable_blocks:,} blocks of {pool.block_tokens} tokens"
            + ("" if size is None else f", {readable(size[0])} {size[1]}")
        )
    devices: dict[str, Device] = {}
    for sample in timeline.samples:
        if sample.devices is not None:
            devices.update({device.uuid: device for device in sample.devices})
    names = [", ".join(filter(None, (device.name, _size(device)))) for device in devices.values()]
    rows = [
        ("model", facts.model or "not told"),
        ("server", facts.url or "not told"),
        ("engine", engine or "not told"),
        ("context", "not told" if facts.max_model_len_tokens is None else f"{facts.max_model_len_tokens:,} tokens"),
        ("KV pool", "; ".join(_counted(pools)) or "not told"),
        ("parallel", ", ".join(parallel) or "not told"),
        ("GPUs", "; ".join(_counted(names)) or "not seen"),
        ("time", _window(diagnosis)),
    ]
    return element(
        "dl", *(element("div", element("dt", name), element("dd", told)) for name, told in rows), class_="about"
    )


def _size(device: Device) -> str:
    return "" if device.memory is None else readable(device.memory.total_bytes)


def _counted(told: Sequence[str]) -> list[str]:
    """Equal ones once."""
    return [one if told.count(one) == 1 else f"{told.count(one)} x {one}" for one in dict.fromkeys(told)]


def _window(diagnosis: Diagnosis) -> str:
    if not diagnosis.samples:
        return "no readings"
    seconds = diagnosis.end_seconds - diagnosis.start_seconds
    unit, size = next((one for one in LENGTHS if seconds >= 2 * one[1]), LENGTHS[-1])
    length = f"{seconds / size:.{0 if size == 1 else 1}f} {unit}"
    return f"{date(diagnosis.start_seconds)}, {length}, {diagnosis.samples:,} readings"


def problem(finding: Finding) -> Html:
    """A finding with its evidence, and what to do about it."""
    rows = [
        element(
            "tr",
            element("th", one.name.replace("_", " "), scope="row"),
            element("td", evidence_value(one), class_="text" if isinstance(one.value, str) else "number"),
            element("td", one.source, class_="dim"),
        )
        for one in finding.evidence
    ]
    advice = [
        joined(element("dt", name), element("dd", told, class_="remedy" if name == "Remedy" else "plain"))
        for name, told in (
            ("Likely cause", finding.likely_cause),
            ("Confirm", finding.confirm),
            ("Remedy", finding.remedy),
            ("Runbook", finding.runbook),
        )
        if told
    ]
    return element(
        "section",
        element("header", mark(finding.status), element("h3", finding.id)),
        element("p", finding.summary),
        element(
            "div",
            element("div", element("table", *rows, class_="evidence"), class_="scroll") if rows else "",
            element("dl", *advice, class_="advice"),
            class_="columns",
        ),
        class_="finding",
    )


def _steps(steps: Iterable[StepResult]) -> Html:
    head = element(
        "tr",
        *(element("th", name, scope="col") for name in ("", "step", "what was seen")),
        element("th", "expected / measured", scope="col", class_="figures"),
    )
    rows = []
    for number, step in enumerate(steps, start=1):
        notes = [element("p", note, class_="dim") for note in step.notes]
        rows.append(
            element(
                "tr",
                element("td", mark(step.status)),
                element("th", f"{number} {step.id.replace('_', ' ')}", scope="row"),
                element("td", step.summary, *notes),
                element("td", *_compared(step), class_="figures dim"),
            )
        )
    return element("div", element("table", head, *rows, class_="steps"), class_="scroll")


def _compared(step: StepResult) -> Iterator[Html]:
    """What had to be seen beside what was, where both are told."""
    measured = {one.name: one for one in step.measured}
    for one in step.expected:
        other = measured.get(one.name)
        if other is not None and one.name not in ("requests", "tokens") and (one.value, other.value) != (None, None):
            yield element(
                "div", f"{one.name.replace('_', ' ').removesuffix(' bytes')}: {_quantity(one)} / {_quantity(other)}"
            )


def _quantity(one: Quantity) -> str:
    told = evidence_value(Evidence(name=one.name, value=one.value, unit=one.unit, source=""))
    return told.removesuffix(" blocks").removesuffix(" block")


def _verdicts(findings: Iterable[Finding]) -> Html:
    return _rows([([one.id], one.summary.removeprefix("cannot tell: ")) for one in findings])


def unknowns(findings: Iterable[Finding]) -> Html:
    """Findings that could not be told, those with one reason together."""
    reasons: dict[str, list[str]] = {}
    for one in findings:
        reasons.setdefault(one.summary.removeprefix("cannot tell: "), []).append(one.id)
    return _rows([(ids, reason) for reason, ids in reasons.items()], "unknown")


def _rows(rows: Iterable[tuple[Sequence[str], str]], style: str = "dim") -> Html:
    told = [
        element(
            "tr",
            element("th", *(element("div", name) for name in names), scope="row", class_=style),
            element("td", text),
        )
        for names, text in rows
    ]
    return element("div", element("table", *told, class_="pairs"), class_="scroll")
