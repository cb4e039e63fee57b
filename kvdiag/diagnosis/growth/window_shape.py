"""The bins of one window: their slope, halves and quarters, and the gates that even growth passes (4 to 9)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from kvdiag import stats
from kvdiag.diagnosis.growth.growth_evidence import (
    HOUR_SECONDS,
    MINUTE_SECONDS,
    MINUTES_PER_HOUR,
    GrowthEvidence,
)
from kvdiag.diagnosis.growth.growth_limits import GrowthLimits

UNEVEN = ("event", "ended", "weak", "uneven")
"""How growth in steps looks to the gates of even growth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The bins of a window, their slope, those of their halves, and the medians of their quarters."""

    bins: Sequence[float]
    rate: float
    halves: tuple[float, float]
    quarters: Sequence[float]

    @classmethod
    def of(cls, bins: Sequence[float]) -> Shape:
        """Measure the bins."""
        count, half = len(bins), len(bins) // 2
        return cls(
            bins=bins,
            rate=stats.theil_sen(bins),
            halves=(stats.theil_sen(bins[:half]), stats.theil_sen(bins[-half:])),
            quarters=[median(bins[count * part // 4 : count * (part + 1) // 4]) for part in range(4)],
        )

    @property
    def risen(self) -> float:
        """The rise from the first quarter to the last."""
        return self.quarters[-1] - self.quarters[0]

    def measured(self, lows: Sequence[float], past: Sequence[float], size: int, limits: GrowthLimits) -> GrowthEvidence:
        """The figures of the window before any gate; `size` is the minutes of a bin."""
        quarter, (earlier, later) = len(self.bins) // 4, self.halves
        hours, bin_seconds = len(self.bins) * size / MINUTES_PER_HOUR, size * MINUTE_SECONDS
        error = stats.slope_error(self.bins, self.rate)
        return GrowthEvidence(
            status="none",
            reason="flat",
            window_hours=hours,
            bytes_per_second=self.rate / bin_seconds,
            error_bytes_per_second=error / bin_seconds,
            later_bytes_per_second=later / bin_seconds,
            gain_bytes=self.rate * len(self.bins),
            floor_gain_bytes=min(lows[-quarter:]) - min(lows[:quarter]),
            strength=self.rate / error if error > 0.0 else 0.0,
            p_drift=1.0,
            beyond_past=_beyond_past(self.risen, past, quarter, limits),
            later_ratio=later / earlier if earlier > 0.0 else 1.0 if later > 0.0 else 0.0,
            keeps_up=_keeps_up(earlier, later, error, hours, limits),
            steps_up=0,
            steps_down=0,
            load_removed=False,
            detection_limit_bytes_per_second=max(
                limits.min_bytes_per_hour / HOUR_SECONDS,
                limits.min_gain_bytes / (hours * HOUR_SECONDS),
                limits.visible_errors * error / bin_seconds,
            ),
        )

    def even(
        self, evidence: GrowthEvidence, limits: GrowthLimits, *, is_step: bool, recurring: bool, in_steps: bool
    ) -> GrowthEvidence:
        """Gates 4 to 9 on growth whose number of steps does not decide."""
        rises, (earlier, later) = [newer - older for older, newer in pairwise(self.quarters)], self.halves
        if is_step or max(rises) > limits.largest_quarter_ratio * self.risen:
            return replace(evidence, reason="event")
        if later < limits.later_ratio * earlier or rises[-1] < limits.last_quarter_ratio * self.risen:
            return replace(evidence, reason="ended")
        if recurring:
            return replace(evidence, reason="recurring")
        tails = (stats.drift_tail(self.bins, pieces) for pieces in limits.drift_pieces)
        p_drift = min((tail for tail in tails if tail is not None), default=1.0)
        evidence = replace(evidence, status="unknown", p_drift=p_drift)
        if evidence.strength < limits.suspect_strength:
            return replace(evidence, reason="weak")
        if min(rises) <= 0.0:
            return replace(evidence, reason="uneven")
        return _by_drift(evidence, limits, in_steps=in_steps)


def _by_drift(evidence: GrowthEvidence, limits: GrowthLimits, *, in_steps: bool) -> GrowthEvidence:
    """Gate 9, and how sure growth that passed it is: by its drift, its past, its size, or the number of its steps."""
    beyond = evidence.beyond_past or 0.0
    few = evidence.p_steps >= limits.steps_p
    if few and evidence.p_drift >= limits.drift_p and beyond <= limits.suspect_beyond_past:
        return replace(evidence, reason="few steps" if in_steps else "drift")
    certain = evidence.p_drift < limits.certain_drift_p or beyond > limits.fault_beyond_past
    certain = certain or evidence.p_steps < limits.certain_steps_p or evidence.gain_bytes >= limits.certain_gain_bytes
    certain = certain and evidence.strength >= limits.fault_strength
    return replace(evidence, status="fault" if certain else "suspect", reason="grows")


def _keeps_up(earlier: float, later: float, error: float, hours: float, limits: GrowthLimits) -> bool:
    """Whether the later half of a window climbs faster, by its error, than the slowest warm-up would by then."""
    if earlier <= 0.0:
        return later > 0.0
    # Half of the values leave a slope 2^1.5 times the error.
    spread = 2.0**1.5 * error / earlier * math.hypot(1.0, later / earlier)
    slowest: float = math.exp(-hours / (2.0 * limits.warmup_hours))
    return bool(later / earlier - spread > slowest)


def _beyond_past(risen: float, past: Sequence[float], quarter: int, limits: GrowthLimits) -> float | None:
    """The rise of a window over the largest movement of earlier windows of the same length."""
    medians = [median(past[end - quarter : end]) for end in range(len(past), quarter - 1, -quarter)]
    if len(medians) < limits.past_quarters:
        return None
    most = max(abs(newer - older) for newer, older in zip(medians, medians[3:], strict=False))
    return risen / max(most, 1.0)
