"""Print what the growth estimator calls: leaks in time, healthy memory never. Seeded; by hand, since it takes minutes.

nice python -m tests.quality.bench.growth_power [--draws N] [--seed N]

Each series is judged again and again as a daemon would: each hour of 60 hours without a leak; after a leak began, each
ten minutes for two hours at 500 MB/h, each half hour for 20 hours at 50 MB/h, each two hours for 68 hours at 20 MB/h.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from random import Random
from types import MappingProxyType

from kvdiag import stats
from kvdiag.diagnosis.growth.estimator import assess
from kvdiag.diagnosis.growth.growth_evidence import Series
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from tests.builders.series import MB_PER_HOUR, MODELS, Model, memory, report
from tests.builders.values import GIB, MIB

TICK_SECONDS = 60.0
WARMUP_HOURS = 0.5
ROOM_BYTES = 20 * GIB


def slow_collections(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """Garbage of 900 MiB, collected every 1.5 to 5 hours."""
    left = period = random.uniform(1.5, 5.0) * 3600.0
    for _, load in MODELS["pool"](random, tick):
        yield 900.0 * MIB * (1.0 - left / period) + random.gauss(0.0, 6.0 * MIB), load
        left -= tick
        if left <= 0.0:
            left = period = random.uniform(1.5, 5.0) * 3600.0


def slow_warmup(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """Three GiB that come with a time constant of 2 to 8 hours."""
    tau, second = random.uniform(2.0, 8.0) * 3600.0, 0.0
    for _, load in MODELS["pool"](random, tick):
        yield 3.0 * GIB * (1.0 - math.exp(-second / tau)) + random.gauss(0.0, 8.0 * MIB), load
        second += tick


def lagging_load(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """Four GiB that follow the load a quarter of an hour late."""
    level: float | None = None
    for above, load in MODELS["slow noise"](random, tick):
        level = load if level is None else level + (load - level) * min(1.0, tick / 900.0)
        yield 4.0 * GIB * level + above, load


def mixture(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """Two of the other kinds at once."""
    names = random.sample(["fast noise", "slow noise", "sawtooth", "level steps", "warm-up"], 2)
    for (first, load), (second, _) in zip(*(MODELS[name](random, tick) for name in names), strict=False):
        yield first + second, load


KINDS: Mapping[str, Model] = MappingProxyType(
    {
        **MODELS,
        "slow collections": slow_collections,
        "slow warm-up": slow_warmup,
        "lagging load": lagging_load,
        "mixture": mixture,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What is offered: a leak (0 for none) from an hour on, judged until an hour at a pace, and its time limit."""

    leak_mb_per_hour: float
    onset_hours: float
    since_hours: float
    hours: float
    every_hours: float
    limit_hours: float


WORLDS: Mapping[str, World] = MappingProxyType(
    {
        "healthy": World(
            leak_mb_per_hour=0, onset_hours=0, since_hours=1.5, hours=60, every_hours=1, limit_hours=math.inf
        ),
        "500 MB/h": World(
            leak_mb_per_hour=500, onset_hours=12, since_hours=12, hours=14, every_hours=1 / 6, limit_hours=1.5
        ),
        "50 MB/h": World(
            leak_mb_per_hour=50, onset_hours=14, since_hours=14, hours=34, every_hours=0.5, limit_hours=10
        ),
        "20 MB/h": World(leak_mb_per_hour=20, onset_hours=4, since_hours=8, hours=72, every_hours=2, limit_hours=40),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """When a series was first called, and as a fault, in hours from the onset; and how often a fault was taken back."""

    suspect_hours: float | None
    fault_hours: float | None
    exhaustion_ratio: float | None
    withdrawn: int


def watched(job: tuple[str, str, int]) -> Called:
    """Judge one series of a kind again and again."""
    name, kind, seed = job
    world = WORLDS[name]
    times, sizes, load = memory(
        kind,
        seed,
        hours=world.hours,
        tick_seconds=TICK_SECONDS,
        leak_mb_per_hour=world.leak_mb_per_hour,
        onset=world.onset_hours,
        models=KINDS,
    )
    first = round(WARMUP_HOURS * 3600.0 / TICK_SECONDS)
    suspect = fault = ratio = None
    before, withdrawn, at_hours = "none", 0, world.since_hours
    while at_hours <= world.hours + 1e-9:
        end = round(at_hours * 3600.0 / TICK_SECONDS) + 1
        judged = Series(times_seconds=times[first:end], sizes_bytes=sizes[first:end], load=load[first:end])
        found = assess(judged, DEFAULT_LIMITS.growth).decides
        status = "none" if found is None else found.status
        if found is not None and found.grows and suspect is None:
            suspect = at_hours - world.onset_hours
            left = found.exhaustion_seconds(ROOM_BYTES, DEFAULT_LIMITS.growth)
            if left is not None and world.leak_mb_per_hour:
                ratio = left.estimate * world.leak_mb_per_hour * MB_PER_HOUR / ROOM_BYTES
        if status == "fault" and fault is None:
            fault = at_hours - world.onset_hours
        withdrawn += before == "fault" and status == "none"
        before, at_hours = status, at_hours + world.every_hours
    return Called(suspect_hours=suspect, fault_hours=fault, exhaustion_ratio=ratio, withdrawn=withdrawn)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=5, help="series of each kind")
    parser.add_argument("--seed", type=int, default=0, help="first of the draws")
    chosen = parser.parse_args(arguments)
    draws = range(chosen.seed, chosen.seed + chosen.draws)
    jobs = list(product(WORLDS, KINDS, draws))
    with ProcessPoolExecutor(max_workers=2) as pool:
        results = dict(zip(jobs, pool.map(watched, jobs, chunksize=4), strict=True))
    report(f"{chosen.draws} series of each kind: called, as a fault, taken back; in time where there is a leak\n")
    report(f"{'':18}" + "".join(f"{name:>22}" for name in WORLDS))
    for kind in (*KINDS, "all"):
        cells = []
        for name, world in WORLDS.items():
            mine = [one for key, one in results.items() if key[0] == name and kind in (key[1], "all")]
            called = sum(one.suspect_hours is not None for one in mine)
            faults = sum(one.fault_hours is not None for one in mine)
            late = [one for one in mine if one.suspect_hours is not None and one.suspect_hours <= world.limit_hours]
            withdrawn = sum(one.withdrawn for one in mine)
            in_time = f", {len(late)} in time" if world.leak_mb_per_hour else ""
            cells.append(f"{called} {faults} {withdrawn}{in_time}")
        report(f"{kind:18}" + "".join(f"{cell:>22}" for cell in cells))
    ratios = [one.exhaustion_ratio for one in results.values() if one.exhaustion_ratio is not None]
    told = "  ".join(f"{stats.quantile(ratios, share):.2f}" for share in (0.1, 0.5, 0.9))
    report(f"\ntime to exhaustion over the truth at the first call, 10-50-90 %: {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
