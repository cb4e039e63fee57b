"""What a rule is: a pure function from a timeline to the findings of one verdict family.

Rules know nothing of each other: what two of them must agree on stands in `timeline_queries` or is decided by a module
that both ask. So each can be read, tested and replaced alone, and their order is that of the output.
"""

from collections.abc import Callable, Iterable

from kvdiag.diagnosis.limits import Limits
from kvdiag.model import Facts, Finding, Status, Timeline

Rule = Callable[[Timeline, Facts, Limits], tuple[Finding, ...]]
"""The `judge` of a module in `rules/`: `judge(timeline, facts, limits)`.

It returns one finding for each of its ids, every time: `fault` or `suspect` with the evidence; `ok` if it was looked
for and not found, with the detection limit; `unknown` with what is missing and how to get it. Cause, confirmation,
remedy and runbook may be left out: `diagnose` adds them from knowledge.json. It is pure, and raises nothing.
"""

SEVERITY: tuple[Status, ...] = ("ok", "unknown", "suspect", "fault")


def unknown(verdict: str, missing: str) -> tuple[Finding, ...]:
    """The answer of a rule that lacks its evidence: what is missing, and how to get it."""
    return (Finding(verdict, "unknown", missing),)


def worst(findings: Iterable[Finding]) -> Finding:
    """The first of the findings with the most severe status."""
    return max(findings, key=lambda finding: SEVERITY.index(finding.status))
