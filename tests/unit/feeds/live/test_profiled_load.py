"""Requests that a server finished while its processes were profiled, and its speed before, during and after."""

import pytest

from kvdiag.feeds.live.profiling import counted_load
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
