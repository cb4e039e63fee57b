from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvdiag.diagnosis.postmortem import postmortem
from tests.unit.diagnosis.postmortem.cases import case_of

FOLDER = Path(__file__).parents[3] / "fixtures" / "failures"
INCIDENTS: list[dict[str, Any]] = json.loads((FOLDER / "incidents.json").read_text())


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: str(incident["id"]))
def test_public_incident_gets_its_verdict(incident: dict[str, Any]) -> None:
    """What a public thread found out in the end is said from the text alone; what it cannot tell is known."""
    actual = postmortem(case_of(incident["text"]))

    miss = incident.get("miss")
    verdict = incident["verdict"] if miss is None else miss["verdict"]
    first = next((one for one in actual.findings if one.status == incident["status"]), None)
    assert first is not None, [(one.id, one.status, one.summary) for one in actual.findings]
    expected = {one.id for one in actual.findings if one.status == incident["status"]}
    assert verdict == first.id if incident["status"] != "unknown" else verdict in expected
    assert incident["status"] == actual.worst


def test_most_incidents_are_told() -> None:
    """Misses are few, and each says what would have told."""
    misses = [incident for incident in INCIDENTS if "miss" in incident]
    assert len(misses) <= len(INCIDENTS) // 6
    assert all(incident["miss"]["why"] for incident in misses)
