"""The shipped rules: by promtool what fires and what does not, and by their text what they read and where they lead."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvdiag.diagnosis.knowledge import KNOWLEDGE
from kvdiag.diagnosis.limits import Limits
from kvdiag.outputs.metrics.fleet_metrics import fleet_contract
from tests.integration.alerts.rules import FILES, FOLDER, WRAPPED, alerts, groups, records, wrapped_text
from tests.integration.alerts.tools import promtool
from tests.unit.outputs.test_metrics import GOLDEN

HERE = Path(__file__).parent
SCRAPES = HERE.parents[1] / "fixtures" / "scrapes"
CASES = sorted(HERE.glob("*.yaml"))

OLDER = {
    "vllm:time_per_output_token_seconds",
    "vllm:gpu_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_hits_total",
}
"""Names of versions before 0.11, which the rules join to today's with `or`."""

SELDOM = {
    "kvdiag_server_down_since_timestamp_seconds",
    "kvdiag_finding_or_info",
    "sglang:prompt_tokens_histogram_bucket",
}
"""Only of a server that is down, of a finding that may be either of two, and what the recorded pages are cut by."""

NOT_NAMES = {"and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "bool", "offset"}


def names_in(expression: str) -> set[str]:
    """The metrics that an expression reads: what is left of its words without labels, ranges, calls and keywords."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]', " ", expression)
    bare = re.sub(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    bare = re.sub(r"\boffset\s+\w+", " ", bare)
    words = re.findall(r"(?<![\w:.])([a-zA-Z_:][\w:]*)(?!\s*\(|[\w:])", bare)
    return set(words) - NOT_NAMES


def quoted_queries(rule: dict[str, Any]) -> Iterator[str]:
    """The queries within an alert's texts, their blanks filled."""
    for text in rule["annotations"].values():
        for query in re.findall(r'printf "([^"]*)" [^|]*\| query', text):
            yield query.replace("%s", "x").replace("'", '"')


@cache
def sent_by_kvdiag() -> set[str]:
    """Every series on a whole page of the exporter, and of a fleet's daemon."""
    fleet = {f"kvdiag_{name}" + "_total" * (one["type"] == "counter") for name, one in fleet_contract().items()}
    page = text_string_to_metric_families(GOLDEN.read_text())
    return fleet | {sample.name for family in page for sample in family.samples}


@cache
def sent_by_engines() -> set[str]:
    """Every series on the recorded pages of the engines, today's and those before, as Prometheus names it."""
    return {name for file in SCRAPES.glob("*.prom") for name in re.findall(r"(?m)^([\w:]+)[{ ]", file.read_text())}


@cache
def cases() -> tuple[dict[str, Any], ...]:
    """Every case of promtool's."""
    return tuple(case for file in CASES for case in yaml.safe_load(file.read_text(encoding="utf-8"))["tests"])


def fired(check: dict[str, Any]) -> set[tuple[str, str]]:
    """Name and severity of what a check expects to fire."""
    return {(check["alertname"], each["exp_labels"]["severity"]) for each in check["exp_alerts"]}


ALERTS = [pytest.param(rule, id=f"{rule['alert']}-{rule['labels']['severity']}") for rule in alerts()]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_promtool_takes_every_rule(file: Path) -> None:
    """They are valid on Prometheus 2.42, and none stands twice."""
    done = promtool("check", "rules", "--lint-fatal", file)
    assert (0, "") == (done.returncode, done.stderr), done.stdout


@pytest.mark.parametrize("case", CASES, ids=lambda file: file.stem)
def test_what_fires_and_what_does_not(case: Path) -> None:
    """Each alert at its moment with its labels and texts, not before it, and never for what only looks like it."""
    done = promtool("test", "rules", case)
    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("rule", ALERTS)
def test_every_alert_has_an_early_moment_a_firing_one_and_a_lookalike(rule: dict[str, Any]) -> None:
    """Each alert has a test in which it is silent first and then fires, and one in which it stays silent."""
    key = (rule["alert"], rule["labels"]["severity"])
    checks = [
        [key in fired(check) for check in case["alert_rule_test"] if check["alertname"] == key[0]] for case in cases()
    ]
    lookalikes = [
        case
        for case in cases()
        if case["name"].startswith(f"{key[0]}, {key[1]}: stays silent for ")
        and not any(key in fired(check) for check in case["alert_rule_test"])
    ]
    assert [False, True] in checks
    assert lookalikes


@pytest.mark.parametrize("rule", ALERTS)
def test_every_alert_says_what_where_and_what_to_do(rule: dict[str, Any]) -> None:
    """Severity, a summary that names the server, a description, and absolute links to a runbook and a dashboard."""
    texts = rule["annotations"]
    assert rule["alert"].startswith("Kvdiag")
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert {"summary", "description", "runbook_url", "dashboard_url"} == set(texts)
    assert texts["summary"].endswith(".")
    for label in ("namespace", "pod", "instance"):
        assert f"$labels.{label} " in texts["summary"]
    assert "$labels.instance }}" in texts["description"]
    assert texts["dashboard_url"].startswith("http://")
    assert texts["runbook_url"].startswith("http://")
    for verdict in KNOWLEDGE:
        _, _, runbook = texts["runbook_url"].replace("{{ $labels.id }}", verdict).rpartition("/runbooks/")
        assert (FOLDER / "runbooks" / runbook).is_file()


@pytest.mark.parametrize("rule", [*alerts(), *records()], ids=lambda rule: str(rule.get("alert") or rule["record"]))
def test_every_series_that_a_rule_reads_is_sent(rule: dict[str, Any]) -> None:
    """What an expression or a text asks for is on a page of kvdiag's, on an engine's recorded page, or is recorded."""
    known = sent_by_kvdiag() | sent_by_engines() | {one["record"] for one in records()} | {"up", *SELDOM}
    asked = [rule["expr"], *(quoted_queries(rule) if "alert" in rule else ())]
    for expression in asked:
        assert names_in(expression)
        assert set() == names_in(expression) - known


def test_todays_vllm_sends_all_but_the_older_names() -> None:
    """What no recorded page of 0.32 has is an older name of something that it has, and stands in an `or`."""
    today = {
        sample.name
        for file in SCRAPES.glob("vllm-0.32.0-*.prom")
        for family in text_string_to_metric_families(file.read_text())
        for sample in family.samples
    }
    asked = {name for rule in (*alerts(), *records()) for name in names_in(rule["expr"]) if name.startswith("vllm:")}
    assert OLDER == {re.sub("_(bucket|sum|count)$", "", name) for name in asked - today}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("rate(a_total[5m]) / (b > 0)", {"a_total", "b"}),
        ('x:y:z{id="q"} and ignoring(le) group_left () (m offset 5m)', {"x:y:z", "m"}),
        ("max without (status) (f) == bool 2e9 unless g", {"f", "g"}),
    ],
)
def test_names_are_found(expression: str, expected: set[str]) -> None:
    """The reader of expressions takes metrics, and neither labels, functions nor keywords."""
    assert expected == names_in(expression)


