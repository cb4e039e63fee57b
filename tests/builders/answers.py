"""What a diagnosis says of a verdict or a step, by name."""

from __future__ import annotations

from collections.abc import Sequence

from kvdiag.model import Diagnosis, Finding, StepResult


class _AnyText(str):
    """Equal to every text, and part of every text: wording is kept in golden files."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str)

    def __ne__(self, other: object) -> bool:
        return not isinstance(other, str)

    __hash__ = str.__hash__


ANY_TEXT = _AnyText()


def finding(diagnosis: Diagnosis, verdict: str) -> Finding:
    """The one finding of a verdict."""
    (found,) = [one for one in diagnosis.findings if one.id == verdict]
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


def expected(result: StepResult) -> dict[str, float | str | None]:
    """Expected values of a step by name."""
    return {one.name: one.value for one in result.expected}


def measured(result: StepResult) -> dict[str, float | str | None]:
    """Measured values of a step by name."""
    return {one.name: one.value for one in result.measured}
