"""Samples that a Prometheus gets late, or after newer ones: the fleet's verdicts are by them all the same."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdiag.commands.daemons.fleet_daemon import status_of
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.feeds.fleet.fleet_feed import FleetFeed
from tests.integration.prometheus.histories import END_SECONDS
from tests.integration.prometheus.test_bad_fleets import COUNTER, Series, counted, feed, holding, rising
from tests.integration.prometheus.test_fleet_rounds import diagnosed
from tests.unit.outputs.test_fleet import SOURCE

HOUR = 3600.0
Arrival = Callable[[Series, float], float]
"""When a sample of a series and a time can be read."""

MEMORY = [{**one, "__name__": "process_resident_memory_bytes"} for one in counted(2) if one["__name__"] == COUNTER]


def late(arrives: Arrival, now: list[float]) -> Callable[[Series, int], str]:
    """Values of which each can be read from some time on; the first server has a leak."""

    def value(one: Series, age: int) -> str:
        grows = one["__name__"].startswith("process_resident") and "vllm-00" in one.values()
        text = str(2**33 + grows * 2**25 * (180 - age)) if "resident" in one["__name__"] else rising(one, age)
        return text if arrives(one, END_SECONDS - 60.0 * age) <= now[0] else ""

    return value


def rounds(kept: FleetFeed, now: list[float], hours: float, every_seconds: float) -> None:
    """Rounds over the last hours until the end of all samples."""
    for step in range(int(hours * HOUR / every_seconds), -1, -1):
        now[0] = END_SECONDS - step * every_seconds
        asyncio.run(kept.round(now[0]))


def after_a_queue(_one: Series, moment: float) -> float:
    """Half an hour's samples, which a queue on a disk had, arrive after newer ones."""
    is_queued = END_SECONDS - 2.0 * HOUR <= moment < END_SECONDS - 1.5 * HOUR
    return END_SECONDS - 1.25 * HOUR if is_queued else moment


def with_their_past(one: Series, moment: float) -> float:
    """All samples of two hours come at once: those of the second server, and of the first one's process."""
    is_held = "vllm-01" in one.values() or one["__name__"].startswith("process_")
    return max(moment, END_SECONDS - 0.4 * HOUR) if is_held else moment


@pytest.mark.parametrize(
    ("arrives", "hours", "every_seconds"),
    [
        pytest.param(lambda _, moment: moment + 600.0, 0.5, 300.0, id="all by 10 min"),
        pytest.param(lambda one, moment: moment + 240.0 * ("resident" in one["__name__"]), 0.5, 300.0, id="one metric"),
        pytest.param(lambda _, moment: moment + 180.0, 0.1, 30.0, id="by more than a round"),
        pytest.param(after_a_queue, 2.0, 300.0, id="after newer ones"),
        pytest.param(with_their_past, 0.5, 300.0, id="with their past"),
    ],
)
def test_samples_that_arrive_late_are_read(
    tmp_path: Path, arrives: Arrival, hours: float, every_seconds: float
) -> None:
    """The documents are those of `kvdiag diagnose`, which reads all of it at once."""
    now = [0.0]
    with holding(counted(2) + MEMORY, late(arrives, now)) as server, feed(server, tmp_path) as kept:
        rounds(kept, now, hours, every_seconds)
        assert {one.key: one.present for one in kept.state.verdicts} == diagnosed(server.url, END_SECONDS)
    assert ["ok", "suspect"] == sorted(one.present.worst for one in kept.state.verdicts)


def test_samples_older_than_an_hour_are_no_fleet_without_problems(tmp_path: Path) -> None:
    """All replicas seem to have ended; that samples may come late is a gap of the fleet, until they are there."""
    now = [0.0]
    lag = [2.0 * HOUR]
    value = late(lambda _, moment: moment + lag[0], now)
    with holding(counted(2), value) as server, feed(server, tmp_path) as kept:
        rounds(kept, now, 0.25, 300.0)
        status = status_of(kept.state, SOURCE, 24.0 * HOUR, DEFAULT_LIMITS)
        assert ((), 1) == (status.replicas, sum(gap.kind == "failed" for gap in status.gaps))
        lag[0] = 60.0
        state = asyncio.run(kept.round(END_SECONDS + 60.0))
        assert {one.key: one.present for one in state.verdicts} == diagnosed(server.url, END_SECONDS + 60.0)
        assert ["ok", "ok"] == [one.status for one in status_of(state, SOURCE, 24.0 * HOUR, DEFAULT_LIMITS).replicas]
