"""Which growth decides, and what the room that is left makes of it."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.growth.estimator import Assessment, GrowthEvidence, GrowthStatus, Reason
from kvdiag.diagnosis.growth.growth_verdicts import decisive
from kvdiag.diagnosis.growth.memory_series import MemoryOwner
from kvdiag.diagnosis.limits import DEFAULT_LIMITS

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
OWNERS = [MemoryOwner(device_uuid="GPU-0", who=f"pid {number}") for number in range(4)]
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


def test_the_worst_of_several_owners_decides_then_the_fastest() -> None:
    """A fault comes before faster growth that is none; of equals the faster one, then the larger gain."""
    fault = replace(GROWTH, status="fault", reason="grows")
    faster = replace(fault, bytes_per_second=1_001.0, gain_bytes=1.0)
    larger = replace(faster, gain_bytes=2.0)
    fastest = replace(GROWTH, reason="weak", bytes_per_second=9_000.0)
    order = (fastest, fault, faster, larger)
    for count in range(1, len(order) + 1):
        assessed = {OWNERS[number]: Assessment(seconds=1.0, windows=(one,)) for number, one in enumerate(order[:count])}
        found = decisive(assessed, LIMITS, lambda _: None)
        assert found is not None
        assert (OWNERS[count - 1], order[count - 1]) == found
    assert decisive({}, LIMITS, lambda _: None) is None
