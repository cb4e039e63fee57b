"""A fault that was called before a gap in the samples: whether it holds after it."""

from collections.abc import Callable

import pytest

from kvdiag.diagnosis.growth.estimator import assess
from kvdiag.diagnosis.growth.growth_evidence import Series
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from tests.builders.values import GIB

LIMITS = DEFAULT_LIMITS.growth
MB = 10**6


def with_gap(above: Callable[[int], int], minutes: int) -> Series:
    """A sample each minute, of 20 GiB and `above` by the minute; none from minute 145 to 200."""
    times = [minute for minute in range(minutes + 1) if not 145 <= minute < 200]
    sizes = [20 * GIB + above(minute) * MB + minute % 3 * MB for minute in times]
    return Series(times_seconds=[60.0 * minute for minute in times], sizes_bytes=sizes)


@pytest.mark.parametrize(
    ("above", "minutes", "reasons"),
    [
        (lambda minute: 8 * minute, 208, {"held"}),
        (lambda minute: 8 * minute if minute < 170 else 0, 208, set()),
        (lambda minute: 8 * min(minute, 145), 230, set()),
    ],
    ids=["continues", "released", "has stopped"],
)
def test_a_gap_in_the_samples_ends_no_growth(above: Callable[[int], int], minutes: int, reasons: set[str]) -> None:
    """No window next to the gap is full; what was a fault before it is one after it, unless it returned or stopped."""
    found = assess(with_gap(above, minutes), LIMITS)
    assert reasons == {one.reason for one in found.windows if one.status == "fault"}
