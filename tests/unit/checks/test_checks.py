"""What each check makes of what its source has shown: all well, doubtful, broken, not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import kvdiag.outputs.documents
from kvdiag.checks import Check, Outcome, agent_check, engine_check, gpu_check, prometheus_check, worst
from kvdiag.engines.engine import Identity
from kvdiag.model import Gap
from kvdiag.outputs.terminal import doctor_text
from kvdiag.sources.prometheus_text import Page, parse_page
from tests.builders.values import GIB, allocator, device, process

SCRAPES = Path(__file__).parents[2] / "fixtures" / "scrapes"
REAL = parse_page((SCRAPES / "vllm-0.32.0-cpu-tp2-idle.prom").read_text())
FOLDER = Path("/shared/published")
GAP = Gap(source="nvml", kind="failed", reason="the driver is gone; reboot")
SERVER = Identity(version="0.32.0", model="m", root=None, max_model_len_tokens=None, server_header=None)
BUSY = device(processes=(process(7, GIB),))


def without(*names: str) -> Page:
    """A real page from which some series are missing."""
    return {name: lines for name, lines in REAL.items() if name not in names}


CASES: dict[str, tuple[Callable[[], Check], Outcome, str]] = {
    "container": (
        lambda: gpu_check.container({"NVIDIA_VISIBLE_DEVICES": "all"}, ["null", "nvidia0", "nvidiactl"]),
        "pass",
        "1 device file /dev/nvidia*",
    ),
    "all abilities": (lambda: gpu_check.container({"NVIDIA_DRIVER_CAPABILITIES": "all"}, ["nvidia0"]), "pass", "=all"),
    "void container": (lambda: gpu_check.container({"NVIDIA_VISIBLE_DEVICES": "void"}, ["nvidia0"]), "fail", "UUIDs"),
    "no utility": (
        lambda: gpu_check.container({"NVIDIA_DRIVER_CAPABILITIES": "compute,graphics"}, ["nvidia0"]),
        "fail",
        "add utility",
    ),
    "no device file": (lambda: gpu_check.container({}, ["null", "nvidiactl"]), "warn", "no device file"),
    "driver": (lambda: gpu_check.driver([BUSY], (), 0.002), "pass", "2.0 ms"),
    "driver of a drill": (lambda: gpu_check.driver([BUSY], (), None), "pass", "1 device (NVIDIA Test)"),
    "slow driver": (lambda: gpu_check.driver([BUSY], (), 0.3), "warn", "persistenced"),
    "no driver": (lambda: gpu_check.driver(None, (GAP,), 0.0), "fail", "reboot"),
    "no GPU": (lambda: gpu_check.driver((), (), 0.0), "fail", "lists no GPU"),
    "memory": (lambda: gpu_check.memory([BUSY], ()), "pass", "20.0 of 24.0 GiB"),
    "memory of slices": (
        lambda: gpu_check.memory(
            [device(used_bytes=None, uuid="whole"), device(uuid="slice", mig_parent_uuid="whole")],
            (),
        ),
        "pass",
        "20.0 of 24.0 GiB",
    ),
    "blind": (lambda: gpu_check.memory([device(used_bytes=None)], (GAP,)), "fail", "the driver is gone"),
    "old driver": (lambda: gpu_check.memory([device(driver_reserved_bytes=None)], ()), "warn", "R510"),
    "memory without GPUs": (lambda: gpu_check.memory(None, (GAP,)), "skip", "no GPU"),
    "processes": (lambda: gpu_check.processes([BUSY], {7}), "pass", "1 process holds memory"),
    "idle GPU": (lambda: gpu_check.processes([device(used_bytes=GIB // 2, processes=())], {7}), "pass", "no process"),
    "hidden processes": (lambda: gpu_check.processes([device(processes=())], {7}), "warn", "shareProcessNamespace"),
    "processes elsewhere": (lambda: gpu_check.processes([BUSY], {8}), "warn", "1 of them not seen here"),
    "processes without bytes": (
        lambda: gpu_check.processes([device(processes=(process(7, None),))], {7}),
        "warn",
        "hostPID",
    ),
    "no lists": (lambda: gpu_check.processes([device()], {7}), "warn", "no GPU tells"),
    "processes without GPUs": (lambda: gpu_check.processes((), {7}), "skip", "no GPU"),
    "engine": (lambda: engine_check.answers("http://x", SERVER, None), "pass", "serves m"),
    "no engine": (lambda: engine_check.answers("http://x", None, "refused"), "fail", "http://x: refused"),
    "version": (lambda: engine_check.version(SERVER), "pass", "0.32.0"),
    "old version": (lambda: engine_check.version(replace(SERVER, version="0.5.5")), "warn", "0.6 to 0.32"),
    "patch of the newest": (lambda: engine_check.version(replace(SERVER, version="0.32.4+cu130")), "pass", "0.32.4"),
    "new version": (lambda: engine_check.version(replace(SERVER, version="0.33.0")), "warn", "newer kvdiag"),
    "no version": (lambda: engine_check.version(replace(SERVER, version=None)), "warn", "/version"),
    "version of nobody": (lambda: engine_check.version(None), "skip", "no server"),
    "series": (lambda: engine_check.series(REAL, None), "pass", "names of vLLM"),
    "a series less": (lambda: engine_check.series(without("vllm:cache_config_info"), None), "warn", "the pool's size"),
    "no series": (lambda: engine_check.series({}, None), "fail", "no vllm:* series"),
    "no page": (lambda: engine_check.series(None, "404 on /metrics"), "fail", "404 on /metrics"),
    "page of nobody": (lambda: engine_check.series(None, None), "skip", "no server"),
    "filter": (lambda: engine_check.name_filter(whole_bytes=9, some_bytes=3, took_seconds=0.0013), "pass", "1.3 ms"),
    "no filter": (lambda: engine_check.name_filter(whole_bytes=9, some_bytes=9, took_seconds=0.1), "warn", "name[]"),
    "filter of nobody": (
        lambda: engine_check.name_filter(whole_bytes=9, some_bytes=None, took_seconds=0.0),
        "skip",
        "no server",
    ),
    "server's processes": (lambda: engine_check.processes([1, 2], 2, None), "pass", "2 processes"),
    "processes of another user": (lambda: engine_check.processes([1, 2], 1, None), "warn", "the server's user"),
    "unseen processes": (lambda: engine_check.processes(None, 0, "not this host"), "warn", "not this host"),
    "processes of nobody": (lambda: engine_check.processes(None, 0, None), "skip", "no server"),
    "clock": (lambda: engine_check.clock("Thu, 01 Jan 1970 00:16:40 GMT", 1001.5), "pass", "agree"),
    "clock behind": (lambda: engine_check.clock("Thu, 01 Jan 1970 00:16:40 GMT", 1100.0), "warn", "100 s behind"),
    "clock ahead": (lambda: engine_check.clock("Thu, 01 Jan 1970 00:16:40 GMT", 900.0), "warn", "100 s ahead"),
    "clock of garbage": (lambda: engine_check.clock("yesterday", 900.0), "skip", "none"),
    "clock of nobody": (lambda: engine_check.clock(None, None), "skip", "no server"),
    "no clock": (lambda: engine_check.clock(None, 900.0), "skip", "does not tell"),
    "agents": (lambda: agent_check.publications(FOLDER, [allocator()], ()), "pass", "1 allocator,"),
    "agents of a CPU engine": (
        lambda: agent_check.publications(FOLDER, [], (GAP,)),
        "warn",
        "agents publish; the driver",
    ),
    "agent hangs": (lambda: agent_check.publications(FOLDER, [allocator(age_seconds=60.0)], ()), "warn", "py-spy"),
    "agent's gap": (lambda: agent_check.publications(FOLDER, [allocator()], (GAP,)), "warn", "the driver is gone"),
    "no agent": (lambda: agent_check.publications(FOLDER, None, (GAP,)), "fail", "agent install"),
    "agents not wanted": (lambda: agent_check.publications(None, None, ()), "skip", "--agent-dir"),
    "folder": (lambda: agent_check.permission(FOLDER, readable=True, writable=True), "pass", "written"),
    "read-only folder": (
        lambda: agent_check.permission(FOLDER, readable=True, writable=False),
        "warn",
        "once a minute",
    ),
    "folder of others": (lambda: agent_check.permission(FOLDER, readable=False, writable=False), "fail", "fsGroup"),
    "no folder": (lambda: agent_check.permission(None, readable=False, writable=False), "skip", "--agent-dir"),
    "prometheus": (lambda: prometheus_check.answers("http://p", None), "pass", "http://p"),
    "prometheus fails": (lambda: prometheus_check.answers("http://p", "401"), "fail", "--token-file"),
    "prometheus not wanted": (lambda: prometheus_check.answers(None, None), "skip", "--prometheus"),
    "its clock": (lambda: prometheus_check.clock(1.0), "pass", "agree"),
    "its clock behind": (lambda: prometheus_check.clock(60.0), "warn", "60 s behind"),
    "its clock not told": (lambda: prometheus_check.clock(None), "skip", "no Prometheus"),
    "scraped": (lambda: prometheus_check.scraped("vllm", 30, 40), "pass", "30 series"),
    "scraped no more": (lambda: prometheus_check.scraped("vllm", 0, 30), "warn", "/targets"),
    "never scraped": (lambda: prometheus_check.scraped("gpu", 0, 0), "warn", "dcgm-exporter"),
    "not known whether scraped": (lambda: prometheus_check.scraped("gpu", None, None), "skip", "no Prometheus"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_check_says_what_is_there_and_what_to_change(case: str) -> None:
    """Each outcome of each check, with what it tells."""
    check, outcome, told = CASES[case]
    # WHEN it is made
    made = check()
    # THEN it has that outcome, and names what was found or what to do
    assert outcome == made.outcome
    assert told in f"{made.found} {made.fix}"


def test_every_complaint_names_a_fix() -> None:
    """A warning alone helps nobody."""
    with pytest.raises(ValueError, match="names no fix"):
        Check(id="a.b", outcome="warn", found="wrong")


def test_the_worst_outcome_decides_and_nothing_seen_is_no_pass() -> None:
    """What was skipped neither passes nor fails."""

    def of(*outcomes: Outcome) -> Outcome:
        return worst(Check(id="a.b", outcome=each, found="x", fix="y") for each in outcomes)

    assert "fail" == of("pass", "warn", "fail", "skip")
    assert "warn" == of("skip", "warn", "pass")
    assert "pass" == of("skip", "pass")
    assert "skip" == of("skip")
    assert "skip" == of()


def test_the_document_keeps_to_its_schema() -> None:
    """The schema is for those who read it with a program."""
    # GIVEN every check in every case
    made = [check() for check, _, _ in CASES.values()]
    schema = json.loads((Path(kvdiag.outputs.documents.__path__[0]) / "doctor.schema.json").read_text())
    # WHEN they are written
    document = doctor_text.document(made)
    # THEN the document keeps to the schema, and has them all
    Draft202012Validator(schema).validate(document)
    assert [one.found for one in made] == [one["found"] for one in document["checks"]]
