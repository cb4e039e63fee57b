"""Recorded runs of real engines, judged again: what once was judged wrongly stays judged rightly."""

from pathlib import Path

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.feeds.recording.trace import read_trace
from tests.builders.answers import evidence, finding, known, step
from tests.builders.values import KIB

TRACES = Path(__file__).with_name("traces")


def test_a_client_that_lags_behind_the_server_accuses_nobody() -> None:
    """Tokens that our own streams have still to bring are no waste, and a request that has ended is no empty pool."""
    # A run on a machine so busy that streams are read seconds late.
    timeline, facts = read_trace(TRACES / "vllm-0.32.0-starved.jsonl.gz")
    actual = diagnose(timeline, facts)
    # What was observed is exact, the rest is unknown, and nothing is called a fault.
    steps = {step.id: (step.status, known(step.measured)) for step in actual.steps}
    assert ("unknown", {"ok", "unknown"}) == (actual.worst, {finding.status for finding in actual.findings})
    assert ("ok", 21) == (steps["single_request"][0], steps["single_request"][1]["blocks"])
    assert ("unknown", {}) == steps["concurrent"]


def test_a_soak_of_a_healthy_server_finds_nothing() -> None:
    """Host memory of a real server's processes stands still, to half a MiB in a load cycle; no block stays."""
    timeline, facts = read_trace(TRACES / "vllm-0.32.0-soak-healthy.jsonl.gz")
    actual = diagnose(timeline, facts)
    soak, host = step(actual, "soak"), finding(actual, "leak.host")
    assert ("ok", "ok", "ok") == (actual.worst, soak.status, host.status)
    assert "no leak found over 18 load and 18 idle cycles, 188 requests; judged: 12 load cycles" in soak.summary
    assert "VLLM::Worker 9655" == evidence(host)["holder"]
    assert 512 * KIB == evidence(host)["detection_limit"]


def test_a_soak_counts_the_blocks_that_a_real_server_loses() -> None:
    """Two blocks of each of 196 requests, exactly; and its host memory is not blamed."""
    timeline, facts = read_trace(TRACES / "vllm-0.32.0-soak-leak.jsonl.gz")
    actual = diagnose(timeline, facts)
    soak = step(actual, "soak")
    assert ("fault", 392, 196) == (soak.status, soak.measured.blocks_kept, soak.measured.requests)
    assert ("fault", "ok") == (finding(actual, "leak.kv_blocks").status, finding(actual, "leak.host").status)


def test_a_soak_finds_the_process_that_keeps_host_memory() -> None:
    """128 KiB of each request stay in the engine core: it is named, measured to 2 %, and nothing else is blamed."""
    timeline, facts = read_trace(TRACES / "vllm-0.32.0-soak-host-leak.jsonl.gz")
    actual = diagnose(timeline, facts)
    found = finding(actual, "leak.host")
    assert ("suspect", "VLLM::EngineCore 22323") == (found.status, evidence(found)["holder"])
    assert pytest.approx(128 * KIB, rel=0.02) == evidence(found)["growth_per_request"]
    assert {"leak.host"} == {one.id for one in actual.findings if one.status in ("suspect", "fault")}
