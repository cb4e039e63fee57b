"""The page of a fleet at `/`: the worst replicas first, by version and by node; links filter and sort it. Pure.

It has no script: a link's address is the view (`View`). Every replica links to its own page, which is that of a report.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlencode

import kvdiag
from kvdiag.formatting import format_count, format_duration, format_time, plural
from kvdiag.outputs.fleet_status import FleetReplica, FleetStatus
from kvdiag.outputs.html import kit
from kvdiag.outputs.html.markup import Html, element
from kvdiag.outputs.presentation import NOT_REPORTED, ORDER, problems_of

REFRESH_SECONDS = 60
ROWS = 200
"""Replicas on one page."""

MAX_GROUPS = 50
"""Versions, or nodes, in a table."""

SORTS = ("worst", "name", "version", "node", "exhausted", "as of")

LINKS: Mapping[str, str] = {
    "/metrics": "metrics for Prometheus",
    "/api/v1/fleet": "all verdicts as one document",
    "/runbooks": "what to do about each verdict and alert: /runbooks/ID",
    "/-/healthy": "liveness",
    "/-/ready": "readiness: the first round is over",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Which replicas the page shows, and in which order; an empty filter is none."""

    status: str = ""
    version: str = ""
    node: str = ""
    sort: str = "worst"
    start: int = 0

    @property
    def address(self) -> str:
        """The page's address."""
        found = {"status": self.status, "version": self.version, "node": self.node}
        shown = {name: value for name, value in found.items() if value}
        shown |= {"sort": self.sort} if self.sort != SORTS[0] else {}
        shown |= {"start": str(self.start)} if self.start else {}
        return f"/?{urlencode(shown)}" if shown else "/"


def view_of(query: Mapping[str, Sequence[str]]) -> View:
    """The view that a request asks for; what it does not know is left out."""
    first = {name: values[0] for name, values in query.items() if values}
    start = first.get("start", "")
    return View(
        status=first.get("status", "") if first.get("status") in ORDER else "",
        version=first.get("version", ""),
        node=first.get("node", ""),
        sort=first.get("sort", "") if first.get("sort") in SORTS else SORTS[0],
        start=int(start) if start.isascii() and start.isdecimal() and len(start) < 6 else 0,  # noqa: PLR2004
    )


def page(status: FleetStatus, view: View, now_seconds: float) -> str:
    """The whole document."""
    source = status.source
    subject = source.url + (f" {{{source.match}}}" if source.match else "")
    links = [element("li", element("a", path, href=path), " ", kit.prose(text)) for path, text in LINKS.items()]
    version = f"kvdiag {kvdiag.__version__}, {format_time(now_seconds)}; refreshes every {REFRESH_SECONDS} s"
    parts = (
        element("header", element("h1", "kvdiag fleet"), element("span", subject, class_="dim")),
        kit.verdict(status.worst, status.sentence),
        element("main", *_content(status, view)),
        element("footer", element("ul", *links), element("p", version)),
    )
    refresh = element("meta", http_equiv="refresh", content=str(REFRESH_SECONDS))
    return kit.document(status.worst, "kvdiag fleet", parts, refresh)


def _content(status: FleetStatus, view: View) -> Iterator[Html]:
    yield element("p", _round(status), class_="dim")
    if status.fleet is not None:
        yield from (kit.finding_card(one, served=True) for one in problems_of(status.fleet.findings))
    yield element("h2", "Replicas")
    yield element("p", *_filters(status, view))
    chosen = _chosen(status.replicas, view)
    shown = chosen[view.start : view.start + ROWS]
    if shown:
        yield kit.table(_titles(view), [_row(one) for one in shown], "replicas")
    else:
        missing = "No replica has a verdict yet." if status.round_seconds is None else "No replica has a verdict."
        yield kit.unobserved("No replica matches." if status.replicas else missing)
    if len(chosen) > len(shown):
        yield element("p", *_pages(view, len(chosen)))
    yield from _group("By version", "version", status, view)
    yield from _group("By node", "node", status, view)
    left = [] if status.fleet is None else [one for one in status.fleet.findings if one.status == "unknown"]
    if left:
        yield element("h2", "Comparison of replicas: unknown")
        yield kit.unknown_rows(left)
    if status.gaps:
        yield element("h2", "Not assigned to a replica")
        yield kit.gap_rows(status.gaps)


def _round(status: FleetStatus) -> str:
    if status.round_seconds is None:
        return f"{plural(status.listed, 'replica')} listed, {len(status.replicas)} with a verdict so far."
    unread = f", {plural(len(status.unread), 'replica')} not read completely" if status.unread else ""
    work = f"{plural(status.samples, 'new sample')}, {plural(status.judged, 'replica')} judged"
    # The page is kept until the next round: an age would not be true for long.
    return f"Last round {format_time(status.round_seconds)}: {work}, {format_duration(status.took_seconds)}{unread}."


