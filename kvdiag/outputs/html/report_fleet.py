"""The report of many replicas: a table with the worst first, the comparison of all, then the worst in full. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvdiag.formatting import format_count, format_time
from kvdiag.model import Timeline
from kvdiag.outputs.fleet_results import FleetDiagnosis, Judged
from kvdiag.outputs.html.kit import finding_card, gap_rows, mark, prose, row, table, unknown_rows, verdict
from kvdiag.outputs.html.markup import Html, element
from kvdiag.outputs.html.report_page import Making, body, report
from kvdiag.outputs.presentation import problems_of, sentence, word

MAX_ROWS = 500
"""Of the table, the worst first; the JSON document lists every replica."""


def render(result: FleetDiagnosis, timeline_of: Callable[[Judged], Timeline], making: Making) -> str:
    """The whole document. `timeline_of` gives the history of the one replica that is shown in full."""
    source = result.source
    subject = "recorded traces" if source is None else source.url + (f" {{{source.match}}}" if source.match else "")
    return report(result.worst, result.sentence, subject, making, *_content(result, timeline_of))


def _content(result: FleetDiagnosis, timeline_of: Callable[[Judged], Timeline]) -> Iterator[Html]:
    source = result.source
    if source is not None:
        window = f"{format_time(source.start_seconds)} to {format_time(source.end_seconds)}"
        yield element("p", f"{window}; {source.joined}", class_="dim")
    yield element("h2", "Replicas")
    rows = [
        row(mark(one.diagnosis.worst), one.name, (format_count(one.hours), "number"), prose(one.summary), header=1)
        for one in result.judged[:MAX_ROWS]
    ]
    yield table((("", ""), ("replica", ""), ("hours", "number"), ("result", "")), rows, "replicas")
    if len(result.judged) > MAX_ROWS:
        yield element("p", f"and {len(result.judged) - MAX_ROWS:,} more: --output json lists them all")
    called = problems_of(result.fleet.findings)
    if called:
        yield element("h2", "Comparison of replicas")
        yield from map(finding_card, called)
    left = [one for one in result.fleet.findings if one.status == "unknown"]
    if left and len(result.judged) > 1:
        yield element("h2", "Comparison of replicas: unknown")
        yield unknown_rows(left)
    if result.gaps:
        yield element("h2", "Not assigned to a replica")
        yield gap_rows(result.gaps)
    if result.judged:
        worst = result.judged[0]
        yield element("h2", f"In full: {worst.name}")
        yield verdict(worst.diagnosis.worst, sentence(worst.diagnosis), word(worst.diagnosis))
        timeline = timeline_of(worst) if worst.diagnosis.samples else Timeline(samples=())
        yield from body(worst.diagnosis, timeline)
