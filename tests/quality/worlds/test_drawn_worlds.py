"""The generator of worlds draws what it says, and the tally counts what it should."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.model import Status
from tests.quality.corpus.score import prefix
from tests.quality.worlds.calibrate import counted, mean_square
from tests.quality.worlds.planted import Right, World
from tests.quality.worlds.world_tally import Outcome, judged, table, worlds_of

WORLDS = worlds_of(1)


def world(row: str, name: str = "") -> World:
    """The shortest world of a row of seed 1."""
    found = (one for one in WORLDS if row in one.row and name in one.name)
    return min(found, key=lambda one: one.hours)


def test_a_third_is_benign_and_every_row_is_there() -> None:
    """Planted worlds of every row of the issue, and benign ones for a third of all."""
    rows = {one.row for one in WORLDS}
    assert {"0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "b"} == {row[0] for row in rows}
    assert 0.28 < sum(one.right == "benign" for one in WORLDS) / len(WORLDS) < 0.45
    assert len(WORLDS) == len({one.name for one in WORLDS})


def test_a_seed_draws_the_same_world_again() -> None:
    """Nothing depends on anything but world and seed."""
    one = world("0 growth")
    first, again, other = (one.play(seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_planted_growth_is_in_the_series() -> None:
    """A host that leaks holds at its end what the rate gives over the hours since the onset."""
    one = world("3 steps", "host process +7168")
    timeline, _ = one.play(1)
    host = [sum(each.anonymous_bytes or 0 for each in sample.host) for sample in timeline.samples if sample.host]
    expected = (one.mib_per_hour or 0.0) * (one.hours - one.onset_hours) * 2**20
    assert 0.6 * expected < host[-1] - host[0] < 1.3 * expected


def test_a_world_is_judged_on_the_way_and_at_its_end() -> None:
    """A leak that exhausts the device within hours is called a fault, and when."""
    found = judged(world("0 growth", "torch +1500"), 1)
    assert "fault" == found.status
    assert found.fault_hours is not None


def outcome(
    right: Right, *, called: dict[str, str], worst: Status, accept: tuple[str, ...] = ("leak.host",)
) -> Outcome:
    """The answers about a world with a given right one."""
    one = replace(world("0 growth"), right=right, accept=accept, also=(), hours=100.0, mib_per_hour=None)
    return Outcome(world=one, worst=worst, called=called)


def test_the_table_counts_hits_misses_and_false_faults() -> None:
    """One right fault, one leak shown as ok, one suspect where only a fault is right, one healthy server accused."""
    outcomes = [
        outcome("fault", called={"leak.host": "fault"}, worst="fault"),
        outcome("fault", called={}, worst="ok"),
        outcome("fault", called={"leak.host": "suspect"}, worst="suspect"),
        replace(outcome("benign", called={"leak.device_torch": "fault"}, worst="fault", accept=()), false_faults=2),
        outcome("unknown", called={}, worst="unknown", accept=()),
    ]
    shown = {row.name: row.text.partition(" (")[0] for row in table(outcomes)}
    assert "1 of 2" == shown["fault precision at the end"]
    assert "1 of 3" == shown["recall of certain faults"]
    assert "1 of 2" == shown["missed and ok overall"]
    assert "1 of 1" == shown["benign with a fault"]
    assert "4" == shown["false faults per 1,000 GPU-hours"]


def test_a_part_is_as_sure_as_the_whole_that_grows() -> None:
    """Outside torch is less clear than the server's bytes on the device, and the only part of them that grows."""
    one = worlds_of(25)[25]
    timeline, facts = one.play(25)
    begin = timeline.samples[0].at_seconds
    found = diagnose(prefix(timeline, begin + 10.0 * 3600.0), facts).findings
    assert one.accept == ("leak.device_non_torch",)
    assert "fault" == next(each.status for each in found if each.id == one.accept[0])


def test_calibration_counts_each_finding_and_scores_the_ratios() -> None:
    """Two of three findings were right; a ratio of 0.9 costs 0.01 where it is right, 0.81 where it is wrong."""
    cases = [("leak.host", "fault", True), ("leak.host", "fault", False), ("leak.host", "suspect", True)]
    assert {"leak.host": {"fault": [1, 2], "suspect": [1, 1]}} == counted(cases)
    found = mean_square([(0.9, True), (0.9, False)])
    assert found is not None
    assert pytest.approx(0.41) == found[0]
    assert found[1] == 2
    assert mean_square([]) is None
