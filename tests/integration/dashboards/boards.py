"""The committed boards as Grafana reads them, and their queries as Grafana sends them."""

import json
import re
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from dashboards.drawing import board_page
from dashboards.generate import BOARDS, FOLDER
from dashboards.queries import KVDIAG

NAME = re.compile(
    r"(?<![\w:$])((?:kvdiag_|vllm:|sglang:|trtllm_|lmdeploy:|tgi_|llamacpp:)[\w:]+|process_start_time_seconds|ALERTS)(\{[^}]*\})?"
)
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


ALL = {"__rate_interval": "4m", "__range": "1h", "job": ".+", "model_name": ".*", "instance": ".+", "gpu": ".*"}
"""The variables of a board of the last hour, with nothing chosen."""


def sent(expr: str, **values: str) -> str:
    """A query with its variables filled in: All for the choices that are not named."""
    return board_page.sent(expr, ALL | values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    """A Prometheus asked for one time range, as a board's panels ask."""

    url: str
    end_seconds: float
    range_seconds: float
    step_seconds: float

    def __call__(self, expr: str, *, instant: bool = True) -> list[dict[str, Any]]:
        """The result of a query at the end of the range, or over the range."""
        asked: dict[str, Any] = {"query": expr, "time": self.end_seconds}
        if not instant:
            start = self.end_seconds - self.range_seconds
            asked = {"query": expr, "start": start, "end": self.end_seconds, "step": self.step_seconds}
        path = "query" if instant else "query_range"
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", data=urlencode(asked).encode())
        with urllib.request.urlopen(request, timeout=30.0) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return result


def beside(ask: Prometheus, **chosen: str) -> set[str]:
    """The values of the variable `kvdiag`, for these choices above it."""
    definition = variable(board("kvdiag.json"), "kvdiag")
    assert KVDIAG == definition["definition"]
    inner = KVDIAG.removeprefix("query_result(").removesuffix(")")
    found = ask(sent(inner, **chosen))
    # Grafana matches the variable's pattern against each result as text.
    pattern = re.compile(definition["regex"].strip("/"))
    shown = ["{" + ",".join(f'{name}="{text}"' for name, text in one["metric"].items()) + "}" for one in found]
    return {match[1] for one in shown if (match := pattern.search(one))}


def chosen(instances: set[str]) -> str:
    """How Grafana writes several values into a matcher."""
    return "(" + "|".join(sorted(one.replace(".", r"\\.") for one in instances)) + ")"


def drawn(name: str, ask: Prometheus, *, rows: int = 1000, rows_open: bool = False, **choices: str) -> str:
    """A committed board as a page, with these choices; `rows_open` has what is in collapsed rows too."""
    # Grafana's `$__rate_interval` is at least four scrape intervals.
    span = {"__range": f"{ask.range_seconds:.0f}s", "__rate_interval": f"{4 * ask.step_seconds:.0f}s"}
    values = {**ALL, **span, **choices, "kvdiag": chosen(beside(ask, **span, **choices))}
    shown = board(name)
    if rows_open:
        shown["panels"] = list(panels(shown))
    return board_page.page(shown, ask, values, rows=rows, **choices)
