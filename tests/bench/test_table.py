"""The table of the benchmarks: figures with their ratio, and what did not run is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.table import NOTES, note, rendered


def test_a_noted_figure_stands_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what stands beside it, and the ratio; nothing is divided by nothing."""
    # GIVEN
    notes = tmp_path / "notes"
    monkeypatch.setenv(NOTES, str(notes))

    # WHEN
    note("memory", 60.0, 40.0, than="the other", unit="MiB")
    note("preemptions", 0.0, 1216.0, than="without", unit="")
    note("faults", 1.0, 0.0, than="none", unit="")
    table = rendered([json.loads(line) for line in notes.read_text().splitlines()], ["fleet_speed"])

    # THEN
    assert "| memory | 60 MiB | 40 MiB | the other | 1.50 |" in table
    assert "| preemptions | 0 | 1,216 | without | 0.00 |" in table
    assert "| faults | 1 | 0 | none | - |" in table
    assert "fleet_speed" in table


def test_alone_a_benchmark_notes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the table's own run has a file for them."""
    monkeypatch.delenv(NOTES, raising=False)
    monkeypatch.chdir(tmp_path)
    note("memory", 60.0, 40.0, than="the other", unit="MiB")
    assert [] == list(tmp_path.iterdir())
