"""Thresholds that can be set: by flag, by environment, by file."""

from pathlib import Path

import pytest

from kvdiag.feeds.recording.trace import TraceWriter
from kvdiag.model import Facts, Sample
from tests.builders.values import GIB, MIB, allocator
from tests.unit.commands.bad_input.refusals import call as kvdiag

WAYS = {
    "flag": (["--reserved-gap-bytes", "1000000"], {}, ""),
    "environment": ([], {"KVDIAG_DIAGNOSE_RESERVED_GAP_BYTES": "1000000"}, ""),
    "file": ([], {}, "[diagnose]\nreserved-gap-bytes = 1000000\n"),
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A process with 2 MiB reserved but not allocated, without a breakdown of that gap."""
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, Facts()) as writer:
        held = allocator(allocated_bytes=8 * GIB - 2 * MIB)
        writer.add(Sample(at_seconds=1.0, allocators=(held,)))
    return path


def test_usual_threshold_calls_a_small_gap_normal(trace: Path) -> None:
    """At the default threshold a gap of 2 MiB is ok."""
    actual = kvdiag("diagnose", str(trace), "--output", "json").finding("fragmentation.allocator")
    assert "ok" == actual["status"]


@pytest.mark.parametrize("way", WAYS)
def test_lower_threshold_has_the_gap_judged(trace: Path, tmp_path: Path, way: str) -> None:
    """A gap above the threshold is unknown when its breakdown is not reported."""
    flags, env, text = WAYS[way]
    config = tmp_path / "kvdiag.toml"
    config.write_text(text)
    result = kvdiag("--config", str(config), "diagnose", str(trace), "--output", "json", *flags, env=env)
    assert "unknown" == result.finding("fragmentation.allocator")["status"]
