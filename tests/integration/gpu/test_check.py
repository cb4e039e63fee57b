"""The program without a GPU: why it does not run, and every scenario played on stand-ins.

Of a GPU this proves nothing; it proves that what a GPU shows will be recorded, judged and written down.
"""

import sys
from pathlib import Path

import pytest

from tests.integration.gpu.conftest import Played
from tests.integration.gpu.scenario import Scenario
from tests.integration.gpu.scenarios import SCENARIOS, replay
from tests.integration.gpu.stand_in_machine import program

LIMIT_SECONDS = 300.0
ALL = [each.name for each in SCENARIOS]


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize("name", [name for name in ALL if name != "cost"])
def test_scenario_finds_what_was_done(played: Played, name: str) -> None:
    """Each fault is called what it is, and what only looks like one is not; every figure is within its limit."""
    actual = played
    assert (0, True) == (actual.code, actual.figures["scenarios"][0]["ok"]), actual.table
    assert f"{name}  " in actual.table


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize("name", ["cost"])
def test_costs_are_measured_and_their_limits_held_against_them(played: Played) -> None:
    """On a machine with other work only the presence of the figures and of their limits is checked."""
    actual = played
    (told,) = actual.figures["scenarios"]
    figures = {one["name"]: one for one in told["figures"]}
    assert told["failed"] is None
    assert {"publication", "interpreter held", "loop slowdown", "steps delayed by the agent"} <= {
        name for name, one in figures.items() if one["ok"] is not None
    }
    assert 0 < figures["publication"]["value"] < 1e6
    assert (0 if told["ok"] else 2) == actual.code


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize("name", [each.name for each in SCENARIOS if isinstance(each, Scenario)])
def test_trace_is_judged_again_as_when_it_was_recorded(played: Played, name: str) -> None:
    """What a scenario leaves is replayed to the same figures, by its name alone."""
    replayed = [figure.ok for figure in replay(played.out / f"{name}.jsonl.gz")]
    assert replayed
    assert {True} >= {ok for ok in replayed if ok is not None}


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize("name", ALL)
def test_figures_name_what_they_are_of(played: Played) -> None:
    """A stand-in is called one wherever its figures go."""
    told = played.figures["machine"]
    assert ("NVIDIA Stand-in", "580.0-standin", "2.13.0+standin") == (told["gpu"], told["driver"], told["torch"])


@pytest.mark.parametrize(
    ("python", "reason"),
    [
        (sys.executable, "has no torch"),
        ("/nowhere/python", "(FileNotFoundError)"),
    ],
    ids=["no torch", "no Python"],
)
def test_where_it_cannot_run_one_line_says_why(tmp_path: Path, python: str, reason: str) -> None:
    """Nothing to play on is neither a pass nor a failure of kvdiag: exit code 3, and the reason."""
    process = program(["--out", str(tmp_path), "--python", python])
    out, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert (3, "", 1) == (process.returncode, out, errors.count("\n"))
    assert python in errors
    assert reason in errors
    assert [] == list(tmp_path.iterdir())
