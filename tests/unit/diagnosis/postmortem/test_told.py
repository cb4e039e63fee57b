from __future__ import annotations

import pytest

from tests.unit.diagnosis.postmortem.told import LOGS, TEXTS, kept, told

KEPT = kept()


@pytest.mark.parametrize("name", [*TEXTS, *LOGS])
def test_recorded_failure_is_told_as_it_was(name: str) -> None:
    """Figures, verdicts, reasons and the bytes of each remedy are those that were read and found right."""
    assert KEPT[name].split("\n") == told(name).split("\n")


def test_nothing_is_kept_of_failures_that_are_none() -> None:
    """What is kept is of the recorded ones alone."""
    assert {*TEXTS, *LOGS} == set(KEPT)
