"""What a diagnosis says of a verdict or a step, by name."""

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any, cast

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rule import Rule
from kvdiag.model import Diagnosis, Facts, Finding, Life, StepFigures, StepResult, Timeline


class _Containing(str):
    """A text that equals every text in which it occurs, and whose other parts occur there too."""

    __slots__ = ("others",)
    others: tuple[str, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and all(part in str(other) for part in (str(self), *self.others))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def containing(part: str, *others: str) -> str:
    """A text that equals every text with these parts: for a reason whose names and figures matter, not its wording."""
    text = _Containing(part)
    text.others = others
    return text


ANY_TEXT = containing("")
"""Equal to every text: wording is kept in golden files."""


def finding(diagnosis: Diagnosis, verdict: str) -> Finding:
    """The one finding of a verdict."""
    (found,) = [one for one in diagnosis.findings if one.id == verdict]
    return found


def only(judge: Rule, timeline: Timeline, known: Facts) -> Finding:
    """The one finding of a rule on a timeline."""
    (found,) = judge(timeline, known, DEFAULT_LIMITS)
    return found


def step(diagnosis: Diagnosis, name: str) -> StepResult:
    """The result of a step."""
    (found,) = [one for one in diagnosis.steps if one.id == name]
    return found


def statuses(found: Sequence[Finding]) -> dict[str, str]:
    """Status by verdict id."""
    return {one.id: one.status for one in found}


def evidence(found: Finding) -> dict[str, float | str | None]:
    """Evidence values by name."""
    return {one.name: one.value for one in found.evidence}


def rows(found: Finding) -> list[tuple[str, object, str, str]]:
    """Evidence as rows of name, value, unit and source."""
    return [(one.name, one.value, one.unit, one.source) for one in found.evidence]


def later(diagnosis: Diagnosis, seconds: float) -> Diagnosis:
    """The same diagnosis of what happened so much later."""

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(moved, value))
        if not isinstance(value, Diagnosis | Life | Finding):
            return value
        times = ("start_seconds", "end_seconds", "since_seconds", "last_seen_seconds")
        parts = {one.name: getattr(value, one.name) for one in fields(value)}
        return replace(
            value,
            **{
                name: part + seconds if name in times and part is not None else moved(part)
                for name, part in parts.items()
            },
        )

    return cast("Diagnosis", moved(diagnosis))


def known(figures: StepFigures) -> dict[str, float]:
    """The figures of one side of a step that are known, by name."""
    return {name: value for name, value in asdict(figures).items() if value is not None}
