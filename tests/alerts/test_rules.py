"""The shipped rules: by promtool what fires and what does not, and by their text what they read and where they lead."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvdiag.diagnosis.knowledge import KNOWLEDGE
from kvdiag.diagnosis.limits import Limits
from kvdiag.model import Facts, Sample, Snapshot, SourceHealth
from tests.alerts.rules import FILES, FOLDER, WRAPPED, alerts, groups, records, wrapped_text
from tests.builders import GIB, SERVER_PID, World, allocator, device, engine, facts, judged, process
from tests.outputs.test_metrics import GOLDEN, page
from tests.prometheus.alertmanager import alert_programs
from tests.prometheus.server import PrometheusEnvError, programs
from tests.support import require

HERE = Path(__file__).parent
SCRAPES = HERE.parent / "fixtures" / "scrapes"
REAL = SCRAPES / "vllm-0.32.0-cpu-tp2-idle.prom"
CASES = sorted(HERE.glob("*.yaml"))

OLDER = {
    "vllm:time_per_output_token_seconds",
    "vllm:gpu_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_hits_total",
}
"""Names of versions before 0.11, which stand beside today's in an `or`."""

NOT_NAMES = {"and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "bool", "offset"}


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What promtool says."""
    try:
        program = programs().promtool
    except PrometheusEnvError as error:
        require(ok=False, what=f"Prometheus ({error})")
        raise
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def amtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What amtool says."""
    try:
        program = alert_programs().amtool
    except PrometheusEnvError as error:
        require(ok=False, what=f"Alertmanager ({error})")
        raise
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


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
    """Every series on a whole page of the exporter."""
    return {sample.name for family in text_string_to_metric_families(GOLDEN.read_text()) for sample in family.samples}


@cache
def sent_by_vllm() -> set[str]:
    """Every series on the recorded pages of vLLM, today's and those before."""
    return {
        sample.name
        for file in SCRAPES.glob("*.prom")
        for family in text_string_to_metric_families(file.read_text())
        for sample in family.samples
    }


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
    # WHEN
    done = promtool("check", "rules", "--lint-fatal", file)

    # THEN
    assert (0, "") == (done.returncode, done.stderr), done.stdout


@pytest.mark.parametrize("case", CASES, ids=lambda file: file.stem)
def test_what_fires_and_what_does_not(case: Path) -> None:
    """Each alert at its moment with its labels and texts, not before it, and never for what only looks like it."""
    # WHEN
    done = promtool("test", "rules", case)

    # THEN
    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("rule", ALERTS)
def test_every_alert_has_an_early_moment_a_firing_one_and_a_lookalike(rule: dict[str, Any]) -> None:
    """No alert is shipped that was not seen to fire, and to be silent for what is not meant."""
    # GIVEN
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

    # THEN
    assert [False, True] in checks
    assert lookalikes


@pytest.mark.parametrize("rule", ALERTS)
def test_every_alert_says_what_where_and_what_to_do(rule: dict[str, Any]) -> None:
    """Severity, a static summary, a description with the number that decided, a runbook that exists, the dashboard."""
    # GIVEN
    texts = rule["annotations"]

    # THEN
    assert rule["alert"].startswith("Kvdiag")
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert {"summary", "description", "runbook_url", "dashboard_url"} == set(texts)
    assert texts["summary"].endswith(".")
    assert "{{" not in texts["summary"]
    assert "{{ $labels.instance }}" in texts["description"]
    assert "/d/kvdiag" == texts["dashboard_url"]
    for verdict in KNOWLEDGE:
        runbook = FOLDER.parent / texts["runbook_url"].replace("{{ $labels.id }}", verdict)
        assert runbook.is_file()


@pytest.mark.parametrize("rule", [*alerts(), *records()], ids=lambda rule: str(rule.get("alert") or rule["record"]))
def test_every_series_that_a_rule_reads_is_sent(rule: dict[str, Any]) -> None:
    """What an expression or a text asks for is on a page of kvdiag's, on a recorded page of vLLM's, or is recorded."""
    # GIVEN
    known = sent_by_kvdiag() | sent_by_vllm() | {one["record"] for one in records()} | {"up"}
    asked = [rule["expr"], *(quoted_queries(rule) if "alert" in rule else ())]

    # THEN
    for expression in asked:
        assert names_in(expression)
        assert set() == names_in(expression) - known


def test_todays_vllm_sends_all_but_the_older_names() -> None:
    """What no recorded page of 0.32 has is an older name of something that it has, and stands in an `or`."""
    # GIVEN
    today = {
        sample.name
        for file in SCRAPES.glob("vllm-0.32.0-*.prom")
        for family in text_string_to_metric_families(file.read_text())
        for sample in family.samples
    }
    asked = {name for rule in (*alerts(), *records()) for name in names_in(rule["expr"]) if name.startswith("vllm:")}

    # THEN
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
    # THEN
    assert expected == names_in(expression)


def test_only_what_the_oldest_prometheus_has() -> None:
    """No labels of a group, no query_offset, no function that came after 2.42 or went with 3.0, no `le` to match."""
    # GIVEN
    expressions = "\n".join(rule["expr"] for rule in (*alerts(), *records()))

    # THEN
    assert {"name", "rules"} == {key for group in groups() for key in group}
    assert not re.search(r"holt_winters|histogram_avg|mad_over_time|sort_by_label|limitk|info\(", expressions)
    assert not re.search(r"\ble\s*=", expressions)
    assert not re.search(r"\b\d+_\d", expressions)


def test_the_operators_object_holds_the_same_rules() -> None:
    """alerts/prometheusrule.yaml is what the two files make; `python -m tests.alerts.rules` writes it anew."""
    # THEN
    assert wrapped_text() == WRAPPED.read_text(encoding="utf-8")
    assert groups() == yaml.safe_load(WRAPPED.read_text(encoding="utf-8"))["spec"]["groups"]


def test_the_readme_lists_every_alert_with_its_severities() -> None:
    """The table has each alert once, with the severities that it has."""
    # GIVEN
    rows = re.findall(r"(?m)^\| (Kvdiag[^|]+) \| ([^|]+) \|", (FOLDER / "README.md").read_text(encoding="utf-8"))
    listed = {name: set(severities.split(", ")) for names, severities in rows for name in names.split(", ")}

    # WHEN
    shipped: dict[str, set[str]] = {}
    for rule in alerts():
        shipped.setdefault(rule["alert"], set()).add(rule["labels"]["severity"])

    # THEN
    assert shipped == listed


def test_the_rule_of_thumb_is_the_diagnosis_own() -> None:
    """The reserved gap that the alert names is the one from which `run` and `diagnose` show its parts."""
    # GIVEN
    (rule,) = [rule for rule in alerts() if rule["alert"] == "KvdiagReservedUnallocated"]

    # THEN
    assert Limits().reserved_gap_bytes == float(rule["expr"].rpartition("> ")[2])


def idle() -> Snapshot:
    """A default vLLM that nothing runs on: 0.92 of the device is its own, for its life."""
    total = 24 * GIB
    used = round(0.92 * total)
    newest = Sample(
        at_seconds=1_000.0,
        engines=(engine(),),
        devices=(
            device(
                used_bytes=used, total_bytes=total, processes=(process(SERVER_PID, used - GIB, "VLLM::EngineCore"),)
            ),
        ),
        allocators=(allocator(allocated_bytes=18 * GIB, reserved_bytes=19 * GIB, tensor_rank=0),),
    )
    return Snapshot(
        state="serving",
        facts=facts(World()),
        newest=newest,
        sources=tuple(
            SourceHealth(source=name, up=True, errors_total=0, duration_seconds=0.002) for name in ("nvml", "vllm")
        ),
        diagnosis=judged(World()),
        diagnosed_seconds=1_000.0,
    )


def input_series(text: str, target: dict[str, str], grows: tuple[str, ...] = ()) -> Iterator[dict[str, str]]:
    """A page that stays as it is for an hour and more, but for the moments that it tells, which go on.

    Series whose names end as `grows` says grow by their value each minute.
    """
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={yaml_string(value)}" for name, value in {**sample.labels, **target}.items())
            values = f"{sample.value}x70"
            if sample.name.endswith("_timestamp_seconds"):
                values = "0+60x70"
            elif grows and sample.name.endswith(grows):
                values = f"0+{sample.value}x70"
            yield {"series": f"{sample.name}{{{labels}}}", "values": values}


def yaml_string(text: str) -> str:
    """A label's value as PromQL writes it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


@pytest.mark.parametrize(
    "scrape",
    ["vllm-0.32.0-cpu-tp2-idle.prom", "vllm-0.32.0-cpu-dp2-apiserver2-idle.prom", "vllm-0.9.2-V1-rendered.prom"],
)
def test_an_idle_default_vllm_fires_nothing(scrape: str, tmp_path: Path) -> None:
    """With 0.92 of the device taken for hours no alert fires, and none is about to; beside real pages of vLLM."""
    # GIVEN
    pod = {"namespace": "llm", "pod": "vllm-0"}
    series = [
        *input_series(page(idle()), {"job": "kvdiag", "instance": "vllm-0:9743", **pod}),
        *input_series((SCRAPES / scrape).read_text(), {"job": "vllm", "instance": "vllm-0:8000", **pod}),
        {"series": 'up{job="kvdiag",instance="vllm-0:9743"}', "values": "1x70"},
    ]
    silent = [
        {"expr": "count(ALERTS) or vector(0)", "eval_time": moment, "exp_samples": [{"labels": "{}", "value": 0}]}
        for moment in ("2m", "20m", "70m")
    ]
    recorded = {"expr": "count(gpu:kvdiag_gpu_memory_used_per_total:ratio > 0.91)", "eval_time": "70m"}
    case = {
        "rule_files": [str(file) for file in FILES],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [*silent, {**recorded, "exp_samples": [{"labels": "{}", "value": 1}]}],
            }
        ],
    }
    file = tmp_path / "idle.yaml"
    file.write_text(yaml.safe_dump(case))

    # WHEN
    done = promtool("test", "rules", file)

    # THEN
    assert 0 == done.returncode, done.stdout + done.stderr


def test_every_record_has_series_on_real_pages(tmp_path: Path) -> None:
    """With the labels that vLLM and kvdiag really send each recording rule gives a number."""
    # GIVEN a vLLM whose counters grow, and a kvdiag whose pool keeps ever more at idle
    counters = ("_total", "_bucket", "_sum", "_count")
    leaks = replace(idle(), newest=replace(idle().newest, engines=(engine(usage=0.01),)))
    series = [
        *input_series(page(leaks), {"job": "kvdiag", "instance": "vllm-0:9743"}, ("kv_usage_ratio", "kv_used_bytes")),
        *(
            one
            for name in ("vllm-0.32.0-cpu-load", "vllm-0.32.0-V1-speculative-rendered")
            for one in input_series((SCRAPES / f"{name}.prom").read_text(), {"job": "vllm", "instance": name}, counters)
        ),
    ]
    running = {"series": 'kvdiag_context_mean_tokens{engine="0",job="kvdiag",instance="vllm-0:9743"}', "values": "9x70"}
    told = [
        {
            "expr": f"count({one['record']} > -1) > bool 0",
            "eval_time": "20m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for one in records()
    ]
    case = {
        "rule_files": [str(file) for file in FILES],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": [*series, running], "promql_expr_test": told}],
    }
    file = tmp_path / "records.yaml"
    file.write_text(yaml.safe_dump(case))

    # WHEN
    done = promtool("test", "rules", file)

    # THEN
    assert 0 == done.returncode, done.stdout + done.stderr


def test_nothing_fires_before_there_is_a_server(tmp_path: Path) -> None:
    """A daemon whose server still loads its model for half an hour is no fault, however full its device gets."""
    # GIVEN
    waits = Snapshot(
        state="starting",
        facts=Facts(),
        newest=Sample(at_seconds=1_000.0),
        sources=(SourceHealth(source="vllm", up=False, errors_total=0),),
    )
    case = {
        "rule_files": [str(file) for file in FILES],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [*input_series(page(waits), {"job": "kvdiag", "instance": "vllm-0:9743"})],
                "promql_expr_test": [
                    {
                        "expr": 'count(ALERTS{alertstate="firing"}) or vector(0)',
                        "eval_time": "30m",
                        "exp_samples": [{"labels": "{}", "value": 0}],
                    }
                ],
            }
        ],
    }
    file = tmp_path / "starting.yaml"
    file.write_text(yaml.safe_dump(case))

    # WHEN
    done = promtool("test", "rules", file)

    # THEN
    assert 0 == done.returncode, done.stdout + done.stderr


def test_amtool_takes_the_example() -> None:
    """The example for Alertmanager is valid."""
    # WHEN
    done = amtool("check-config", FOLDER / "alertmanager.example.yaml")

    # THEN
    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("rule", ALERTS)
def test_the_example_sends_each_severity_to_its_own(rule: dict[str, Any]) -> None:
    """A critical alert reaches the pager, a warning the tickets, and nobody is told of an info."""
    # GIVEN
    receiver = {"critical": "pager", "warning": "tickets", "info": "nobody"}[rule["labels"]["severity"]]
    labels = [f"alertname={rule['alert']}", f"severity={rule['labels']['severity']}", "pod=vllm-0"]

    # WHEN
    config = f"--config.file={FOLDER / 'alertmanager.example.yaml'}"
    done = amtool("config", "routes", "test", config, f"--verify.receivers={receiver}", *labels)

    # THEN
    assert 0 == done.returncode, done.stdout + done.stderr


def test_the_example_inhibits_alerts_that_there_are() -> None:
    """Each pattern of an inhibition matches an alert, and a warning is inhibited by its own critical one."""
    # GIVEN
    config = yaml.safe_load((FOLDER / "alertmanager.example.yaml").read_text())
    names = {rule["alert"] for rule in alerts()}
    patterns = [
        matcher.partition("alertname")[2].strip(' =~"')
        for rule in config["inhibit_rules"]
        for matcher in (*rule["source_matchers"], *rule["target_matchers"])
        if matcher.startswith("alertname")
    ]

    # THEN
    assert all(any(re.fullmatch(pattern, name) for name in names) for pattern in patterns)
    own = config["inhibit_rules"][0]
    assert {"alertname", "instance", "gpu", "engine", "id"} <= set(own["equal"])
