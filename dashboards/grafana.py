"""Panels, variables and boards as values, and Grafana's classic JSON of them. Pure; knows nothing of any metric.

The classic model (schema 39) is what Grafana 10.4 to 13 import, provision and migrate on load.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

SCHEMA_VERSION = 39
GRID_WIDTH = 24
SOURCE: Mapping[str, str] = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One query; `instant` asks for the value at the end of the time range alone, so that nothing old looks new."""

    expr: str
    legend: str = "__auto"
    instant: bool = False
    table: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. `kind` is Grafana's name of its type; width and height are units of the grid."""

    kind: str
    title: str
    description: str
    targets: Sequence[Target]
    width: int
    height: int
    defaults: Json
    options: Json
    overrides: Sequence[Json] = ()
    transformations: Sequence[Json] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels under a title. A collapsed row asks nothing until it is opened; `repeat` makes one for each value."""

    title: str
    panels: Sequence[Panel]
    collapsed: bool = False
    repeat: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A choice at the top, filled by a query. Without `all_value` All means every value that the query gave."""

    name: str
    label: str
    query: str
    all_value: str | None = ".+"
    regex: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """Marks on every graph, where a query has a value; or at the moment, in milliseconds, that is its value."""

    name: str
    expr: str
    title: str
    text: str
    color: str
    value_is_time: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A whole dashboard."""

    uid: str
    title: str
    description: str
    variables: Sequence[Variable]
    annotations: Sequence[Annotation]
    rows: Sequence[Row] = field(default=())


def document(board: Board) -> Json:
    """The board as Grafana imports it."""
    return {
        "annotations": {"list": [_BUILT_IN, *map(_annotation, board.annotations)]},
        "description": board.description,
        "editable": False,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "id": None,
        "links": [_LINK],
        "panels": _placed(board.rows),
        "refresh": "30s",
        "schemaVersion": SCHEMA_VERSION,
        "tags": ["vllm", "kvdiag"],
        "templating": {"list": [_DATASOURCE, *map(_variable, board.variables)]},
        "time": {"from": "now-6h", "to": "now"},
        "timepicker": {},
        "timezone": "",
        "title": board.title,
        "uid": board.uid,
        "version": 1,
        "weekStart": "",
    }


_BUILT_IN: Json = {
    "builtIn": 1,
    "datasource": {"type": "grafana", "uid": "-- Grafana --"},
    "enable": True,
    "hide": True,
    "iconColor": "rgba(0, 211, 255, 1)",
    "name": "Annotations & Alerts",
    "type": "dashboard",
}

# The menu that vLLM's own boards have: whatever carries the tag, with the variables and the time taken along.
_LINK: Json = {
    "asDropdown": False,
    "icon": "external link",
    "includeVars": True,
    "keepTime": True,
    "tags": ["vllm"],
    "targetBlank": False,
    "title": "vLLM dashboards",
    "type": "dashboards",
}

_DATASOURCE: Json = {
    "current": {"selected": False, "text": "default", "value": "default"},
    "hide": 0,
    "includeAll": False,
    "label": "Data source",
    "multi": False,
    "name": "datasource",
    "options": [],
    "query": "prometheus",
    "refresh": 1,
    "regex": "",
    "type": "datasource",
}


def _annotation(one: Annotation) -> Json:
    return {
        "datasource": dict(SOURCE),
        "enable": True,
        "expr": one.expr,
        "hide": False,
        "iconColor": one.color,
        "name": one.name,
        "step": "60s",
        "textFormat": one.text,
        "titleFormat": one.title,
        "useValueForTime": one.value_is_time,
    }


def _variable(one: Variable) -> Json:
    made: Json = {
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "datasource": dict(SOURCE),
        "definition": one.query,
        "hide": 0,
        "includeAll": True,
        "label": one.label,
        "multi": True,
        "name": one.name,
        "options": [],
        "query": one.query,
        "refresh": 2,
        "regex": one.regex,
        "sort": 1,
        "type": "query",
    }
    return made if one.all_value is None else {**made, "allValue": one.all_value}


def _placed(rows: Iterable[Row]) -> list[Json]:
    placed: list[Json] = []
    number, top = 1, 0
    for row in rows:
        header: Json = {
            "collapsed": row.collapsed,
            "gridPos": {"h": 1, "w": GRID_WIDTH, "x": 0, "y": top},
            "id": number,
            "panels": [],
            "title": row.title,
            "type": "row",
        }
        if row.repeat is not None:
            header["repeat"] = row.repeat
        inside, bottom = _flow(row.panels, number + 1, top + 1)
        number += 1 + len(inside)
        placed.append(header)
        if row.collapsed:
            header["panels"] = inside
            top += 1
        else:
            placed += inside
            top = bottom
    return placed


def _flow(panels: Sequence[Panel], number: int, top: int) -> tuple[list[Json], int]:
    """Panels from left to right, in lines as high as their highest; and where the next line would begin."""
    found: list[Json] = []
    left, height = 0, 0
    for panel in panels:
        if left + panel.width > GRID_WIDTH:
            left, top, height = 0, top + height, 0
        found.append(_panel(panel, number + len(found), {"h": panel.height, "w": panel.width, "x": left, "y": top}))
        left, height = left + panel.width, max(height, panel.height)
    return found, top + height


def _panel(panel: Panel, number: int, place: Json) -> Json:
    made: Json = {
        "datasource": dict(SOURCE),
        "description": panel.description,
        "fieldConfig": {"defaults": panel.defaults, "overrides": list(panel.overrides)},
        "gridPos": place,
        "id": number,
        "options": panel.options,
        "targets": [_target(target, chr(ord("A") + place)) for place, target in enumerate(panel.targets)],
        "title": panel.title,
        "type": panel.kind,
    }
    return {**made, "transformations": list(panel.transformations)} if panel.transformations else made


def _target(target: Target, letter: str) -> Json:
    return {
        "datasource": dict(SOURCE),
        "editorMode": "code",
        "expr": target.expr,
        "format": "table" if target.table else "time_series",
        "instant": target.instant,
        "legendFormat": target.legend,
        "range": not target.instant,
        "refId": letter,
    }
