"""One check: its outcome, what was found, and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["pass", "warn", "fail", "skip"]

ORDER: tuple[Outcome, ...] = ("fail", "warn", "pass", "skip")
"""The worst first; a skipped check does not count."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `kvdiag doctor`.

    `fail`: kvdiag cannot do its work. `warn`: some verdicts will be unknown or doubtful. `skip`: not requested, or
    impossible because of an earlier failure.
    """

    id: str
    outcome: Outcome
    found: str
    fix: str | None = None

    def __post_init__(self) -> None:
        """Refuse a problem without a fix."""
        if self.outcome in ("warn", "fail") and not self.fix:
            raise ValueError(f"{self.id} is {self.outcome} and names no fix")


def skipped(reason: str, *ids: str) -> list[Check]:
    """The checks that were not made."""
    return [Check(id_, "skip", reason) for id_ in ids]


def worst(checks: Iterable[Check]) -> Outcome:
    """The worst outcome of all; `skip` where nothing was checked."""
    return min((check.outcome for check in checks), key=ORDER.index, default="skip")
