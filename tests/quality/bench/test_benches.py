"""What the benchmarks compute and write: steps compared, fleets called, growth found, and the table."""

import json
from pathlib import Path

import pytest

from kvdiag.feeds.daemon.retention import Retention
from tests.builders.series import MODELS
from tests.quality.bench.fleet_power import kinds, main
from tests.quality.bench.serve_soak import grown, soaked
from tests.quality.bench.steps import SETTLING, Compared, Steps, Stretch, compared, touched
from tests.quality.bench.table import BENCHES, KEPT, NOTES, PAGE, README, note, rendered, short, with_table

ALONE = Steps((1_000_000,) * 999 + (5_000_000,))


def test_what_is_no_slower_costs_nothing() -> None:
    """Equal noise with and without the disturbance gives a slowdown of 0."""
    assert Compared(
        count=2000, usual_seconds=0.001, slower_ratio=0.0, held_up_ratio=0.0, held_up_anyway_ratio=0.001
    ) == compared(ALONE, ALONE)


def test_slower_steps_are_told_by_the_median() -> None:
    """Every step a hundredth slower is 0.01, though none is held up."""
    actual = compared(Steps((1_010_000,) * 100), ALONE)
    assert (0.01, 0.0) == (round(actual.slower_ratio, 9), actual.held_up_ratio)


def test_held_up_steps_are_those_beyond_what_there_is_anyway() -> None:
    """Three of a thousand take long where one does without: two thousandths are held up."""
    actual = compared(Steps((1_000_000,) * 997 + (2_000_000,) * 3), ALONE)
    assert (0.0, 0.002) == (actual.slower_ratio, round(actual.held_up_ratio, 9))


@pytest.mark.parametrize(("beside", "alone"), [((), (1,)), ((1,), ())])
def test_nothing_cannot_be_compared(beside: tuple[int, ...], alone: tuple[int, ...]) -> None:
    """Steps of one kind alone say nothing."""
    with pytest.raises(ValueError, match="no steps"):
        compared(Steps(beside), Steps(alone))


def begun(durations: list[int]) -> list[int]:
    """When steps of these durations began, after those that do not count."""
    return [0] * SETTLING + [sum(durations[:number]) for number in range(len(durations) + 1)]


def test_steps_that_a_publication_falls_into_are_compared_with_those_around() -> None:
    """Of two steps during a publication one is longer than those around it and one is not, despite a level shift."""
    durations = [1000] * 500 + [3000] * 500
    durations[100], durations[700] = 1500, 9000
    at = [sum(durations[:100]) + 10, sum(durations[:700]) + 10]
    stretch = Stretch(begun=begun(durations), publications=[(start, start + 50) for start in at])
    actual = touched([stretch])
    assert (1000, 2, 1) == (actual.steps, actual.touched, actual.affected)
    assert (500 + 6000) / 2 / 1e9 == pytest.approx(actual.longer_seconds)
    assert 0.999 == actual.unaffected_ratio
    assert 0.996 < actual.least_unaffected_ratio < 0.9985


def test_long_step_that_anything_would_fall_into_is_nobodys_fault() -> None:
    """A machine that stands still for a second has a publication in it, and so it would have at any other moment."""
    # A step of two seconds among those of ten milliseconds.
    durations = [10_000_000] * 300
    durations[150] = 2_000_000_000
    publications = [(second * 10**9 + 5, second * 10**9 + 6) for second in (2, 3, 4)]
    actual = touched([Stretch(begun=begun(durations), publications=publications)])
    assert (300, 2, 1) == (actual.steps, actual.touched, actual.affected)
    assert 0.8 < actual.by_chance <= 1.0
    assert actual.unaffected_ratio > 0.999


def test_publication_that_lasts_touches_every_step_it_lasts_for() -> None:
    """One from within the second step to within the fourth touches three; those before and after are its measure."""
    stretch = Stretch(begun=begun([100] * 20), publications=[(150, 350)])
    actual = touched([stretch])
    assert (20, 3, 0, 0.0) == (actual.steps, actual.touched, actual.affected, actual.longer_seconds)


@pytest.mark.parametrize("publications", [(), ((0, 10_000),)], ids=["none", "all"])
def test_without_both_kinds_nothing_is_said(publications: tuple[tuple[int, int], ...]) -> None:
    """Steps that nothing fell into are the measure of the others."""
    with pytest.raises(ValueError, match="too few"):
        touched([Stretch(begun=begun([100] * 20), publications=publications)])


def test_table_has_a_column_for_each_leak_and_size(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of one kind: nothing called where nothing leaks, everything at 50 MB/h."""
    accused = main(["--replicas", "20", "--fleets", "3", "--tick", "600", "--only", "pool"])
    title, leaks, row = capsys.readouterr().out.splitlines()
    assert 0 == accused
    assert ["K=6"] * 4 + ["K=20"] * 4 == title.split()[-8:]
    assert leaks.startswith("leak")
    assert ["pool", "0.0%", "100.0%", "100.0%", "100.0%", "0.0%", "100.0%", "100.0%", "100.0%"] == row.split()


def test_every_null_model_is_in_the_table() -> None:
    """The table has every null model of a healthy server's memory."""
    assert set(MODELS) < set(kinds())


MAX_BYTES = 256 * 2**10


def test_nothing_grows(tmp_path: Path) -> None:
    """Once the history is full, memory, descriptors, disk and samples stay what they are."""
    retention = Retention(whole_seconds=60.0, all_seconds=420.0)
    standings = soaked(tmp_path, hours=0.6, every_hours=0.1, retention=retention, max_bytes=MAX_BYTES)
    assert [] == grown(standings[2:], MAX_BYTES)
    assert all(one.disk_bytes > MAX_BYTES // 2 for one in standings[3:])


def test_a_noted_figure_stands_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has the figure, its comparison and their ratio; a comparison of zero gives no ratio."""
    notes = tmp_path / "notes"
    monkeypatch.setenv(NOTES, str(notes))
    note("memory", 60.0, 40.0, than="the other", unit="MiB")
    note("preemptions", 0.0, 1216.0, than="without", unit="")
    note("faults", 1.0, 0.0, than="none", unit="")
    rows = [json.loads(line) for line in notes.read_text().splitlines()]
    table = rendered({"day_speed": {"machine": "2 x Core", "rows": rows}})
    assert "| memory | 60 MiB | 40 MiB | the other | 1.50 | day_speed |" in table
    assert "| preemptions | 0 | 1,216 | without | 0.00 | day_speed |" in table
    assert "| faults | 1 | 0 | none | - | day_speed |" in table
    assert table.endswith(": day_speed on 2 x Core.\n")


def test_documents_show_what_was_measured() -> None:
    """The whole table stands in docs/accuracy.md, six of its rows in the README, from the newest run of each."""
    results = json.loads(KEPT.read_text(encoding="utf-8"))
    assert set(BENCHES) == set(results)
    table = rendered({name: results[name] for name in BENCHES})
    for page, part in ((PAGE, table), (README, short(table))):
        document = page.read_text(encoding="utf-8")
        assert with_table(document, part) == document


def test_alone_a_benchmark_notes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the table's own run has a file for them."""
    monkeypatch.delenv(NOTES, raising=False)
    monkeypatch.chdir(tmp_path)
    note("memory", 60.0, 40.0, than="the other", unit="MiB")
    assert [] == list(tmp_path.iterdir())
