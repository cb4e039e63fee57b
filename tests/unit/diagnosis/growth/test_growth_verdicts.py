"""Which growth decides, and what the room that is left makes of it."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.growth.growth_evidence import Assessment, GrowthEvidence, GrowthStatus, Reason
from kvdiag.diagnosis.growth.growth_verdicts import decisive, finding, too_short
from kvdiag.diagnosis.growth.memory_series import MemoryOwner
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.formatting import format_duration, format_rate
from kvdiag.model import Finding
from tests.builders.answers import containing
from tests.builders.values import MIB

LIMITS = DEFAULT_LIMITS.growth
GROWTH = GrowthEvidence(
    status="unknown",
    reason="slowing",
    window_hours=2.0,
    bytes_per_second=1_000.0,
    error_bytes_per_second=0.0,
    later_bytes_per_second=500.0,
    gain_bytes=7_200_000.0,
    floor_gain_bytes=7_200_000.0,
    strength=20.0,
    p_drift=0.0,
    beyond_past=None,
    later_ratio=0.5,
    steps_up=0,
    steps_down=0,
    load_removed=False,
    detection_limit_bytes_per_second=1.0,
)
OWNERS = [MemoryOwner(device_uuid="GPU-0", who=f"pid {number}") for number in range(5)]
TO_COME_BYTES = 1_800_000
"""Half a window of two hours at the later rate."""


def of(
    *windows: GrowthEvidence, room_bytes: int | None, burst: GrowthEvidence | None = None
) -> tuple[GrowthStatus, Reason]:
    """What decides for the only owner of memory."""
    only = Assessment(seconds=7_200.0, windows=windows, burst=burst)
    found = decisive({OWNERS[0]: only}, LIMITS, lambda _: room_bytes)
    assert found is not None
    return found[1].status, found[1].reason


@pytest.mark.parametrize(
    ("room_bytes", "expected"),
    [
        (TO_COME_BYTES - 1, ("fault", "grows")),
        (TO_COME_BYTES, ("unknown", "slowing")),
        (None, ("unknown", "slowing")),
    ],
)
def test_growth_that_slows_down_is_a_fault_where_the_room_ends_first(
    room_bytes: int | None, expected: tuple[str, str]
) -> None:
    """What levels off has half a window at its later rate before it."""
    assert expected == of(GROWTH, room_bytes=room_bytes)
    assert ("unknown", "weak") == of(replace(GROWTH, reason="weak"), room_bytes=room_bytes)


@pytest.mark.parametrize(
    ("room_bytes", "expected"),
    [(3_600_000, ("fault", "grows")), (3_601_000, ("unknown", "recent")), (None, ("unknown", "recent"))],
)
def test_a_burst_is_a_fault_where_the_room_ends_within_the_hour(
    room_bytes: int | None, expected: tuple[str, str]
) -> None:
    """At 1,000 bytes a second, 3,600,000 bytes last just as long."""
    burst = replace(GROWTH, status="fault", reason="grows", later_bytes_per_second=1_000.0)
    assert expected == of(room_bytes=room_bytes, burst=burst)


def judged(growth: GrowthEvidence, room_bytes: int | None = None) -> Finding:
    """The finding on the only owner's host memory."""
    return finding("leak.host", (OWNERS[0], growth), MemoryComponent.HOST_ANONYMOUS, room_bytes, LIMITS)


@pytest.mark.parametrize("reason", ["recent", "slowing", "weak", "uneven", "drift", "few steps"])
def test_what_is_undecided_has_how_long_it_takes(reason: Reason) -> None:
    """A third of the window, twice the window, or until what slows down has ended: in minutes."""
    found = judged(replace(GROWTH, reason=reason), room_bytes=1)
    longer = {"recent": 40, "slowing": 480}.get(reason, 240)
    assert ("unknown", None) == (found.status, found.growth and found.growth.exhaustion_seconds)
    assert f"{format_duration(60.0 * longer)} of " in found.summary


