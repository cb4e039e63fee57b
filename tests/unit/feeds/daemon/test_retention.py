"""A day of samples in bounded memory: what is thinned, what never is, and what is forgotten."""

from dataclasses import fields
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.diagnosis import diagnose
from kvdiag.feeds.daemon import retention
from kvdiag.feeds.daemon.retention import Retention, thinned
from kvdiag.model import PARTS, Facts, Gap, HostProcess, Sample, Timeline
from tests.builders.answers import finding
from tests.builders.values import device, engine, holding, pool, process

FAILED = Gap("engine", "failed", "no answer")


def reading(at_seconds: float, usage: float = 0.0, running: int = 0) -> Sample:
    """The engine at a moment."""
    return Sample(at_seconds=at_seconds, engines=(engine(usage=usage, running=running),))


def test_the_newest_minutes_are_whole() -> None:
    """Within the newest five minutes every sample is there, as it came."""
    tiers = Retention()
    came = [reading(float(second), usage=second % 100 / 100) for second in range(3600)]
    for sample in came:
        tiers.add(sample)
    kept = tiers.samples()
    assert tuple(came[-300:]) == kept[-300:]
    assert len(kept) < 300 + 60 + 3 * 60


def test_a_day_is_kept_and_no_more() -> None:
    """The oldest sample is of a day ago, and the number of all is bounded."""
    tiers = Retention()
    for second in range(0, 2 * 86_400, 10):
        tiers.add(reading(float(second), running=second % 3))
    kept = tiers.samples()
    assert 86_400 - 120 <= kept[0].at_seconds <= 86_400
    assert len(kept) <= 3 * 1440 + 36


def test_engines_without_number_shorten_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with 500 engines, whose figures change each second, would fill the memory within a day."""
    monkeypatch.setattr(retention, "MAX_PARTS", 1000)
    tiers = Retention()
    for second in range(7200):
        tiers.add(Sample(at_seconds=float(second), engines=(engine(running=second),) * 100))
    kept = tiers.samples()
    assert 7199.0 == kept[-1].at_seconds
    assert sum(len(one.engines or ()) for one in tiers.thinned) <= 1000
    assert len(tiers.thinned) > 5


def test_a_minute_keeps_what_floors_peaks_and_banks_stand_on() -> None:
    """The last idle pair, the fullest reading, devices with their processes, host, and each kind of gap once."""
    listed = Sample(at_seconds=5.0, devices=(device(processes=(process(1, 1),)),))
    host = Sample(at_seconds=58.0, host=(HostProcess(pid=1, name="vllm", resident_bytes=1),))
    fullest, pair = reading(30.0, usage=0.9, running=5), (reading(56.0), reading(57.0))
    minute = [
        reading(1.0, usage=0.1, running=1),
        listed,
        Sample(at_seconds=6.0, devices=(device(),)),
        Sample(at_seconds=20.0, gaps=(FAILED,)),
        Sample(at_seconds=21.0, gaps=(FAILED,)),
        fullest,
        *pair,
        host,
    ]

    assert (listed, minute[3], fullest, *pair, host) == thinned(minute)


def test_an_idle_moment_of_a_busy_minute_is_kept() -> None:
    """Two samples in the middle of a busy minute saw the idle usage: a day later they still prove it."""
    minute = [reading(float(second), usage=0.5, running=5) for second in range(60)]
    minute[20:23] = [reading(float(second), usage=0.01) for second in range(20, 23)]
    assert (21.0, 22.0, 23.0, 59.0) == tuple(one.at_seconds for one in thinned(minute))[-4:]
    assert 5 >= len(thinned(minute))


def test_a_leak_that_a_pause_proved_is_one_a_day_later() -> None:
    """`serve` judges every ten seconds what is left of the day: no verdict goes with a minute that is thinned."""
    # An hour of work with one pause, in which forty blocks are still in use
    tiers = Retention()
    for second in range(3600):
        pause = 600 <= second < 603
        tiers.add(Sample(at_seconds=float(second), engines=(holding(40 if pause else 900, running=0 if pause else 5),)))
    found = finding(diagnose(Timeline(samples=tiers.samples()), Facts(pools=(pool(),))), "leak.kv_blocks")
    assert "fault" == found.status


def test_another_server_begins_with_nothing() -> None:
    """What was of the server before is forgotten."""
    tiers = Retention()
    tiers.add(reading(1.0))
    tiers.clear()
    tiers.add(reading(2.0))
    assert (reading(2.0),) == tiers.samples()


@settings(deadline=None)
@given(
    steps=st.lists(st.floats(0.0, 200.0), max_size=200),
    parts=st.lists(st.sampled_from(["engine", "device", "gap"]), min_size=200, max_size=200),
)
def test_what_is_kept_is_a_timeline_of_what_came(steps: list[float], parts: list[str]) -> None:
    """However samples come, the kept ones are in order, none is changed, and the newest is always among them."""
    tiers, now, came = Retention(whole_seconds=60.0, all_seconds=3600.0), 0.0, []
    for step, part in zip(steps, parts, strict=False):
        now += step
        came.append(
            {
                "engine": reading(now, usage=min(step / 200, 1.0)),
                "device": Sample(at_seconds=now, devices=(device(),)),
                "gap": Sample(at_seconds=now, gaps=(FAILED,)),
            }[part]
        )
        tiers.add(came[-1])

    kept = tiers.samples()

    assert all(sample in came for sample in kept)
    assert Timeline(samples=kept).samples == kept
    assert came[-1:] == list(kept[-1:])
    assert all(earlier.at_seconds <= later.at_seconds for earlier, later in pairwise(kept))


def test_every_part_of_a_sample_has_its_source() -> None:
    """What keeps, thins and shows samples goes by the list of sources, so that no part may be missing there."""
    # Profiles are made by a run, never by a daemon.
    beside = {"at_seconds", "load", "load_before", "gaps", "profiles"}
    assert {field.name for field in fields(Sample)} - beside == set(PARTS.values())
