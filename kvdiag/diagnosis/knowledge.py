"""What is known of each verdict: symptom, likely cause, how to confirm it, what to change. One entry for every id.

The texts stand in knowledge.json, apart from the rules, so that advice can be reviewed and changed without touching a
judgement, in the words of vLLM; memory.json of another engine has its own for them. A rule or the post-mortem brings
its own only where it is computed from the figures; `diagnose` fills in the others. A verdict without an entry is an
error of the program, and the entry names its runbook.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from kvdiag.engine_memory import advice_words


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


def worded(advice: str, engine_name: str | None) -> str:
    """Advice with the flags and names of the engine that it is for."""
    for ours, its in advice_words(engine_name).items():
        advice = advice.replace(ours, its)
    return advice
