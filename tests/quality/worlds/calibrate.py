"""Count how often each verdict was right, on drawn servers and on the reported incidents, for kvdiag/diagnosis.

nice python -m tests.quality.worlds.calibrate              the seeds 24 to 27: some minutes
nice python -m tests.quality.worlds.calibrate --seeds 24   fewer

A finding counts once for each server and status: when it is first called so, at one of a few ages or at the end. The
seeds that the score is on are no part of it.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import kvdiag.diagnosis
from kvdiag.diagnosis import diagnose
from kvdiag.model import Diagnosis
from tests.quality.corpus.incidents import INCIDENTS
from tests.quality.corpus.score import HEALTHY, UNDETERMINED, answer, answers, expectations, messages, prefix, score
from tests.quality.worlds.world_tally import HOUR, Outcome, worlds_of

TABLE = Path(kvdiag.diagnosis.__file__).with_name("confidence.json")
AGES_HOURS = (1.5, 4.0, 10.0)

Case = tuple[str, str, bool]
"""The id and status of a finding, and whether it was right."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[24, 25, 26, 27])
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args(arguments)
    worlds = [(seed, number) for seed in chosen.seeds for number in range(len(worlds_of(seed)))]
    with ProcessPoolExecutor(chosen.jobs) as pool:
        cases = [case for found in pool.map(of_world, worlds, chunksize=4) for case in found]
        cases += [case for found in pool.map(of_incident, INCIDENTS, chunksize=4) for case in found]
    TABLE.write_text(written(counted(cases)))
    sys.stdout.write(f"{len(cases)} findings in {TABLE.name}\n")
    return 0


def of_world(world: tuple[int, int]) -> list[Case]:
    """The findings of one drawn server, of a seed and number."""
    seed, number = world
    one = worlds_of(seed)[number]
    timeline, facts = one.play(seed)
    begin, found = timeline.samples[0].at_seconds, dict[tuple[str, str], bool]()
    true = (*one.accept, *one.also)
    for age in (*(age for age in AGES_HOURS if age < one.hours), one.hours + 1.0):
        for called in problems(diagnose(prefix(timeline, begin + age * HOUR), facts)):
            # Before its onset a fault is not there yet.
            found.setdefault(called, called[0] in true and age >= one.onset_hours)
    return [(*called, right) for called, right in found.items()]


def of_incident(name: str) -> list[Case]:
    """The findings of one reported incident, at its end, in each way to observe it."""
    incident, expected = INCIDENTS[name], expectations()[name]
    found = dict[tuple[str, str], bool]()
    for variant, made in answers(incident, messages(), *incident.recording().play()).items():
        wrong = score(name, variant, expected, answer(made)).wrong
        known = expected.accept not in {(HEALTHY,), (UNDETERMINED,)}
        for called in problems(made):
            found.setdefault(called, known and called[0] not in wrong)
    return [(*called, right) for called, right in found.items()]


def problems(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """The ids and statuses of suspects and faults, of earlier lives as well."""
    for one in (*(each for life in diagnosis.lives for each in life.findings), *diagnosis.findings):
        if one.status in ("suspect", "fault"):
            yield one.id, one.status


def counted(cases: Iterable[Case]) -> Mapping[str, Mapping[str, list[int]]]:
    """For each id and status how many were right, and of how many."""
    counts, right = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for verdict, status, is_right in cases:
        counts[verdict, status] += 1
        right[verdict, status] += is_right
    table: dict[str, dict[str, list[int]]] = {}
    for verdict, status in sorted(counts):
        table.setdefault(verdict, {})[status] = [right[verdict, status], counts[verdict, status]]
    return table


def written(table: Mapping[str, Mapping[str, list[int]]]) -> str:
    """The table as its file holds it: a line for each id."""
    rows = (f"  {json.dumps(verdict)}: {json.dumps(row)}" for verdict, row in table.items())
    return "{\n" + ",\n".join(rows) + "\n}\n"


def brier(outcomes: Iterable[Outcome]) -> tuple[float, int] | None:
    """The Brier score of the confidence of what was called at the end, and of how many; `None` for none.

    The mean of the squared difference between the ratio and 1 for a right finding, 0 for a wrong one.
    """
    return mean_square(
        (one.confidence[name], name in (*one.world.accept, *one.world.also))
        for one in outcomes
        for name in one.called
        if name in one.confidence
    )


def mean_square(pairs: Iterable[tuple[float, bool]]) -> tuple[float, int] | None:
    """The mean squared difference between probabilities and what came true, and of how many; `None` for none."""
    squares = [(ratio - is_right) ** 2 for ratio, is_right in pairs]
    return (sum(squares) / len(squares), len(squares)) if squares else None


if __name__ == "__main__":
    sys.exit(main())
