import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvdiag.commands import main
from kvdiag.feeds.recording.trace import TraceWriter
from kvdiag.model import Timeline
from tests.builders.series import device_part
from tests.unit.diagnosis.fleet.replicas import FACTS, day

Record = Callable[[str, Timeline], str]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Keeps a timeline as a trace, and gives its path."""

    def keep(name: str, seen: Timeline, version: str = "0.32.0") -> str:
        path = tmp_path / f"{name}.jsonl"
        with TraceWriter(path, replace(FACTS, engine_version=version)) as trace:
            for sample in seen.samples:
                trace.add(sample)
        return str(path)

    return keep


def test_several_traces_are_the_replicas_of_a_fleet(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is judged by itself, and all are compared."""
    paths = [record(f"r{seed}", day(seed, leak=20.0, part=device_part)) for seed in range(6)]
    code = main(["diagnose", "--output", "json", *paths])
    document = json.loads(capsys.readouterr().out)
    assert 2 == code
    assert ("fault", None) == (document["worst"], document["source"])
    assert set(paths) == {one["subject"]["trace"] for one in document["replicas"]}
    assert (6, 1) == (document["fleet"]["replicas"], len(document["fleet"]["versions"]))
    (growth,) = [one for one in document["fleet"]["growths"] if one["component"] == "server"]
    assert ("grows", 6, "0.32.0") == (growth["course"], growth["replicas"], growth["version"])


def test_text_of_two_traces_has_both_and_says_what_is_missing(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two replicas cannot be compared, which makes neither of them worse."""
    paths = [record(f"r{seed}", day(seed, name="pool", part=device_part, busy=False)) for seed in range(2)]
    code = main(["diagnose", *paths])
    told = capsys.readouterr().out
    assert told.startswith("SUSPECT  2 replicas: 2 suspect\n")  # because of another process on the GPU
    assert 1 == code
    assert "Versions\n" in told
    assert "fewer than 6 replicas" in " ".join(told.split())
    assert max(map(len, told.splitlines())) <= 80


def test_a_trace_that_is_given_twice_is_refused(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    """Replicas prove together what none does alone; one that counts six times would."""
    path = record("r0", day(0, name="pool", part=device_part))
    again = str(Path(path).parent / "." / ".." / Path(path).parent.name / Path(path).name)
    assert 3 == main(["diagnose", path, again])
    assert f"{path} is given twice" in capsys.readouterr().err


def test_trace_that_cannot_be_read_is_named(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    """One missing file among several is an error, and not one replica less."""
    assert 3 == main(["diagnose", record("r", day(1)), "/nowhere/trace"])
    assert "/nowhere/trace" in capsys.readouterr().err
