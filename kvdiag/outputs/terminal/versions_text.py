"""What a fleet shows, for a person at a terminal: what grows in which version, and since which one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvdiag.diagnosis.fleet import Fleet, Version, VersionChange, VersionGrowth
from kvdiag.diagnosis.fleet.comparison import Course
from kvdiag.diagnosis.fleet.components import BY_NAME
from kvdiag.diagnosis.fleet.verdicts import amount
from kvdiag.model import Finding, Status
from kvdiag.outputs.terminal.text import ORDER, STYLES, WORDS, heading, plain, problem, problems_of, unknowns
from kvdiag.stats import Interval

MAX_ROWS = 20
"""Of each table, what grows before what does not; all rows are in the JSON document."""

LEAST_SHOWN = 0.001
"""Smaller chances are not told apart."""

VERSION_ORDER: tuple[Status, ...] = ("fault", "suspect", "ok")

COURSES: tuple[Course, ...] = ("grows", "chance", "untested", "ended", "flat")
COURSE_STYLES: dict[Course, str] = {"grows": "red", "chance": "magenta", "untested": "magenta"}
COURSE_WORDS: dict[Course, str] = {
    "grows": "grows",
    "chance": "perhaps",
    "untested": "too few",
    "ended": "ended",
    "flat": "flat",
}


def parts(fleet: Fleet) -> list[RenderableType]:
    """The fleet's part of a result, to stand below its replicas; nothing where there is just one replica."""
    if sum(one.replicas for one in fleet.versions) <= 1:
        return []
    shown: list[RenderableType] = [heading("Versions"), _versions(fleet)]
    if fleet.growths:
        shown += [heading("What grows, per hour, in the middle one of a version's replicas"), _growths(fleet.growths)]
    if fleet.changes:
        shown += [heading("Per hour more than in the version before"), _changes(fleet.changes)]
    for finding in problems_of(fleet.findings):
        shown += [heading(f"All replicas: {finding.id}"), problem(finding)]
    left: list[Finding] = [one for one in fleet.findings if one.status == "unknown"]
    if left:
        shown += [heading("Could not tell of all replicas together"), unknowns(left)]
    return shown


def _title(version: Version) -> str:
    return version.version or "not told"


def _table(*columns: tuple[str, bool]) -> Table:
    """Columns by their titles; numbers stand to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    for title, is_number in columns:
        if is_number:
            table.add_column(title, justify="right", no_wrap=True)
        else:
            table.add_column(title, overflow="fold")
    return table


def _versions(fleet: Fleet) -> RenderableType:
    table = _table(
        ("", False), ("version", False), ("model", False), ("replicas", True), ("compared", True), ("hours", True)
    )
    judged = [(_worst(fleet, one.version), one) for one in fleet.versions]
    # The oldest first, as they are; only where not all can be shown the worst stand before the others.
    shown = judged if len(judged) <= MAX_ROWS else sorted(judged, key=lambda one: ORDER.index(one[0]))
    for worst, one in shown[:MAX_ROWS]:
        table.add_row(
            Text(WORDS[worst], style=STYLES[worst]),
            plain(_title(one.version)),
            plain(one.version.model or "not told"),
            f"{one.replicas:,}",
            f"{one.compared:,}",
            f"{one.hours:.1f}",
        )
    return _with_rest(table, len(judged))


def _worst(fleet: Fleet, version: Version) -> Status:
    """The worst that was told of a version; what nobody tells leaves it alone."""
    own = {finding.status for finding in fleet.findings if _is_of(finding, version)}
    return next((status for status in VERSION_ORDER if status in own), "unknown")


def _is_of(finding: Finding, version: Version) -> bool:
    told = {one.name: one.value for one in finding.evidence}
    return (told.get("version"), told.get("model")) == (version.title, version.model)


def _growths(growths: Sequence[VersionGrowth]) -> RenderableType:
    table = _table(
        ("", False), ("version", False), ("part", False), ("per hour", True), ("replicas", True), ("chance", True)
    )
    ordered = sorted(growths, key=lambda one: (COURSES.index(one.course), -one.per_hour.middle))
    for one in ordered[:MAX_ROWS]:
        table.add_row(
            Text(COURSE_WORDS[one.course], style=COURSE_STYLES.get(one.course, "green")),
            plain(_title(one.version)),
            one.component.replace("_", " "),
            amount(one.per_hour.middle, BY_NAME[one.component].unit),
            f"{one.replicas:,}",
            _chance(one.chance),
        )
    return _with_rest(table, len(growths))


def _changes(changes: Sequence[VersionChange]) -> RenderableType:
    table = _table(("", False), ("versions", False), ("part", False), ("more per hour", True), ("chance", True))
    ordered = sorted(changes, key=lambda one: (not one.faster, -one.per_hour.middle))
    for one in ordered[:MAX_ROWS]:
        table.add_row(
            Text("faster", style="red") if one.faster else Text("no more", style="green"),
            plain(f"{_title(one.newer)} after {_title(one.older)}"),
            one.component.replace("_", " "),
            _bounds(one.per_hour, one.component),
            _chance(one.chance),
        )
    return _with_rest(table, len(changes))


def _bounds(interval: Interval, component: str) -> str:
    unit = BY_NAME[component].unit
    if math.isinf(interval.low) or math.isinf(interval.high):
        return amount(interval.middle, unit)
    low, middle, high = (amount(bound, unit) for bound in (interval.low, interval.middle, interval.high))
    last = high.rpartition(" ")[1:]
    return f"{middle} ({low.removesuffix(''.join(last))} to {high})"


def _chance(chance: float) -> str:
    return f"{chance:.1%}" if chance >= LEAST_SHOWN else f"< {LEAST_SHOWN:.1%}"


def _with_rest(table: Table, count: int) -> RenderableType:
    if count > MAX_ROWS:
        table.add_row("", plain(f"and {count - MAX_ROWS} more", "dim"))
    return Padding(table, (0, 0, 0, 2))
