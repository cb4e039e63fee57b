"""The committed boards as Grafana reads them, and their queries as Grafana sends them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dashboards.generate import BOARDS, FOLDER

NAME = re.compile(r"(?<![\w:$])((?:kvdiag_|vllm:)[\w:]+|process_start_time_seconds|ALERTS)(\{[^}]*\})?")
"""A series in a query, and its matchers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query of a board, and where it stands."""

    panel: str
    expr: str
    instant: bool


def board(name: str) -> dict[str, Any]:
    """A committed board."""
    decoded: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return decoded


def boards() -> list[dict[str, Any]]:
    """Both."""
    return [board(name) for name in BOARDS]


def panels(of: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel, those in collapsed rows too; no rows."""
    for panel in of["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def queries(of: Mapping[str, Any]) -> Iterator[Query]:
    """Every panel's."""
    for panel in panels(of):
        for target in panel["targets"]:
            where = f"{panel['title']} {target['refId']}"
            yield Query(panel=where, expr=target["expr"], instant=target["instant"])


def variable(of: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A variable of a board."""
    found: dict[str, Any] = next(one for one in of["templating"]["list"] if one["name"] == name)
    return found


def sent(expr: str, **values: str) -> str:
    """A query with its variables filled in: All for the choices that are not named."""
    told = {"__rate_interval": "4m", "__range": "1h", "job": ".+", "model_name": ".+", "instance": ".+", "gpu": ".*"}
    told |= values
    return re.sub(r"\$(\w+)", lambda match: told.get(match[1], match[0]), expr)
