"""Counters that fall: of several servers behind one address, and of one that restarts."""

from array import array
from random import Random

import pytest

from kvdiag.feeds.history.columns import Column
from kvdiag.feeds.history.counter_courses import falls_of
from tests.builders.series import seeded

HOURS = 6.0


def sampled(values: list[float | None], every_seconds: float = 60.0) -> Column:
    """A sample each time; `None` is a scrape that failed."""
    kept = [(every_seconds * at, value) for at, value in enumerate(values) if value is not None]
    times, numbers = zip(*kept, strict=True)
    return Column(targets=frozenset(), times=array("d", times), values=array("d", numbers))


def servers(column: Column, started_seconds: float = 0.0) -> int | None:
    """How many servers the falls show: 0 where they are unexplained, `None` where they are few."""
    falls = falls_of(column, started_seconds)
    return None if falls is None else falls.servers


def courses(choose: list[int]) -> list[float | None]:
    """Of servers that have counted 52, 1,000 and so on, that which answers each time."""
    return [52.0 + 948.0 * number + 5.0 * at for at, number in enumerate(choose)]


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        pytest.param([0, 1] * 90, 2, id="in turn"),
        pytest.param([0, 0, 0, 0, 1, 1, 1, 1] * 40, 2, id="changing every fourth scrape"),
        pytest.param(seeded("two").choices(range(2), k=180), 2, id="two at random"),
        pytest.param(seeded("five").choices(range(5), k=720), 5, id="five at random"),
        pytest.param([0] * 1200 + [0, 1] * 40 + [0] * 160, 2, id="for an hour of a day"),
    ],
)
def test_counters_that_continue_are_of_several_servers(chosen: list[int], count: int) -> None:
    """Each server's counter rises whenever that server answers, however seldom it changes."""
    assert count == servers(sampled(courses(chosen)))


def lives(random: Random, *, every_seconds: float, life_seconds: float, down_seconds: float) -> list[float | None]:
    """A server that crashes about as often, at another load and time each life; no answer while it starts."""
    found: list[float | None] = []
    began, ends, rate = 0.0, random.gauss(life_seconds, 5.0), 10.0
    for at in range(int(HOURS * 3600.0 / every_seconds)):
        now = at * every_seconds
        while now >= ends + down_seconds:
            began, ends = ends + down_seconds, ends + down_seconds + random.gauss(life_seconds, 5.0)
            rate = random.uniform(5.0, 15.0)
        found.append(float(int(rate * (now - began))) if began <= now < ends else None)
    return found


@pytest.mark.parametrize("every_seconds", [15.0, 30.0, 60.0])
@pytest.mark.parametrize("down_seconds", [0.0, 45.0])
def test_a_server_that_crashes_every_two_minutes_is_one(every_seconds: float, down_seconds: float) -> None:
    """What one life counts is not continued by the next one, be it up again at once."""
    for number in range(20):
        made = lives(seeded(f"{number}"), every_seconds=every_seconds, life_seconds=120.0, down_seconds=down_seconds)
        assert not servers(sampled(made, every_seconds))


def test_lives_that_are_all_alike_are_unexplained() -> None:
    """They may be restarts, and may be two idle servers: counters do not show it."""
    assert 0 == servers(sampled([0.0, 16.0] * 90))


@pytest.mark.parametrize("ago_seconds", [30.0, 900.0, 10830.0])
def test_courses_are_of_servers_whenever_one_of_them_began(ago_seconds: float) -> None:
    """A rollout behind one address: the newest process has just begun."""
    column = sampled(courses([0, 1] * 90))
    assert 2 == servers(column, column.times[-1] - ago_seconds)


def test_a_process_that_began_after_all_falls_restarted() -> None:
    """Its start is reported; one that began before them did not."""
    column = sampled([0.0, 16.0] * 90)
    assert None is servers(column, column.times[-1] - 30.0)
    assert 0 == servers(column, column.times[0] - 30.0)


def test_a_server_that_restarts_in_most_samples_is_unexplained() -> None:
    """Whether a scrape fails at each restart or not: no life is long enough to judge it by."""
    assert 0 == servers(sampled([0.0, 900.0, None, 0.0, 700.0, None] * 30))
