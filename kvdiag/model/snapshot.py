"""The state of a daemon at one moment: newest sample, newest diagnosis, and the health of its sources."""

from dataclasses import dataclass
from typing import Literal

from kvdiag.model.facts import Facts
from kvdiag.model.request_lengths import Lengths
from kvdiag.model.timeline import Sample
from kvdiag.model.verdicts import Diagnosis

ServerState = Literal["starting", "serving", "lost"]
"""Starting: no engine has answered yet, which is not a fault. Lost: one answered before and no longer does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceHealth:
    """The health of one source: whether its newest read succeeded, failed reads since the start, newest duration.

    Of `ticks_total` scheduled reads, `ticks_missed_total` did not happen because the previous read was still running or
    the daemon was late.
    """

    source: str
    up: bool
    errors_total: int
    duration_seconds: float | None = None
    ticks_total: int | None = None
    ticks_missed_total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureThresholds:
    """Memory pressure above which a warning fires, and above which on-call is paged; the second is higher."""

    warning_ratio: float
    critical_ratio: float

    def __post_init__(self) -> None:
        """Refuse thresholds that are out of range or in the wrong order."""
        if not 0.0 < self.warning_ratio < self.critical_ratio <= 1.0:
            raise ValueError(
                f"the warning threshold {self.warning_ratio:g} must be below "
                f"the critical threshold {self.critical_ratio:g}, both above 0 and at most 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that the outputs of the daemon show.

    `newest` holds the last sample of each part, `None` if it is too old or the newest read failed. `diagnosis` is
    `None` before the first one; `diagnosed_seconds` is its time. `engines_seconds` is when the engines of `newest` were
    read, `lengths` the length distribution of their finished requests. `down_since_seconds` is the last answer of a
    server that no longer answers. `pressure_thresholds` are the configured ones, `None` if not configured.
    `refused_total` counts connections closed without an answer because all places were taken. `push_failures_total`
    counts pushes to an OpenTelemetry collector that failed, `None` without one.
    """

    state: ServerState
    facts: Facts
    newest: Sample
    sources: tuple[SourceHealth, ...]
    diagnosis: Diagnosis | None = None
    diagnosed_seconds: float | None = None
    engines_seconds: float | None = None
    lengths: Lengths | None = None
    down_since_seconds: float | None = None
    pressure_thresholds: PressureThresholds | None = None
    refused_total: int | None = None
    push_failures_total: int | None = None
