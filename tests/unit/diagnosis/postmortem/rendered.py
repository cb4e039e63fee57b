"""The recorded failures and what the post-mortem says of each, as text for tests/golden/diagnosis/postmortem.txt."""

import json
from dataclasses import fields, replace
from pathlib import Path

from kvdiag.diagnosis.knowledge import entry_of, known_engines
from kvdiag.diagnosis.postmortem import Case, postmortem
from kvdiag.engines import flags_of
from kvdiag.feeds.postmortem_inputs import gather
from kvdiag.model import Evidence, Finding
from kvdiag.oom.log import read_failures
from kvdiag.outputs.presentation import fixes
from tests.unit.diagnosis.postmortem.cases import case_of

FOLDER = Path(__file__).parents[3] / "fixtures" / "failures"
_ROWS = [
    one
    for name in ("incidents", "kept_aside", "engines", "engines_kept_aside")
    for one in json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
]
TEXTS: dict[str, str] = {one["id"]: one["text"] for one in _ROWS}
ENGINES: dict[str, str | None] = {one["id"]: one["engine"] for one in _ROWS if "engine" in one}
"""Whose log a text is of, where it is not vLLM's."""

LOGS = {path.name: path for path in sorted(FOLDER.glob("*.log"))}


def rendered(name: str) -> str:
    """What is reported of one text or log, a line for each thing."""
    if name in LOGS:
        return _rendered(LOGS[name].read_text(encoding="utf-8"), gather([LOGS[name]]))
    case = case_of(TEXTS[name])
    if name in ENGINES:
        case = replace(case, engine_name=ENGINES[name], flags=flags_of(ENGINES[name]))
    return _rendered(TEXTS[name], case)


def _rendered(text: str, case: Case) -> str:
    diagnosis = postmortem(case)
    (figures,) = {one.evidence for one in diagnosis.findings if one.evidence} or {()}  # every finding stands on one set
    return "\n".join(
        [
            f"worst: {diagnosis.worst}",
            f"read: {_read(text)}",
            *(f"{one.name}: {_plain(one.value)} {_unit(one)}({one.source})" for one in figures),
            *(line for one in diagnosis.findings for line in of_finding(one)),
            *(f"gap: {gap.reason}" for gap in diagnosis.gaps),
        ]
    )


def _unit(one: Evidence) -> str:
    return f"{one.unit} " if one.unit not in ("", "holder") else ""


def _read(text: str) -> str:
    found = read_failures(text)
    if found is None:
        return "no failure"
    parts = {one.name: getattr(found, one.name) for one in fields(found) if one.name not in ("shortage", "origin")}
    return ", ".join([found.shortage.kind, *(f"{name} {_plain(part)}" for name, part in parts.items() if part)])


def _plain(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def of_finding(finding: Finding) -> list[str]:
    """A finding, the remedy that is this failure's own, and its computed fixes."""
    own = finding.remedy not in {entry_of(finding.id, name).remedy for name in (None, *known_engines())}
    computed = [f"    {title}: {change}{f': {effect}' if effect else ''}" for title, change, effect in fixes(finding)]
    return [
        f"{finding.id}: {finding.status}, {finding.summary}",
        *([f"    {finding.remedy}"] if own else []),
        *computed,
    ]
