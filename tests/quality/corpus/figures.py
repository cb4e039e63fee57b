"""What was said of every history when figures/ was written: a net that shows each change of a figure, meant or not.

It does not say that a figure is right. It is there to be renewed, and its diff to be read, whenever a change of the
rules is meant to change what they say.

python -m tests.quality.corpus.figures writes the files again. A line is a finding: its status, and its evidence without
sources, to four digits; of what is told in words only what stands before a colon.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from kvdiag.diagnosis import diagnose
from kvdiag.model import Diagnosis, Evidence, Facts, Quantity, Timeline
from tests.golden import record
from tests.quality.corpus.incidents import INCIDENTS
from tests.quality.corpus.score import Variant, answers, messages, prefix

FOLDER = Path(__file__).with_name("figures")
RENEW = "to be renewed, and its diff to be read, where that is meant: python -m tests.quality.corpus.figures"
SHARES: Mapping[str, float] = {"first tenth": 0.1, "first third": 1.0 / 3.0}
"""How much of an incident had been seen: most of what is `unknown` is so for want of time."""

VERDICTS = "verdicts"

Figures = dict[str, dict[str, list[str]]]
"""By what was judged, and by finding: its status and its figures."""


def figures(diagnosis: Diagnosis) -> dict[str, list[str]]:
    """The figures of one diagnosis."""
    steps = {
        f"step {one.id}": [one.status, *_told(one.expected, "expected "), *_told(one.measured)]
        for one in diagnosis.steps
    }
    findings = {one.id: [one.status, *_told(one.evidence)] for one in diagnosis.findings}
    return {"worst": [diagnosis.worst], **steps, **findings}


def _told(quantities: Iterable[Evidence | Quantity], prefix: str = "") -> list[str]:
    return [f"{prefix}{one.name} {_readable(one.value)} {one.unit}".rstrip() for one in quantities]


def _readable(value: float | str | None) -> str:
    if isinstance(value, str):
        return value.partition(":")[0]
    return "none" if value is None else f"{value:.4g}"


def figures_of(incident: str, given: Mapping[Variant, Diagnosis], timeline: Timeline, facts: Facts) -> Figures:
    """The figures of an incident's diagnoses by variant, and of what was said when less had been seen."""
    begin, end = timeline.samples[0].at_seconds, timeline.samples[-1].at_seconds
    moments = {name: prefix(timeline, begin + (end - begin) * share) for name, share in SHARES.items()}
    variants = {f"{incident}, {variant}": figures(made) for variant, made in given.items()}
    return {**variants, **{f"{incident}, {name}": figures(diagnose(seen, facts)) for name, seen in moments.items()}}


def kept(incident: str) -> Figures:
    """The figures of an incident that were written."""
    return {name: rows for name, rows in _file(group(incident)).items() if name.startswith(f"{incident}, ")}


def kept_verdict(name: str) -> dict[str, list[str]]:
    """The figures of a verdict's trace that were written."""
    return _file(VERDICTS).get(name, {})


def group(incident: str) -> str:
    """The file that an incident is in: the part of its name before a dash."""
    return incident.partition("-")[0]


@cache
def _file(name: str) -> Figures:
    path = FOLDER / f"{name}.json"
    found: Figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def written(made: Figures) -> str:
    """A file's text: a line for each finding."""
    blocks = [
        f"{json.dumps(name)}: {{\n" + ",\n".join(f"{json.dumps(one)}: {json.dumps(told)}" for one, told in rows.items())
        for name, rows in made.items()
    ]
    return "{\n" + "\n},\n".join(blocks) + "\n}\n}\n"


def main() -> int:
    """Write every file."""
    files: dict[str, Figures] = {}
    for incident in INCIDENTS.values():
        seen = incident.recording().play()
        made = figures_of(incident.id, answers(incident, messages(), *seen), *seen)
        files.setdefault(group(incident.id), {}).update(made)
    files[VERDICTS] = {name: figures(diagnose(*seen)) for name, seen in record.cases().items()}
    FOLDER.mkdir(exist_ok=True)
    for name, rows in files.items():
        text = written(rows)
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
        sys.stdout.write(f"{name}.json: {len(text) / 1024:.0f} KiB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
