"""What a live view remembers: for how long, and when it dares to say a rate."""

import math
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from kvdiag.commands.top import Feed
from kvdiag.diagnosis import diagnose
from kvdiag.model import Sample, Snapshot, Timeline
from kvdiag.outputs.current_verdict import SILENT_SECONDS, current_verdict
from kvdiag.outputs.terminal.sparkline_history import (
    HISTORY_SECONDS,
    LIMITS,
    POINT_SECONDS,
    Point,
    Trend,
    history_samples,
    longer,
    point,
    trends,
)
from kvdiag.outputs.terminal.top_frame import View
from tests.builders import lives
from tests.builders.values import GIB, MIB, SERVER_PID, device, engine, process
from tests.builders.worlds import World, facts
from tests.unit.outputs.test_status_page import NOW, well


async def unused() -> None:
    """No view reads anything here."""
    raise AssertionError


def of(*usages: float, every_seconds: float = 1.0) -> tuple[Point, ...]:
    """The trail of a pool of these shares."""
    return tuple(
        Point(at_seconds=1000.0 + every_seconds * place, shares={("0", True): usage})
        for place, usage in enumerate(usages)
    )


def trend(points: tuple[Point, ...]) -> Trend:
    """The one trend of a trail."""
    (found,) = trends(points)
    return found


def noise(place: int) -> float:
    """Something that goes nowhere, the same each time."""
    return 0.01 * math.sin(place * 12.9898) * math.cos(place * 78.233)


def test_a_view_begins_with_what_the_daemon_has_seen() -> None:
    """Each source has samples of its own: a point has all of them, every five seconds, of the last ten minutes."""
    engines, devices = (engine(usage=0.5),), (device(processes=(process(7, 1),)),)
    seen = [
        Sample(at_seconds=float(at), engines=engines) if at % 2 else Sample(at_seconds=float(at), devices=devices)
        for at in range(700)
    ]
    points = history_samples(seen, now_seconds=700.0)
    assert (100.0, 695.0, 120) == (points[0].at_seconds, points[-1].at_seconds, len(points))
    assert all((engines, (device(processes=None),)) == (one.engines, one.devices) for one in points[1:])


def test_a_point_holds_what_was_seen() -> None:
    """Shares by engine and bytes by device; nothing where nothing has been read."""
    newest = Sample(at_seconds=5.0, engines=(engine(usage=0.5), engine(usage=None, label="1")), devices=(device(),))
    assert Point(at_seconds=5.0, shares={("0", True): 0.5, ("GPU-0", False): 20 / 24}) == point(newest)
    assert point(Sample(at_seconds=0.0)) is None


def test_what_another_process_used_is_no_trend() -> None:
    """Two lives of a minute each, of a pool that stands: no rise from the one to the other."""
    diagnosis = lives.judged(lives.life(100.0, 0, tokens=90), lives.life(160.0, 3072))
    seen = [Sample(at_seconds=100.0 + at, engines=(engine(usage=0.0 if at < 60 else 0.5),)) for at in range(120)]
    shown = Snapshot(state="serving", facts=lives.KNOWN, newest=seen[-1], sources=(), diagnosis=diagnosis)

    feed = Feed(run=unused, newest=lambda: View(snapshot=shown, lines=(), origin="test"), before=tuple(seen))
    assert [None] == [one.per_minute_ratio for one in feed.view().trends]
    assert [(60.0, 0.5)] == [(one.watched_seconds + 1.0, min(one.recent)) for one in feed.view().trends]


@pytest.mark.parametrize("silent_seconds", [SILENT_SECONDS - 10, SILENT_SECONDS + 1])
def test_what_a_starved_daemon_showed_stays_for_a_minute(silent_seconds: float) -> None:
    """Then nothing is shown, and why."""
    shown = Snapshot(state="serving", facts=lives.KNOWN, newest=Sample(at_seconds=5.0), sources=())
    feed = Feed(
        run=unused,
        newest=lambda: View(snapshot=shown, lines=(), origin="test"),
        _newest_at_seconds=5.0,
        _advanced_seconds=time.monotonic() - silent_seconds,
    )
    assert (feed.view().problem is None) == (silent_seconds < SILENT_SECONDS)


