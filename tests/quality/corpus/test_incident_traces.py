"""The committed traces of the incidents: what the generator writes, nothing of the answer in them, judged as listed."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdiag.diagnosis.knowledge import KNOWLEDGE
from kvdiag.feeds.recording.trace import read_trace
from tests.quality.corpus.history_figures import figures_of
from tests.quality.corpus.incidents import INCIDENTS
from tests.quality.corpus.score import HEALTHY, UNDETERMINED, answer, answers, expectations, half, messages, score
from tests.quality.corpus.write import SUFFIX, TRACES, content, parts


def path_of(incident: str) -> Path:
    """Where a trace lies."""
    return TRACES / f"{incident}{SUFFIX}"


@pytest.mark.parametrize("incident", INCIDENTS)
def test_trace_is_what_its_generator_writes(incident: str) -> None:
    """A trace can be made again, line by line: `python -m tests.quality.corpus.write`."""
    assert parts(content(INCIDENTS[incident])) == parts(gzip.decompress(path_of(incident).read_bytes()))


@pytest.mark.parametrize("incident", INCIDENTS)
def test_incident_gets_its_verdict(incident: str, golden: Callable[[str, str], None]) -> None:
    """Every variant of an incident is judged as expected.json says, except for the misses that it gives a reason for.

    All figures equal the golden ones, also when only a tenth and a third of the incident was recorded.
    """
    timeline, facts = read_trace(path_of(incident))
    actual = answers(INCIDENTS[incident], messages(), timeline, facts)
    expected = expectations()[incident]
    scored = [score(incident, variant, expected, answer(made)) for variant, made in actual.items()]
    assert {*expected.missed} == {one.variant for one in scored if one.mark not in {"right", "honest"}}
    assert [()] * len(scored) == [one.wrong for one in scored]
    golden(f"figures/incidents/{incident}.txt", figures_of(actual, timeline, facts))


def test_every_incident_has_its_answer() -> None:
    """The table has each incident, answers of the vocabulary, and a reason."""
    table = expectations()
    known = {*KNOWLEDGE, HEALTHY, UNDETERMINED}
    assert set(INCIDENTS) == set(table)
    assert [] == [name for name, row in table.items() if not all(row.missed.values())]
    assert [] == [name for name, row in table.items() if not row.why or not {*row.accept, *row.also} <= known]
    assert 79 == len(table)


def test_no_trace_holds_its_answer() -> None:
    """A header says what was reported and what was assumed; the names of verdicts stand in no trace."""
    for incident in INCIDENTS:
        header, rest = parts(gzip.decompress(path_of(incident).read_bytes()))
        assert {"incident", "sources", "reported", "assumed"} == set(header["about"])
        assert [] == [name for name in KNOWLEDGE if name.encode() in rest or name in str(header)]


def test_halves_are_halves() -> None:
    """Constants are fitted on a part of every kind that is neither most nor little of it."""
    held_out = [name for name in INCIDENTS if half(name) == "held out"]
    assert len(INCIDENTS) * 0.35 <= len(held_out) <= len(INCIDENTS) * 0.65


def test_figures_are_kept_of_what_there_is() -> None:
    """No file is left of an incident that is no more."""
    assert {*INCIDENTS} == {path.stem for path in (TRACES.parents[1] / "figures" / "incidents").iterdir()}
