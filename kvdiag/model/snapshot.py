"""What a daemon knows at one moment: the newest reading of everything, the newest diagnosis, and how its sources do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvdiag.model.facts import Facts
from kvdiag.model.request_lengths import Lengths
from kvdiag.model.timeline import Sample
from kvdiag.model.verdicts import Diagnosis

ServerState = Literal["starting", "serving", "lost"]
"""Starting: no engine has answered yet, which is no fault. Lost: one did, and does no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceHealth:
    """One source: whether its newest reading succeeded, how many failed since the start, how long the newest took.

    Of `ticks_total` moments at which it was due to be read, it was not read at `ticks_missed_total`: the reading before
    was not over, or the daemon was late.
    """

    source: str
    up: bool
    errors_total: int
    duration_seconds: float | None = None
    ticks_total: int | None = None
    ticks_missed_total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureThresholds:
    """Memory pressure above which a person is warned, and above which one is called: the second is the higher."""

    warning_ratio: float
    critical_ratio: float

    def __post_init__(self) -> None:
        """Refuse a pair of which one would never be told from the other."""
        if not 0.0 < self.warning_ratio < self.critical_ratio <= 1.0:
            raise ValueError(
                f"the warning threshold {self.warning_ratio:g} must be below the critical threshold "
                f"{self.critical_ratio:g}, and both above 0 and at most 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that the daemon's outputs show.

    `newest` holds each part as it was last read, `None` where that is too long ago or the newest reading of it failed:
    what is gone is not shown. `diagnosis` is `None` until the first one is made, `diagnosed_seconds` when it was made.
    `engines_seconds` is when the engines of `newest` were read, `lengths` what their finished requests were like.
    `pressure_thresholds` are those of the one who runs the daemon, `None` where nobody has told them. `refused_total`
    counts connections to the daemon's own port that were closed without an answer, for want of places.
    """

    state: ServerState
    facts: Facts
    newest: Sample
    sources: tuple[SourceHealth, ...]
    diagnosis: Diagnosis | None = None
    diagnosed_seconds: float | None = None
    engines_seconds: float | None = None
    lengths: Lengths | None = None
    pressure_thresholds: PressureThresholds | None = None
    refused_total: int | None = None
