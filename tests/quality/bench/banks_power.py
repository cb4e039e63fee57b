"""Print what the banks call: leaks in time, and healthy memory never. Seeded; by hand, since it takes minutes.

nice python -m tests.quality.bench.banks_power [--draws N]

Each series is judged again and again as a daemon would: each half hour of 36 hours without a leak, each ten minutes for
an hour and a half after a leak of 500 MB/h began, each half hour for ten hours after one of 50 MB/h.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from kvdiag import stats
from kvdiag.diagnosis.banks import Series, watch
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.window import LEAKS, Trend
from tests.builders.series import MB_PER_HOUR, MODELS, memory, report

TICK_SECONDS = 30.0
WARMUP_HOURS = 0.5
NULL_HOURS = 36.0
ROOM_BYTES = 20 * 2**30


def judged(
    name: str, seed: int, hours: float, every_hours: float, *, since: float, leak: float = 0.0, onset: float = 0.0
) -> Iterator[tuple[float, tuple[Trend, ...]]]:
    """The trends of a drawn series, judged at equal times from `since` on; its first half hour is left out."""
    times, sizes, load = memory(name, seed, hours=hours, tick_seconds=TICK_SECONDS, leak_mb_per_hour=leak, onset=onset)
    first = round(WARMUP_HOURS * 3600.0 / TICK_SECONDS)
    at_hours = since
    while at_hours <= hours + 1e-9:
        end = round(at_hours * 3600.0 / TICK_SECONDS) + 1
        series = Series(
            times_seconds=tuple(times[first:end]),
            sizes_bytes=tuple(sizes[first:end]),
            idle=(False,) * (end - first),
            load=tuple(load[first:end]),
        )
        yield at_hours - onset, watch(series, DEFAULT_LIMITS).trends
        at_hours += every_hours


def called(evaluations: Iterator[tuple[float, tuple[Trend, ...]]]) -> tuple[bool, bool]:
    """Whether any evaluation was suspect or worse, and whether any was certain."""
    suspect = certain = False
    for _, trends in evaluations:
        suspect = suspect or any(trend.shape in LEAKS for trend in trends)
        certain = certain or any(trend.certain for trend in trends)
    return suspect, certain


def exhaustion_ratios(name: str, draws: int, leak: float) -> list[float]:
    """Time to exhaustion over the truth, at the first call of each series."""
    ratios = []
    for seed in range(draws):
        for _, trends in judged(name, 4000 + seed, 20.0, 0.5, since=6.0, leak=leak, onset=5.0):
            found = next((trend for trend in trends if trend.shape in LEAKS), None)
            left = None if found is None else found.exhaustion_seconds(ROOM_BYTES, DEFAULT_LIMITS)
            if left is not None:
                ratios.append(left.middle * leak * MB_PER_HOUR / ROOM_BYTES)
                break
    return ratios


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=20, help="series of each kind")
    draws = parser.parse_args(arguments).draws
    report(f"{draws} series of each kind\n")
    report(f"{'':14}{'36 h healthy':>18}{'500 MB/h, 1.5 h':>18}{'50 MB/h, 10 h':>18}{'time left / truth':>20}")
    report(f"{'':14}{'suspect  fault':>18}{'called  fault':>18}{'called  fault':>18}{'10 %  50 %  90 %':>20}")
    faults = 0
    for name in MODELS:
        null = [called(judged(name, 5000 + seed, NULL_HOURS, 0.5, since=1.5)) for seed in range(draws)]
        fast = [
            called(judged(name, 2000 + seed, 7.0, 1 / 6, since=6.0, leak=500.0, onset=5.5)) for seed in range(draws)
        ]
        slow = [called(judged(name, 3000 + seed, 18.0, 0.5, since=9.0, leak=50.0, onset=8.0)) for seed in range(draws)]
        ratios = exhaustion_ratios(name, draws, 200.0)
        faults += sum(certain for _, certain in null)
        cells = [(sum(one for one, _ in each), sum(one for _, one in each)) for each in (null, fast, slow)]
        left = "  ".join(f"{stats.quantile(ratios, share):.2f}" for share in (0.1, 0.5, 0.9)) if ratios else ""
        report(f"{name:14}" + "".join(f"{first:>11}{second:>7}" for first, second in cells) + f"{left:>20}")
    report(f"\nfalse faults in 1,000 hours, over all kinds: {1000.0 * faults / (draws * len(MODELS) * NULL_HOURS):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
