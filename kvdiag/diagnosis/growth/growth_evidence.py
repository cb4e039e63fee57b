"""What the estimator of growth is given and what it answers: a series, windows with the figure of every gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvdiag import stats
from kvdiag.diagnosis.growth.growth_limits import GrowthLimits

MINUTE_SECONDS = 60.0
HOUR_SECONDS = 3600.0
MINUTES_PER_HOUR = 60

GrowthStatus = Literal["fault", "suspect", "unknown", "none"]
Reason = Literal[
    "grows",
    "flat",
    "returns",
    "event",
    "ended",
    "recurring",
    "weak",
    "uneven",
    "drift",
    "few steps",
    "recent",
    "slowing",
    "no past",
    "held",
]
"""The gate that decided; `grows` passed all of them. `slowing`: every fifth of the history rose less than the one
before. `no past`: garbage-collected memory over a short window without a history to compare with. `held`: a fault of a
window that ended before, whose growth has not been released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Samples of one component in ascending time, in bytes; `load` (any unit) is the engines' at each sample.

    `work` is what they had done until then, in tokens. Both are `None` where the engines report none. `collected` says
    that a garbage collector may return this memory. `shared` keeps what was computed of the times and the load, for the
    other series that were read at the same times.
    """

    times_seconds: Sequence[float]
    sizes_bytes: Sequence[int]
    load: Sequence[float] | None = None
    work: Sequence[float] | None = None
    collected: bool = False
    shared: dict[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthEvidence:
    """What one window says, with the figure of every gate. Rates are bytes per second, of the load-adjusted series.

    `gain_bytes` is the slope times the window, `floor_gain_bytes` the rise of the lowest samples. `strength` is the
    slope over its standard error. `p_drift` is the probability of so regular a rise in a random walk. `beyond_past` is
    the rise over the largest one in earlier windows of this length, `None` without enough history. `later_ratio` is the
    later half's rate over the earlier half's. `detection_limit_bytes_per_second` is the least rate that is called.
    `since_seconds` is when the longest window that is as sure of the growth as any began. `over_work`: the window was
    judged over the work done in it, and its rates are means over its time. `keeps_up`: its later half climbs faster
    than the slowest warm-up would. `p_steps` is the probability of its steps where levels move either way.
    `by_count`: their number alone decided, and `pause_minutes` after the window without another they have ended.
    `age_seconds` is how long ago it ended, of growth that is held.
    """

    status: GrowthStatus
    reason: Reason
    window_hours: float
    bytes_per_second: float
    error_bytes_per_second: float
    later_bytes_per_second: float
    gain_bytes: float
    floor_gain_bytes: float
    strength: float
    p_drift: float
    beyond_past: float | None
    later_ratio: float
    steps_up: int
    steps_down: int
    load_removed: bool
    detection_limit_bytes_per_second: float
    since_seconds: float | None = None
    over_work: bool = False
    keeps_up: bool = True
    p_steps: float = 1.0
    age_seconds: float = 0.0
    by_count: bool = False
    pause_minutes: float = math.inf

    @property
    def grows(self) -> bool:
        """Whether growth is called, as a fault or a suspect."""
        return self.status in ("fault", "suspect")

    def lasting(self, hours: float) -> GrowthEvidence:
        """The same growth over another time: that in which the work of the window was done."""
        pace = self.window_hours / hours
        return replace(
            self,
            window_hours=hours,
            bytes_per_second=self.bytes_per_second * pace,
            error_bytes_per_second=self.error_bytes_per_second * pace,
            later_bytes_per_second=self.later_bytes_per_second * pace,
            detection_limit_bytes_per_second=self.detection_limit_bytes_per_second * pace,
            over_work=True,
        )

    def exhaustion_seconds(self, room_bytes: float, limits: GrowthLimits) -> stats.Interval | None:
        """How long the room lasts. The later half counts twice where it is faster: a leak may have begun late."""
        fastest = max(self.later_bytes_per_second, self.bytes_per_second)
        spread = stats.exhaustion_seconds(
            room_bytes, (self.bytes_per_second + fastest) / 2.0, self.error_bytes_per_second, limits.exhaustion_errors
        )
        if spread is None:
            return None
        return replace(spread, low=min(spread.low, max(room_bytes, 0.0) / fastest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """A series over every window that its history reaches, and how long that history is.

    `burst` is growth over twenty minutes so fast that the room may be used up before the shortest window is full.
    """

    seconds: float
    windows: tuple[GrowthEvidence, ...]
    burst: GrowthEvidence | None = None

    def lasts(self, hours: float) -> bool:
        """Whether a window of so many hours or more is a fault."""
        return any(one.status == "fault" and one.window_hours >= hours for one in self.windows)

    @property
    def decides(self) -> GrowthEvidence | None:
        """The window that answers; `None` where the history is too short for any."""
        called = [window for status in ("fault", "suspect") for window in self.windows if window.status == status]
        pending = [window for window in self.windows if window.reason in ("recent", "slowing")]
        return next(iter((*called, *pending[-1:], *self.windows[-1:])), None)
