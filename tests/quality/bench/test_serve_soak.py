"""Three quarters of an hour of `serve` with a history of minutes: nothing of its own grows."""

from __future__ import annotations

from pathlib import Path

from kvdiag.feeds.daemon.retention import Keep
from tests.quality.bench.serve_soak import grown, soaked

MAX_BYTES = 256 * 2**10


def test_nothing_grows(tmp_path: Path) -> None:
    """Once the history is full, memory, descriptors, disk and samples stay what they are."""
    keep = Keep(whole_seconds=60.0, all_seconds=420.0)
    standings = soaked(tmp_path, hours=0.6, every_hours=0.1, keep=keep, max_bytes=MAX_BYTES)
    assert [] == grown(standings[2:], MAX_BYTES)
    assert all(one.disk_bytes > MAX_BYTES // 2 for one in standings[3:])
