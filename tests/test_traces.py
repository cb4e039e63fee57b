"""Recorded runs of real engines, judged again: what once was judged wrongly stays judged rightly."""

from __future__ import annotations

from pathlib import Path

from kvdiag.diagnosis import diagnose
from kvdiag.feeds.trace import read_trace

TRACES = Path(__file__).with_name("traces")


def test_a_client_that_lags_behind_the_server_accuses_nobody() -> None:
    """Tokens that our own streams have still to bring are no waste, and a request that has ended is no empty pool."""
    # GIVEN a run on a machine so busy that streams are read seconds late
    timeline, facts = read_trace(TRACES / "vllm-0.32.0-starved.jsonl.gz")

    # WHEN
    actual = diagnose(timeline, facts)

    # THEN what was seen is exact, what was not seen is unknown, and nothing is called a fault
    steps = {step.id: (step.status, {one.name: one.value for one in step.measured}) for step in actual.steps}
    assert ("unknown", {"ok", "unknown"}) == (actual.worst, {finding.status for finding in actual.findings})
    assert ("ok", 21) == (steps["single_request"][0], steps["single_request"][1]["blocks"])
    assert ("unknown", {}) == steps["concurrent"]
