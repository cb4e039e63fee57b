"""Print how often a fleet is accused where nothing leaks, and how often a leak that one replica hides is called.

python -m tests.quality.bench.fleet_power                    every kind of memory, 100 replicas and 200 fleets of each
python -m tests.quality.bench.fleet_power --replicas 200     as many as the figures were first taken from
"""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from statistics import median
from types import MappingProxyType

from kvdiag.diagnosis.fleet import ReplicaSummary, compare, summarise
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Facts, Sample, Timeline
from tests.builders.series import BASE_BYTES, MB_PER_HOUR, MODELS, Model, device_part, seeded
from tests.builders.values import GIB, MIB, engine
from tests.quality.bench.table import note

HOURS = 24.0
TICK_SECONDS = 180.0
LEAKS = (0.0, 10.0, 20.0, 50.0)
SIZES = (6, 20)
SAME_HOUR = " at one hour"
"""Ends the name of a kind whose replicas all meet the same hour of the day, as those of one service do."""

FACTS = Facts(engine_name="vllm", engine_version="0.32.0", model="m")


class OneHour(Random):
    """Randomness in which every day begins at the same hour."""

    def uniform(self, a: float, b: float) -> float:
        """The phase of the day is the only figure drawn between 0 and a full turn."""
        return 1.9 if b == 2.0 * math.pi else super().uniform(a, b)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a kind is accused in more than 2 % of the fleets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--fleets", type=int, default=200)
    parser.add_argument("--hours", type=float, default=HOURS)
    parser.add_argument("--tick", type=float, default=TICK_SECONDS, help="seconds between readings")
    parser.add_argument("--only", help="one kind alone")
    given = parser.parse_args(arguments)
    columns = [f"{leak:.0f} MB/h" if leak else "none" for leak in LEAKS]
    print_line(
        f"called, of {given.fleets} fleets over {given.hours:.0f} h", *(f"K={size}" for size in SIZES for _ in LEAKS)
    )
    print_line("leak", *(columns * len(SIZES)))
    accused, most_accused, found = [], 0.0, []
    for name in kinds() if given.only is None else (given.only,):
        drawn = [[life(name, seed, leak, given.hours, given.tick) for seed in range(given.replicas)] for leak in LEAKS]
        shares = [called(each, size, given.fleets) for size in SIZES for each in drawn]
        print_line(name, *(f"{share:.1%}" for share in shares))
        most_accused = max(most_accused, *shares[:: len(LEAKS)])
        found.append([shares[LEAKS.index(20.0) + place * len(LEAKS)] for place in range(len(SIZES))])
        accused += [name] if max(shares[:: len(LEAKS)]) > DEFAULT_LIMITS.fleet.significance else []
    bar = DEFAULT_LIMITS.fleet.significance
    workloads = f"worst of {len(found)} healthy workloads"
    note(f"fleets: false alarms, {workloads}", 100 * most_accused, 100 * bar, than="limit", unit="%")
    for which, share in (("median", median), ("worst", min)):
        few, many = (100 * share(column) for column in zip(*found, strict=True))
        what = f"fleets of {SIZES[0]}: 20 MB/h leak detected, {which} workload"
        note(what, few, many, than=f"{SIZES[1]} replicas", unit="%")
    if accused:
        sys.stdout.write(f"accused too often: {', '.join(accused)}\n")
    return 1 if accused else 0


def kinds() -> tuple[str, ...]:
    """Every null model, and those that follow the load once more for a service whose replicas share its day."""
    return (*MODELS, *OWN, *(f"{name}{SAME_HOUR}" for name in ("load cycles", "ratchet", "faint load")))


def filling(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """A bounded cache of 8 GiB that fills in 6 to 12 hours, and then stays: a leak until then."""
    hours = random.uniform(6.0, 12.0)
    for number, (_, load) in enumerate(MODELS["pool"](random, tick)):
        yield 8.0 * GIB * min(number * tick / 3600.0 / hours, 1.0) + random.gauss(0.0, 8.0 * MIB), load


def faint(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """A hundred MiB that follow the load, among noise that hides it."""
    for (noise, _), (_, load) in zip(MODELS["slow noise"](random, tick), MODELS["pool"](random, tick), strict=False):
        yield noise + 100.0 * MIB * load, load


def collected(random: Random, tick: float) -> Iterator[tuple[float, float]]:
    """A gibibyte of garbage that is collected every five hours."""
    begun = random.uniform(0.0, 5.0)
    for number, (_, load) in enumerate(MODELS["pool"](random, tick)):
        yield GIB * ((begun + number * tick / 3600.0) % 5.0) / 5.0 + random.gauss(0.0, 4.0 * MIB), load


OWN: Mapping[str, Model] = MappingProxyType({"filling cache": filling, "faint load": faint, "slow sawtooth": collected})
"""Kinds that could cause a false alarm in fleets alone, or that only a fleet can detect."""


def life(name: str, seed: int, leak_mb_per_hour: float, hours: float, tick: float) -> ReplicaSummary:
    """One replica of a kind, a leak added to what its device holds."""
    kind = name.removesuffix(SAME_HOUR)
    random = OneHour(f"{name} {seed}") if name.endswith(SAME_HOUR) else seeded(f"{name} {seed}")
    samples: list[Sample] = []
    model = OWN[kind] if kind in OWN else MODELS[kind]
    for number, (above, load) in enumerate(model(random, tick)):
        second = number * tick
        if second > hours * 3600.0:
            break
        size = max(round(BASE_BYTES + above + leak_mb_per_hour * MB_PER_HOUR * second) // 2**21 * 2**21, GIB)
        page = engine(usage=round(load, 4), running=1)
        samples.append(replace(device_part(size), at_seconds=second, engines=(page,)))
    return summarise(Timeline(samples=tuple(samples)), FACTS, DEFAULT_LIMITS, replica=str(seed))


def called(replicas: Sequence[ReplicaSummary], size: int, fleets: int) -> float:
    """The share of fleets of this size in which a component is found to grow."""
    random = seeded(f"fleets of {size}")
    found = 0
    for _ in range(fleets):
        fleet = compare(random.sample(replicas, size), DEFAULT_LIMITS)
        found += any(one.course == "grows" for one in fleet.growths)
    return found / fleets


def print_line(name: str, *cells: str) -> None:
    """One row."""
    sys.stdout.write(f"{name:42}" + "".join(f"{cell:>9}" for cell in cells) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
