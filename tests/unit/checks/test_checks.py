"""What each check makes of what its source has shown: all well, doubtful, broken, not there."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import kvdiag.outputs.documents
from kvdiag.checks import agent_check, engine_check, gpu_check, prometheus_check
from kvdiag.checks.check import Check, Outcome, clock_check, worst
from kvdiag.engines import DEFAULT as ENGINE
from kvdiag.engines import trtllm
from kvdiag.engines.engine import Identity
from kvdiag.model import Capabilities, Gap
from kvdiag.outputs.terminal import doctor_text
from kvdiag.sources.http import Unreadable
from kvdiag.sources.prometheus_text import Page
from tests.builders.metrics_pages import parse_page
from tests.builders.values import GIB, allocator, device, process

SCRAPES = Path(__file__).parents[2] / "fixtures" / "scrapes"
REAL = parse_page((SCRAPES / "vllm-0.32.0-cpu-tp2-idle.prom").read_text())
FOLDER = Path("/shared/published")
GAP = Gap(source="nvml", kind="failed", reason="the driver is gone; reboot")
UNFILTERED = replace(ENGINE, polled_metrics=())
WITHOUT_BLOCKS = replace(ENGINE, capabilities=lambda _: Capabilities(blocks=False))
SERVER = Identity(version="0.32.0", model="m", root=None, max_model_len_tokens=None, server_header=None)
BUSY = device(processes=(process(7, GIB),))


def without(*names: str) -> Page:
    """A real page from which some series are missing."""
    return {name: lines for name, lines in REAL.items() if name not in names}


CASES: dict[str, tuple[Callable[[], Check], Outcome]] = {
    "container": (
        lambda: gpu_check.container({"NVIDIA_VISIBLE_DEVICES": "all"}, ["null", "nvidia0", "nvidiactl"]),
        "pass",
    ),
    "all abilities": (lambda: gpu_check.container({"NVIDIA_DRIVER_CAPABILITIES": "all"}, ["nvidia0"]), "pass"),
    "void container": (lambda: gpu_check.container({"NVIDIA_VISIBLE_DEVICES": "void"}, ["nvidia0"]), "fail"),
    "no utility": (lambda: gpu_check.container({"NVIDIA_DRIVER_CAPABILITIES": "compute"}, ["nvidia0"]), "fail"),
    "no device file": (lambda: gpu_check.container({}, ["null", "nvidiactl"]), "warn"),
    "driver": (lambda: gpu_check.driver([BUSY], (), 0.002), "pass"),
    "driver of a drill": (lambda: gpu_check.driver([BUSY], (), None), "pass"),
    "slow driver": (lambda: gpu_check.driver([BUSY], (), 0.3), "warn"),
    "no driver": (lambda: gpu_check.driver(None, (GAP,), 0.0), "fail"),
    "no GPU": (lambda: gpu_check.driver((), (), 0.0), "fail"),
    "memory": (lambda: gpu_check.memory([BUSY], ()), "pass"),
    "memory of slices": (
        lambda: gpu_check.memory(
            [device(used_bytes=None, uuid="whole"), device(uuid="slice", mig_parent_uuid="whole")], ()
        ),
        "pass",
    ),
    "blind": (lambda: gpu_check.memory([device(used_bytes=None)], (GAP,)), "fail"),
    "old driver": (lambda: gpu_check.memory([device(driver_reserved_bytes=None)], ()), "warn"),
    "memory without GPUs": (lambda: gpu_check.memory(None, (GAP,)), "skip"),
    "processes": (lambda: gpu_check.processes([BUSY], {7}), "pass"),
    "idle GPU": (lambda: gpu_check.processes([device(used_bytes=GIB // 2, processes=())], {7}), "pass"),
    "hidden processes": (lambda: gpu_check.processes([device(processes=())], {7}), "warn"),
    "processes elsewhere": (lambda: gpu_check.processes([BUSY], {8}), "warn"),
    "processes without bytes": (lambda: gpu_check.processes([device(processes=(process(7, None),))], {7}), "warn"),
    "no lists": (lambda: gpu_check.processes([device()], {7}), "warn"),
    "processes without GPUs": (lambda: gpu_check.processes((), {7}), "skip"),
    "engine": (lambda: engine_check.answers("http://x", SERVER, None), "pass"),
    "no engine": (lambda: engine_check.answers("http://x", None, "refused"), "fail"),
    "a key": (lambda: engine_check.answers("http://x", None, Unreadable("refused", "401", status=401)), "fail"),
    "no such path": (lambda: engine_check.answers("http://x", None, Unreadable("absent", "404", status=404)), "fail"),
    "version": (lambda: engine_check.version(ENGINE, SERVER), "pass"),
    "old version": (lambda: engine_check.version(ENGINE, replace(SERVER, version="0.5.5")), "warn"),
    "patch of the newest": (lambda: engine_check.version(ENGINE, replace(SERVER, version="0.32.4+cu130")), "pass"),
    "new version": (lambda: engine_check.version(ENGINE, replace(SERVER, version="0.33.0")), "warn"),
    "no version": (lambda: engine_check.version(ENGINE, replace(SERVER, version=None)), "warn"),
    "a version that is never reported": (
        lambda: engine_check.version(replace(ENGINE, reports_version=False), replace(SERVER, version=None)),
        "skip",
    ),
    "series before the first request": (
        lambda: engine_check.series(trtllm.ENGINE, parse_page("trtllm_prompt_tokens_total 0\n"), ""),
        "warn",
    ),
    "series": (lambda: engine_check.series(ENGINE, REAL, ""), "pass"),
    "an engine without blocks": (lambda: engine_check.series(WITHOUT_BLOCKS, REAL, ""), "pass"),
    "a series less": (lambda: engine_check.series(ENGINE, without("vllm:cache_config_info"), ""), "warn"),
    "no series": (lambda: engine_check.series(ENGINE, {}, ""), "fail"),
    "no page": (lambda: engine_check.series(ENGINE, None, "404 on /metrics"), "fail"),
    "filter": (lambda: engine_check.name_filter(ENGINE, whole_bytes=9, some_bytes=3, took_seconds=0.0013), "pass"),
    "no filter": (lambda: engine_check.name_filter(ENGINE, whole_bytes=9, some_bytes=9, took_seconds=0.1), "warn"),
    "engine without filter": (
        lambda: engine_check.name_filter(UNFILTERED, whole_bytes=9, some_bytes=9, took_seconds=0.1),
        "skip",
    ),
    "filter of nobody": (
        lambda: engine_check.name_filter(ENGINE, whole_bytes=9, some_bytes=None, took_seconds=0.0),
        "skip",
    ),
    "server's processes": (lambda: engine_check.processes([1, 2], 2, None), "pass"),
    "processes of another user": (lambda: engine_check.processes([1, 2], 1, None), "warn"),
    "unseen processes": (lambda: engine_check.processes(None, 0, "not this host"), "warn"),
    "clock": (lambda: engine_check.clock("Thu, 01 Jan 1970 00:16:40 GMT", 1001.5), "pass"),
    "clock behind": (lambda: engine_check.clock("Thu, 01 Jan 1970 00:16:40 GMT", 1100.0), "warn"),
    "clock ahead": (lambda: engine_check.clock("Thu, 01 Jan 1970 00:16:40 GMT", 900.0), "warn"),
    "clock of garbage": (lambda: engine_check.clock("yesterday", 900.0), "skip"),
    "agents": (lambda: agent_check.publications(FOLDER, [allocator()], ()), "pass"),
    "agents of a CPU engine": (lambda: agent_check.publications(FOLDER, [], (GAP,)), "warn"),
    "agent hangs": (lambda: agent_check.publications(FOLDER, [allocator(age_seconds=60.0)], ()), "warn"),
    "agent's gap": (lambda: agent_check.publications(FOLDER, [allocator()], (GAP,)), "warn"),
    "no agent": (lambda: agent_check.publications(FOLDER, None, (GAP,)), "fail"),
    "folder": (lambda: agent_check.permission(FOLDER, readable=True, writable=True), "pass"),
    "read-only folder": (lambda: agent_check.permission(FOLDER, readable=True, writable=False), "warn"),
    "folder of others": (lambda: agent_check.permission(FOLDER, readable=False, writable=False), "fail"),
    "prometheus": (lambda: prometheus_check.answers("http://p", None), "pass"),
    "prometheus fails": (lambda: prometheus_check.answers("http://p", "401"), "fail"),
    "its clock behind": (lambda: clock_check("prometheus.clock", "its", 60.0), "warn"),
    "its clock not told": (lambda: clock_check("prometheus.clock", "its", None), "skip"),
    "scraped": (lambda: prometheus_check.scraped("vllm", 30, 40), "pass"),
    "scraped no more": (lambda: prometheus_check.scraped("vllm", 0, 30), "warn"),
    "never scraped": (lambda: prometheus_check.scraped("gpu", 0, 0), "warn"),
}


def test_a_check_says_what_is_there_and_what_to_change(golden: Callable[[str, str], None]) -> None:
    """The text of each outcome of each check equals its golden file."""
    made = {name: check() for name, (check, _) in CASES.items()}
    assert {name: outcome for name, (_, outcome) in CASES.items()} == {name: one.outcome for name, one in made.items()}
    texts = (f"{name}\n    {one.outcome} {one.id}: {one.found}\n    {one.fix or '-'}\n" for name, one in made.items())
    golden("doctor_checks.txt", "".join(texts))


def test_every_complaint_names_a_fix() -> None:
    """Every warning comes with a fix."""
    with pytest.raises(ValueError, match="names no fix"):
        Check("a.b", "warn", "wrong")


def test_the_worst_outcome_decides_and_nothing_seen_is_no_pass() -> None:
    """What was skipped neither passes nor fails."""

    def of(*outcomes: Outcome) -> Outcome:
        return worst(Check("a.b", each, "x", fix="y") for each in outcomes)

    assert "fail" == of("pass", "warn", "fail", "skip")
    assert "warn" == of("skip", "warn", "pass")
    assert "pass" == of("skip", "pass")
    assert "skip" == of("skip")
    assert "skip" == of()


def test_the_document_keeps_to_its_schema() -> None:
    """The schema is for those who read it with a program."""
    made = [check() for check, _ in CASES.values()]
    schema = json.loads((Path(kvdiag.outputs.documents.__path__[0]) / "doctor.schema.json").read_text())
    document = doctor_text.document(made)
    Draft202012Validator(schema).validate(document)
    assert [one.found for one in made] == [one["found"] for one in document["checks"]]
