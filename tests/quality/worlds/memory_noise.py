"""What the memory of healthy processes does on its own: noise, collectors, high-water marks, allocator steps."""

import math
from collections.abc import Callable

from tests.quality.corpus.tape import GIB, MIB, Tape, Track, highest, scaled
from tests.quality.worlds.request_load import Requests

Noise = Callable[[Tape, Requests, float], Track]
"""Bytes at each time, of a tape, its requests and a size of about 1."""


def correlated(tape: Tape, requests: Requests, size: float) -> Track:
    """First-order autoregressive noise that forgets within minutes to half an hour."""
    return tape.noise(size * 35.0 * MIB, tape.random.uniform(2.0, 30.0))


def collected(tape: Tape, requests: Requests, size: float) -> Track:
    """Garbage that grows with requests and is collected every few minutes, to nearly the same floor."""
    random, value, track = tape.random, 0.0, []
    most = size * random.uniform(120.0, 400.0) * MIB
    period = random.uniform(5.0, 35.0) * 60.0
    until = period
    for place, _ in enumerate(tape.hours):
        value += most * tape.tick_seconds / period
        until -= tape.tick_seconds
        if until <= 0.0:
            value, until = random.uniform(0.0, 0.1) * most, period * random.uniform(0.7, 1.3)
        track.append(value + 3.0 * MIB * math.sin(place))
    return track


def high_water(tape: Tape, requests: Requests, size: float) -> Track:
    """What an allocator keeps of the most that was ever needed at once."""
    peak = max(requests.running) or 1
    return scaled(highest(requests.load), size * 0.9 * GIB / peak)


def with_load(tape: Tape, requests: Requests, size: float) -> Track:
    """Memory that each running request takes and gives back, smoothed over some minutes."""
    keep, level, track = math.exp(-tape.tick_seconds / 420.0), 0.0, []
    peak = max(requests.running) or 1
    for running, jitter in zip(requests.running, tape.noise(6.0 * MIB), strict=True):
        level = keep * level + (1.0 - keep) * running
        track.append(size * 1.6 * GIB * level / peak + jitter)
    return track


def allocator_steps(tape: Tape, requests: Requests, size: float) -> Track:
    """Levels that move up and down by arenas, every few hours, around the same middle."""
    random, level, track = tape.random, 0.0, []
    rate = tape.tick_seconds / 3600.0 / random.uniform(1.5, 5.0)
    for jitter in tape.noise(5.0 * MIB):
        if random.random() < rate:
            level = size * random.choice((-1.0, 1.0)) * random.uniform(20.0, 130.0) * MIB
        track.append(level + jitter)
    return track


def warming(tape: Tape, requests: Requests, size: float) -> Track:
    """First use of kernels, arenas and tables: exponential, over within some hours."""
    tau = tape.random.uniform(0.2, 0.9)
    most = size * tape.random.uniform(0.4, 1.8) * GIB
    jitter = tape.noise(8.0 * MIB, 4.0)
    return [most * (1.0 - math.exp(-hour / tau)) + more for hour, more in zip(tape.hours, jitter, strict=True)]


def still(tape: Tape, requests: Requests, size: float) -> Track:
    """Next to nothing: a few pages in the first minutes."""
    return tape.of(lambda hour: 24.0 * MIB * size if hour > 0.05 else 0.0)


ON_HOST: dict[str, Noise] = {
    one.__name__: one for one in (correlated, collected, high_water, with_load, allocator_steps, warming)
}
ON_DEVICE: dict[str, Noise] = {one.__name__: one for one in (still, allocator_steps, high_water)}


def drawn_noise(tape: Tape, requests: Requests, kinds: dict[str, Noise], *, size: float = 1.0) -> Track:
    """One or two kinds of noise together."""
    names = tape.random.sample(sorted(kinds), tape.random.choice((1, 1, 2)))
    tracks = [kinds[name](tape, requests, size * tape.random.uniform(0.5, 1.2)) for name in names]
    return [sum(values) for values in zip(*tracks, strict=True)]
