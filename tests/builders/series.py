"""Synthetic server memory, minute by minute or finer: what a healthy server's memory does, and leaks to add to it.

Seeded generators of the null models that any test for growth has to stay silent on. Sizes are bytes at 2-MiB pages.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from random import Random
from types import MappingProxyType

from kvdiag.model import HostProcess, Sample, Timeline
from tests.builders.values import GIB, MIB, SERVER_PID, allocator, device, engine, process

Part = Callable[[int], Sample]
"""From bytes to the sample that a source would make of them, at no time yet."""

MB_PER_HOUR = 10**6 / 3600.0
"""Bytes per second of a leak of 1 MB/h."""

BASE_BYTES = 20 * GIB

Model = Callable[[Random, float], Iterator[tuple[float, float]]]
"""A null model: from a random generator and the seconds between samples, it yields bytes above the base, and load."""


def seeded(name: str) -> Random:
    """The same randomness for the same name, on every machine."""
    return Random(name)  # noqa: S311 - it guards nothing


def report(line: str) -> None:
    """A measured figure, for `pytest -s`."""
    print(line)  # noqa: T201 - asked for by the reader


def _noise(random: Random, tick: float, tau_seconds: float, deviation: float) -> Iterator[float]:
    keep = math.exp(-tick / tau_seconds)
    push = deviation * math.sqrt(1.0 - keep * keep)
    value = random.gauss(0.0, deviation)
    while True:
        yield value
        value = keep * value + random.gauss(0.0, push)


def _load(random: Random, tick: float) -> Iterator[float]:
    """Load of 0 to 1: a daily cycle from any hour of the day, and bursts."""
    phase = random.uniform(0.0, 2.0 * math.pi)
    bursts = _noise(random, tick, 600.0, 0.15)
    second = 0.0
    while True:
        yield min(max(0.45 + 0.3 * math.sin(phase + 2.0 * math.pi * second / 86_400.0) + next(bursts), 0.0), 1.0)
        second += tick


def pool(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """A pool allocated at start: the memory is constant under any load."""
    for load in _load(random, tick):
        yield 0.0, load


def fast_noise(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """Noise that forgets within a minute."""
    yield from zip(_noise(random, tick, 60.0, 60.0 * MIB), _load(random, tick), strict=False)


def slow_noise(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """Noise that forgets within twenty minutes."""
    yield from zip(_noise(random, tick, 1200.0, 60.0 * MIB), _load(random, tick), strict=False)


def load_cycles(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """Three GiB that follow the load."""
    for load in _load(random, tick):
        yield 3.0 * GIB * load + random.gauss(0.0, 10.0 * MIB), load


def ratchet(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """An allocator that keeps the most that the load ever needed."""
    most = 0.0
    for load in _load(random, tick):
        most = max(most, load)
        yield 3.0 * GIB * most, load


def warmup(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """Two GiB that come with a time constant of 25 minutes."""
    second = 0.0
    for load in _load(random, tick):
        yield 2.0 * GIB * (1.0 - math.exp(-second / 1500.0)) + random.gauss(0.0, 4.0 * MIB), load
        second += tick


def sawtooth(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """Garbage of 400 MiB, collected every 8 to 14 minutes."""
    left = period = random.uniform(480.0, 840.0)
    for load in _load(random, tick):
        yield 400.0 * MIB * (1.0 - left / period) + random.gauss(0.0, 4.0 * MIB), load
        left -= tick
        if left <= 0.0:
            left = period = random.uniform(480.0, 840.0)


def level_steps(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """Levels that change by 80 to 500 MiB either way about every three hours."""
    level = 0.0
    for noise, load in zip(_noise(random, tick, 60.0, 10.0 * MIB), _load(random, tick), strict=False):
        if random.random() < tick / 10_800.0:
            level += random.choice((-1, 1)) * random.uniform(80.0, 500.0) * MIB
        yield level + noise, load


def random_walk(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """A walk of 60 MiB in an hour."""
    push = 60.0 * MIB * math.sqrt(tick / 3600.0)
    level = 0.0
    for load in _load(random, tick):
        level += random.gauss(0.0, push)
        yield level, load


def ramps(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """Levels that rise by 100 to 600 MiB about every eight hours, taking 2 to 30 minutes: what is loaded when used."""
    level = left = push = 0.0
    for load in _load(random, tick):
        if left <= 0.0 and random.random() < tick / 28_800.0:
            left = random.uniform(120.0, 1800.0)
            push = random.uniform(100.0, 600.0) * MIB / left
        level += push * min(tick, max(left, 0.0))
        left -= tick
        yield level + random.gauss(0.0, 4.0 * MIB), load


def filled_cache(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """A cache of 8 GiB that is full by now, its contents changing."""
    for noise, load in zip(_noise(random, tick, 300.0, 8.0 * MIB), _load(random, tick), strict=False):
        yield 8.0 * GIB + min(noise, 0.0), load


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "pool": pool,
        "fast noise": fast_noise,
        "slow noise": slow_noise,
        "load cycles": load_cycles,
        "ratchet": ratchet,
        "warm-up": warmup,
        "sawtooth": sawtooth,
        "level steps": level_steps,
        "ramps": ramps,
        "random walk": random_walk,
        "filled cache": filled_cache,
    }
)


def memory(
    name: str,
    seed: int,
    *,
    hours: float,
    tick_seconds: float = 60.0,
    leak_mb_per_hour: float = 0.0,
    onset: float = 0.0,
    models: Mapping[str, Model] = MODELS,
) -> tuple[list[float], list[int], list[float]]:
    """Times, bytes and load of a null model over some hours, a leak added from `onset` (hours) on."""
    random = seeded(f"{name} {seed}")
    times: list[float] = []
    sizes: list[int] = []
    loads: list[float] = []
    for number, (above, load) in enumerate(models[name](random, tick_seconds)):
        second = number * tick_seconds
        if second > hours * 3600.0:
            break
        leaked = leak_mb_per_hour * MB_PER_HOUR * max(second - onset * 3600.0, 0.0)
        times.append(1_000.0 + second)
        sizes.append(max(round((BASE_BYTES + above + leaked) / (2 * MIB)) * 2 * MIB, 0))
        loads.append(load)
    return times, sizes, loads


def timeline(
    name: str,
    seed: int = 1,
    *,
    hours: float,
    tick_seconds: float = 60.0,
    leak_mb_per_hour: float = 0.0,
    onset: float = 0.0,
    part: Part,
    busy: bool = True,
) -> Timeline:
    """A timeline without steps in which `part` of each sample holds the memory; idle throughout unless `busy`."""
    readings = memory(
        name, seed, hours=hours, tick_seconds=tick_seconds, leak_mb_per_hour=leak_mb_per_hour, onset=onset
    )
    samples = []
    for at_seconds, size, load in zip(*readings, strict=True):
        page = engine(usage=round(load, 4) if busy else 0.0, running=1 if busy else 0)
        samples.append(replace(part(size), at_seconds=at_seconds, engines=(page,)))
    return Timeline(samples=tuple(samples))


def host_part(size: int) -> Sample:
    """The engine core's anonymous memory, next to an API server's that is constant."""
    core = HostProcess(pid=SERVER_PID, name="VLLM::EngineCore", resident_bytes=size + GIB, anonymous_bytes=size)
    server = HostProcess(pid=SERVER_PID + 1, name="vllm", resident_bytes=3 * GIB, anonymous_bytes=2 * GIB)
    return Sample(at_seconds=0.0, host=(core, server))


def device_part(size: int) -> Sample:
    """The server's process on GPU 0, as NVML lists it, next to another process of constant size."""
    listed = (process(SERVER_PID, size), process(SERVER_PID + 900, GIB))
    return Sample(at_seconds=0.0, devices=(device(used_bytes=size + 2 * GIB, total_bytes=80 * GIB, processes=listed),))


