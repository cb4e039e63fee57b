"""The figures of every history's diagnosis, kept in tests/golden/figures: a net that shows each change of a figure.

It does not say that a figure is right. It is there to be renewed, and its diff to be read, whenever a change of the
rules is meant to change them: `pytest --update-golden`. A line is a finding: its status, and its evidence without
sources, to four digits; of values that are text only what stands before a colon.
"""

from collections.abc import Iterable, Mapping

from kvdiag.diagnosis import diagnose
from kvdiag.model import Diagnosis, Evidence, Facts, Timeline
from tests.builders.answers import known
from tests.quality.corpus.score import Variant, prefix

SHARES: Mapping[str, float] = {"first tenth": 0.1, "first third": 1.0 / 3.0}
"""The recorded share of an incident: most `unknown` verdicts are due to a short recording."""


def figures(diagnosis: Diagnosis) -> str:
    """The figures of one diagnosis."""
    steps = {
        f"step {one.id}": [
            one.status,
            *(f"expected {name} {value:.4g}" for name, value in known(one.expected).items()),
            *(f"{name} {value:.4g}" for name, value in known(one.measured).items()),
        ]
        for one in diagnosis.steps
    }
    findings = {one.id: [one.status, *_told(one.evidence)] for one in diagnosis.findings}
    told: dict[str, list[str]] = {"worst": [diagnosis.worst], **steps, **findings}
    return "".join(f"{name}: {'; '.join(values)}\n" for name, values in told.items())


def _told(evidence: Iterable[Evidence]) -> list[str]:
    return [f"{one.name} {_readable(one.value, one.unit)}" for one in evidence]


def _readable(value: float | str | None, unit: str) -> str:
    if isinstance(value, str):
        return value.partition(":")[0]
    return f"{'none' if value is None else f'{value:.4g}'} {unit}".rstrip()


def figures_of(given: Mapping[Variant, Diagnosis], timeline: Timeline, facts: Facts) -> str:
    """The figures of an incident's diagnoses by variant, and of its diagnosis when less of it was recorded."""
    begin, end = timeline.samples[0].at_seconds, timeline.samples[-1].at_seconds
    moments = {name: prefix(timeline, begin + (end - begin) * share) for name, share in SHARES.items()}
    made: dict[str, Diagnosis] = {**given} | {name: diagnose(seen, facts) for name, seen in moments.items()}
    return "\n".join(f"# {name}\n{figures(diagnosis)}" for name, diagnosis in made.items())
