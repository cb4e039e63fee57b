"""Every query of the boards, on a real Prometheus that has scraped a real daemon and a real vLLM."""

import re

import pytest

from dashboards.generate import BOARDS
from dashboards.queries import CODES, each, own, verdict_codes
from tests.integration.dashboards.boards import Prometheus, beside, board, chosen, queries, sent
from tests.integration.dashboards.conftest import ALONE, FLEET, HOST, HOST_SGLANG, HOST_VLLM, POD, POD_VLLM, SILENT

pytestmark = pytest.mark.xdist_group("boards")


@pytest.mark.parametrize("name", BOARDS)
def test_every_query_has_an_answer(ask: Prometheus, name: str) -> None:
    """With nothing chosen, no panel of either board is empty."""
    kvdiag = chosen(beside(ask))
    empty = [
        query.panel for query in queries(board(name)) if not ask(sent(query.expr, kvdiag=kvdiag), instant=query.instant)
    ]
    assert [] == empty


@pytest.mark.parametrize("name", BOARDS)
def test_every_mark_has_an_answer(ask: Prometheus, name: str) -> None:
    """So have the alerts and the restarts on the graphs."""
    kvdiag = chosen(beside(ask))
    asked = [one for one in board(name)["annotations"]["list"] if "expr" in one]
    empty = [one["name"] for one in asked if not ask(sent(one["expr"], kvdiag=kvdiag), instant=False)]
    assert len(asked) == 4
    assert [] == empty


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        pytest.param({}, {HOST["instance"], POD["instance"], SILENT["instance"]}, id="all"),
        pytest.param({"instance": HOST_VLLM["instance"]}, {HOST["instance"]}, id="one on a host"),
        pytest.param({"instance": POD_VLLM["instance"]}, {POD["instance"]}, id="one in a pod"),
        pytest.param({"job": "other"}, set(), id="none"),
    ],
)
def test_kvdiag_follows_the_choice_of_vllm(ask: Prometheus, choice: dict[str, str], expected: set[str]) -> None:
    """A choice of vLLM selects the kvdiag of the same host or pod, and any kvdiag without a scraped vLLM."""
    assert {ALONE["instance"], FLEET["instance"], *expected} == beside(ask, **choice)


def test_panels_of_the_engine_show_whichever_is_chosen(ask: Prometheus) -> None:
    """With an SGLang chosen its tokens, hits and retractions are shown, and what is vLLM's alone is empty."""
    shown = {
        query.panel: bool(ask(sent(query.expr, job=HOST_SGLANG["job"]), instant=query.instant))
        for query in queries(board("kvdiag.json"))
        if "$job" in query.expr
    }
    assert {"Tokens per second A", "Tokens per second B", "Prefix cache hit rate A", "Preemptions per second A"} <= {
        panel for panel, answered in shown.items() if answered
    }
    assert not shown["Waiting, by reason A"]


def test_a_replica_is_a_pod_or_a_host(ask: Prometheus) -> None:
    """With pod labels or without, both targets of a replica have one name."""
    found = {one["metric"]["replica"] for one in ask(each("max", "", sent(own("build_info"), kvdiag=".+")))}
    assert {"10.0.0.1", "vllm-0", "10.0.0.3", "10.0.0.5"} == found


def test_verdicts_are_the_worst_and_never_better_than_known(ask: Prometheus) -> None:
    """What was judged well, what is a fault, what was not judged yet; who is silent has none."""
    found = {one["metric"]["replica"]: float(one["value"][1]) for one in ask(sent(verdict_codes(), kvdiag=".+"))}
    assert {"10.0.0.1": CODES["ok"], "vllm-0": CODES["fault"], "10.0.0.3": CODES["unknown"]} == found


@pytest.mark.parametrize(
    ("series", "instead"),
    [
        pytest.param("kvdiag_sample_timestamp_seconds", "{0} - 120", id="a sample that is old"),
        pytest.param("kvdiag_diagnosis_timestamp_seconds", "{0} - 1000", id="a diagnosis that is old"),
        pytest.param("kvdiag_server_state", "{0} + 1", id="a server that is lost"),
        pytest.param("kvdiag_source_up", "{0} * 0", id="an engine that is lost"),
    ],
)
def test_what_is_blind_is_unknown(ask: Prometheus, series: str, instead: str) -> None:
    """A server without findings is shown as unknown once kvdiag has lost it or its engine."""
    expr = sent(verdict_codes(), kvdiag=re.escape(HOST["instance"]).replace("\\", "\\\\"))
    changed = re.sub(rf"{series}\{{[^}}]*\}}", lambda match: f"({instead.format(match[0])})", expr)
    before, after = ask(expr), ask(changed)
    assert expr != changed
    assert [str(CODES["ok"])] == [one["value"][1] for one in before]
    assert [str(CODES["unknown"])] == [one["value"][1] for one in after]


def test_who_is_silent_is_counted(ask: Prometheus) -> None:
    """A replica that answered half an hour ago and does not now is in the number of the silent."""
    silent = next(query for query in queries(board("kvdiag-fleet.json")) if query.panel.startswith("Silent"))
    found = ask(sent(silent.expr, kvdiag=chosen(beside(ask))))
    assert ["1"] == [one["value"][1] for one in found]


def test_what_is_wrong_has_its_first_moment(ask: Prometheus) -> None:
    """In milliseconds, which Grafana shows as "an hour ago"; what has ended is in no list."""
    wrong = [query for query in queries(board("kvdiag.json")) if query.panel.startswith("Problems now")]
    found = ask(sent(wrong[1].expr, kvdiag=".+"))
    since = {one["metric"]["id"]: (one["metric"]["replica"], float(one["value"][1])) for one in found}
    assert {"leak.kv_blocks", "leak.host"} <= set(since)
    assert {"vllm-0"} == {name for name, _ in since.values()}
    assert all(1_769_996_300_000 < moment < 1_769_996_600_000 for _, moment in since.values())


def test_the_fleets_daemon_is_no_replica(ask: Prometheus) -> None:
    """It is not counted as one without a diagnosis; its replicas have a row of their own."""
    rows = [
        query for query in queries(board("kvdiag-fleet.json")) if query.panel == "Problems of replicas by history A"
    ]
    found = [one["metric"] for one in ask(sent(rows[0].expr, kvdiag=".+"))]
    assert "10.0.0.5" not in {one["metric"]["replica"] for one in ask(sent(verdict_codes(), kvdiag=".+"))}
    assert [("prod", "vllm-7", "leak.host")] == [(one["namespace"], one["pod"], one["id"]) for one in found]
