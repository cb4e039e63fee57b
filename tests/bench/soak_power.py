"""Print how often a soak calls healthy memory a leak, and how often it finds leaks of 2, 5 and 20 MiB a cycle.

python -m tests.bench.soak_power              200 soaks of each kind, lengths of 5, 12, 24 and 60 minutes
python -m tests.bench.soak_power --soaks 1000
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from tests.soak_series import MODELS, Kind, contents, cycles_of, soaked

MINUTES = (5, 12, 24, 60)
LEAKS_MIB = (0, 1, 2, 5, 20)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--soaks", type=int, default=200)
    soaks = parser.parse_args(arguments).soaks
    models = {**MODELS, "contents": Kind(model=contents)}
    write(f"share of {soaks} soaks called a leak (and left open), in %")
    write(f"{'':16}" + "".join(f"{name:>14}" for name in models))
    for minutes in MINUTES:
        cycles = cycles_of(minutes)
        for leak in LEAKS_MIB:
            row = []
            for name, kind in models.items():
                shapes = Counter(soaked(kind, f"{name} {seed}", cycles, leak).shape for seed in range(soaks))
                open_ = shapes["unsteady"] + shapes["background"] + shapes["content"]
                row.append(f"{100 * shapes['leak'] / soaks:.1f} ({100 * open_ / soaks:.0f})")
            write(f"{minutes:3} min {leak:2} MiB   " + "".join(f"{cell:>14}" for cell in row))
    return 0


def write(line: str) -> None:
    """One line of the table."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
