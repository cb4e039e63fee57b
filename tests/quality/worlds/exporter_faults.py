"""What a Prometheus holds of a timeline: late and lost scrapes, an exporter that was down, a gauge that was stuck."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from kvdiag.model import Sample, Timeline


def lossy(timeline: Timeline, random: Random) -> Timeline:
    """Up to a scrape in twenty is lost."""
    share = random.uniform(0.005, 0.05)
    return Timeline(samples=tuple(one for one in timeline.samples if random.random() >= share))


def late(timeline: Timeline, random: Random) -> Timeline:
    """Each scrape comes up to 20 seconds late."""
    moved = [replace(one, at_seconds=one.at_seconds + random.uniform(0.0, 20.0)) for one in timeline.samples]
    return Timeline(samples=tuple(sorted(moved, key=lambda one: one.at_seconds)))


def exporter_down(timeline: Timeline, random: Random) -> Timeline:
    """One exporter gives nothing for up to an hour."""
    begin, end = _interval(timeline, random, 600.0, 3600.0)
    part = random.choice(("devices", "host"))
    kept = [one for one in timeline.samples if getattr(one, part) is None or not begin <= one.at_seconds < end]
    return Timeline(samples=tuple(kept))


def stuck(timeline: Timeline, random: Random) -> Timeline:
    """DCGM repeats one value for up to an hour."""
    begin, end = _interval(timeline, random, 900.0, 3600.0)
    held: Sample | None = None
    made = []
    for one in timeline.samples:
        if one.devices is not None and begin <= one.at_seconds < end:
            held = held or one
            one = replace(one, devices=held.devices)  # noqa: PLW2901
        made.append(one)
    return Timeline(samples=tuple(made))


Fault = Callable[[Timeline, Random], Timeline]
FAULTS: tuple[tuple[Fault, ...], ...] = ((), (lossy,), (late,), (lossy, late), (exporter_down, late), (stuck, lossy))


def scraped_by(timeline: Timeline, random: Random) -> Timeline:
    """The timeline through exporters with some of these faults."""
    for fault in random.choice(FAULTS):
        timeline = fault(timeline, random)
    return timeline


def _interval(timeline: Timeline, random: Random, least: float, most: float) -> tuple[float, float]:
    first, last = timeline.samples[0].at_seconds, timeline.samples[-1].at_seconds
    lasting = min(random.uniform(least, most), (last - first) / 6.0)
    begin = random.uniform(first + 0.15 * (last - first), first + 0.75 * (last - first))
    return begin, begin + lasting
