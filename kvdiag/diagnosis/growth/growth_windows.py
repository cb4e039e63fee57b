"""The minutes of one series, and the gates that a window of them passes: their order and reasons are in `estimator`."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from kvdiag import stats
from kvdiag.diagnosis.growth.growth_evidence import (
    HOUR_SECONDS,
    MINUTE_SECONDS,
    MINUTES_PER_HOUR,
    GrowthEvidence,
    Series,
)
from kvdiag.diagnosis.growth.growth_limits import GrowthLimits
from kvdiag.diagnosis.growth.minute_load import MinuteLoad, binned, mean_of
from kvdiag.diagnosis.growth.step_growth import continues, p_steps, pause_bins, records
from kvdiag.diagnosis.growth.window_shape import UNEVEN, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Minutes:
    """Medians, minima and mean load of each minute, the newest last; `None` where a minute has no sample."""

    medians: list[float | None]
    lows: list[float | None]
    load: MinuteLoad | None
    spacing_seconds: float
    collected: bool
    newest_minute: int

    @classmethod
    def of(cls, series: Series, limits: GrowthLimits) -> Minutes:
        """At most one value a minute, over the longest window and the history that it is compared with."""
        end = series.times_seconds[-1]
        longest = (1.0 + limits.past_windows) * limits.window_hours[-1] * HOUR_SECONDS
        start = bisect_left(series.times_seconds, end - longest)
        times = series.times_seconds[start:]
        count = int((end - times[0]) / MINUTE_SECONDS) + 1
        # A sample on the edge belongs to the minute that it ends.
        if "bins" not in series.shared:
            gaps = [later - earlier for earlier, later in pairwise(times)]
            ends = list(pairwise(stats.bin_ends(times, end + MINUTE_SECONDS / 60.0, MINUTE_SECONDS, count)))
            series.shared["bins"] = ends, median(gaps) if gaps else 0.0
        ends, spacing_seconds = series.shared["bins"]

        def binned_by(of: Callable[[Sequence[float]], float], values: Sequence[float]) -> list[float | None]:
            return [of(values[lower:upper]) if lower < upper else None for lower, upper in ends]

        sizes = series.sizes_bytes[start:]
        least = min(sizes)
        # What stays the same follows no load.
        is_level, load = least == max(sizes), None
        if series.load is not None and not is_level:
            load = series.shared.get("load")
            if load is None:
                means = binned_by(mean_of, series.load[start:])
                filled = stats.interpolated(means, limits.load_filled_ratio)
                load = None if filled is None else MinuteLoad(filled)
                series.shared["load"] = load
        lows = binned_by((lambda _: least) if is_level else min, sizes)
        return cls(
            medians=lows if is_level else binned_by(_middle, sizes),
            lows=lows,
            load=load,
            spacing_seconds=spacing_seconds,
            collected=series.collected,
            newest_minute=int(end / MINUTE_SECONDS),
        )

    def until(self, back: int) -> Minutes:
        """The minutes without so many of the newest ones."""
        end = max(len(self.medians) - back, 0)
        return replace(self, medians=self.medians[:end], lows=self.lows[:end])

    def held(
        self, lengths: Sequence[int], limits: GrowthLimits, certain: Callable[[GrowthEvidence, Minutes], bool]
    ) -> GrowthEvidence | None:
        """A window that ended before and was a fault then, whose growth was not released since, nor has long stopped.

        Of each length, and of the whole history until then. `certain` confirms the fault by what was known then.
        """
        count = len(self.medians)
        sampled = self._sampled(limits)
        for length in lengths:
            step = max(length // limits.held_steps, 1)
            medians, _ = self._at_equal_load(0, count, max(length // limits.bins, 1), limits)
            share = max(length // limits.held_share, limits.held_minutes)
            least, newer, now = math.inf, count, _level(medians, count, share)
            # The moments of a fixed grid: a later history finds the same.
            for back in range(self.newest_minute % step or step, count, step):
                end = count - back
                size = length if length < lengths[-1] else min(length, end)
                age = sampled[count] - sampled[end]
                if size > end or size < lengths[0] or age > limits.held_windows * size:
                    break
                # The lowest level since then: what was released and grew again is another growth.
                levels = (_level(medians, place, share) for place in range(newer, end, -share))
                least, newer = min([least, *(level for level in levels if level is not None)]), end
                before, then = _level(medians, end - size + share, share), _level(medians, end, share)
                if before is None or then is None or now is None or then - before < limits.min_gain_bytes:
                    continue
                # What has stopped is over sooner than what continues more slowly, or with more noise.
                middle = count - back // 2
                halfway = _level(medians, middle, share)
                since, base = (end, then) if halfway is None else (middle, halfway)
                least_rise = limits.held_rate_ratio * (then - before) * (sampled[count] - sampled[since]) / size
                continues = now - base >= least_rise
                if age > limits.paused_ratio * size and not continues:
                    continue
                past = self.until(back)
                one = past.judged(size, limits) if then - least < limits.released_ratio * (then - before) else None
                if one is None or one.status != "fault" or age > one.pause_minutes:
                    continue
                one = replace(one, reason="held", age_seconds=back * MINUTE_SECONDS)
                if certain(one, past):
                    return one
        return None

    def _sampled(self, limits: GrowthLimits) -> list[int]:
        """How many minutes came before each, without gaps in the samples: they neither end growth nor continue it."""
        counted, missing = [0], 0
        for value in self.medians:
            missing = missing + 1 if value is None else 0
            counted.append(counted[-1] + (missing < limits.held_minutes))
        return counted

    def judged(self, length: int, limits: GrowthLimits) -> GrowthEvidence | None:
        """The window of so many minutes that ends now, confirmed by those that ended before; `None` if too sparse."""
        # Bins of two samples at least: a scrape comes late now and then, and a bin without any is a hole.
        sparse = self.spacing_seconds > limits.dense_seconds
        scrapes = limits.bin_readings * self.spacing_seconds / MINUTE_SECONDS
        spaced = math.ceil(scrapes - limits.late_ratio) if sparse else 1
        size = max(-(-length // limits.bins), spaced)
        length -= length % size
        found: list[GrowthEvidence] = []
        for share in limits.confirming_ratios:
            end = len(self.medians) - int(share * length)
            one = self._window(max(end - length, 0), end, size, limits)
            if one is None or (found and end < limits.confirming_filled_ratio * length):
                break
            found.append(one)
            if not one.grows or one.by_count:
                break
        if not found or not found[0].grows:
            return found[0] if found else None
        if found[0].by_count:
            return found[0]
        agreed = [one.status for one in found if one.grows]
        if len(agreed) < limits.suspect_windows:
            return replace(found[0], status="unknown", reason="recent")
        certain = agreed.count("fault") >= limits.fault_windows and len(agreed) == len(limits.confirming_ratios)
        if certain and self._may_be_garbage(found[0], limits):
            return replace(found[0], status="suspect", reason="no past")
        return replace(found[0], status="fault" if certain else "suspect")

    def _window(self, start: int, end: int, size: int, limits: GrowthLimits) -> GrowthEvidence | None:
        """One window through all gates but the last; `None` where too few of its bins hold samples."""
        # A window shortened at its beginning keeps whole bins.
        start += (end - start) % size
        count = (end - start) // size
        back = max(0, start - max(limits.past_minutes, int(limits.past_windows * (end - start))))
        back += (start - back) % size
        medians, removed = self._at_equal_load(back, end, size, limits)
        bins = binned(medians, size, median)
        level = stats.interpolated(bins[-count:], limits.filled_ratio) if count >= limits.min_bins else None
        if level is None:
            return None
        past = [value for value in bins[:-count] if value is not None]
        # The lowest samples of a bin are those of its lowest load, which is not the mean that is taken out.
        lows = None
        if not removed:
            lows = stats.interpolated(binned(self.lows[start:end], size, min), limits.filled_ratio)
        evidence = self._gated(level, lows or level, past, start, size, limits)
        return replace(evidence, load_removed=removed)

    def _at_equal_load(
        self, start: int, end: int, size: int, limits: GrowthLimits
    ) -> tuple[Sequence[float | None], bool]:
        """Gate 1: the minutes less what follows the load, and whether there was any such part."""
        medians: Sequence[float | None] = self.medians[start:end]
        means = None if self.load is None else stats.interpolated(binned(medians, size, mean_of), limits.filled_ratio)
        if self.load is None or means is None:
            return medians, False
        bins, averages = self.load.binned(start, end, size)
        follows = stats.sensitivities(means, bins, limits.load_correlation)
        if not any(follows):
            return medians, False
        for column, average, sensitivity in zip(self.load.columns(start, end), averages, follows, strict=True):
            if sensitivity:
                medians = [
                    None if value is None else value - sensitivity * (each - average)
                    for value, each in zip(medians, column, strict=True)
                ]
        return medians, True

    def _gated(
        self,
        level: Sequence[float],
        lows: Sequence[float],
        past: Sequence[float],
        start: int,
        size: int,
        limits: GrowthLimits,
    ) -> GrowthEvidence:
        """Gates 2 to 9 on the bins of one window that begins at minute `start`; `size` is the minutes of a bin.

        `past` are the bins before it.
        """
        count = len(level)
        jumps = stats.without_jumps(level, limits.jump_deviations, limits.jump_min_bytes)
        small = limits.small_fall_ratio * (max(level) - min(level))
        jumps = replace(jumps, jumps=tuple(one for one in jumps.jumps if one[1] > 0.0 or one[1] < -small))
        # Levels that moved both ways are events apart from the growth; steps that only go up are the growth itself.
        smooth = jumps.values if jumps.ups and jumps.downs else level
        shape = Shape.of(smooth)
        evidence = shape.measured(lows, past, size, limits)
        evidence = replace(evidence, steps_up=jumps.ups, steps_down=jumps.downs)
        claim = max(evidence.gain_bytes, shape.risen)
        if claim < max(limits.min_gain_bytes, limits.min_bytes_per_hour * evidence.window_hours):
            return evidence
        # Without its falls a sawtooth only climbs: there the floor has to show more.
        if evidence.floor_gain_bytes < (limits.floor_ratio if smooth is level else limits.raw_floor_ratio) * claim:
            return replace(evidence, reason="returns")
        long_past = len(past) * size >= max(limits.compared_windows * count * size, limits.compared_minutes)
        recurring = long_past and (
            shape.quarters[-1] - stats.quantile(past, limits.past_quantile) < limits.new_ground_ratio * shape.risen
        )
        heights = sum(height for _, height in jumps.jumps)
        in_steps = bool(jumps.ups and not jumps.downs) and (
            stats.theil_sen(jumps.values) < limits.steps_ratio * shape.rate or heights >= limits.steps_ratio * claim
        )
        much = claim >= limits.certain_gain_bytes
        if in_steps:
            load = None if self.load is None or much else self.load.minutes[: start + count * size]
            high_water = records(load, start, size, limits)
            evidence = replace(evidence, p_steps=p_steps(jumps, past, high_water, size, limits))
        counted = in_steps and not recurring and evidence.p_steps < limits.counted_steps_p and continues(jumps, limits)
        if counted and (much or evidence.p_steps < limits.certain_steps_p):
            one = replace(evidence, status="fault", reason="grows", by_count=True)
            one = replace(one, pause_minutes=pause_bins(jumps, limits) * size)
            lasts = (jumps.jumps[-1][0] - jumps.jumps[0][0]) * size / MINUTES_PER_HOUR
            warms = self.collected and not much and lasts < limits.collected_steps_hours
            return replace(one, status="suspect", reason="no past") if warms else one
        one = shape.even(evidence, limits, is_step=stats.is_step(level), recurring=recurring, in_steps=in_steps)
        if counted and one.reason in UNEVEN:
            return replace(evidence, status="suspect", reason="grows", by_count=True)
        return one

    def _may_be_garbage(self, one: GrowthEvidence, limits: GrowthLimits) -> bool:
        """Whether a collector may return what grew: over a short window without a past, unless much or steady."""
        length = one.window_hours * MINUTES_PER_HOUR
        past = len(self.medians) - length
        if not self.collected or past >= max(limits.compared_windows * length, limits.compared_minutes):
            return False
        steady = one.keeps_up and one.gain_bytes >= limits.steady_bytes
        return not steady and one.gain_bytes < limits.collected_bytes and one.window_hours < limits.collected_hours


def slowing(minutes: Minutes, limits: GrowthLimits) -> bool:
    """Whether each fifth of the whole history rose less than the one before: a warm-up of hours looks steady for one.

    Of steady growth in noise one in 24 looks so, which costs it until the window of `slowing_hours` decides.
    """
    rises = rises_of_fifths(minutes, limits)
    if rises is None:
        return False
    slower = all(later < earlier for earlier, later in pairwise(rises))
    return slower and rises[0] > 0.0 and rises[-1] < limits.slowing_ratio * rises[0]


def ends(minutes: Minutes, limits: GrowthLimits) -> bool:
    """Whether the later half of the whole history rose so much less than the earlier that what it showed has ended."""
    rises = rises_of_fifths(minutes, limits)
    return rises is not None and sum(rises[2:]) < limits.held_later_ratio * sum(rises[:2])


def rises_of_fifths(minutes: Minutes, limits: GrowthLimits) -> list[float] | None:
    """The rises between the medians of the fifths of a history; `None` where it is too short or has holes."""
    size = len(minutes.medians) // 5
    if size < limits.slowing_fifth_minutes:
        return None
    fifths = stats.interpolated(binned(minutes.medians[-5 * size :], size, median), limits.filled_ratio)
    return None if fifths is None else [later - earlier for earlier, later in pairwise(fifths)]


def _level(minutes: Sequence[float | None], end: int, count: int) -> float | None:
    """The median of so many minutes before an end; `None` where none has a sample."""
    known = [value for value in minutes[max(end - count, 0) : end] if value is not None]
    return median(known) if known else None


def _middle(values: Sequence[float]) -> float:
    # Most minutes have one sample or two.
    count = len(values)
    if count == 1:
        return values[0]
    if count == 2:  # noqa: PLR2004 - sorting takes as long as all else here
        return (values[0] + values[1]) / 2
    ordered = sorted(values)
    return ordered[count // 2] if count % 2 else (ordered[count // 2 - 1] + ordered[count // 2]) / 2
