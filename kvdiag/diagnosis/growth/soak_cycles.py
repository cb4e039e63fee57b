"""A soak's cycles, and what one component did over them: whether it leaks, by which tests, and its detection limit.

A soak alternates load cycles and idle ones of the same length. Requests leak what load cycles add and idle ones do not;
growth in both is another process's or that of a task of the server's own. No test decides alone, because each of
them by itself calls some kinds of healthy memory a leak, up to every time (`tests/quality/bench/soak_power.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Literal

from kvdiag.diagnosis.limits import Limits
from kvdiag.stats import theil_sen
from kvdiag.stats.rank_tests import rank_sum_tail, rising

Shape = Literal["leak", "content", "background", "ended", "unsteady", "flat"]
"""Leak: every gate passed. Content: the same, but not where contents are repeated. Background: idle cycles grow, too.
Ended: it grew, ever less. Unsteady: a trend that a gate does not believe. Flat: no trend that would count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """One cycle: its requests (0 in an idle one), whether their contents were repeated, and what spoilt it."""

    requests: int
    repeated: bool = False
    problem: str | None = None

    @property
    def clean(self) -> bool:
        """Whether it may be judged."""
        return self.problem is None

    @property
    def fresh(self) -> bool:
        """Whether it is a clean load cycle of new content."""
        return self.clean and self.requests > 0 and not self.repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """One component over a soak's judged cycles, in its own unit (bytes, or blocks).

    `per_cycle` is the median slope between load cycles, idle ones among it; `per_idle_cycle` the mean step of an idle
    cycle. `dose_p` is the p-value of so much more growth with the largest dose than with the smallest. `bins` is how
    often the lowest sample of a bin of cycles could rise. `visible_per_cycle` is the detection limit.
    """

    shape: Shape
    load_cycles: int
    idle_cycles: int
    requests: int
    per_cycle: float
    per_idle_cycle: float
    per_request: float
    gain: float
    first_touch: float
    trend_p: float
    load_p: float
    dose_p: float | None
    bins: int
    visible_per_cycle: float

    @property
    def visible_per_request(self) -> float:
        """The detection limit per request."""
        return self.visible_per_cycle * self.load_cycles / max(self.requests, self.load_cycles)


@dataclass(frozen=True, slots=True)
class _Step:
    """What one clean cycle added, and the level that the clean cycles up to it add up to."""

    cycle: Cycle
    rise: float
    level: float


def judge(
    readings: Sequence[float | None], cycles: Sequence[Cycle], limits: Limits, *, least: float, noisy: bool = False
) -> Soaked | None:
    """What a component's samples after each cycle say; `None` where too few cycles can be judged.

    `least` is the growth per load cycle from which it counts. `noisy` components (host memory) have to pass their
    own noise, and the lowest samples of every few cycles have to rise, too.
    """
    steps = _steps(readings, cycles)
    fresh = [place for place, step in enumerate(steps) if step.cycle.fresh]
    warmup = max(limits.soak.warmup_cycles, int(len(fresh) * limits.soak.warmup_ratio))
    if len(fresh) < limits.soak.cycles:
        return None
    # Idle cycles count from the last warm-up cycle on, repeated contents not at all but in their own comparison.
    judged = [step for step in steps[fresh[warmup - 1] + 1 : fresh[-1] + 1] if not step.cycle.repeated]
    load = [step for step in judged if step.cycle.requests]
    idle = [step for step in judged if not step.cycle.requests]
    if len(idle) < limits.soak.idle_cycles:
        return None
    levels = [step.level for step in load]
    sizes = {step.cycle.requests for step in load}
    doses = {size: [step.rise for step in load if step.cycle.requests == size] for size in sizes}
    aside, noise = fmean(step.rise for step in idle), pstdev([step.rise for step in idle])
    least = max(least, limits.soak.host_deviations * noise / len(levels)) if noisy else least
    soaked = Soaked(
        shape="flat",
        load_cycles=len(load),
        idle_cycles=len(idle),
        requests=sum(step.cycle.requests for step in load),
        per_cycle=theil_sen(levels),
        per_idle_cycle=aside,
        per_request=sum(step.rise - aside for step in load) / sum(step.cycle.requests for step in load),
        gain=levels[-1] - levels[0],
        first_touch=levels[0],
        trend_p=rising(levels),
        load_p=rank_sum_tail([step.rise for step in load], [step.rise for step in idle]),
        dose_p=rank_sum_tail(doses[max(doses)], doses[min(doses)]) if len(doses) > 1 else None,
        bins=len(judged) // _bin_size(len(judged), limits),
        visible_per_cycle=max(limits.soak.visible_ratio * least, limits.soak.visible_deviations * noise),
    )
    return replace(soaked, shape=_shape(soaked, steps, judged, limits, least=least, noisy=noisy))


