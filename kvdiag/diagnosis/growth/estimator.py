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

Growth in steps up that continue is counted instead (`step_growth`): from three on their number decides, after gates
1 to 3 and 6, since a few steps are never even, and each of them has confirmed the one before.

Where no window is a fault, the same gates judge the memory over the work done (tokens) in place of the time: a leak of
requests rises with them, by day and hardly by night, so that it is even over work and neither ends nor drifts there.

Windows that pass are a fault where strength and drift reach their upper limit and all three evaluations grow, else a
suspect.
Those that fail at 2 to 6 are explained: `none`. Those that fail at 7 to 10 have grown and may yet be noise: `unknown`.
A fault of a window that ended before holds (`held`) while its growth is not released, and continues or has only just
stopped, where a later history only looks uneven or slower; a gap in the samples neither ends nor continues it. After a
longer pause, or once half of it has been released, the fault ends, and growth after it is judged as new. So it does
where the whole history turns out to have ended, or slows down (short windows), and where steps that decided by their
number have paused for longer than they ever did.
Two doubts lower a window that passed: a whole history that slows down, over the work done as well, makes a short one
`slowing` (unknown), and memory that a garbage collector may return is no fault over a short window without a past,
unless it is much and its rate keeps up where that of a warm-up would fall (`no past`, a suspect).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvdiag.diagnosis.growth.growth_evidence import (
    HOUR_SECONDS,
    MINUTE_SECONDS,
    MINUTES_PER_HOUR,
    Assessment,
    GrowthEvidence,
    Series,
)
from kvdiag.diagnosis.growth.growth_limits import GrowthLimits
from kvdiag.diagnosis.growth.growth_windows import Minutes, ends, rises_of_fifths, slowing


