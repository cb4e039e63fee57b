"""Each verdict on histories that are kept: what was once judged so is judged so, from the disk on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.knowledge import KNOWLEDGE
from kvdiag.diagnosis.postmortem import postmortem
from kvdiag.feeds.recording.trace import read_trace
from kvdiag.model import Diagnosis
from tests.golden.record import FOLDER, SUFFIX, cases
from tests.quality.corpus.history_figures import figures
from tests.unit.diagnosis.postmortem.cases import case_of

TRACES = Path(__file__).with_name("traces")
GOLDEN: dict[str, list[str]] = json.loads((TRACES / "golden.json").read_text())
FAILURES = {
    one["id"]: one["text"]
    for one in json.loads((Path(__file__).parents[1] / "fixtures" / "failures" / "incidents.json").read_text())
}


def found(name: str) -> Diagnosis:
    """The diagnosis of a trace, or of a message that a server wrote when it crashed."""
    kind, _, left = name.partition("/")
    if kind == "failures":
        return postmortem(case_of(FAILURES[left]))
    return diagnose(*read_trace(TRACES / f"{name}{SUFFIX}"))


@pytest.mark.parametrize(("verdict", "name"), [(verdict, name) for verdict, names in GOLDEN.items() for name in names])
def test_golden_history_gets_its_verdict(verdict: str, name: str, golden: Callable[[str, str], None]) -> None:
    """The verdict is called; a warm-up is explained instead. All figures of a verdict's own trace are those kept."""
    said = found(name)
    (actual,) = [one for one in said.findings if one.id == verdict]
    assert actual.status in (("ok",) if verdict == "benign.warmup" else ("fault", "suspect"))
    assert actual.evidence
    if name.startswith(f"{FOLDER.name}/"):
        golden(f"figures/{name}.txt", figures(said))


def test_every_verdict_has_two_golden_histories() -> None:
    """None is known by a single one."""
    assert set(KNOWLEDGE) == set(GOLDEN)
    assert [] == [verdict for verdict, names in GOLDEN.items() if len(set(names)) < 2]


def test_traces_are_those_that_were_made() -> None:
    """Each committed trace of a verdict reads as its content, and there is no other."""
    made = cases()
    assert {f"{name}{SUFFIX}" for name in made} == {path.name for path in FOLDER.iterdir()}
    for name, (timeline, facts) in made.items():
        assert (timeline, facts) == read_trace(FOLDER / f"{name}{SUFFIX}"), name
