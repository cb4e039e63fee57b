"""What a board must be before anybody imports it: grafana/dashboard-linter's rules, vLLM's conventions, and ours."""

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dashboards.generate import BOARDS, FOLDER, main, text
from kvdiag.outputs.metrics.fleet_metrics import fleet_contract
from tests.integration.alerts.test_alert_rules import SELDOM, sent_by_engines
from tests.integration.dashboards.boards import NAME, board, boards, panels, queries, variable
from tests.unit.outputs.test_metrics import GOLDEN

SCRAPE = Path(__file__).parents[2] / "fixtures" / "scrapes" / "vllm-0.32.0-cpu-load.prom"

UNITS = {"none", "short", "percentunit", "bytes", "s", "ops", "cps"}
"""Of Grafana's, those that the boards use (packages/grafana-data/src/valueFormats/categories.ts)."""

KINDS = {"stat", "table", "timeseries", "state-timeline"}
"""None of those that Grafana deprecates."""

each_board = pytest.mark.parametrize("name", BOARDS)


def names(path: Path) -> set[str]:
    """Every series on a page."""
    families = text_string_to_metric_families(path.read_text(encoding="utf-8"))
    return {sample.name for family in families for sample in family.samples}


def series(expr: str) -> list[tuple[str, str]]:
    """The names in a query, and their matchers."""
    return [(match[1], match[2] or "") for match in NAME.finditer(expr)]


@each_board
def test_the_committed_board_is_what_the_generator_makes(name: str) -> None:
    """The committed JSON equals the generator's output, so it has not been edited by hand."""
    assert text(BOARDS[name]) == (FOLDER / name).read_text(encoding="utf-8")
    assert 0 == main(["--check"])


def test_the_folder_holds_no_other_board() -> None:
    """What lies there is generated."""
    assert set(BOARDS) == {path.name for path in FOLDER.glob("*.json")}


@each_board
def test_it_stands_in_the_menu_of_vllms_own_boards(name: str) -> None:
    """Their tag, their link, and their variables, which a link takes along."""
    shown = board(name)
    assert name == f"{shown['uid']}.json"
    assert "vllm" in shown["tags"]
    assert [(["vllm"], True, True)] == [
        (link["tags"], link["includeVars"], link["keepTime"]) for link in shown["links"]
    ]
    assert ["datasource", "job", "model_name", "instance"] == [one["name"] for one in shown["templating"]["list"]][:4]


@each_board
def test_it_can_be_provisioned(name: str) -> None:
    """Classic JSON with nothing that only the import dialog fills in, and nothing to edit by mistake."""
    shown = board(name)
    assert (39, None, False) == (shown["schemaVersion"], shown["id"], shown["editable"])
    assert "__inputs" not in shown


@each_board
def test_ids_are_unique_and_panels_lie_side_by_side(name: str) -> None:
    """No panel lies on another or beyond the grid; those of a collapsed row count among themselves."""
    shown = board(name)
    everything = [one for row in shown["panels"] for one in (row, *row.get("panels", ()))]
    groups = [shown["panels"], *(row["panels"] for row in shown["panels"] if row["type"] == "row" and row["collapsed"])]
    ids = [one["id"] for one in everything]
    assert sorted(set(ids)) == sorted(ids)
    for group in groups:
        places = [one["gridPos"] for one in group]
        assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
        assert not any(_overlap(one, other) for one, other in combinations(places, 2))
    tops = [row["gridPos"]["y"] for row in shown["panels"]]
    assert sorted(tops) == tops


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
    below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    return not beside and not below


@each_board
def test_no_line_of_panels_is_left_short(name: str) -> None:
    """Panels fill the width, so that nothing looks forgotten."""
    widths: dict[tuple[int, int], int] = {}
    for number, row in enumerate(board(name)["panels"]):
        for one in row.get("panels") or [row]:
            key = (number if row["type"] == "row" and row["collapsed"] else -1, one["gridPos"]["y"])
            widths[key] = widths.get(key, 0) + one["gridPos"]["w"]
    assert {24} == set(widths.values())


