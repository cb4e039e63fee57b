"""The rules over whole pages as kvdiag and vLLM send them: what they record; where all is well nothing fires."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvdiag.diagnosis.knowledge import KNOWLEDGE
from kvdiag.model import Facts, Sample, Snapshot, SourceHealth
from tests.builders.runs import judged
from tests.builders.values import GIB, SERVER_PID, allocator, device, engine, process
from tests.builders.worlds import World, facts
from tests.integration.alerts.rules import FILES, records
from tests.integration.alerts.tools import promtool
from tests.unit.outputs.test_metrics import page

SCRAPES = Path(__file__).parents[2] / "fixtures" / "scrapes"


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
    """The series of one scrape, constant for over an hour, except for timestamps, which advance.

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


def assert_queries(folder: Path, series: list[dict[str, str]], queries: Iterable[tuple[str, str, int]]) -> None:
    """By promtool, each expression has this one value at its moment, over these series and the shipped rules."""
    tests = [
        {"expr": expression, "eval_time": moment, "exp_samples": [{"labels": "{}", "value": value}]}
        for expression, moment, value in queries
    ]
    case = {
        "rule_files": [str(file) for file in FILES],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": tests}],
    }
    file = folder / "case.yaml"
    file.write_text(yaml.safe_dump(case))
    done = promtool("test", "rules", file)
    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "scrape",
    ["vllm-0.32.0-cpu-tp2-idle.prom", "vllm-0.32.0-cpu-dp2-apiserver2-idle.prom", "vllm-0.9.2-V1-rendered.prom"],
)
def test_an_idle_default_vllm_fires_nothing(scrape: str, tmp_path: Path) -> None:
    """With 92 % of the device in use for hours no alert fires or is pending, also with real vLLM pages scraped."""
    pod = {"namespace": "llm", "pod": "vllm-0"}
    series = [
        *input_series(page(idle()), {"job": "kvdiag", "instance": "vllm-0:9743", **pod}),
        *input_series((SCRAPES / scrape).read_text(), {"job": "vllm", "instance": "vllm-0:8000", **pod}),
        {"series": 'up{job="kvdiag",instance="vllm-0:9743"}', "values": "1x70"},
    ]
    silent = [("count(ALERTS) or vector(0)", moment, 0) for moment in ("2m", "20m", "70m")]
    recorded = ("count(gpu:kvdiag_gpu_memory_used_per_total:ratio > 0.91)", "70m", 1)
    assert_queries(tmp_path, series, [*silent, recorded])


def test_every_record_has_series_on_real_pages(tmp_path: Path) -> None:
    """With the labels that vLLM and kvdiag really send each recording rule gives a number."""
    # A vLLM whose counters grow, and a kvdiag whose pool keeps ever more at idle.
    counters = ("_total", "_bucket", "_sum", "_count")
    leaks = replace(idle(), newest=replace(idle().newest, engines=(engine(usage=0.01),)))
    series = [
        *input_series(page(leaks), {"job": "kvdiag", "instance": "vllm-0:9743"}, ("kv_usage_ratio", "kv_used_bytes")),
        *(
            one
            for name in ("vllm-0.32.0-cpu-load", "vllm-0.32.0-V1-speculative-rendered")
            for one in input_series((SCRAPES / f"{name}.prom").read_text(), {"job": "vllm", "instance": name}, counters)
        ),
        {"series": 'kvdiag_context_mean_tokens{engine="0",job="kvdiag",instance="vllm-0:9743"}', "values": "9x70"},
    ]
    assert_queries(tmp_path, series, [(f"count({one['record']} > -1) > bool 0", "20m", 1) for one in records()])


TRAFFIC = {
    "engine:prompt_tokens:rate5m",
    "engine:generation_tokens:rate5m",
    "engine:prefix_cache_queries:rate5m",
    "engine:prefix_cache_hits_per_queries:ratio_rate5m",
}
DRAFTS = {"engine:spec_decode_num_draft_tokens:rate5m"}
ACCEPTED = {*DRAFTS, "engine:spec_decode_accepted_per_draft_tokens:ratio_rate5m"}
FINISHED = {"engine:request_success:rate5m"}
PROMPTS = {f"engine:request_prompt_tokens{each}" for each in ("_bucket:current", ":mean5m", ":max5m")}


@pytest.mark.parametrize(
    ("scrape", "expected"),
    [
        ("llamacpp-b11549-unified4-load", TRAFFIC | DRAFTS),
        ("trtllm-1.3-written", TRAFFIC | FINISHED),
        ("tgi-3.3-written", TRAFFIC | FINISHED | PROMPTS),
        ("lmdeploy-0.18-written", TRAFFIC | ACCEPTED | FINISHED | PROMPTS),
    ],
)
def test_another_engine_records_what_it_reports(scrape: str, expected: set[str], tmp_path: Path) -> None:
    """The alerts on requests are for the engines that alerts/README.md names: the others have no such series.

    SGLang's pages are recorded without most buckets; its series are in requests.yaml.
    """
    text = re.sub(r"(?m)^#.*\n", "", (SCRAPES / f"{scrape}.prom").read_text())  # else the parser renames TGI's counters
    counters = ("_total", "_bucket", "_sum", "_count", "_success")
    target = {"job": "engine", "instance": scrape}
    series = list(input_series(text, target, counters))
    names = {one["record"] for one in records() if "kvdiag" not in one["record"]}
    queries = [(f"count({name}) > bool 0 or vector(0)", "20m", int(name in expected)) for name in sorted(names)]
    assert_queries(tmp_path, series, queries)


def test_every_verdict_that_is_a_fault_fires_one_alert(tmp_path: Path) -> None:
    """Each id, and each new one, is one ticket: by an alert of its own or by KvdiagVerdict; benign ones are none."""
    ids = (*KNOWLEDGE, "leak.new", "baseline.new", "new.family")
    series = [{"series": f'kvdiag_finding{{id="{one}",status="fault"}}', "values": "1x70"} for one in ids]
    fired = 'count(ALERTS{{id="{}",severity="warning",alertstate="firing"}}) or vector(0)'
    assert_queries(tmp_path, series, [(fired.format(one), "30m", int(not one.startswith("benign."))) for one in ids])


def test_nothing_fires_before_there_is_a_server(tmp_path: Path) -> None:
    """A daemon whose server still loads its model for half an hour is no fault, however full its device gets."""
    waits = Snapshot(
        state="starting",
        facts=Facts(),
        newest=Sample(at_seconds=1_000.0),
        sources=(SourceHealth(source="engine", up=False, errors_total=0),),
    )
    series = [*input_series(page(waits), {"job": "kvdiag", "instance": "vllm-0:9743"})]
    assert_queries(tmp_path, series, [('count(ALERTS{alertstate="firing"}) or vector(0)', "30m", 0)])