def test_only_what_the_oldest_prometheus_has() -> None:
    """No labels of a group, no query_offset, no function that came after 2.42 or went with 3.0, no `le` to match."""
    expressions = "\n".join(rule["expr"] for rule in (*alerts(), *records()))
    assert {"name", "rules"} == {key for group in groups() for key in group}
    assert not re.search(r"holt_winters|histogram_avg|mad_over_time|sort_by_label|limitk|info\(", expressions)
    assert not re.search(r"\ble\s*=", expressions)
    assert not re.search(r"\b\d+_\d", expressions)


def test_the_operators_object_holds_the_same_rules() -> None:
    """alerts/prometheusrule.yaml holds the rules of the two files; regenerate it with
    `python -m tests.integration.alerts.rules`.
    """
    assert wrapped_text() == WRAPPED.read_text(encoding="utf-8")
    assert groups() == yaml.safe_load(WRAPPED.read_text(encoding="utf-8"))["spec"]["groups"]


def test_the_readme_lists_every_alert_with_its_severities() -> None:
    """The table has each alert once, with the severities that it has."""
    rows = re.findall(r"(?m)^\| (Kvdiag[^|]+) \| ([^|]+) \|", (FOLDER / "README.md").read_text(encoding="utf-8"))
    listed = {name: set(severities.split(", ")) for names, severities in rows for name in names.split(", ")}
    shipped: dict[str, set[str]] = {}
    for rule in alerts():
        shipped.setdefault(rule["alert"], set()).add(rule["labels"]["severity"])
    assert shipped == listed


def test_the_rule_of_thumb_is_the_diagnosis_own() -> None:
    """The reserved gap that the alert names is the one from which `run` and `diagnose` show its parts."""
    (rule,) = [rule for rule in alerts() if rule["alert"] == "KvdiagReservedUnallocated"]
    assert Limits().reserved_gap_bytes == float(rule["expr"].rpartition("> ")[2])


def test_the_usual_pressure_is_the_daemons_own() -> None:
    """The alert's default pressure thresholds, and those in the documents, equal the daemon's defaults."""
    usual = Limits().pressure
    shipped = {
        rule["labels"]["severity"]: float(re.findall(r"> (0\.\d+)", rule["expr"])[0])
        for rule in alerts()
        if rule["alert"] == "KvdiagMemoryPressure"
    }
    assert {"warning": usual.warning_ratio, "critical": usual.critical_ratio} == shipped
    for page in ("docs/serve.md", "alerts/README.md", "alerts/runbooks/alert.memory_pressure.md"):
        text = (FOLDER.parent / page).read_text(encoding="utf-8")
        assert all(re.search(rf"{ratio:g}\b", text) for ratio in shipped.values()), page
