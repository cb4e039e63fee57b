"""The recorded public incidents: what the post-mortem concludes from each text, and from those kept aside."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvdiag.diagnosis.postmortem import postmortem
from kvdiag.oom.log import read_failures
from tests.unit.diagnosis.postmortem.cases import case_of

FOLDER = Path(__file__).parents[3] / "fixtures" / "failures"

INCIDENTS: list[dict[str, Any]] = json.loads((FOLDER / "incidents.json").read_text())


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: str(incident["id"]))
def test_public_incident_gets_its_verdict(incident: dict[str, Any]) -> None:
    """The text alone gives the verdict at which the public thread arrived, or its known miss."""
    actual = postmortem(case_of(incident["text"]))

    miss = incident.get("miss")
    verdict = incident["verdict"] if miss is None else miss["verdict"]
    first = next((one for one in actual.findings if one.status == incident["status"]), None)
    assert first is not None, [(one.id, one.status, one.summary) for one in actual.findings]
    expected = {one.id for one in actual.findings if one.status == incident["status"]}
    assert verdict == first.id if incident["status"] != "unknown" else verdict in expected
    assert incident["status"] == actual.worst


def test_most_incidents_are_told() -> None:
    """At most one incident in six is a miss, and each miss has a reason."""
    misses = [incident for incident in INCIDENTS if "miss" in incident]
    assert len(misses) <= len(INCIDENTS) // 6
    assert all(incident["miss"]["why"] for incident in misses)


TEXTS: list[dict[str, Any]] = json.loads((FOLDER / "kept_aside.json").read_text())

FAILURES = [text for text in TEXTS if text["kind"] is not None]

OTHERS = [text for text in TEXTS if text["kind"] is None]


@pytest.mark.parametrize("text", FAILURES, ids=lambda text: str(text["id"]))
def test_text_is_read_and_judged(text: dict[str, Any]) -> None:
    """The text gives the recorded kind, figures, status and verdict."""
    found = read_failures(text["text"])
    diagnosis = postmortem(case_of(text["text"]))

    assert found is not None
    assert text["kind"] == found.shortage.kind
    assert text["figures"] == {name: _plain(getattr(found.shortage, name)) for name in text["figures"]}
    said = [one.id for one in diagnosis.findings if one.status == text["status"]]
    assert text["status"] == diagnosis.worst
    assert text["verdict"] in (said if text["status"] == "unknown" else said[:1])


@pytest.mark.parametrize("text", OTHERS, ids=lambda text: str(text["id"]))
def test_what_only_looks_like_it_is_no_failure_for_want_of_memory(text: dict[str, Any]) -> None:
    """An assertion of the same library about something else."""
    assert read_failures(text["text"]) is None


def _plain(value: object) -> object:
    return [list(each) for each in value] if isinstance(value, tuple) else value
