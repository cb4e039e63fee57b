from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.formatting import format_time
from kvdiag.outputs.html.axes import counts, moments, shares, sizes
from tests.builders.values import GIB, KIB, MIB


@given(st.integers(0, 2**50), st.integers(0, 2**50))
def test_a_scale_has_a_few_ticks_within_it(low: int, height: int) -> None:
    """For any range, an axis has one to seven labels, all different, in ascending order."""
    for scale in (
        counts(0.0, float(height)),
        sizes(0.0, float(height)),
        sizes(-float(low), float(height), signed=True),
    ):
        labels = [label for _, label in scale.ticks]
        assert 1 <= len(labels) <= 11
        assert len(labels) == len(set(labels))
        assert all(scale.low <= value <= scale.high for value, _ in scale.ticks)
        assert all(one < other for (one, _), (other, _) in pairwise(scale.ticks))


@pytest.mark.parametrize(
    ("high", "labels"),
    [
        (24 * GIB, ["0", "8 GiB", "16 GiB", "24 GiB"]),
        (2 * GIB, ["0", "0.5 GiB", "1.0 GiB", "1.5 GiB", "2.0 GiB"]),
        (16 * MIB, ["0", "4 MiB", "8 MiB", "12 MiB", "16 MiB"]),
        (3 * KIB, ["0", "1 KiB", "2 KiB", "3 KiB"]),
    ],
)
def test_bytes_have_one_unit_on_an_axis(high: int, labels: list[str]) -> None:
    """Ticks are powers of two, in the unit of the largest."""
    assert labels == [label for _, label in sizes(0.0, float(high)).ticks]


def test_a_change_has_its_sign() -> None:
    """What grew has a plus."""
    assert ["-16 MiB", "0", "+16 MiB", "+32 MiB"] == [
        label for _, label in sizes(-20.0 * MIB, 40.0 * MIB, signed=True).ticks
    ]


def test_counts_are_whole() -> None:
    """There is no half of a request."""
    assert ["0", "1", "2"] == [label for _, label in counts(0.0, 2.0).ticks]
    assert ["0", "500", "1,000", "1,500"] == [label for _, label in counts(0.0, 1600.0).ticks]
    assert ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"] == [label for _, label in shares(0.0, 1.0).ticks]


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        pytest.param(0.0, 0.07, ["0 %", "2 %", "4 %", "6 %"], id="a leak of seven per cent"),
        pytest.param(0.0, 0.0, ["0.0 %", "0.5 %", "1.0 %", "1.5 %", "2.0 %"], id="nothing"),
        pytest.param(0.6, 0.67, ["60 %", "62 %", "64 %", "66 %"], id="a device that fills"),
        pytest.param(0.92, 0.925, ["92 %", "94 %", "96 %", "98 %", "100 %"], id="near the limit"),
    ],
)
def test_ratios_have_an_axis_of_their_own_size(low: float, high: float, labels: list[str]) -> None:
    """A small change uses the whole plot; the limit is on it where it is near."""
    assert labels == [label for _, label in shares(low, high).ticks]


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_ratios_are_within_their_axis(one: float, other: float) -> None:
    """With a few labels, all different."""
    low, high = sorted((one, other))
    scale = shares(low, high)
    labels = [label for _, label in scale.ticks]
    assert scale.low <= low <= high <= scale.high <= 1.0 + 0.0025
    assert 2 <= len(labels) == len(set(labels)) <= 11


@pytest.mark.parametrize(
    ("seconds", "labels"),
    [
        (30, ["00:16:40", "00:16:45", "00:16:50", "00:16:55", "00:17:00", "00:17:05", "00:17:10"]),
        (3600, ["00:20", "00:30", "00:40", "00:50", "01:00", "01:10"]),
        (90_000, ["06:00", "12:00", "18:00", "Jan 02"]),
        (400_000, ["Jan 02", "Jan 03", "Jan 04", "Jan 05"]),
    ],
)
def test_times_stand_at_whole_moments(seconds: int, labels: list[str]) -> None:
    """Seconds, minutes, hours or days of UTC, depending on the interval's length."""
    assert labels == [label for _, label in moments(1000.0, 1000.0 + seconds)]


def test_a_time_beyond_the_calendar_is_its_last() -> None:
    """A trace may have any time, and its report is written all the same."""
    assert "9999-12-31T23:59:59Z" == format_time(1e300)
    assert 1 <= len(moments(1e15, 1e15 + 3600.0)) <= 7