def version_name(one: FleetReplica) -> str:
    """A replica's version in a table and in a filter."""
    return f"{one.version.title}, {one.version.model or 'model ' + NOT_REPORTED}"


def _names(one: FleetReplica) -> dict[str, str]:
    return {"version": version_name(one), "node": one.node or NOT_REPORTED}


def _chosen(replicas: Iterable[FleetReplica], view: View) -> list[FleetReplica]:
    wanted = {name: value for name, value in (("version", view.version), ("node", view.node)) if value}
    found = [
        one
        for one in replicas
        if view.status in ("", one.status) and all(_names(one)[name] == value for name, value in wanted.items())
    ]
    if view.sort == "name":
        return sorted(found, key=lambda one: one.judged.name)
    if view.sort in ("version", "node"):
        return sorted(found, key=lambda one: _names(one)[view.sort])
    if view.sort == "exhausted":
        return sorted(found, key=lambda one: one.exhaustion_seconds)
    if view.sort == "as of":
        return sorted(found, key=lambda one: one.as_of_seconds)
    return found


def _filters(status: FleetStatus, view: View) -> Iterator[Html | str]:
    counts = Counter(one.status for one in _chosen(status.replicas, replace(view, status="")))
    yield _link(f"all {len(status.replicas)}", View(sort=view.sort), chosen=view == View(sort=view.sort))
    for each in ORDER:
        yield " · "
        to = replace(view, status=each, start=0)
        yield _link(f"{counts[each]} {each}", to, chosen=view.status == each)
    for name, value in (("version", view.version), ("node", view.node)):
        if value:
            yield f" · {name} {value} "
            yield _link("(any)", _only(replace(view, start=0), name, ""))
        if status.replicas:
            yield " · "
            yield element("a", f"by {name}", href=f"#{name}")


def _only(view: View, name: str, value: str) -> View:
    return replace(view, version=value) if name == "version" else replace(view, node=value)


def _link(text: str, view: View, *, chosen: bool = False) -> Html:
    return element("b", text) if chosen else element("a", text, href=view.address)


def _titles(view: View) -> list[tuple[str, str]]:
    titles = {"": "worst", "replica": "name", "version": "version", "node": "node", "exhausted in": "exhausted"}
    found: list[tuple[str, str]] = []
    for title, sort in (titles | {"as of": "as of"}).items():
        to = replace(view, sort=sort, start=0)
        found.append((_link(title or "verdict", to, chosen=view.sort == sort), ""))
    return [*found, ("result", "result")]


def _row(one: FleetReplica) -> Html:
    left = one.exhaustion_seconds
    link = element("a", one.judged.name, href=one.address)
    return kit.row(
        kit.mark(one.status),
        link,
        (version_name(one), "dim version"),
        (one.node or f"node {NOT_REPORTED}", "dim"),
        (format_duration(left) if left != float("inf") else "", "number left"),
        (format_time(one.as_of_seconds), "dim time"),
        (kit.prose(one.judged.summary), "result"),
        header=1,
    )


def _pages(view: View, count: int) -> Iterator[Html | str]:
    end = min(view.start + ROWS, count)
    yield f"{format_count(min(view.start + 1, count))} to {format_count(end)} of {format_count(count)} "
    if view.start:
        yield _link("previous", replace(view, start=max(view.start - ROWS, 0)))
        yield " "
    if end < count:
        yield _link("next", replace(view, start=view.start + ROWS))


def _group(title: str, name: str, status: FleetStatus, view: View) -> Iterator[Html]:
    """How many replicas of each version, or on each node, have which verdict; those with most problems first."""
    groups: dict[str, Counter[str]] = {}
    for one in status.replicas:
        groups.setdefault(_names(one)[name], Counter())[one.status] += 1
    if not groups:
        return
    ranked = sorted(groups.items(), key=lambda each: ([-each[1][status] for status in ORDER], each[0]))
    rows = [
        kit.row(
            _link(group, _only(View(sort=view.sort), name, group), chosen=getattr(view, name) == group),
            *((format_count(counts[each]), "number") for each in ORDER),
        )
        for group, counts in ranked[:MAX_GROUPS]
    ]
    yield element("h2", title, id=name)
    yield kit.table(((name, ""), *((each, "number") for each in ORDER)), rows, "groups")
    if len(ranked) > MAX_GROUPS:
        yield element("p", f"and {len(ranked) - MAX_GROUPS:,} more: sort the replicas by {name}")
