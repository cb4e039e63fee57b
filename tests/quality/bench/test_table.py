"""The table of the benchmarks: figures with their ratio, and what did not run is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.quality.bench.table import BENCHES, KEPT, NOTES, PAGE, README, note, rendered, short, with_table


def test_a_noted_figure_stands_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what stands beside it, and the ratio; nothing is divided by nothing."""
    notes = tmp_path / "notes"
    monkeypatch.setenv(NOTES, str(notes))
    note("memory", 60.0, 40.0, than="the other", unit="MiB")
    note("preemptions", 0.0, 1216.0, than="without", unit="")
    note("faults", 1.0, 0.0, than="none", unit="")
    rows = [json.loads(line) for line in notes.read_text().splitlines()]
    table = rendered({"day_speed": {"machine": "2 x Core", "rows": rows}})
    assert "| memory | 60 MiB | 40 MiB | the other | 1.50 |" in table
    assert "| preemptions | 0 | 1,216 | without | 0.00 |" in table
    assert "| faults | 1 | 0 | none | - |" in table
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
