"""The figures of every history's diagnosis, kept in tests/golden/figures: a net that shows each change of a figure.

It does not say that a figure is right. It is there to be renewed, and its diff to be read, whenever a change of the
rules is meant to change them: `pytest --update-golden`. A line is a finding: its status, and its evidence without
sources, to four digits; of values that are text only what stands before a colon.
"""

from collections.abc import Iterable, Mapping

from kvdiag.diagnosis import diagnose
from kvdiag.model import Diagnosis, Evidence, Facts, Quantity, Timeline
from tests.quality.corpus.score import Variant, prefix

SHARES: Mapping[str, float] = {"first tenth": 0.1, "first third": 1.0 / 3.0}
"""How much of an incident was recorded: most of what is `unknown` is so for want of time."""


def figures(diagnosis: Diagnosis) -> str:
    """The figures of one diagnosis."""
    steps = {
        f"step {one.id}": [one.status, *_told(one.expected, "expected "), *_told(one.measured)]
        for one in diagnosis.steps
    }
    findings = {one.id: [one.status, *_told(one.evidence)] for one in diagnosis.findings}
    told: dict[str, list[str]] = {"worst": [diagnosis.worst], **steps, **findings}
    return "".join(f"{name}: {'; '.join(values)}\n" for name, values in told.items())


def _told(quantities: Iterable[Evidence | Quantity], prefix: str = "") -> list[str]:
    return [f"{prefix}{one.name} {_readable(one.value)} {one.unit}".rstrip() for one in quantities]


def _readable(value: float | str | None) -> str:
    if isinstance(value, str):
        return value.partition(":")[0]
    return "none" if value is None else f"{value:.4g}"


def figures_of(given: Mapping[Variant, Diagnosis], timeline: Timeline, facts: Facts) -> str:
    """The figures of an incident's diagnoses by variant, and of its diagnosis when less of it was recorded."""
    begin, end = timeline.samples[0].at_seconds, timeline.samples[-1].at_seconds
    moments = {name: prefix(timeline, begin + (end - begin) * share) for name, share in SHARES.items()}
    made: dict[str, Diagnosis] = {**given} | {name: diagnose(seen, facts) for name, seen in moments.items()}
    return "\n".join(f"# {name}\n{figures(diagnosis)}" for name, diagnosis in made.items())