def assess(series: Series, limits: GrowthLimits, served_since_seconds: float | None = None) -> Assessment:
    """Judge a series over all windows; a burst only where the engines have answered since before it began.

    Loading a model takes memory faster than any leak does, and answers no request.
    """
    if not series.times_seconds:
        return Assessment(seconds=0.0, windows=())
    minutes = Minutes.of(series, limits)
    count = len(minutes.medians)
    lengths = [round(hours * MINUTES_PER_HOUR) for hours in limits.window_hours]
    fitting = [length for length in lengths if length <= count]
    if fitting and count >= limits.whole_history_ratio * fitting[-1]:
        fitting.append(count)
    still = max(series.sizes_bytes) - min(series.sizes_bytes) < limits.min_gain_bytes
    # What never moved so much needs one look: for the rate that the longest window would have called.
    found = [minutes.judged(length, limits) for length in (fitting[-1:] if still else fitting)]
    windows = tuple(one for one in found if one is not None)
    work = None if still else _Work.of(series, limits)

    def less_work(then: Minutes) -> bool:
        """Whether growth until a moment may have slowed down only because the engines did less."""
        return work is not None and work.keeps_up(count - len(then.medians), limits)

    def slows(then: Minutes) -> bool:
        """Whether the history until a moment slows down by itself."""
        return slowing(then, limits) and not less_work(then)

    judged_by_work = None if any(one.status == "fault" for one in windows) else work
    if judged_by_work is not None:
        windows += judged_by_work.windows(fitting, limits)
    if any(one.grows for one in windows) and slows(minutes):
        windows = tuple(
            replace(one, status="unknown", reason="slowing") if _is_doubted(one, limits) else one for one in windows
        )
    if not still and not any(one.status == "fault" for one in windows):
        # That a history slows down, or ends, is known later, and doubts what it showed before.
        now = (slowing(minutes, limits) or ends(minutes, limits)) and not less_work(minutes)
        held = minutes.held(
            fitting,
            limits,
            lambda one, past: one.window_hours >= limits.slowing_hours or not (now or slows(past)),
        )
        if held is None and judged_by_work is not None and not now:
            held = judged_by_work.held(fitting, limits)
        windows += (held,) if held is not None else ()
    sure = ((one.status == "fault", one.window_hours * HOUR_SECONDS + one.age_seconds) for one in windows if one.grows)
    since_seconds = series.times_seconds[-1] - max(sure, default=(False, 0.0))[1]
    windows = tuple(replace(one, since_seconds=since_seconds) if one.grows else one for one in windows)
    burst = None
    length = round(limits.burst_hours * MINUTES_PER_HOUR)
    begin = series.times_seconds[-1] - length * MINUTE_SECONDS
    if not still and served_since_seconds is not None and served_since_seconds <= begin and count >= length:
        fast = minutes.judged(length, replace(limits, min_gain_bytes=limits.burst_gain_bytes))
        burst = replace(fast, since_seconds=begin) if fast is not None and fast.status == "fault" else None
    return Assessment(seconds=series.times_seconds[-1] - series.times_seconds[0], windows=windows, burst=burst)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The same samples on a clock that runs by the work done, as fast as the time on average.

    What each request leaves grows evenly there, by day and by night.
    """

    times: Sequence[float]
    clock: list[float]
    minutes: Minutes

    @classmethod
    def of(cls, series: Series, limits: GrowthLimits) -> _Work | None:
        """The clock of a series; `None` where the engines did no work, or report none."""
        work, times = series.work, series.times_seconds
        if work is None or work[-1] <= work[0]:
            return None
        pace = (times[-1] - times[0]) / (work[-1] - work[0])
        clock = [times[-1] - pace * (work[-1] - done) for done in work]
        by_work = replace(series, times_seconds=clock, shared={})
        return cls(times=times, clock=clock, minutes=Minutes.of(by_work, limits))

    def windows(self, lengths: Sequence[int], limits: GrowthLimits) -> tuple[GrowthEvidence, ...]:
        """The windows that grow by the work done, with the time that each took."""
        judged = (self.minutes.judged(length, limits) for length in lengths)
        return tuple(self._over_time(one, 0.0, limits) for one in judged if one is not None and one.grows)

    def held(self, lengths: Sequence[int], limits: GrowthLimits) -> GrowthEvidence | None:
        """The newest window that was a fault by work before, and whose growth has not been released since."""
        found = self.minutes.held(
            lengths, limits, lambda one, _: self._over_time(one, one.age_seconds, limits).status == "fault"
        )
        return None if found is None else self._over_time(found, found.age_seconds, limits)

    def keeps_up(self, back: int, limits: GrowthLimits) -> bool:
        """Whether so many minutes ago the last fifth of the work had left about as much as the first."""
        place = bisect_right(self.times, self.times[-1] - back * MINUTE_SECONDS) - 1
        then = self.minutes.until(round((self.clock[-1] - self.clock[max(place, 0)]) / MINUTE_SECONDS))
        rises = rises_of_fifths(then, limits)
        return rises is not None and rises[-1] >= limits.slowing_ratio * rises[0] > 0.0

    def _over_time(self, one: GrowthEvidence, age_seconds: float, limits: GrowthLimits) -> GrowthEvidence:
        """A window that ended so long ago on the clock, with the time that it took and its age in time."""
        times, clock, until = self.times, self.clock, self.clock[-1] - age_seconds
        first, last = bisect_left(clock, until - one.window_hours * HOUR_SECONDS), bisect_right(clock, until) - 1
        hours = max((times[last] - times[first]) / HOUR_SECONDS, MINUTE_SECONDS / HOUR_SECONDS)
        # A warm-up ends with the hours; over the work of an evening it may look steady.
        steps_alone = one.p_steps < limits.certain_steps_p
        lasts = hours >= limits.collected_steps_hours or not self.minutes.collected
        steady = (steps_alone and lasts) or (
            one.keeps_up and one.gain_bytes >= limits.steady_bytes and self._is_even(first, last, limits)
        )
        doubted = hours < limits.slowing_hours and one.gain_bytes < limits.collected_bytes and not steady
        status = "suspect" if doubted else one.status
        return replace(one.lasting(hours), status=status, age_seconds=times[-1] - times[last] if age_seconds else 0.0)

    def _is_even(self, first: int, last: int, limits: GrowthLimits) -> bool:
        """Whether the later half of an interval did about as much work as the earlier one, or more."""
        middle = bisect_left(self.times, (self.times[first] + self.times[last]) / 2.0)
        clock = self.clock
        return clock[last] - clock[middle] >= limits.steady_work_ratio * (clock[middle] - clock[first])


def _is_doubted(one: GrowthEvidence, limits: GrowthLimits) -> bool:
    """Whether growth may be a warm-up if the history slows down: over time, short, and not of steps that continue."""
    return one.grows and one.window_hours < limits.slowing_hours and not (one.over_work or one.by_count)
