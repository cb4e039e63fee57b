"""Numbers in, numbers out: whether figures rise, lie above none, or above another group's, by their ranks alone.

No figure's distribution is assumed, and none of them can decide by its size. What makes the tests here strong is that
replicas do not depend on one another, which samples of one replica in a row do.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, combinations, zip_longest
from statistics import NormalDist, median

from kvdiag.stats import Interval

EXACT_COUNT = 30
"""Up to so many figures the distribution is counted out; beyond, the normal one is within 0.001 of it."""

EXACT_TREND = 12
"""Longest series without ties whose trend is tested exactly; Kendall's tables end at 10."""

MAX_DIFFERED = 400
"""Figures of a group whose differences to the other's are taken: 160,000 are sorted in a fifth of a second."""

NORMAL = NormalDist()


def rising(values: Sequence[float]) -> float:
    """The probability of so many rising pairs in a series whose order means nothing (Mann 1945, Kendall 1975).

    Ties shrink the variance; half a step between neighbouring scores (2) is taken off for continuity.
    """
    count = len(values)
    score = sum((later > earlier) - (later < earlier) for earlier, later in combinations(values, 2))
    groups = [size for size in Counter(values).values() if size > 1]
    if not groups and count <= EXACT_TREND:
        return _inversions_tail(count, score)
    variance = (
        count * (count - 1) * (2 * count + 5) - sum(size * (size - 1) * (2 * size + 5) for size in groups)
    ) / 18.0
    if variance <= 0.0:
        return 1.0
    return 1.0 - NORMAL.cdf((score - 1) / math.sqrt(variance))


def _inversions_tail(count: int, score: int) -> float:
    """The share of all orders of so many different values with at least this score."""
    pairs = count * (count - 1) // 2
    orders = [1]
    for size in range(2, count + 1):
        # A further value may stand before none to all of those before it (Knuth, TAOCP 3, 5.1.1).
        sums = list(accumulate(orders + [0] * (size - 1)))
        orders = [total - (sums[place - size] if place >= size else 0) for place, total in enumerate(sums)]
    # score = pairs - 2 x inversions
    most = (pairs - score) // 2
    return sum(orders[: most + 1]) / math.factorial(count)


def signed_rank_tail(values: Sequence[float]) -> float:
    """The probability of figures so far above 0 where either sign is as likely, one-sided (Wilcoxon 1945).

    A figure of 0 says nothing and is left out; equal sizes share their ranks.
    """
    nonzero = [value for value in values if value != 0.0]
    count = len(nonzero)
    if not nonzero:
        return 1.0
    ranks = _double_ranks([abs(value) for value in nonzero])
    reached = sum(rank for rank, value in zip(ranks, nonzero, strict=True) if value > 0.0)
    if count <= EXACT_COUNT:
        ways = [1]
        for rank in ranks:
            ways = _added(ways, [0] * rank + ways)
        return sum(ways[reached:]) / 2.0**count
    spread = math.sqrt(sum(rank * rank for rank in ranks)) / 2.0
    return 1.0 - NORMAL.cdf((reached - sum(ranks) / 2.0 - 1.0) / spread)


def rank_sum_tail(higher: Sequence[float], lower: Sequence[float]) -> float:
    """The probability of a group so far above another where they are alike, one-sided (Mann and Whitney 1947)."""
    first, count = len(higher), len(higher) + len(lower)
    if not higher or not lower:
        return 1.0
    ranks = _double_ranks([*higher, *lower])
    reached = sum(ranks[:first])
    if count <= EXACT_COUNT:
        # ways[taken][total]: how many choices of so many figures have ranks of that total.
        ways: list[list[int]] = [[1], *([] for _ in range(first))]
        for rank in ranks:
            for taken in range(first, 0, -1):
                if ways[taken - 1]:
                    ways[taken] = _added(ways[taken], [0] * rank + ways[taken - 1])
        return sum(ways[first][reached:]) / math.comb(count, first)
    average = sum(ranks) / count
    spread = sum((rank - average) ** 2 for rank in ranks) / (count - 1)
    error = math.sqrt(spread * first * len(lower) / count)
    return 1.0 - NORMAL.cdf((reached - first * average - 1.0) / error) if error > 0.0 else 1.0


def _added(one: list[int], other: list[int]) -> list[int]:
    """Two counts by total, together."""
    return [each + more for each, more in zip_longest(one, other, fillvalue=0)]


def _double_ranks(values: Sequence[float]) -> list[int]:
    """Twice the rank of each value, the lowest's being 1: ranks that equal values share are whole numbers so."""
    ranks, below = {}, 0
    for value, times in sorted(Counter(values).items()):
        ranks[value] = 2 * below + times + 1
        below += times
    return [ranks[value] for value in values]


def median_interval(values: Sequence[float], ratio: float) -> Interval:
    """The median, and the bounds between which that of all such figures lies with at least this probability.

    The bounds are figures of the sample (the sign test turned round); infinite where there are too few for any.
    """
    ordered, count = sorted(values), len(values)
    outside, out = (1.0 - ratio) / 2.0, 0
    # So many figures may lie outside on either side.
    if count > EXACT_COUNT:
        out = max(math.floor(count / 2.0 + NORMAL.inv_cdf(outside) * math.sqrt(count) / 2.0), 0)
    else:
        tail = 2.0**-count
        while tail <= outside:
            out += 1
            tail += math.comb(count, out) * 2.0**-count
    if out == 0:
        return Interval(low=-math.inf, estimate=median(ordered), high=math.inf)
    return Interval(low=ordered[out - 1], estimate=median(ordered), high=ordered[count - out])


def shift_interval(higher: Sequence[float], lower: Sequence[float], ratio: float) -> Interval:
    """By how much one group lies above another: the median of all differences, and its bounds (Hodges and Lehmann)."""
    differences = sorted(one - other for one in _thinned(higher) for other in _thinned(lower))
    pairs = len(differences)
    spread = math.sqrt((len(higher) + len(lower) + 1) / (12.0 * len(higher) * len(lower)))
    out = math.floor(pairs * (0.5 - NORMAL.inv_cdf((1.0 + ratio) / 2.0) * spread))
    if out <= 0:
        return Interval(low=-math.inf, estimate=median(differences), high=math.inf)
    return Interval(low=differences[out - 1], estimate=median(differences), high=differences[pairs - out])


def _thinned(values: Sequence[float]) -> list[float]:
    """The values in order, of a large group evenly spaced ones."""
    ordered = sorted(values)
    step = -(-len(ordered) // MAX_DIFFERED)
    return ordered[step // 2 :: step]


def discovery_ratios(chances: Sequence[float]) -> tuple[float, ...]:
    """For each test the share of false ones among all that are called if this one is (Benjamini and Hochberg 1995)."""
    count = len(chances)
    ratios, least = [1.0] * count, 1.0
    for above, place in enumerate(sorted(range(count), key=lambda place: chances[place], reverse=True)):
        least = ratios[place] = min(least, chances[place] * count / (count - above))
    return tuple(ratios)
