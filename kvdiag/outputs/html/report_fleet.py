"""The report of many replicas: a table with the worst first, what all show together, then the worst in full. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvdiag.model import Timeline
from kvdiag.outputs.fleet_results import FleetDiagnosis, Judged
from kvdiag.outputs.html.markup import Html, element
from kvdiag.outputs.html.report_page import Making, body, document, mark, problem, unknowns
from kvdiag.outputs.html.svg_plots import date
from kvdiag.outputs.terminal.fleet_text import found, name_of, sentence
from kvdiag.outputs.terminal.text import problems_of
from kvdiag.outputs.terminal.text import sentence as verdict

MAX_ROWS = 500
"""Of the table, the worst first; the JSON document has them all."""


def render(result: FleetDiagnosis, timeline_of: Callable[[Judged], Timeline], making: Making) -> str:
    """The whole document. `timeline_of` gives the history of the one replica that is shown in full."""
    source = result.source
    subject = "recorded traces" if source is None else source.url + (f" {{{source.match}}}" if source.match else "")
    return document(result.worst, sentence(result), subject, making, *_content(result, timeline_of))


def _content(result: FleetDiagnosis, timeline_of: Callable[[Judged], Timeline]) -> Iterator[Html]:
    source = result.source
    if source is not None:
        joined = f"readings of different scrapes stand together up to {source.join_seconds:g} s apart"
        yield element("p", f"{date(source.start_seconds)} to {date(source.end_seconds)}; {joined}", class_="dim")
    yield element("h2", "Replicas")
    yield _table(result)
    if len(result.judged) > MAX_ROWS:
        yield element("p", f"and {len(result.judged) - MAX_ROWS} more: --output json has them all")
    called = problems_of(result.fleet.findings)
    if called:
        yield element("h2", "All replicas together")
        yield from map(problem, called)
    left = [one for one in result.fleet.findings if one.status == "unknown"]
    if left and len(result.judged) > 1:
        yield element("h2", "Could not tell of all replicas together")
        yield unknowns(left)
    if result.gaps:
        yield element("h2", "Not joined")
        yield element("ul", *(element("li", f"{gap.source}, {gap.kind}: {gap.reason}") for gap in result.gaps))
    if result.judged:
        worst = result.judged[0]
        yield element("h2", f"In full: {name_of(worst)}")
        told = element("p", verdict(worst.diagnosis))
        yield element("section", mark(worst.diagnosis.worst), told, class_=f"verdict {worst.diagnosis.worst}")
        timeline = timeline_of(worst) if worst.diagnosis.samples else Timeline(samples=())
        yield from body(worst.diagnosis, timeline)


def _table(result: FleetDiagnosis) -> Html:
    names = (("", ""), ("replica", ""), ("hours", "number"), ("found", ""))
    head = element("tr", *(element("th", name, scope="col", class_=style) for name, style in names))
    rows = []
    for one in result.judged[:MAX_ROWS]:
        hours = (one.diagnosis.end_seconds - one.diagnosis.start_seconds) / 3600.0
        rows.append(
            element(
                "tr",
                element("td", mark(one.diagnosis.worst)),
                element("th", name_of(one), scope="row"),
                element("td", f"{hours:.1f}", class_="number"),
                element("td", found(one.diagnosis)),
            )
        )
    return element("div", element("table", head, *rows, class_="replicas"), class_="scroll")
