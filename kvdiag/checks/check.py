"""One thing that was checked: how it went, what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["pass", "warn", "fail", "skip"]

ORDER: tuple[Outcome, ...] = ("fail", "warn", "pass", "skip")
"""The worst first; what was skipped says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of `kvdiag doctor`.

    `fail`: kvdiag cannot see what it is for. `warn`: some verdicts will be unknown, or doubtful. `skip`: not asked for,
    or cannot be asked because of an earlier failure.
    """

    id: str
    outcome: Outcome
    found: str
    fix: str | None = None

    def __post_init__(self) -> None:
        """Refuse a complaint that does not say what to do."""
        if self.outcome in ("warn", "fail") and not self.fix:
            raise ValueError(f"{self.id} is {self.outcome} and names no fix")


def counted(number: int, one: str, many: str) -> str:
    """A number of things, of which there may be one."""
    return f"{number} {one if number == 1 else many}"


def worst(checks: Iterable[Check]) -> Outcome:
    """The worst outcome of all; `skip` where nothing was checked."""
    return min((check.outcome for check in checks), key=ORDER.index, default="skip")
