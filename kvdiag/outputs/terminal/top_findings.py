"""The findings of a live view, in five lengths, and the time until memory is exhausted."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from kvdiag.formatting import format_duration
from kvdiag.model import Diagnosis, Finding, Status
from kvdiag.outputs.presentation import WORDS, problems_of, unknown_by_reason
from kvdiag.outputs.terminal.cells import plain, wrapped
from kvdiag.outputs.terminal.text import STYLES

DETAILS = (4, 3, 2, 1, 0)
"""Forms of the findings, the longest first; see `findings`."""

WITH_REMEDIES, WITH_ALL, WITH_SENTENCES = (4, 3), (4, 2), 1
MOST_ROWS = 8
"""Of one sentence."""


def findings(diagnosis: Diagnosis | None, columns: int, *, detail: int) -> list[Text]:
    """Findings, the worst first.

    0: one line for each problem. 1: whole sentences of the problems. 2: also what is unknown or was not found.
    3: problems with their remedies. 4: all of it.
    """
    if diagnosis is None:
        return []
    most = MOST_ROWS if detail >= WITH_SENTENCES else 1
    rows: list[Text] = []
    for one in problems_of(diagnosis.findings):
        rows += wrapped(_sentence(one), columns, most, indent=2)
        if detail in WITH_REMEDIES and one.remedy:
            rows += wrapped(Text.assemble(("  remedy: ", "bold"), plain(one.remedy)), columns, most, indent=4)
    unknown = [one for one in diagnosis.findings if one.status == "unknown"]
    if diagnosis.worst == "unknown" and unknown:
        rows += _unknown(unknown, columns, most)
    elif unknown and detail in WITH_ALL:
        rows += wrapped(_names("unknown", unknown, "unknown"), columns, most, indent=2)
    healthy = [one for one in diagnosis.findings if one.status == "ok"]
    if healthy and detail in WITH_ALL:
        rows += wrapped(_names("checked, not found", healthy, "ok"), columns, most, indent=2)
    return rows


def _unknown(unknown: Iterable[Finding], columns: int, most: int) -> list[Text]:
    """Why there is no verdict; verdicts with one reason stand together, those of leaks first."""
    rows: list[Text] = []
    for reason, ids in sorted(unknown_by_reason(unknown).items(), key=lambda pair: -_leaks(pair[1])):
        named = plain(", ".join(ids), STYLES["unknown"])
        rows += wrapped(Text.assemble(named, ": ", plain(reason)), columns, most, indent=2)
    return rows


def _leaks(ids: Iterable[str]) -> int:
    return sum(one.startswith("leak.") for one in ids)


def _sentence(finding: Finding) -> Text:
    return Text.assemble(
        (f"{WORDS[finding.status]} ", f"bold {STYLES[finding.status]}"),
        plain(f"{finding.id}: ", "bold"),
        plain(finding.summary),
    )


def _names(what: str, named: Iterable[Finding], status: Status) -> Text:
    return Text.assemble((f"{what}: ", STYLES[status]), plain(", ".join(one.id for one in named), "dim"))


def exhaustion(diagnosis: Diagnosis | None) -> list[Text]:
    """The time until memory is exhausted, by finding, from the whole history."""
    found = []
    for finding in problems_of(diagnosis.findings if diagnosis is not None else ()):
        growth = finding.growth
        if growth is not None and growth.exhaustion_seconds is not None:
            bounds = (growth.exhaustion_low_seconds, growth.exhaustion_high_seconds)
            between = " to ".join("never" if one is None else format_duration(one) for one in bounds)
            left = f"  full in {format_duration(growth.exhaustion_seconds)}"
            found.append(Text.assemble(plain(finding.id, "bold"), (left, "bold"), (f" ({between})", "dim")))
    return found
