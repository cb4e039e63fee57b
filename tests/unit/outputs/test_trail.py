"""What a live view remembers: for how long, and when it dares to say a rate."""

import math
from itertools import pairwise

import pytest

from kvdiag.model import Facts, Sample, Snapshot
from kvdiag.outputs.terminal.sparkline_history import (
    MIN_SECONDS,
    POINT_SECONDS,
    TRAIL_SECONDS,
    Point,
    Trend,
    longer,
    point,
    trends,
)
from tests.builders.values import device, engine


def of(*usages: float, every_seconds: float = 1.0) -> tuple[Point, ...]:
    """The trail of a pool of these shares."""
    return tuple(
        Point(at_seconds=1000.0 + every_seconds * place, pools={"0": usage}, devices={})
        for place, usage in enumerate(usages)
    )


def trend(trail: tuple[Point, ...]) -> Trend:
    """The one trend of a trail."""
    (found,) = trends(trail)
    return found


def noise(place: int) -> float:
    """Something that goes nowhere, the same each time."""
    return 0.01 * math.sin(place * 12.9898) * math.cos(place * 78.233)


def test_a_point_holds_what_was_seen() -> None:
    """Shares by engine and bytes by device; nothing where nothing has been read."""
    newest = Sample(at_seconds=5.0, engines=(engine(usage=0.5), engine(usage=None, label="1")), devices=(device(),))
    snapshot = Snapshot(state="serving", facts=Facts(), newest=newest, sources=())
    assert Point(at_seconds=5.0, pools={"0": 0.5}, devices={"GPU-0": 20 / 24}) == point(snapshot)
    assert point(Snapshot(state="starting", facts=Facts(), newest=Sample(at_seconds=0.0), sources=())) is None


def test_it_keeps_ten_minutes() -> None:
    """What is older goes, points are five seconds apart but the newest, and none comes after the newest."""
    trail: tuple[Point, ...] = ()
    for one in of(*(0.1 for _ in range(1003))):
        trail = longer(longer(trail, one), one)
    moments = [one.at_seconds for one in trail]
    assert 2002.0 == moments[-1]
    assert moments[-1] - TRAIL_SECONDS <= moments[0] <= moments[-1] - TRAIL_SECONDS + POINT_SECONDS
    assert {POINT_SECONDS} == {later - earlier for earlier, later in pairwise(moments[:-1])}
    assert trail == longer(trail, None)
    (first,) = of(0.5)
    assert (first,) == longer(trail, first)


@pytest.mark.parametrize("count", [40, 120])
@pytest.mark.parametrize("every_seconds", [1.0, 4.9])
def test_a_steady_rise_has_a_rate_and_an_end(count: int, every_seconds: float) -> None:
    """A pool that fills by 3 % a minute does so, whatever the noise and the pace of the readings."""
    per_reading = 0.03 / 60.0 * every_seconds
    found = trend(
        of(*(0.2 + per_reading * place + 0.02 * noise(place) for place in range(count)), every_seconds=every_seconds)
    )
    assert found.per_minute_ratio == pytest.approx(0.03, rel=0.1)
    left = 1.0 - found.recent[-1]
    assert found.full_in_seconds == pytest.approx(left / 0.03 * 60.0, rel=0.1)


def test_a_steady_fall_has_no_end() -> None:
    """What empties has a rate, and never fills."""
    found = trend(of(*(0.8 - 0.001 * place for place in range(60))))
    assert found.per_minute_ratio == pytest.approx(-0.06)
    assert found.full_in_seconds is None


@pytest.mark.parametrize(
    "usages",
    [
        pytest.param([0.5] * 100, id="flat"),
        pytest.param([0.5 + noise(place) for place in range(100)], id="noise"),
        pytest.param([0.4 if place % 20 < 10 else 0.6 for place in range(100)], id="requests come and go"),
        pytest.param([0.2 + 0.01 * place for place in range(int(MIN_SECONDS))], id="too short"),
        pytest.param([0.2, 0.4], id="two readings"),
        pytest.param([0.2], id="one reading"),
    ],
)
def test_where_it_goes_nowhere_no_rate_is_told(usages: list[float]) -> None:
    """No rate, and no time that the room lasts, out of what comes and goes."""
    found = trend(of(*usages))
    assert tuple(usages) == found.recent
    assert found.per_minute_ratio is None
    assert found.full_in_seconds is None


def test_what_is_gone_has_no_trend() -> None:
    """A device that the newest reading does not show is not told of."""
    (before,) = of(0.5)
    now = Point(at_seconds=2000.0, pools={}, devices={"GPU-0": 0.5})
    assert [("GPU-0", (0.5,))] == [(one.of, one.recent) for one in trends((before, now))]
    assert () == trends(())