@each_board
def test_every_panel_explains_itself(name: str) -> None:
    """A title, a unit, a kind that is not deprecated, the chosen data source, and a description with its metrics."""
    for panel in panels(board(name)):
        asked = {
            re.sub(r"_(bucket|sum|count)$", "", one) for query in panel["targets"] for one, _ in series(query["expr"])
        }
        told = {one for one in re.findall(r"`([\w:]+)`", panel["description"]) if NAME.fullmatch(one)}
        assert panel["title"]
        assert panel["type"] in KINDS
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["targets"]
        assert {"${datasource}"} == {one["datasource"]["uid"] for one in (panel, *panel["targets"])}
        assert asked - {"kvdiag_build_info", "kvdiag_fleet_replicas"} <= told, panel["title"]
        assert told <= asked, panel["title"]


@each_board
def test_what_is_not_known_is_never_shown_as_well(name: str) -> None:
    """A number says so when there is none, and is asked for as of now: the last one of an hour ago is not the state."""
    for panel in panels(board(name)):
        if panel["type"] in ("stat", "table"):
            assert all(target["instant"] for target in panel["targets"]), panel["title"]
        if panel["type"] == "stat":
            defaults = panel["fieldConfig"]["defaults"]
            missing = [one["options"]["result"] for one in defaults["mappings"] if one["type"] == "special"]
            assert [defaults["noValue"]] == [one["text"] for one in missing], panel["title"]
            assert missing[0]["color"] in ("purple", "text"), panel["title"]
            assert missing[0]["text"] in ("Unknown", "Unknown: no kvdiag", "None", "None known"), panel["title"]
        assert not any("vector(0)" in target["expr"] for target in panel["targets"]), panel["title"]


@each_board
def test_every_series_is_chosen_by_the_variables(name: str) -> None:
    """The engine's series are selected by job, model and instance as on vLLM's boards, kvdiag's by its targets."""
    for query in queries(board(name)):
        for one, matchers in series(query.expr):
            wanted = ['instance=~"$kvdiag"'] if one.startswith("kvdiag_") else ['job=~"$job"', 'instance=~"$instance"']
            assert all(matcher in matchers for matcher in wanted), (query.panel, one)


@each_board
def test_counters_are_asked_for_their_rate(name: str) -> None:
    """Over an interval that is never shorter than a scrape's."""
    for query in queries(board(name)):
        for called, interval in re.findall(r"\b(rate|irate|increase)\([^\[\]]*\[([^\]]+)\]", query.expr):
            assert "$__rate_interval" == interval, (query.panel, called)
        counters = [one for one, _ in series(query.expr) if one.endswith(("_total", "_bucket", "_sum", "_count"))]
        assert len(counters) == len(re.findall(r"\b(?:rate|increase)\(", query.expr)), query.panel


def test_every_series_exists() -> None:
    """On kvdiag's page, or on a recorded one of an engine's; those of vLLM on its newest."""
    others = {one for one in sent_by_engines() | SELDOM if not one.startswith("vllm:")}
    known = names(GOLDEN) | names(SCRAPE) | others | {f"kvdiag_{name}" for name in fleet_contract()}
    asked = {one for shown in boards() for query in queries(shown) for one, _ in series(query.expr)}
    assert set() == asked - known


@each_board
def test_variables_are_as_the_linter_wants_them(name: str) -> None:
    """Query variables allow several values, use the chosen data source, refresh per time range, and are all used."""
    shown = board(name)
    used = " ".join(query.expr for query in queries(shown))
    asked: list[dict[str, Any]] = [one for one in shown["templating"]["list"] if one["type"] == "query"]
    source = variable(shown, "datasource")
    assert ("datasource", "prometheus", "Data source") == (source["type"], source["query"], source["label"])
    for one in asked:
        assert ("${datasource}", True, True, 2) == (
            one["datasource"]["uid"], one["multi"], one["includeAll"], one["refresh"],
        )  # fmt: skip
        assert f'"${one["name"]}"' in used
    assert [(".+", "Job"), (".+", "Instance")] == [
        (variable(shown, each)["allValue"], variable(shown, each)["label"]) for each in ("job", "instance")
    ]


@each_board
def test_links_lead_to_boards_that_exist(name: str) -> None:
    """A click on a replica opens its own board."""
    links = re.findall(r'"/d/([\w-]+)\?', (FOLDER / name).read_text(encoding="utf-8"))
    assert set(links) <= {shown["uid"] for shown in boards()}


def test_every_row_is_in_the_readme() -> None:
    """With what it needs."""
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = [row["title"] for shown in boards() for row in shown["panels"] if row["type"] == "row"]
    assert [] == [row for row in rows if f"| {row} |" not in readme]
