"""What a rule is: a pure function from a timeline to the findings of one verdict family."""

from __future__ import annotations

from collections.abc import Callable

from kvdiag.diagnosis.limits import Limits
from kvdiag.model import Facts, Finding, Timeline

Rule = Callable[[Timeline, Facts, Limits], tuple[Finding, ...]]
"""A rule returns each of its ids every time: `ok` was looked for and not found, `unknown` names what is missing."""


def unseen(finding_id: str, missing: str) -> tuple[Finding, ...]:
    """The answer of a rule that lacks its evidence: what is missing, and how to get it."""
    return (Finding(finding_id, "unknown", missing),)
