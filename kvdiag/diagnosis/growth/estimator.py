"""Decide whether one series of memory samples keeps growing: the one estimator of growth, for every component.

A slope alone calls half of all healthy servers leaking: load, warm-up, garbage collection, an allocator's high-water
mark and random drift all rise for a while. `assess` therefore looks at windows that end now (from an hour up to the
whole history) and puts each through the gates below. The shortest that passes gives the rate, else the longest answers.
In this order, since each gate needs what the one before established:

1. load       What follows the load, or the highest load so far, is taken out. The sensitivity comes from differences of
              neighbouring bins: differences carry no trend, so that a leak cannot hide in the fit.
2. gain       Growth counts from `min_gain_bytes` over the window on, and `min_bytes_per_hour`.    else `flat`
3. floor      The lowest samples of the last quarter lie above those of the first. Garbage and bursts
              return to their floor.                                                                   else `returns`
4. event      A straight line explains the window better than one step does.                           else `event`
5. end        The later half climbs at half the rate of the earlier one at least.                      else `ended`
6. new ground The last quarter lies above what earlier history has shown.                              else `recurring`
7. strength   Theil-Sen slope over its error, which autocorrelation of the residuals widens.           else `weak`
8. quarters   Each quarter of the window lies above the one before.                                    else `uneven`
9. drift      Increments too regular for a random walk, or a rise that no earlier window of this length
              came near to (else `drift`). Growth in steps: so many up and none down.                   else `few steps`
10. again     The window grew as well when it ended a sixth and a third of its length ago.              else `recent`

Where no window is a fault, the same gates judge the memory over the work done (tokens) in place of the time: a leak of
requests rises with them, by day and hardly by night, so that it is even over work and neither ends nor drifts there.

Windows that pass are a fault where strength and drift reach their upper limit and all three evaluations grow, else a
suspect.
Those that fail at 2 to 6 are explained: `none`. Those that fail at 7 to 10 have grown and may yet be noise: `unknown`.
Two doubts lower a window that passed: a whole history that slows down makes a short one `slowing` (unknown), and memory
that a garbage collector may return is no fault over a short window without a past (`no past`, a suspect).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import fmean, median

from kvdiag import stats
from kvdiag.diagnosis.growth.growth_evidence import (
    HOUR_SECONDS,
    MINUTE_SECONDS,
    MINUTES_PER_HOUR,
    Assessment,
    GrowthEvidence,
    Series,
)
from kvdiag.diagnosis.growth.growth_limits import GrowthLimits


def assess(series: Series, limits: GrowthLimits, served_since_seconds: float | None = None) -> Assessment:
    """Judge a series over all windows; a burst only where the engines have answered since before it began.

    Loading a model takes memory faster than any leak does, and answers no request.
    """
    if not series.times_seconds:
        return Assessment(seconds=0.0, windows=())
    minutes = _Minutes.of(series, limits)
    count = len(minutes.medians)
    lengths = [round(hours * MINUTES_PER_HOUR) for hours in limits.window_hours]
    fitting = [length for length in lengths if length <= count]
    if fitting and count >= limits.whole_history_ratio * fitting[-1]:
        fitting.append(count)
    still = max(series.sizes_bytes) - min(series.sizes_bytes) < limits.min_gain_bytes
    # What never moved so much needs one look: for the rate that the longest window would have called.
    found = [minutes.judged(length, limits) for length in (fitting[-1:] if still else fitting)]
    windows = tuple(one for one in found if one is not None)
    if not still and not any(one.status == "fault" for one in windows):
        windows += _over_work(series, fitting, limits)
    if any(one.grows for one in windows) and _slowing(minutes, limits):
        windows = tuple(
            replace(one, status="unknown", reason="slowing")
            if one.grows and one.window_hours < limits.slowing_hours and not one.over_work
            else one
            for one in windows
        )
    sure = ((one.status == "fault", one.window_hours) for one in windows if one.grows)
    since_seconds = series.times_seconds[-1] - max(sure, default=(False, 0.0))[1] * HOUR_SECONDS
    windows = tuple(replace(one, since_seconds=since_seconds) if one.grows else one for one in windows)
    burst = None
    length = round(limits.burst_hours * MINUTES_PER_HOUR)
    begin = series.times_seconds[-1] - length * MINUTE_SECONDS
    if not still and served_since_seconds is not None and served_since_seconds <= begin and count >= length:
        fast = minutes.judged(length, replace(limits, min_gain_bytes=limits.burst_gain_bytes))
        burst = replace(fast, since_seconds=begin) if fast is not None and fast.status == "fault" else None
    return Assessment(seconds=series.times_seconds[-1] - series.times_seconds[0], windows=windows, burst=burst)


def _over_work(series: Series, lengths: Sequence[int], limits: GrowthLimits) -> tuple[GrowthEvidence, ...]:
    """The windows that grow by the work done, with the time that each took; none where the engines did none.

    What each request leaves grows evenly there, by day and by night. The clock runs as fast as the time on average.
    """
    work = series.work
    if work is None or work[-1] <= work[0]:
        return ()
    times, end, found = series.times_seconds, series.times_seconds[-1], []
    pace = (end - times[0]) / (work[-1] - work[0])
    clock = [end - pace * (work[-1] - done) for done in work]
    worked = _Minutes.of(replace(series, times_seconds=clock), limits)
    for length in lengths:
        one = worked.judged(length, limits)
        if one is not None and one.grows:
            begin = times[bisect_left(clock, end - one.window_hours * HOUR_SECONDS)]
            hours = max((end - begin) / HOUR_SECONDS, MINUTE_SECONDS / HOUR_SECONDS)
            # A warm-up ends with the hours; over the work of an evening it may look steady.
            doubted = hours < limits.slowing_hours and one.gain_bytes < limits.collected_bytes
            found.append(replace(one.lasting(hours), status="suspect" if doubted else one.status))
    return tuple(found)


def _slowing(minutes: _Minutes, limits: GrowthLimits) -> bool:
    """Whether each fifth of the whole history rose less than the one before: a warm-up of hours looks steady for one.

    Of steady growth in noise one in 24 looks so, which costs it until the window of `slowing_hours` decides.
    """
    size = len(minutes.medians) // 5
    fifths = stats.interpolated(_binned(minutes.medians[-5 * size :], size, median), limits.filled_ratio)
    if size < limits.slowing_fifth_minutes or fifths is None:
        return False
    rises = [later - earlier for earlier, later in pairwise(fifths)]
    slower = all(later < earlier for earlier, later in pairwise(rises))
    return slower and rises[0] > 0.0 and rises[-1] < limits.slowing_ratio * rises[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Minutes:
    """Medians, minima and mean load of each minute, the newest last; `None` where a minute has no sample."""

    medians: list[float | None]
    lows: list[float | None]
    load: list[float] | None
    spacing_seconds: float
    collected: bool

    @classmethod
    def of(cls, series: Series, limits: GrowthLimits) -> _Minutes:
        """At most one value a minute, over the longest window and the history that it is compared with."""
        end = series.times_seconds[-1]
        longest = (1.0 + limits.past_windows) * limits.window_hours[-1] * HOUR_SECONDS
        start = bisect_left(series.times_seconds, end - longest)
        times = series.times_seconds[start:]
        count = int((end - times[0]) / MINUTE_SECONDS) + 1

        def cells(values: Sequence[float]) -> tuple[tuple[float, ...], ...]:
            # A sample on the edge belongs to the minute that it ends.
            return stats.binned(times, values, end + MINUTE_SECONDS / 60.0, MINUTE_SECONDS, count)

        every = cells(series.sizes_bytes[start:])
        load = None if series.load is None else [_mean(cell) if cell else None for cell in cells(series.load[start:])]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return cls(
            medians=[_middle(cell) if cell else None for cell in every],
            lows=[min(cell) if cell else None for cell in every],
            load=None if load is None else stats.interpolated(load, limits.load_filled_ratio),
            spacing_seconds=median(gaps) if gaps else 0.0,
            collected=series.collected,
        )

    def judged(self, length: int, limits: GrowthLimits) -> GrowthEvidence | None:
        """The window of so many minutes that ends now, confirmed by those that ended before; `None` if too sparse."""
        # Bins of two samples at least: a scrape comes late now and then, and a bin without any is a hole.
        sparse = self.spacing_seconds > limits.dense_seconds
        spaced = math.ceil(limits.bin_readings * self.spacing_seconds / MINUTE_SECONDS) if sparse else 1
        size = max(-(-length // limits.bins), spaced)
        length -= length % size
        found: list[GrowthEvidence] = []
        for share in limits.confirming_ratios:
            end = len(self.medians) - int(share * length)
            one = self._window(max(end - length, 0), end, size, limits)
            if one is None or (found and end < limits.confirming_filled_ratio * length):
                break
            found.append(one)
            if not one.grows:
                break
        if not found or not found[0].grows:
            return found[0] if found else None
        agreed = [one.status for one in found if one.grows]
        if len(agreed) < limits.suspect_windows:
            return replace(found[0], status="unknown", reason="recent")
        certain = agreed.count("fault") >= limits.fault_windows and len(agreed) == len(limits.confirming_ratios)
        return replace(found[0], status="fault" if certain else "suspect")

    def _window(self, start: int, end: int, size: int, limits: GrowthLimits) -> GrowthEvidence | None:
        """One window through all gates but the last; `None` where too few of its bins hold samples."""
        # A window shortened at its beginning keeps whole bins.
        start += (end - start) % size
        count = (end - start) // size
        back = max(0, start - max(limits.past_minutes, int(limits.past_windows * (end - start))))
        back += (start - back) % size
        medians, removed = self._at_equal_load(back, end, size, limits)
        bins = _binned(medians, size, median)
        level = stats.interpolated(bins[-count:], limits.filled_ratio) if count >= limits.min_bins else None
        if level is None:
            return None
        past = [value for value in bins[:-count] if value is not None]
        # The lowest samples of a bin are those of its lowest load, which is not the mean that is taken out.
        lows = None
        if not removed:
            lows = stats.interpolated(_binned(self.lows[start:end], size, min), limits.filled_ratio)
        return replace(self._gated(level, lows or level, past, size, limits), load_removed=removed)

    def _at_equal_load(
        self, start: int, end: int, size: int, limits: GrowthLimits
    ) -> tuple[Sequence[float | None], bool]:
        """Gate 1: the minutes less what follows the load, and whether there was any such part."""
        medians: Sequence[float | None] = self.medians[start:end]
        means = None if self.load is None else stats.interpolated(_binned(medians, size, _mean), limits.filled_ratio)
        if self.load is None or means is None:
            return medians, False
        load = self.load[start:end]
        columns = [load, list(accumulate(load, max))]
        binned = [[mean for mean in _binned(each, size, _mean) if mean is not None] for each in columns]
        follows = stats.sensitivities(means, binned, limits.load_correlation)
        for column, sensitivity in zip(columns, follows, strict=True):
            if sensitivity:
                average = fmean(column)
                medians = [
                    None if value is None else value - sensitivity * (each - average)
                    for value, each in zip(medians, column, strict=True)
                ]
        return medians, any(follows)

    def _gated(
        self, level: Sequence[float], lows: Sequence[float], past: Sequence[float], size: int, limits: GrowthLimits
    ) -> GrowthEvidence:
        """Gates 2 to 9 on the bins of one window; `past` are the bins before it, `size` is the minutes of a bin."""
        count = len(level)
        hours, bin_seconds = count * size / MINUTES_PER_HOUR, size * MINUTE_SECONDS
        jumps = stats.without_jumps(level, limits.jump_deviations, limits.jump_min_bytes)
        # Levels that moved both ways are events apart from the growth; steps that only go up are the growth itself.
        smooth = jumps.values if jumps.ups and jumps.downs else level
        rate = stats.theil_sen(smooth)
        error = stats.slope_error(smooth, rate)
        gain, half, quarter = rate * count, count // 2, count // 4
        quarters = [median(smooth[count * part // 4 : count * (part + 1) // 4]) for part in range(4)]
        rises = [later - earlier for earlier, later in pairwise(quarters)]
        risen = sum(rises)
        floor_gain = min(lows[-quarter:]) - min(lows[:quarter])
        earlier, later = stats.theil_sen(smooth[:half]), stats.theil_sen(smooth[-half:])
        beyond = _beyond_past(risen, past, quarter, limits)
        evidence = GrowthEvidence(
            status="none",
            reason="flat",
            window_hours=hours,
            bytes_per_second=rate / bin_seconds,
            error_bytes_per_second=error / bin_seconds,
            later_bytes_per_second=later / bin_seconds,
            gain_bytes=gain,
            floor_gain_bytes=floor_gain,
            strength=rate / error if error > 0.0 else 0.0,
            p_drift=1.0,
            beyond_past=beyond,
            later_ratio=later / earlier if earlier > 0.0 else 1.0 if later > 0.0 else 0.0,
            steps_up=jumps.ups,
            steps_down=jumps.downs,
            load_removed=False,
            detection_limit_bytes_per_second=max(
                limits.min_bytes_per_hour / HOUR_SECONDS,
                limits.min_gain_bytes / (hours * HOUR_SECONDS),
                limits.visible_errors * error / bin_seconds,
            ),
        )
        claim = max(gain, risen)
        if claim < max(limits.min_gain_bytes, limits.min_bytes_per_hour * hours):
            return evidence
        if floor_gain < limits.floor_ratio * claim:
            return replace(evidence, reason="returns")
        if stats.is_step(level) or max(rises) > limits.largest_quarter_ratio * risen:
            return replace(evidence, reason="event")
        if later < limits.later_ratio * earlier or rises[-1] < limits.last_quarter_ratio * risen:
            return replace(evidence, reason="ended")
        long_past = len(past) * size >= max(limits.compared_windows * count * size, limits.compared_minutes)
        if long_past and quarters[-1] - stats.quantile(past, limits.past_quantile) < limits.new_ground_ratio * risen:
            return replace(evidence, reason="recurring")
        tails = (stats.drift_tail(smooth, pieces) for pieces in limits.drift_pieces)
        p_drift = min((tail for tail in tails if tail is not None), default=1.0)
        evidence = replace(evidence, status="unknown", p_drift=p_drift)
        if evidence.strength < limits.suspect_strength:
            return replace(evidence, reason="weak")
        if min(rises) <= 0.0:
            return replace(evidence, reason="uneven")
        in_steps = bool(jumps.ups and not jumps.downs) and stats.theil_sen(jumps.values) < limits.steps_ratio * rate
        return self._significance(evidence, limits, in_steps=in_steps, long_past=long_past)

    def _significance(
        self, evidence: GrowthEvidence, limits: GrowthLimits, *, in_steps: bool, long_past: bool
    ) -> GrowthEvidence:
        """Gate 9, and how sure growth that passed it is: by its steps or by its drift."""
        beyond = evidence.beyond_past or 0.0
        # Growth that came in steps is as sure as their number makes it, or as they were even.
        p_steps = stats.binomial_tail(evidence.steps_up, evidence.steps_up) if in_steps else 1.0
        if evidence.p_drift >= limits.drift_p and beyond <= limits.suspect_beyond_past and p_steps >= limits.steps_p:
            return replace(evidence, reason="few steps" if in_steps else "drift")
        certain = evidence.p_drift < limits.certain_drift_p or beyond > limits.fault_beyond_past
        certain = certain or p_steps < limits.certain_steps_p or evidence.gain_bytes >= limits.certain_gain_bytes
        certain = certain and evidence.strength >= limits.fault_strength
        garbage = self.collected and evidence.gain_bytes < limits.collected_bytes
        if certain and garbage and not long_past and evidence.window_hours < limits.collected_hours:
            return replace(evidence, status="suspect", reason="no past")
        return replace(evidence, status="fault" if certain else "suspect", reason="grows")


def _beyond_past(risen: float, past: Sequence[float], quarter: int, limits: GrowthLimits) -> float | None:
    """The rise of a window over the largest movement of earlier windows of the same length."""
    medians = [median(past[end - quarter : end]) for end in range(len(past), quarter - 1, -quarter)]
    if len(medians) < limits.past_quarters:
        return None
    most = max(abs(newer - older) for newer, older in zip(medians, medians[3:], strict=False))
    return risen / max(most, 1.0)


def _binned(minutes: Sequence[float | None], size: int, of: Callable[[Sequence[float]], float]) -> list[float | None]:
    """Bins of so many minutes, the newest whole; `None` where a bin holds no sample."""
    cells = (
        [value for value in minutes[start : start + size] if value is not None]
        for start in range(len(minutes) % size, len(minutes), size)
    )
    return [of(cell) if cell else None for cell in cells]


def _middle(values: Sequence[float]) -> float:
    # Most minutes have one sample or two.
    if len(values) == 1:
        return values[0]
    return median(values) if len(values) > 2 else (values[0] + values[1]) / 2  # noqa: PLR2004


def _mean(values: Sequence[float]) -> float:
    if len(values) == 1:
        return float(values[0])
    return fmean(values) if len(values) > 2 else (values[0] + values[1]) / 2  # noqa: PLR2004