def test_it_keeps_ten_minutes() -> None:
    """What is older goes, points are five seconds apart but the newest, and none comes after the newest."""
    points: tuple[Point, ...] = ()
    for one in of(*(0.1 for _ in range(1003))):
        points = longer(longer(points, one), one)
    moments = [one.at_seconds for one in points]
    assert 2002.0 == moments[-1]
    assert moments[-1] - HISTORY_SECONDS <= moments[0] <= moments[-1] - HISTORY_SECONDS + POINT_SECONDS
    assert {POINT_SECONDS} == {later - earlier for earlier, later in pairwise(moments[:-1])}
    assert points == longer(points, None)
    (first,) = of(0.5)
    assert (first,) == longer(points, first)


@pytest.mark.parametrize("count", [40, 120])
@pytest.mark.parametrize("every_seconds", [1.0, 4.9])
def test_a_steady_rise_has_a_rate_and_an_end(count: int, every_seconds: float) -> None:
    """A pool that rises by 3 % a minute gets that rate, with any noise and sampling interval."""
    per_reading = 0.03 / 60.0 * every_seconds
    found = trend(
        of(*(0.2 + per_reading * place + 0.02 * noise(place) for place in range(count)), every_seconds=every_seconds)
    )
    assert found.per_minute_ratio == pytest.approx(0.03, rel=0.1)
    left = 1.0 - found.recent[-1]
    assert found.full_in_seconds == pytest.approx(left / 0.03 * 60.0, rel=0.1)


def test_a_steady_fall_has_no_end() -> None:
    """Falling usage has a rate, but no time until full."""
    found = trend(of(*(0.8 - 0.001 * place for place in range(60))))
    assert found.per_minute_ratio == pytest.approx(-0.06)
    assert found.full_in_seconds is None


@pytest.mark.parametrize(
    "usages",
    [
        pytest.param([0.5] * 100, id="flat"),
        pytest.param([0.5 + noise(place) for place in range(100)], id="noise"),
        pytest.param([0.4 if place % 20 < 10 else 0.6 for place in range(100)], id="requests come and go"),
        pytest.param([0.2 + 0.01 * place for place in range(int(LIMITS.recent_min_seconds))], id="too short"),
        pytest.param([0.2 + 0.01 * min(place, 30) for place in range(60)], id="over"),
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


def test_a_device_that_is_about_to_be_full_is_not_healthy() -> None:
    """Five minutes are too few to judge a leak, and enough to say that the device is full in one: nothing shows OK."""
    seen = [
        Sample(
            at_seconds=NOW - 300.0 + second,
            engines=(engine(),),
            devices=(device(used_bytes=used, processes=(process(SERVER_PID, used - 464 * MIB),)),),
        )
        for second in range(300)
        for used in [18 * GIB + second * GIB // 60]
    ]
    known = facts(World())
    points: tuple[Point, ...] = ()
    for sample in history_samples(seen, NOW):
        points = longer(points, point(sample))
    (left,) = [one.full_in_seconds for one in trends(points) if not one.is_pool]
    diagnosis = diagnose(Timeline(samples=tuple(seen)), known)
    growth = next(one for one in diagnosis.findings if one.is_unexplained).growth
    now = current_verdict(well(diagnosis=diagnosis, newest=seen[-1], facts=known), NOW)
    assert growth is not None
    assert pytest.approx(60.0, abs=6.0) == left == pytest.approx(growth.exhaustion_seconds, abs=5.0)
    assert ("unknown", "unknown") == (diagnosis.worst, now.status)
    assert "full in 1 min" in now.sentence
    # The same device, full and still: what has ended is no reason to doubt.
    still = tuple(replace(seen[-1], at_seconds=NOW + second) for second in range(150))
    assert "ok" == diagnose(Timeline(samples=(*seen, *still)), known).worst


def test_what_is_gone_has_no_trend() -> None:
    """A device that is not in the newest sample has no trend."""
    (before,) = of(0.5)
    now = Point(at_seconds=2000.0, shares={("GPU-0", False): 0.5})
    assert [("GPU-0", (0.5,))] == [(one.of, one.recent) for one in trends((before, now))]
    assert () == trends(())
