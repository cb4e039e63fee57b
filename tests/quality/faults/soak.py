"""Play the fault matrix for a day of accelerated time: random order, several sources at once, kills, clock jumps.

python -m tests.quality.faults.soak               a day at twenty times the usual pace: 72 minutes
python -m tests.quality.faults.soak --hours 1 --seed 7

Each cell is judged as the tests judge it. After each kill the next daemon has to continue from its record folder,
and every record has to be readable, after any damage or clock change meanwhile. Between kills, memory and descriptors
of a daemon must not grow.

Exit code 1 where a promise was broken.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.quality.faults.cells import CELLS, COLUMNS, SHOWN, Cell, play
from tests.quality.faults.daemon_stage import Stage
from tests.quality.faults.mishaps import all_well, drawn_jump, jump, kill

MIB = 2**20
TICK_SECONDS = 0.05
FASTER = 1.0 / TICK_SECONDS
"""Than a daemon that reads everything once a second."""

KILL_RATIO, JUMP_RATIO = 0.3, 0.15
"""Of the rounds: that a kill ends, and in which the wall clock is set."""

DAMAGED_RATIO, SET_RATIO = 0.5, 0.3
"""Of the kills: after which a segment is damaged, and the clock set, before the next daemon starts."""

WARM_SECONDS = 120.0
"""Until a daemon has imported and allocated what it needs."""

MAX_GROWN_BYTES = (24 + 40) * MIB
"""Over a daemon's life after that: five minutes of whole samples and a day of minutes fill up meanwhile, and malloc
keeps what hostile pages took that were read side by side.
"""

MAX_GROWN_DESCRIPTORS = 8


@dataclass(slots=True)
class Told:
    """The results so far."""

    played: Counter[tuple[str, str]] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    most_grown_bytes: int = 0
    most_grown_descriptors: int = 0

    def problem(self, where: str, what: str) -> None:
        """Note what was not as promised, if anything, and say it at once: a run takes an hour."""
        if what:
            self.problems.append(f"{where}: {what}")
            sys.stdout.write(f"not as promised: {where}: {what}\n")
            sys.stdout.flush()


@dataclass(slots=True)
class _Life:
    """One daemon's memory and descriptors, from when it is warm."""

    process: psutil.Process
    begun_seconds: float = field(default_factory=time.monotonic)
    first: tuple[int, int] | None = None

    def watch(self, told: Told) -> None:
        """Compare with the first look."""
        if time.monotonic() - self.begun_seconds < WARM_SECONDS:
            return
        now = self.process.memory_info().rss, self.process.num_fds()
        self.first = self.first or now
        told.most_grown_bytes = max(told.most_grown_bytes, now[0] - self.first[0])
        told.most_grown_descriptors = max(told.most_grown_descriptors, now[1] - self.first[1])


def soak(folder: Path, *, hours: float, drawn: random.Random) -> Told:
    """Play for so many hours of the daemon's time."""
    told = Told()
    until = time.monotonic() + hours * 3600.0 / FASTER
    with Stage(folder, tick_seconds=TICK_SECONDS) as stage, ThreadPoolExecutor(len(COLUMNS)) as pool:
        life = _Life(psutil.Process(stage.serving.process.pid))
        told.problem("the start", "" if all_well(stage) else "not all is well")
        hour = hours
        while (left_seconds := until - time.monotonic()) > 0.0:
            if left_seconds * FASTER / 3600.0 < hour - 1.0:
                hour -= 1.0
                sys.stdout.write(f"{hour:g} h left, {told.happened['kills']} kills\n")
                sys.stdout.flush()
            cells = [drawn.choice(_of(column)) for column in COLUMNS if drawn.random() < 0.6]
            share = drawn.random()
            if share < KILL_RATIO:
                damages, seconds = drawn.random() < DAMAGED_RATIO, drawn_jump(drawn) * (drawn.random() < SET_RATIO)
                problem = kill(stage, cells, drawn, told.happened, damages=damages, seconds=seconds)
                told.problem(f"a kill, then a jump by {seconds} s", problem)
                life = _Life(psutil.Process(stage.serving.process.pid))
                continue
            if share < KILL_RATIO + JUMP_RATIO:
                seconds = drawn_jump(drawn)
                told.problem(f"a jump by {seconds} s", jump(stage, cells, drawn, told.happened, seconds))
                continue
            for cell, problem in zip(cells, pool.map(lambda cell: play(stage, cell), cells), strict=True):
                told.played[cell.source, cell.condition] += 1
                told.problem(f"{cell.source} {cell.condition}", problem)
            life.watch(told)
    return told


def _of(column: tuple[str, ...]) -> list[Cell]:
    return [cell for cell in CELLS if cell.source in column]


def main(arguments: Sequence[str] | None = None) -> int:
    """Play and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="kvdiag-faults-") as folder:
        told = soak(Path(folder), hours=chosen.hours, drawn=random.Random(chosen.seed))  # noqa: S311  a draw, no secret
    conditions = ("absent", "slow", "hanging", "garbage", "flapping", "full", "hostile", "restarted", "leaking")
    sys.stdout.write(f"{'times played':<18}" + "".join(f"{condition:>10}" for condition in conditions) + "\n")
    for source in SHOWN:
        counts = "".join(f"{told.played[source, condition] or '-':>10}" for condition in conditions)
        sys.stdout.write(f"{source:<18}{counts}\n")
    happened = ", ".join(f"{count} {what}" for what, count in sorted(told.happened.items()))
    sys.stdout.write(
        f"{chosen.hours:g} h at {FASTER:g} times the pace, seed {chosen.seed}; {happened}; a daemon grew by "
        f"{told.most_grown_bytes / MIB:.1f} MiB and {told.most_grown_descriptors} descriptors at most\n"
    )
    if told.most_grown_bytes > MAX_GROWN_BYTES or told.most_grown_descriptors > MAX_GROWN_DESCRIPTORS:
        told.problem("memory and descriptors", "a daemon grew")
    sys.stdout.write("all was as promised\n" if not told.problems else "")
    return 1 if told.problems else 0


if __name__ == "__main__":
    sys.exit(main())