def neighbour_part(size: int) -> Sample:
    """A server process of constant size, next to another process whose memory varies."""
    listed = (process(SERVER_PID, 20 * GIB), process(SERVER_PID + 900, size - BASE_BYTES))
    used = 20 * GIB + size - BASE_BYTES + GIB
    return Sample(at_seconds=0.0, devices=(device(used_bytes=used, total_bytes=80 * GIB, processes=listed),))


def hidden_device_part(size: int) -> Sample:
    """The same device where NVML lists no processes."""
    return Sample(at_seconds=0.0, devices=(device(used_bytes=size + 2 * GIB, total_bytes=80 * GIB),))


def torch_part(*, live: bool = False, reserved: bool = False, outside: bool = False, told: bool = True) -> Part:
    """An agent's publication in which the varying bytes are live in torch, in its cache, or outside torch."""

    def part(size: int) -> Sample:
        allocated = size if live else BASE_BYTES
        held = GIB + (max(size, allocated) if reserved or live else BASE_BYTES + 10 * GIB)
        beside = GIB + (size if outside else 0)
        reported_bytes = held + beside if told else None
        seen = allocator(
            allocated_bytes=allocated, reserved_bytes=held, process_bytes=reported_bytes, title="VLLM::Worker"
        )
        whole = device(
            used_bytes=held + beside + GIB, total_bytes=160 * GIB, processes=(process(SERVER_PID, held + beside),)
        )
        return Sample(at_seconds=0.0, devices=(whole,), allocators=(seen,))

    return part
