"""Many replicas at a terminal: a table with the worst first, what grows in which version, then the worst in full.

In this order: the verdict, the source and its time, the replicas, the comparison of versions (where there is more than
one replica), series that belong to no replica, and the worst replica as `text` shows one. Each table is cut, and what
needs attention stays; versions are listed by age as long as all of them fit. The JSON document holds every row.
"""

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvdiag.diagnosis.fleet import Fleet, Version, VersionChange, VersionGrowth, VersionReplicas
from kvdiag.diagnosis.fleet.version_comparison import Course
from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.formatting import format_count, format_p_value, format_time
from kvdiag.model import Finding
from kvdiag.outputs.fleet_results import FleetDiagnosis
from kvdiag.outputs.presentation import NOT_REPORTED, ORDER, problems_of
from kvdiag.outputs.terminal import text
from kvdiag.outputs.terminal.cells import columns, grid, heading, indented, plain
from kvdiag.outputs.terminal.text import gap_list, headed, problem, status_word, unknowns
from kvdiag.stats import Interval

MAX_REPLICAS, MAX_ROWS = 40, 20
"""Rows of the table of replicas, and of each table of versions."""

COURSES: dict[Course, tuple[str, str]] = {
    "grows": ("grows", "red"),
    "inconclusive": ("perhaps", "magenta"),
    "untested": ("too few", "magenta"),
    "ended": ("ended", "green"),
    "small": ("negligible", "green"),
    "flat": ("flat", "green"),
}
"""The words and colours of courses, in the order of the table."""


def render(result: FleetDiagnosis) -> RenderableType:
    """The whole result."""
    parts: list[RenderableType] = [headed(result.worst, result.sentence)]
    if (source := result.source) is not None:
        rows = (
            ("history", source.url + (f" {{{source.match}}}" if source.match else "")),
            ("time", f"{format_time(source.start_seconds)} to {format_time(source.end_seconds)}"),
            ("joined", source.joined),
        )
        parts.append(grid(rows))
    parts += [heading("Replicas"), _replicas(result), *versions(result.fleet)]
    if result.gaps:
        parts += [heading("Not assigned to a replica"), gap_list(result.gaps)]
    if result.judged:
        worst = result.judged[0]
        parts += [heading(f"In full: {worst.name}"), text.render(worst.diagnosis)]
    return Group(*parts)


def _replicas(result: FleetDiagnosis) -> RenderableType:
    table = columns("=", "replica", ">hours", "result")
    for one in result.judged[:MAX_REPLICAS]:
        table.add_row(status_word(one.diagnosis.worst), plain(one.name), format_count(one.hours), plain(one.summary))
    left = len(result.judged) - MAX_REPLICAS
    more = [plain(f"and {format_count(left)} more: --output json lists them all", "dim")] if left > 0 else []
    return indented(Group(table, *more))


def versions(fleet: Fleet) -> list[RenderableType]:
    """The comparison of all replicas, by version; nothing if there is just one replica."""
    if sum(one.replicas for one in fleet.versions) <= 1:
        return []
    shown: list[RenderableType] = [heading("Versions"), _versions(fleet)]
    if fleet.growths:
        shown += [heading("Growth per hour (median of a version's replicas)"), _growths(fleet.growths)]
    if fleet.changes:
        shown += [heading("Growth per hour, compared with the version before"), _changes(fleet.changes)]
    for finding in problems_of(fleet.findings):
        shown += [heading(f"Comparison of replicas: {finding.title}"), problem(finding)]
    left: list[Finding] = [one for one in fleet.findings if one.status == "unknown"]
    if left:
        shown += [heading("Comparison of replicas: unknown"), unknowns(left)]
    return shown


def _title(version: Version) -> str:
    return version.version or NOT_REPORTED


def _versions(fleet: Fleet) -> RenderableType:
    table = columns("", "version", "model", ">replicas", ">compared", ">hours")
    shown: Sequence[VersionReplicas] = fleet.versions
    if len(shown) > MAX_ROWS:  # the oldest first, but where they cannot all be shown the worst
        shown = sorted(shown, key=lambda one: ORDER.index(one.worst))
    for one in shown[:MAX_ROWS]:
        table.add_row(
            status_word(one.worst),
            plain(_title(one.version)),
            plain(one.version.model or NOT_REPORTED),
            format_count(one.replicas),
            format_count(one.compared),
            format_count(one.hours),
        )
    return _with_rest(table, len(fleet.versions))


def _growths(growths: Sequence[VersionGrowth]) -> RenderableType:
    table = columns("", "version", "component", ">per hour", ">replicas", ">p-value")
    order = list(COURSES)
    ordered = sorted(growths, key=lambda one: (order.index(one.course), -one.per_hour.estimate))
    for one in ordered[:MAX_ROWS]:
        table.add_row(
            Text(*COURSES[one.course]),
            plain(_title(one.version)),
            plain(one.component.label),
            one.component.amount(one.per_hour.estimate),
            format_count(one.replicas),
            format_p_value(one.p_value),
        )
    return _with_rest(table, len(growths))


def _changes(changes: Sequence[VersionChange]) -> RenderableType:
    table = columns("", "versions", "component", ">more per hour", ">p-value")
    ordered = sorted(changes, key=lambda one: (not one.faster, -one.per_hour.estimate))
    for one in ordered[:MAX_ROWS]:
        table.add_row(
            Text("faster", style="red") if one.faster else Text("no faster", style="green"),
            plain(f"{_title(one.older)} to {_title(one.newer)}"),
            plain(one.component.label),
            _bounds(one.per_hour, one.component),
            format_p_value(one.p_value),
        )
    return _with_rest(table, len(changes))


def _bounds(interval: Interval, component: MemoryComponent) -> str:
    if math.isinf(interval.low) or math.isinf(interval.high):
        return component.amount(interval.estimate)
    low, estimate, high = (component.amount(bound) for bound in (interval.low, interval.estimate, interval.high))
    last = high.rpartition(" ")[1:]
    return f"{estimate} ({low.removesuffix(''.join(last))} to {high})"


def _with_rest(table: Table, count: int) -> RenderableType:
    if count > MAX_ROWS:
        table.add_row("", plain(f"and {count - MAX_ROWS:,} more", "dim"))
    return indented(table)