@pytest.mark.parametrize("reason", ["returns", "event", "ended", "recurring", "flat"])
def test_what_is_explained_is_ok(reason: Reason) -> None:
    """With the larger of the two gains, unless nothing rose."""
    found = judged(replace(GROWTH, status="none", reason=reason, gain_bytes=float(5 * MIB), floor_gain_bytes=7.0 * MIB))
    assert ("ok", reason != "flat") == (found.status, "7.00 MiB over 2 h" in found.summary)


@pytest.mark.parametrize(("error", "high", "latest"), [(100.0, 1_200.0, 4_500.0), (600.0, 2_200.0, None)])
def test_the_rate_has_bounds_of_two_errors(error: float, high: float, latest: float | None) -> None:
    """3,600,000 bytes last an hour at 1,000 bytes a second; what may be none at all has no latest end."""
    growth = replace(GROWTH, status="fault", reason="grows", later_bytes_per_second=1e3, error_bytes_per_second=error)
    figures = judged(growth, 3_600_000).growth
    assert figures is not None
    assert (max(2_000.0 - high, 0.0), high) == (figures.low_bytes_per_second, figures.high_bytes_per_second)
    assert (3_600.0, latest) == (figures.exhaustion_seconds, figures.exhaustion_high_seconds)
    doubted = replace(growth, status="suspect", reason="no past", steps_up=2)
    assert containing("in 2 steps up", "garbage") == judged(doubted).summary
    assert containing("drift") == judged(replace(doubted, reason="grows")).summary


@pytest.mark.parametrize(
    ("room", "cache", "status"), [(14_400, 15_400, "suspect"), (14_399, 15_399, "fault"), (14_400, 15_401, "fault")]
)
def test_growth_with_four_hours_left_may_fill_a_cache(room: int, cache: int, status: str) -> None:
    """In MB, at 1 MB/s, where there is room for the rest of the cache: 1,000 MB of it are in use."""
    growth = replace(GROWTH, status="fault", reason="grows", bytes_per_second=1e6, later_bytes_per_second=1e6)
    part, sizes = MemoryComponent.HOST_ANONYMOUS, {"cache_bytes": cache * 10**6, "grown_bytes": 10**9}
    found = finding("leak.host", (OWNERS[0], growth), part, room * 10**6, LIMITS, **sizes)  # type: ignore[arg-type]
    assert status == found.status


def test_what_was_sampled_too_shortly_says_the_longest_of_it() -> None:
    """Of several histories; an hour of them shows growth of so much."""
    short = [Assessment(seconds=seconds, windows=()) for seconds in (60.0, 1_800.0)]
    assert ["1 min;" in too_short(each, "", LIMITS) for each in (short[:1], [])] == [True, False]
    assert containing("only 30 min", "1 h", format_rate(LIMITS.min_gain_bytes)) == too_short(short, "", LIMITS)


def test_the_worst_of_several_owners_decides_then_the_fastest() -> None:
    """A fault comes before faster growth that is none; of equals the faster one, then the larger gain."""
    fault = replace(GROWTH, status="fault", reason="grows")
    faster = replace(fault, bytes_per_second=1_001.0, gain_bytes=1.0)
    larger = replace(faster, gain_bytes=2.0)
    fastest = replace(GROWTH, reason="weak", bytes_per_second=9_000.0)
    order = (fastest, replace(fault, status="suspect"), fault, faster, larger)
    for count in range(1, len(order) + 1):
        assessed = {OWNERS[number]: Assessment(seconds=1.0, windows=(one,)) for number, one in enumerate(order[:count])}
        found = decisive(assessed, LIMITS, lambda _: None)
        assert found is not None
        assert (OWNERS[count - 1], order[count - 1]) == found
    assert decisive({}, LIMITS, lambda _: None) is None


@pytest.mark.parametrize(("error", "has_range"), [(100.0, True), (0.0, False)])
def test_a_range_of_one_value_is_left_out(error: float, *, has_range: bool) -> None:
    """An exact rate ends once."""
    growth = replace(GROWTH, status="fault", reason="grows", later_bytes_per_second=1e3, error_bytes_per_second=error)
    assert has_range == (" to " in judged(growth, 3_600_000).summary.rpartition("exhausted")[2])
