"""Growth that comes in steps: an arena, a segment, or a batch of blocks at a time, and none of them returned.

A slope says little of three steps. Their number does: the level of a healthy server moves now and then, as often down
as up, so that so many steps within the time, all of them up, have a p-value. How often it moves is what limits say
until the series' own past shows it. A step with the highest load so far is an allocator's high-water mark and counts
for nothing, unless the growth exceeds what any of them takes.
"""

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate, pairwise

from kvdiag import stats
from kvdiag.diagnosis.growth.growth_evidence import MINUTES_PER_HOUR
from kvdiag.diagnosis.growth.growth_limits import GrowthLimits


def records(load: Sequence[float] | None, start: int, size: int, limits: GrowthLimits) -> frozenset[int]:
    """The bins of a window at which the load was the highest so far, and those next to them; `start` is its minute."""
    if not load:
        return frozenset()
    highest = list(accumulate(load, max))
    least = limits.record_ratio * highest[-1]
    edges = [max(start - 1, 0), *(min(end, len(load)) - 1 for end in range(start + size, len(load) + size, size))]
    rising = [place for place, (before, now) in enumerate(pairwise(edges)) if highest[now] - highest[before] > least]
    return frozenset(place + near for place in rising for near in (-1, 0, 1))


def p_steps(
    jumps: stats.Levelled,
    past: Sequence[float],
    high_water: AbstractSet[int],
    size: int,
    limits: GrowthLimits,
) -> float:
    """The p-value of the steps of a window, all of them up, by how often such a level moves; `size` is a bin's minutes.

    1 where any went down. Of the bins of `past` before the window, one move within the usual time is taken for granted.
    """
    own = [height for place, height in jumps.jumps if place not in high_water]
    if not own or jumps.downs:
        return 1.0
    is_large = min(own) > limits.large_step_bytes
    usual_hours = 1.0 / (limits.large_steps_per_hour if is_large else limits.steps_per_hour)
    moves = len(stats.without_jumps(past, limits.jump_deviations, limits.jump_min_bytes).jumps)
    per_hour = (1.0 + moves) / (usual_hours + len(past) * size / MINUTES_PER_HOUR)
    expected = per_hour * len(jumps.values) * size / MINUTES_PER_HOUR
    fewer = sum(math.exp(count * math.log(expected) - expected - math.lgamma(count + 1.0)) for count in range(len(own)))
    return max(1.0 - fewer, 0.0) * stats.binomial_tail(len(own), len(own))


def continues(jumps: stats.Levelled, limits: GrowthLimits) -> bool:
    """Whether steps up, enough to count, continue to the end of a window: none of them most of it, nor ever rarer."""
    places, heights = zip(*jumps.jumps, strict=True) if jumps.jumps else ((), ())
    if len(places) < limits.counted_steps or jumps.downs or max(heights) > limits.largest_step_ratio * sum(heights):
        return False
    gap = (places[-1] - places[0]) / (len(places) - 1)
    if len(jumps.values) - places[-1] > limits.step_patience * gap:
        return False
    half = len(heights) // 2
    smaller = sum(heights[-half:]) < limits.later_ratio * sum(heights[:half])
    rarer = limits.later_ratio * (places[-1] - places[-1 - half]) > places[half] - places[0]
    return not (smaller or rarer)


def pause_bins(jumps: stats.Levelled, limits: GrowthLimits) -> float:
    """How many bins after a window such steps may pause and still continue: by their mean interval and the longest."""
    places = [place for place, _ in jumps.jumps]
    longest = max(later - earlier for earlier, later in pairwise(places))
    mean = (places[-1] - places[0]) / (len(places) - 1)
    return max(limits.step_patience * mean, limits.longest_pause_ratio * longest) - (len(jumps.values) - places[-1])
