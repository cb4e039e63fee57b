"""Requests that a server finished while its processes were profiled, and its speed before, during and after."""

import asyncio
from pathlib import Path

import pytest

from kvdiag.errors import KvdiagError
from kvdiag.feeds.live.profiling import counted_load, profile_processes
from kvdiag.sources.agents.agent_profiles import ProfileFolder
from tests.builders.allocation_profiles import profile
from tests.builders.values import MIB

PROFILE = profile(process=45 * MIB, traced=45 * MIB)


def test_requests_are_counted_between_the_snapshots() -> None:
    """From 115 s to 160 s, between the counts around each; the turns without tracing are not part of it."""
    counts = [(90.0, 0), (100.0, 100), (110.0, 150), (120.0, 200), (160.0, 400), (170.0, 500)]
    load = counted_load(PROFILE, counts)
    assert (225.0, 10.0, 5.0, 10.0) == (
        load.requests,
        load.before_per_second,
        load.during_per_second,
        load.after_per_second,
    )


@pytest.mark.parametrize("counts", [[], [(120.0, 5)], [(100.0, 50), (130.0, 60), (160.0, 3)]], ids=str)
def test_requests_that_were_not_counted_are_unknown(counts: list[tuple[float, int]]) -> None:
    """Without counts around both snapshots, and where the server restarted, there is no growth per request."""
    assert counted_load(PROFILE, counts).requests is None


def test_no_process_to_profile_is_an_error(tmp_path: Path) -> None:
    """Where no agent publishes, as where the server was started without it."""
    folder = ProfileFolder(tmp_path)
    with pytest.raises(KvdiagError):
        asyncio.run(profile_processes(folder, folder.processes(), "host", 1.0))
    folder.close()
