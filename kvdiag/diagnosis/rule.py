"""What a rule is: a pure function from a timeline to the findings of one verdict family."""

from __future__ import annotations

from collections.abc import Callable

from kvdiag.diagnosis.limits import Limits
from kvdiag.model import Evidence, Facts, Finding, Timeline

Rule = Callable[[Timeline, Facts, Limits], tuple[Finding, ...]]
"""A rule answers with each of its ids every time: `ok` is seen and not so, `unknown` names what is missing."""


def number(name: str, value: float | str | None, unit: str, source: str) -> Evidence:
    """One piece of evidence."""
    return Evidence(name=name, value=value, unit=unit, source=source)


def unseen(finding_id: str, missing: str) -> tuple[Finding, ...]:
    """The answer of a rule that lacks its evidence."""
    return (Finding(id=finding_id, status="unknown", summary=f"cannot tell: {missing}"),)
