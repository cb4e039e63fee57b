import gc
import tracemalloc
from dataclasses import replace

import pytest

from kvdiag.diagnosis.fleet import Version
from kvdiag.model import Timeline
from tests.builders.series import device_part, hidden_device_part
from tests.builders.values import GIB, MIB, device, engine
from tests.unit.diagnosis.fleet.replicas import FACTS, MB, day, replica

HOUR = 3600.0


def test_first_hour_and_lives_before_a_restart_are_left_out() -> None:
    """Only the newest life counts, from an hour after its beginning on."""
    # Counters that begin again after 10 of 24 hours, and memory that fell with them
    samples = []
    for place, sample in enumerate(day(1, name="pool", leak=30.0, part=hidden_device_part).samples):
        age = place if place < 60 else place - 60
        devices = (device(used_bytes=(20 * GIB + age * 5 * MIB), total_bytes=80 * GIB),)
        pages = (engine(usage=0.1, running=1, prompt_tokens=1000 * age),)
        samples.append(replace(sample, engines=pages, devices=devices))

    actual = replica(Timeline(samples=tuple(samples)), "r")

    assert (1, 1000.0 + 10 * HOUR, 13 * HOUR) == (actual.restarts, actual.began_seconds, actual.watched_seconds)
    assert [pytest.approx(30 * MIB / MB, rel=0.05)] == [one.per_hour / MB for one in actual.growths]


@pytest.mark.parametrize(
    ("started", "watched", "began"),
    [(None, 23.0, 1000.0), (10.0, 24.0 - 2610.0 / HOUR, 10.0), (1000.0 + 2 * HOUR, 21.0, 1000.0 + 2 * HOUR)],
    ids=["not told", "before", "within"],
)
def test_age_counts_from_the_start_that_is_told(started: float | None, watched: float, began: float) -> None:
    """Age counts from a known start; the first hour is cut off only if it lies within the samples."""
    actual = replica(day(1, name="pool"), "r", replace(FACTS, started_seconds=started))

    assert (watched * HOUR, began) == (actual.watched_seconds, actual.began_seconds)
    assert 1000.0 + 24 * HOUR - began == actual.age_seconds


def test_version_is_the_engines_unless_another_is_given() -> None:
    """What replicas are compared by may be an image; model and engine go with it."""
    assert Version(engine="vllm", version="0.32.0", model="m") == replica(day(1), "r").version
    assert Version(engine="vllm", version="img:7", model="m") == replica(day(1), "r", version="img:7").version
    assert "engine of unknown version" == Version(engine=None, version=None, model=None).title


def test_without_readings_there_are_no_figures() -> None:
    """Neither growths nor a life."""
    nothing = replica(Timeline(samples=()), "r")
    assert (0.0, 0.0, 0.0) == (nothing.began_seconds, nothing.age_seconds, nothing.watched_seconds)
    assert (0, ()) == (nothing.restarts, nothing.growths)


def test_summaries_are_small() -> None:
    """A thousand of a day take less than 4 MB."""
    short = Timeline(samples=day(1, part=device_part).samples[::2])
    replica(short, "first")

    tracemalloc.start()
    kept = [replica(short, f"replica {number}") for number in range(5)]
    gc.collect()
    size = tracemalloc.get_traced_memory()[0] / len(kept)
    tracemalloc.stop()

    assert 1000 * size <= 4e6
