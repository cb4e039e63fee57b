"""Many replicas for a person at a terminal: a table with the worst first, then the worst one in full."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvdiag.model import Diagnosis
from kvdiag.outputs.fleet_results import FleetDiagnosis, Judged, Source
from kvdiag.outputs.terminal import text, versions_text
from kvdiag.outputs.terminal.text import STYLES, WORDS, gap_list, plain, problems_of

MAX_ROWS = 40
"""Of the table, all that are not ok before the others; the rest is counted, and is in the JSON document."""

NAMES = ("cluster", "namespace", "pod")
GPU_NAMES = ("Hostname", "gpu", "UUID", "uuid")


def render(result: FleetDiagnosis) -> RenderableType:
    """The whole result."""
    parts: list[RenderableType] = [_headline(result)]
    if result.source is not None:
        parts.append(_where(result.source))
    parts += [text.heading("Replicas"), _table(result)]
    left = len(result.judged) - MAX_ROWS
    if left > 0:
        parts.append(plain(f"  and {left} more: --output json has them all", "dim"))
    parts += versions_text.parts(result.fleet)
    if result.gaps:
        parts += [text.heading("Not joined"), gap_list(result.gaps)]
    if result.judged:
        worst = result.judged[0]
        parts += [text.heading(f"In full: {name_of(worst)}"), text.render(worst.diagnosis)]
    return Group(*parts)


def name_of(one: Judged) -> str:
    """What a replica is called."""
    told = dict(one.subject)
    if "trace" in told:
        return told["trace"]
    key, _, realm = one.key.partition(" [")
    where = f" [{realm}" if realm else ""
    if key.startswith("gpu "):
        return (" ".join(told[label] for label in GPU_NAMES if told.get(label)) or key) + where
    if told.get("pod"):
        return "/".join(told[label] for label in NAMES if told.get(label)) + where
    return (told.get("instance") or key.partition(" ")[2].lstrip("/")) + where


def _headline(result: FleetDiagnosis) -> Text:
    return Text.assemble((WORDS[result.worst], f"bold {STYLES[result.worst]}"), "  ", plain(sentence(result)))


def sentence(result: FleetDiagnosis) -> str:
    """The verdict in a sentence."""
    counts = ", ".join(f"{count} {status}" for status, count in result.by_worst.items() if count)
    replicas = "1 replica" if len(result.judged) == 1 else f"{len(result.judged)} replicas"
    called = problems_of(result.fleet.findings)
    return f"{replicas}: {counts}" + (f"; all together {called[0].id}" if called else "")


def _where(source: Source) -> RenderableType:
    first, last = (
        datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%MZ")
        for seconds in (source.start_seconds, source.end_seconds)
    )
    table = text.grid()
    table.add_row(Text("history", style="dim"), plain(source.url + (f" {{{source.match}}}" if source.match else "")))
    table.add_row(Text("time", style="dim"), plain(f"{first} to {last}"))
    joined = f"readings of different scrapes stand together up to {source.join_seconds:g} s apart"
    table.add_row(Text("joined", style="dim"), plain(joined))
    return table


def _table(result: FleetDiagnosis) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("replica", overflow="fold", ratio=2)
    table.add_column("hours", justify="right", no_wrap=True)
    table.add_column("found", overflow="fold", ratio=3)
    for one in result.judged[:MAX_ROWS]:
        diagnosis = one.diagnosis
        hours = (diagnosis.end_seconds - diagnosis.start_seconds) / 3600.0
        word = Text(WORDS[diagnosis.worst], style=STYLES[diagnosis.worst])
        table.add_row(word, plain(name_of(one)), f"{hours:.1f}", plain(found(diagnosis)))
    return Padding(table, (0, 0, 0, 2))


def found(diagnosis: Diagnosis) -> str:
    """What a replica shows, in one sentence."""
    problems = problems_of(diagnosis.findings)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return f"{problems[0].id}{more}: {problems[0].summary}"
    if diagnosis.worst == "unknown":
        return _undecided(diagnosis)
    told = [one for one in diagnosis.findings if one.status == "ok"]
    return f"{len(told)} of {len(diagnosis.findings)} verdicts looked at, none found"


def _undecided(diagnosis: Diagnosis) -> str:
    """Why nothing can be said, the most telling reason first."""
    failed = [gap.reason for gap in diagnosis.gaps if gap.kind == "failed"]
    if failed:
        return failed[0]
    if not diagnosis.samples:
        return "no samples in this time"
    unknown = [one for one in diagnosis.findings if one.status == "unknown" and one.id.startswith("leak.")]
    unknown.sort(key=lambda one: not one.evidence)
    return f"{unknown[0].id}: {unknown[0].summary}" if unknown else "not enough was seen to judge"
