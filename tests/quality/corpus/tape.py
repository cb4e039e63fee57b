"""Series at equal times, from which incidents are put together: levels, ramps, steps, noise, traffic. Seeded."""

import math
from collections.abc import Callable, Sequence
from random import Random

MIB, GIB = 2**20, 2**30
PAGE_BYTES = 2 * MIB
"""The unit in which a driver maps memory; a host's pages are smaller, which does not matter at gigabytes."""

Track = list[float]
"""One value at each time of a tape."""


def seeded(name: str) -> Random:
    """The same randomness for the same name, on every machine."""
    return Random(name)  # noqa: S311 - it guards nothing


class Tape:
    """Equally spaced times, and builders of tracks over them. Hours count from its first sample."""

    def __init__(self, name: str, *, hours: float, tick_seconds: float = 60.0) -> None:
        """Begin at no time in particular."""
        self.random = seeded(name)
        self.tick_seconds = tick_seconds
        self.hours = [number * tick_seconds / 3600.0 for number in range(round(hours * 3600.0 / tick_seconds) + 1)]

    def flat(self, value: float = 0.0) -> Track:
        """One level."""
        return [value] * len(self.hours)

    def of(self, shape: Callable[[float], float]) -> Track:
        """A function of the hour."""
        return [shape(hour) for hour in self.hours]

    def line(self, per_hour: float, *, start: float = 0.0, begin: float = 0.0, end: float = math.inf) -> Track:
        """A ramp between two hours, level before and after."""
        return self.of(lambda hour: start + per_hour * (min(max(hour, begin), end) - begin))

    def levels(self, *changes: tuple[float, float]) -> Track:
        """The level that each hour brings, from then on; 0 before the first."""
        return self.of(lambda hour: next((level for at, level in reversed(changes) if hour >= at), 0.0))

    def noise(self, deviation: float, tau_minutes: float = 0.0) -> Track:
        """Gaussian noise that forgets with a time constant; white where it is 0."""
        keep = math.exp(-self.tick_seconds / (60.0 * tau_minutes)) if tau_minutes else 0.0
        push = deviation * math.sqrt(1.0 - keep * keep)
        value = self.random.gauss(0.0, deviation)
        track = []
        for _ in self.hours:
            track.append(value)
            value = keep * value + self.random.gauss(0.0, push)
        return track

    def events(self, per_hour: float | Sequence[float], *, begin: float = 0.0, end: float = math.inf) -> Track:
        """How many events fall into each tick, of a rate (or one for each tick): Poisson."""
        rates = [per_hour] * len(self.hours) if isinstance(per_hour, int | float) else list(per_hour)
        return [
            self._poisson(rate * self.tick_seconds / 3600.0) if begin <= hour < end else 0.0
            for hour, rate in zip(self.hours, rates, strict=True)
        ]

    def traffic(self, middle: float = 0.5, *, swing: float = 0.3, bursts: float = 0.12) -> Track:
        """Demand of 0 to 1 by the time of day, from a drawn hour on, with bursts."""
        phase = self.random.uniform(0.0, 24.0)
        return [
            min(max(middle + swing * math.sin((hour + phase) * math.pi / 12.0) + burst, 0.02), 1.0)
            for hour, burst in zip(self.hours, self.noise(bursts, 10.0), strict=True)
        ]

    def pauses(self, demand: Sequence[float], *, every: float, lasting: float, first: float | None = None) -> Track:
        """Demand with idle intervals of `lasting` hours at the end of each `every` hours."""
        shift = 0.0 if first is None else every - lasting - first
        return [
            0.0 if (hour + shift) % every >= every - lasting else value
            for hour, value in zip(self.hours, demand, strict=True)
        ]

    def _poisson(self, mean: float) -> float:
        if mean > 60.0:
            return float(max(round(self.random.gauss(mean, math.sqrt(mean))), 0))
        limit, count, product = math.exp(-mean), 0, self.random.random()
        while product > limit:
            count += 1
            product *= self.random.random()
        return float(count)


def total(*tracks: Sequence[float]) -> Track:
    """Tracks added up."""
    return [sum(values) for values in zip(*tracks, strict=True)]


def scaled(track: Sequence[float], by: float, start: float = 0.0) -> Track:
    """A track times a factor, on a base."""
    return [start + by * value for value in track]


def running_total(track: Sequence[float], by: float = 1.0, start: float = 0.0) -> Track:
    """What the events of a track have brought so far."""
    out, value = [], start
    for step in track:
        value += by * step
        out.append(value)
    return out


def highest(track: Sequence[float]) -> Track:
    """The highest so far: what an allocator keeps."""
    out, most = [], -math.inf
    for value in track:
        most = max(most, value)
        out.append(most)
    return out


def capped(track: Sequence[float], most: float) -> Track:
    """A track under a bound."""
    return [min(value, most) for value in track]


def pages(value: float) -> int:
    """Bytes as a device counts them."""
    return max(round(value / PAGE_BYTES), 0) * PAGE_BYTES
