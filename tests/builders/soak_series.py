"""Memory after each cycle of a soak: what healthy servers' memory does meanwhile, and leaks to add to it. Seeded.

Sizes are MiB above a base; a device's come in the driver's pages of 2 MiB, a host's in pages of 4 KiB.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from types import MappingProxyType

from kvdiag.diagnosis.growth.soak_cycles import Cycle, Soaked, judge
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.feeds.active.soak_plan import plan_soak
from kvdiag.model import Facts
from tests.builders.series import seeded
from tests.builders.values import GIB, KIB, MIB

Model = Callable[[Random, Sequence[Cycle]], Iterator[float]]


def quiet(random: Random, cycles: Sequence[Cycle]) -> Iterator[float]:
    """Nothing moves at all."""
    yield from (random.random() * 0.0 for _ in cycles)


def flat(random: Random, cycles: Sequence[Cycle]) -> Iterator[float]:
    """Half a MiB of jitter."""
    yield from (random.gauss(0.0, 0.5) for _ in cycles)


def ratchet(random: Random, cycles: Sequence[Cycle]) -> Iterator[float]:
    """First touch: each load cycle takes a share (0.4 to 0.75) of what the one before took."""
    level, step, keep = 0.0, random.uniform(60.0, 300.0), random.uniform(0.4, 0.75)
    for cycle in cycles:
        if cycle.requests:
            level, step = level + step, step * keep
        yield level


def records(random: Random, cycles: Sequence[Cycle]) -> Iterator[float]:
    """The high-water mark of shapes that load cycles draw at random."""
    level = 0.0
    for cycle in cycles:
        level = max(level, random.gauss(600.0, 100.0)) if cycle.requests else level
        yield level


def neighbour(random: Random, cycles: Sequence[Cycle]) -> Iterator[float]:
    """Another process takes 5 to 15 MiB in every cycle."""
    level = 0.0
    for _ in cycles:
        level += random.uniform(5.0, 15.0)
        yield level


def noise(random: Random, cycles: Sequence[Cycle]) -> Iterator[float]:
    """Resident memory that comes and goes by 12 MiB."""
    yield from (random.gauss(0.0, 12.0) for _ in cycles)


def garbage(random: Random, cycles: Sequence[Cycle]) -> Iterator[float]:
    """Garbage of 18 to 42 MiB a load cycle, collected at 100 to 400 MiB: every 3 to 20 load cycles."""
    level, most = random.uniform(0.0, 100.0), random.uniform(100.0, 400.0)
    mean = fmean(cycle.requests for cycle in cycles if cycle.requests)
    for cycle in cycles:
        level += random.uniform(18.0, 42.0) * cycle.requests / mean
        if level > most:
            level, most = random.uniform(0.0, 10.0), random.uniform(100.0, 400.0)
        yield level + random.gauss(0.0, 3.0)


def contents(random: Random, cycles: Sequence[Cycle]) -> Iterator[float]:
    """A cache that keeps 2 MiB of every request whose content is new."""
    level, brought = 0.0, False
    for cycle in cycles:
        if cycle.requests and not (cycle.repeated and brought):
            level += 2.0 * cycle.requests + random.uniform(0.0, 0.5)
            brought = cycle.repeated
        yield level


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A model, and whether it is a host's memory."""

    model: Model
    host: bool = False


MODELS: Mapping[str, Kind] = MappingProxyType(
    {
        "quiet": Kind(model=quiet),
        "flat": Kind(model=flat),
        "ratchet": Kind(model=ratchet),
        "records": Kind(model=records),
        "neighbour": Kind(model=neighbour),
        "RSS noise": Kind(model=noise, host=True),
        "GC": Kind(model=garbage, host=True),
    }
)
"""The null models."""


def cycles_of(minutes: float) -> tuple[Cycle, ...]:
    """The cycles of a soak of so many minutes as it is planned."""
    return tuple(
        Cycle(requests=load.requests, repeated=load.repeated) for load in plan_soak(60.0 * minutes, Facts()).cycles
    )


def readings(kind: Kind, seed: str, cycles: Sequence[Cycle], leak_mib: float = 0.0) -> list[int]:
    """Bytes after each cycle, with a leak of so many MiB in the mean load cycle, by its requests."""
    mean = fmean(cycle.requests for cycle in cycles if cycle.fresh)
    page = 4 * KIB if kind.host else 2 * MIB
    leaked, sizes = 0.0, []
    for cycle, level in zip(cycles, kind.model(seeded(seed), cycles), strict=True):
        leaked += leak_mib * cycle.requests / mean
        sizes.append(10 * GIB + math.floor((level + leaked) * MIB / page) * page)
    return sizes


def soaked(kind: Kind, seed: str, cycles: Sequence[Cycle], leak_mib: float = 0.0) -> Soaked:
    """`judge` on the model's samples after these cycles."""
    limits = DEFAULT_LIMITS
    least = limits.soak.host_bytes if kind.host else limits.soak.device_bytes
    found = judge(readings(kind, seed, cycles, leak_mib), cycles, limits, least=least, noisy=kind.host)
    assert found is not None
    return found
