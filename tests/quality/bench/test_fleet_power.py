from __future__ import annotations

import pytest

from tests.builders.series import MODELS
from tests.quality.bench.fleet_power import kinds, main


def test_table_has_a_column_for_each_leak_and_size(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of one kind: nothing called where nothing leaks, everything at 50 MB/h."""
    accused = main(["--replicas", "20", "--fleets", "3", "--tick", "600", "--only", "pool"])
    title, leaks, row = capsys.readouterr().out.splitlines()
    assert 0 == accused
    assert ["K=6"] * 4 + ["K=20"] * 4 == title.split()[-8:]
    assert leaks.startswith("leak")
    assert ["pool", "0.0%", "100.0%", "100.0%", "100.0%", "0.0%", "100.0%", "100.0%", "100.0%"] == row.split()


def test_every_null_model_is_in_the_table() -> None:
    """Whatever a healthy server's memory is known to do is among the kinds."""
    assert set(MODELS) < set(kinds())
