"""Print how often a soak calls healthy memory a leak, and how often it finds leaks of 2, 5 and 20 MiB a cycle.

python -m tests.quality.bench.soak_power                        200 soaks of each kind, of 12 minutes
python -m tests.quality.bench.soak_power --minutes 5 12 24 60 --soaks 1000

The manual method is printed as well: memory after the soak minus memory before it.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from kvdiag.diagnosis.growth.soak_cycles import Cycle
from tests.builders.soak_series import MODELS, Kind, contents, cycles_of, readings, soaked
from tests.builders.values import MIB
from tests.quality.bench.table import note

MINUTES = 12.0
LEAKS_MIB = (0, 1, 2, 5, 20)
NOTED = {
    ("flat", 0): "false alarms on jitter",
    ("ratchet", 0): "false alarms on first touch",
    ("records", 0): "false alarms on high-water marks",
    ("GC", 0): "false alarms on slow garbage collection",
    ("flat", 2): "2 MiB/cycle leak detected in jitter",
    ("ratchet", 2): "2 MiB/cycle leak detected during first touch",
    ("flat", 5): "5 MiB/cycle leak detected in jitter",
    ("ratchet", 5): "5 MiB/cycle leak detected during first touch",
}
"""What of it stands in the table of `make bench`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--soaks", type=int, default=200)
    parser.add_argument("--minutes", type=float, nargs="+", default=[MINUTES])
    given = parser.parse_args(arguments)
    soaks = given.soaks
    models = {**MODELS, "contents": Kind(model=contents)}
    write(f"share of {soaks} soaks called a leak (and left open), in %")
    write(f"{'':16}" + "".join(f"{name:>14}" for name in models))
    for minutes in given.minutes:
        cycles = cycles_of(minutes)
        for leak in LEAKS_MIB:
            row = []
            for name, kind in models.items():
                shapes = Counter(soaked(kind, f"{name} {seed}", cycles, leak).shape for seed in range(soaks))
                open_ = shapes["unsteady"] + shapes["background"] + shapes["content"]
                row.append(f"{100 * shapes['leak'] / soaks:.1f} ({100 * open_ / soaks:.0f})")
                if minutes == MINUTES and (what := NOTED.get((name, leak))):
                    by_hand = sum(risen(kind, f"{name} {seed}", cycles, leak) for seed in range(soaks))
                    note(
                        f"soak of {minutes:g} min: {what}",
                        100 * shapes["leak"] / soaks,
                        100 * by_hand / soaks,
                        than="difference before and after",
                        unit="%",
                    )
            write(f"{minutes:3g} min {leak:2} MiB   " + "".join(f"{cell:>14}" for cell in row))
    return 0


def risen(kind: Kind, seed: str, cycles: Sequence[Cycle], leak_mib: float) -> bool:
    """Whether there is more after the soak than before it, by what a device's driver takes at once."""
    sizes = readings(kind, seed, cycles, leak_mib)
    return sizes[-1] - sizes[0] >= 2 * MIB


def write(line: str) -> None:
    """One line of the table."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