def _steps(readings: Sequence[float | None], cycles: Sequence[Cycle]) -> list[_Step]:
    level, steps = 0.0, []
    for (before, after), cycle in zip(pairwise(readings), cycles[1:], strict=True):
        if before is not None and after is not None and cycle.clean:
            level += after - before
            steps.append(_Step(cycle, after - before, level))
    return steps


def _shape(
    soaked: Soaked, steps: Sequence[_Step], judged: Sequence[_Step], limits: Limits, *, least: float, noisy: bool
) -> Shape:
    levels = [step.level for step in judged if step.cycle.requests]
    if soaked.trend_p >= limits.soak.significance or soaked.per_cycle < least:
        # Memory that was released after all was no first touch.
        stayed = soaked.first_touch + min(soaked.gain, 0.0)
        came_first = stayed >= limits.soak.first_touch_ratio * soaked.visible_per_cycle
        return "ended" if came_first and soaked.gain < limits.soak.steady_ratio * soaked.first_touch else "flat"
    half, third = len(levels) // 2, len(levels) // 3
    early, late = theil_sen(levels[: len(levels) - half]), theil_sen(levels[half:])
    if late < limits.soak.steady_ratio * early:
        return "ended" if late < max(least, limits.soak.ended_ratio * early) else "unsteady"
    if levels[-1] - levels[-1 - third] < limits.soak.steady_ratio * soaked.per_cycle * third:
        return "unsteady"
    if soaked.load_p >= limits.soak.load_significance:
        load_rise = fmean(step.rise for step in judged if step.cycle.requests)
        return "background" if soaked.per_idle_cycle >= limits.soak.background_ratio * load_rise else "unsteady"
    if noisy and not _floors_rise([step.level for step in judged], limits):
        return "unsteady"
    return "content" if _only_new(steps, judged, soaked, limits) else "leak"


def _floors_rise(levels: Sequence[float], limits: Limits) -> bool:
    """Whether the lowest samples of the bins rise, idle cycles' among them."""
    size = _bin_size(len(levels), limits)
    lows = [min(levels[max(end - size, 0) : end]) for end in range(len(levels), size // 2, -size)]
    return len(lows) >= limits.soak.min_bins and all(later > earlier for later, earlier in pairwise(lows))


def _bin_size(readings: int, limits: Limits) -> int:
    """Load cycles and idle ones; the longer the soak, the longer a collector's period that a bin holds."""
    return max(2 * limits.soak.bin_cycles, readings // limits.soak.max_bins)


def _only_new(steps: Sequence[_Step], judged: Sequence[_Step], soaked: Soaked, limits: Limits) -> bool:
    """Whether repeated contents leave next to nothing behind. The first such cycle brings them, and does not count."""
    repeats = [_beyond(step, soaked) for step in steps if step.cycle.repeated][1:]
    fresh = [_beyond(step, soaked) for step in judged if step.cycle.requests]
    if len(repeats) < limits.soak.min_repeats or fmean(repeats) >= limits.soak.content_ratio * fmean(fresh):
        return False
    return rank_sum_tail(fresh, repeats) < limits.soak.load_significance


def _beyond(step: _Step, soaked: Soaked) -> float:
    """What a cycle's requests left behind each, beyond what an idle cycle would have brought."""
    return (step.rise - soaked.per_idle_cycle) / step.cycle.requests
