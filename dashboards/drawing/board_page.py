"""A board drawn as HTML from its own JSON and the answers of a Prometheus, in the look of Grafana's dark theme.

No Grafana takes part. What a panel shows follows the board's options as Grafana documents them: the grid of 24 columns,
stacking, thresholds, value mappings, overrides by name, the `merge` and `organize` transformations, units and legends.
An option that the boards do not use is not drawn.
"""

import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, Protocol

from dashboards.drawing import drawn_panels
from dashboards.drawing.drawn_values import PALETTE, Json, Line, Marks, Points, color_of, settings_of

STYLE = Path(__file__).with_name("board.css")
WIDTH, CELL, GAP, TITLE, TOP = 1400, 38, 8, 30, 96


class Prometheus(Protocol):
    """A Prometheus asked for one time range."""

    @property
    def end_seconds(self) -> float:
        """When the range ends, Unix time."""

    @property
    def range_seconds(self) -> float:
        """How long it is."""

    @property
    def step_seconds(self) -> float:
        """From one value of a graph to the next."""

    def __call__(self, expr: str, *, instant: bool) -> list[dict[str, Any]]:
        """The result of a query at the end of the range, or over the range."""


def page(board: Json, ask: Prometheus, values: Json, *, rows: int = 1000, **choices: str) -> str:
    """The board down to a line of its grid; collapsed rows stay closed.

    `values` are the values of its variables as they stand in queries, `choices` those that are not All, as shown.
    """
    marks = list(_marks(board, ask, values))
    column = (WIDTH - GAP) / 24
    drawn, bottom = [], 0
    for panel in board["panels"]:
        grid = panel["gridPos"]
        if grid["y"] + grid["h"] > rows:
            continue
        width, height = grid["w"] * column - GAP, grid["h"] * CELL - GAP
        x, y = GAP + grid["x"] * column, TOP + grid["y"] * CELL
        place = f'style="left:{x:.0f}px;top:{y}px;width:{width:.0f}px;height:{height}px"'
        title = escape(panel["title"])
        if panel["type"] == "row":
            drawn.append(f'<div class="row" {place}>{"&rsaquo;" if panel["collapsed"] else "&#8964;"} {title}</div>')
        else:
            body = _inside(panel, ask, values, marks, (width, height - TITLE))
            drawn.append(f'<div class="panel" {place}><div class="title">{title}</div>{body}</div>')
        bottom = max(bottom, y + height)
    return (
        f'<!doctype html><meta charset="utf-8"><style>{STYLE.read_text(encoding="utf-8")}body {{ width: {WIDTH}px; '
        f'height: {bottom + GAP}px }}</style><div class="top"><div><span class="dim">Dashboards /</span> '
        f'{escape(board["title"])}</div><div class="dim">Drawn from {board["uid"]}.json, not by Grafana. Last '
        f'{ask.range_seconds / 60:.0f} minutes, UTC</div></div><div class="choices">{_choices(board, choices)}</div>'
        f"{''.join(drawn)}"
    )


def _choices(board: Json, choices: Json) -> str:
    default = {"datasource": "Prometheus"}
    return "".join(
        f'<span class="dim">{escape(one["label"])}</span>'
        f"<span>{escape(choices.get(one['name'], default.get(one['type'], 'All')))}</span>"
        for one in board["templating"]["list"]
    )


def _inside(panel: Json, ask: Prometheus, values: Json, marks: Marks, size: tuple[float, float]) -> str:
    """What stands below the title of a panel."""
    answers = [ask(sent(one["expr"], values), instant=one["instant"]) for one in panel["targets"]]
    if panel["type"] == "table":
        return drawn_panels.table(panel, answers, ask.end_seconds)
    if panel["type"] == "stat":
        return drawn_panels.stat(panel, answers[0], size[0])
    lines = list(_lines(panel, answers, ask.step_seconds))
    if not lines:
        return f'<div class="none dim">{escape(panel["fieldConfig"]["defaults"]["noValue"])}</div>'
    span = (ask.end_seconds - ask.range_seconds, ask.end_seconds)
    if panel["type"] == "state-timeline":
        return drawn_panels.timeline(panel, lines, span, ask.step_seconds, size)
    return drawn_panels.graph(panel, lines, marks, span, size)


def sent(expr: str, values: Json) -> str:
    """A query with its variables filled in."""
    return re.sub(r"\$(\w+)", lambda match: str(values.get(match[1], match[0])), expr)


def _marks(board: Json, ask: Prometheus, values: Json) -> Iterator[tuple[float, str]]:
    """The moment when each annotation began, within the range, and its colour."""
    for one in board["annotations"]["list"]:
        for series in ask(sent(one["expr"], values), instant=False) if "expr" in one else ():
            begun, before = set(), -math.inf
            for at, text in series["values"]:
                if one["useValueForTime"]:
                    begun.add(float(text) / 1000)
                elif at - before > 1.5 * ask.step_seconds:
                    begun.add(at)
                before = at
            yield from ((at, color_of(one["iconColor"])) for at in begun if at > ask.end_seconds - ask.range_seconds)


def _lines(panel: Json, answers: Sequence[list[Any]], step: float) -> Iterator[Line]:
    """Each series with its name in the legend and its colour; a gap that is not spanned has a point without a value."""
    number = 0
    for target, result in zip(panel["targets"], answers, strict=True):
        for one in result:
            name = target["legendFormat"]
            for label in re.findall(r"{{(\w+)}}", name):
                name = name.replace(f"{{{{{label}}}}}", one["metric"].get(label, ""))
            settings = settings_of(panel, name)
            color = settings["color"].get("fixedColor") or PALETTE[number % len(PALETTE)]
            number += 1
            spanned = settings.get("custom.spanNulls") or 0
            points: Points = []
            for at, text in one["values"]:
                if points and at - points[-1][0] > max(1.5 * step, spanned / 1000):
                    points.append((points[-1][0] + step, math.nan))
                points.append((at, float(text)))
            yield Line(name, points, settings, color_of(color))
