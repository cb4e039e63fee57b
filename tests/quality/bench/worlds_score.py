"""Print how the diagnosis does on drawn servers that are in no report: what is called, missed, false, late.

python -m tests.quality.bench.worlds_score                     the seeds 1 to 3, and each miss
python -m tests.quality.bench.worlds_score --seeds 11 12 13    the table alone, as for any seed above 10
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.quality.bench.table import note
from tests.quality.worlds.calibrate import brier
from tests.quality.worlds.world_tally import Outcome, alert_rows, judged, table, worlds_of

SHOWN_UNTIL = 10
"""Seeds above are for the score alone: their misses are not shown."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, side by side for all seeds, the usual alerts, and the misses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="Judge worlds whose name or row has this text.")
    chosen = parser.parse_args(arguments)
    outcomes: dict[int, list[Outcome]] = {}
    with ProcessPoolExecutor(chosen.jobs) as pool:
        for seed in chosen.seeds:
            numbered = enumerate(worlds_of(seed))
            numbers = [place for place, one in numbered if chosen.only in f"{one.row} {one.name}"]
            outcomes[seed] = list(pool.map(partial(_judged, seed), numbers, chunksize=1))
    _print_table(outcomes)
    # Seeds that may be looked at are what the diagnosis was changed by.
    looked_at = any(seed <= SHOWN_UNTIL for seed in outcomes)
    _note(
        [one for found in outcomes.values() for one in found],
        "drawn servers, tuned on" if looked_at else "drawn servers",
    )
    for seed, found in outcomes.items():
        if seed <= SHOWN_UNTIL:
            _print_misses(seed, found)
    return 0


def _judged(seed: int, number: int) -> Outcome:
    return judged(worlds_of(seed)[number], seed)


def _say(line: str = "") -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _print_table(outcomes: dict[int, list[Outcome]]) -> None:
    every = [one for found in outcomes.values() for one in found]
    columns = {f"seed {seed}": table(found) for seed, found in outcomes.items()} | {"all": table(every)}
    _say(f"{len(every)} drawn servers")
    _say(f"{'':44}" + "".join(f"{name:>20}" for name in columns))
    for place, row in enumerate(columns["all"]):
        _say(f"{row.name:44}" + "".join(f"{rows[place].text:>20}" for rows in columns.values()))
    scored = brier(every)
    if scored is not None:
        _say(f"{'Brier score of the confidence':44}{f'{scored[0]:.4f} of {scored[1]}':>20}")
    _say()
    _say(f"{'by row':20}{'accepted':>10}{'of':>5}")
    for name in sorted({one.world.row for one in every}):
        mine = [one for one in every if one.world.row == name]
        _say(f"{name:20}{sum(one.accepted for one in mine):10}{len(mine):5}")
    _say()
    _say(f"{'usual alerts, by the end':34}{'right':>8}{'of':>6}{'benign worlds with it':>24}")
    for name, right, planted, false in alert_rows(every):
        _say(f"{name:34}{right:8}{planted:6}{false:24}")


def _note(outcomes: Sequence[Outcome], of: str) -> None:
    """The rows of the table of all benchmarks, next to the usual alert that finds most."""
    name, right, planted, false = max(alert_rows(outcomes), key=lambda row: row[1])
    rows = {row.name: row for row in table(outcomes)}
    benign = [one for one in outcomes if one.world.right == "benign"]
    if not planted or not benign:
        return
    accepted, called = rows["accepted"], sum(bool(one.called) for one in benign)
    share = 100.0 * accepted.count / (accepted.of or 1.0)
    note(f"{of}: problems found", share, 100.0 * right / planted, than=name, unit="%")
    note(
        f"{of}: healthy ones accused",
        100.0 * called / len(benign),
        100.0 * false / len(benign),
        than=name,
        unit="%",
    )


def _print_misses(seed: int, outcomes: Sequence[Outcome]) -> None:
    for one in outcomes:
        if one.accepted and not one.false_faults and not one.flaps:
            continue
        called = ", ".join(f"{status} {name}" for name, status in one.called.items())
        expected = f"{one.world.right} {one.world.accept[0] if one.world.accept else ''}"
        _say(f"\nseed {seed}, row {one.world.row}, {one.world.name} ({one.world.hours:.0f} h): expected {expected}")
        _say(f"  said {one.worst}: {called}; false faults {one.false_faults}, taken back {one.flaps}")
        for name, text in one.said.items():
            _say(f"    {name}: {text}")


if __name__ == "__main__":
    sys.exit(main())
