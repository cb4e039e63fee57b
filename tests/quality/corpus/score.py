"""Compare an answer with the expected one: right, half right, missed, honest, and wrong calls.

A variant is one way to observe an incident: `recorded` is kvdiag's own recorder in the pod, `series` the standard
series alone (vLLM, DCGM, cAdvisor), `message` a crash's log together with the recording.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.postmortem import Case, postmortem
from kvdiag.model import Diagnosis, Facts, Status, Timeline
from kvdiag.oom.account import Account
from kvdiag.oom.log import read_failures
from tests.quality.corpus.incident import Incident
from tests.quality.corpus.recording import standard_series

Variant = Literal["recorded", "series", "message"]
Mark = Literal["right", "half", "missed", "honest"]

HEALTHY, UNDETERMINED = "healthy", "undetermined"
FAILURES = Path(__file__).parents[2] / "fixtures" / "failures"
ANSWERS = Path(__file__).with_name("expected.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The expected answer of an incident.

    Any of `accept` is right, the first is what it is counted under. `also` is true of it as well, and no answer. In a
    variant of `unseen` there is no evidence: then `unknown` is right, too. In one of `open` the evidence is ambiguous:
    there a suspect is the most that the evidence supports. `missed` has the variants that are known to be judged
    wrongly, with the reason.
    """

    accept: tuple[str, ...]
    also: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    missed: Mapping[str, str] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The given answer: the worst status, and each verdict that is a suspect or a fault, with its sentence."""

    worst: Status
    called: Mapping[str, Status]
    said: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """An answer against what was expected, with what was called without reason."""

    incident: str
    variant: Variant
    expected: Expected
    answer: Answer
    mark: Mark
    wrong: tuple[str, ...]
    """Verdicts called that are not so."""

    near: tuple[str, ...]
    """Verdicts called of the right family."""


def expectations() -> dict[str, Expected]:
    """The table of answers."""
    table = json.loads(ANSWERS.read_text())
    return {
        name: Expected(
            accept=tuple(row["accept"]),
            also=tuple(row.get("also", ())),
            unseen=tuple(row.get("unseen", ())),
            open=tuple(row.get("open", ())),
            missed=row.get("missed", {}),
            why=row["why"],
        )
        for name, row in table.items()
    }


def messages() -> dict[str, str]:
    """The failures' texts by incident."""
    files = (FAILURES / f"{name}.json" for name in ("incidents", "engines"))
    return {row["id"]: row["text"] for file in files for row in json.loads(file.read_text())}


def answers(incident: Incident, texts: Mapping[str, str], timeline: Timeline, facts: Facts) -> dict[Variant, Diagnosis]:
    """The diagnosis of every variant that an incident has, by its trace."""
    made = views_of(timeline, facts)
    if incident.text is not None:
        made["message"] = after_death(texts[incident.text], timeline, facts)
    return made


def views_of(timeline: Timeline, facts: Facts) -> dict[Variant, Diagnosis]:
    """The diagnosis of a recording, whole and by the standard series."""
    return {"recorded": diagnose(timeline, facts), "series": diagnose(*standard_series(timeline, facts))}


def after_death(text: str, timeline: Timeline, facts: Facts) -> Diagnosis:
    """The post-mortem of an error message together with the recording that ends with it."""
    found = read_failures(text)
    accounts: tuple[Account, ...] = ()
    if found is not None:
        names = ("shortage", "process", "rank", "phase", "phase_source", "work", "running", "waiting", "max_num_seqs")
        accounts = (Account(origin="a log", **{name: getattr(found, name) for name in names}),)
    return postmortem(Case(accounts=accounts, timeline=timeline, facts=facts))


def answer(diagnosis: Diagnosis) -> Answer:
    """What a diagnosis says, as far as it counts."""
    called = [one for one in diagnosis.findings if one.status in {"suspect", "fault"}]
    return Answer(
        worst=diagnosis.worst,
        called={one.id: one.status for one in called},
        said={one.id: one.summary for one in called},
    )


def score(incident: str, variant: Variant, expected: Expected, given: Answer) -> Scored:
    """Compare."""
    families = {family(one) for one in expected.accept}
    right = [one for one in given.called if one in expected.accept]
    near = [one for one in given.called if one not in expected.accept and family(one) in families]
    wrong = [one for one in given.called if one not in (*expected.accept, *expected.also, *near)]
    mark: Mark
    if expected.accept == (HEALTHY,):
        mark = "missed" if wrong else "right"
    elif expected.accept == (UNDETERMINED,):
        mark = "right" if given.worst == "unknown" else "missed"
    elif right:
        mark = "right"
    elif near:
        mark = "half"
    elif variant in expected.unseen and given.worst == "unknown":
        mark = "honest"
    else:
        mark = "missed"
    return Scored(
        incident=incident,
        variant=variant,
        expected=expected,
        answer=given,
        mark=mark,
        wrong=tuple(wrong),
        near=() if right else tuple(near),
    )


def family(verdict: str) -> str:
    """The part of a verdict before its dot; the leaks of a device are one family, those of hosts and pools others."""
    if verdict.startswith("leak.device"):
        return "leak.device"
    return verdict if verdict.startswith("leak.") else verdict.partition(".")[0]


def half(incident: str) -> Literal["fitted", "held out"]:
    """Which half of the corpus an incident belongs to: constants may be fitted on the first, never on the other."""
    return "fitted" if sha256(incident.encode()).digest()[0] % 2 == 0 else "held out"


def prefix(timeline: Timeline, until_seconds: float) -> Timeline:
    """What was there to be judged at a moment."""
    return replace(timeline, samples=timeline.between(0.0, until_seconds))
