"""capacity.concurrency: bursts of preemptions in a history of hours."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.rules.capacity_concurrency import judge
from kvdiag.model import Facts, Sample, Timeline
from tests.builders.answers import only
from tests.builders.values import engine, pool

ONE_POOL = Facts(pools=(pool(),))


def history(pressed_minutes: int, *, hours: int = 12, rest_minutes: int = 120, finished: int = 20) -> Timeline:
    """A sample a minute: ends with a rest, before which one request a minute was preempted for some minutes."""
    begin = hours * 60 - rest_minutes - pressed_minutes
    samples = (
        Sample(
            at_seconds=60.0 * at,
            engines=(
                replace(
                    engine(usage=0.95, running=9, preemptions=min(max(at - begin, 0), pressed_minutes)),
                    requests_finished_total=finished * at,
                ),
            ),
        )
        for at in range(hours * 60 + 1)
    )
    return Timeline(samples=tuple(samples))


@pytest.mark.parametrize(
    ("timeline", "status"),
    [
        pytest.param(history(5), "ok", id="a short burst"),
        pytest.param(history(5, rest_minutes=10), "suspect", id="not over yet"),
        pytest.param(history(10, rest_minutes=10), "suspect", id="ten minutes that are not over"),
        pytest.param(history(12, rest_minutes=40), "suspect", id="much of the last hours"),
        pytest.param(history(12, hours=5), "suspect", id="a burst of few hours"),
        pytest.param(history(30), "suspect", id="half an hour of twelve, once"),
        pytest.param(history(75), "fault", id="more than an hour of twelve"),
        pytest.param(history(30, hours=3, finished=1), "fault", id="a sixth of what finished"),
        pytest.param(history(120, hours=2, rest_minutes=0), "fault", id="all of two hours"),
        pytest.param(history(5, hours=5), "suspect", id="a history of few hours"),
        pytest.param(history(5, finished=0), "fault", id="nothing finished"),
    ],
)
def test_a_short_burst_of_a_long_history_is_no_lack_of_room(timeline: Timeline, status: str) -> None:
    """A few minutes of a day cost next to nothing, once they are over; until then they are suspect."""
    assert status == only(judge, timeline, ONE_POOL).status


def test_hours_without_a_sample_are_no_hours_with_room() -> None:
    """Five minutes of two observed hours are much, though nine hours passed."""
    whole = history(5, hours=9, rest_minutes=500).samples
    assert "suspect" == only(judge, Timeline(samples=(*whole[:60], *whole[-60:])), ONE_POOL).status
