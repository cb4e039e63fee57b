"""The committed traces of the incidents: what the generator writes, nothing of the answer in them, judged as listed."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from kvdiag.diagnosis.knowledge import KNOWLEDGE
from kvdiag.feeds.recording.trace import read_trace
from tests.quality.corpus.figures import FOLDER, RENEW, VERDICTS, figures_of, group, kept
from tests.quality.corpus.incidents import INCIDENTS
from tests.quality.corpus.misses import listed, misses
from tests.quality.corpus.score import HEALTHY, UNDETERMINED, answers, expectations, half, messages
from tests.quality.corpus.write import SUFFIX, TRACES, content, parts


def path_of(incident: str) -> Path:
    """Where a trace lies."""
    return TRACES / f"{incident}{SUFFIX}"


@pytest.mark.parametrize("incident", INCIDENTS)
def test_trace_is_what_its_generator_writes(incident: str) -> None:
    """A trace can be made again, line by line: `python -m tests.quality.corpus.write`."""
    assert parts(content(INCIDENTS[incident])) == parts(gzip.decompress(path_of(incident).read_bytes()))


@pytest.mark.parametrize("incident", INCIDENTS)
def test_incident_gets_its_verdict(incident: str) -> None:
    """Every variant of an incident is judged as it should be, but for the misses that misses.json gives a reason for.

    A miss that is new is to be listed there with its reason, one that is no more to be taken out:
    `python -m tests.quality.corpus.misses`. Beside the verdicts all figures are those of figures/, when a tenth and a
    third of the incident had been seen, too; a change of them that is meant: `python -m tests.quality.corpus.figures`.
    """
    timeline, facts = read_trace(path_of(incident))
    actual = answers(INCIDENTS[incident], messages(), timeline, facts)
    assert tuple(replace(one, why="") for one in listed() if one.incident == incident) == misses(incident, actual)
    assert kept(incident) == figures_of(incident, actual, timeline, facts), RENEW


def test_every_miss_has_its_reason() -> None:
    """What is judged wrongly is known, and why."""
    assert [] == [one for one in listed() if not one.why or one.incident not in INCIDENTS]


def test_every_incident_has_its_answer() -> None:
    """The table has each incident, answers of the vocabulary, and a reason."""
    table = expectations()
    known = {*KNOWLEDGE, HEALTHY, UNDETERMINED}
    assert set(INCIDENTS) == set(table)
    assert [] == [name for name, row in table.items() if not row.why or not {*row.accept, *row.also} <= known]
    assert 67 == len(table)


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
    """No file is left of a group that is no more."""
    assert {*map(group, INCIDENTS), VERDICTS} == {path.stem for path in FOLDER.iterdir()}
