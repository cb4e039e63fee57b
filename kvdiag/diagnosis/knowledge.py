"""What is known of each verdict: symptom, likely cause, how to confirm it, what to change. One entry for every id.

The texts stand in knowledge.json; a rule or the post-mortem brings its own only where it is computed from the figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One verdict explained to the person who has to act on it."""

    symptom: str
    likely_cause: str
    confirm: str
    remedy: str
    runbook: str


KNOWLEDGE: Mapping[str, Entry] = {
    verdict: Entry(runbook=f"alerts/runbooks/{verdict}.md", **texts)
    for verdict, texts in json.loads(
        resources.files("kvdiag.diagnosis").joinpath("knowledge.json").read_text(encoding="utf-8")
    ).items()
}
