"""One check: its outcome, what was found, and the fix."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvdiag.formatting import format_duration

Outcome = Literal["pass", "warn", "fail", "skip"]

ORDER: tuple[Outcome, ...] = ("fail", "warn", "pass", "skip")
"""The worst first; a skipped check does not count."""

APART_SECONDS = 5.0
"""Clocks that differ by more join samples of different loads; a window that ends now misses the newest samples."""


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


def clock_check(id_: str, whose: str, apart_seconds: float | None) -> Check:
    """Check whether a clock matches this host's, of which it is `apart_seconds` behind."""
    if apart_seconds is None:
        return Check(id_, "skip", f"{whose} time is not reported")
    if abs(apart_seconds) <= APART_SECONDS:
        return Check(id_, "pass", f"{whose} clock matches this host's")
    found = f"{whose} clock is {format_duration(abs(apart_seconds))} {'behind' if apart_seconds > 0 else 'ahead'}"
    return Check(id_, "warn", found, "synchronise both clocks with NTP (chrony)")


def skipped(reason: str, *ids: str) -> list[Check]:
    """The checks that were not made."""
    return [Check(id_, "skip", reason) for id_ in ids]


def worst(checks: Iterable[Check]) -> Outcome:
    """The worst outcome of all; `skip` where nothing was checked."""
    return min((check.outcome for check in checks), key=ORDER.index, default="skip")
