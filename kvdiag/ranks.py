"""Tests by ranks, for short series of unknown noise: does it rise (Mann-Kendall), is one sample larger (Mann-Whitney).

Numbers in, probabilities out, one-sided. Exact where that is cheap, since a dozen values are too few for a normal
approximation at 1 %; ties count by their midranks. Readings that depend on those before them break both tests: what is
tested here has to be differences of cycles, or floors far apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, combinations

EXACT_TREND = 12
"""Longest series without ties whose trend is tested exactly; Kendall's tables end at 10."""

EXACT_PAIRS = 120
"""Products of two samples' sizes up to which the rank sum's distribution is counted out (some 20 ms)."""


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
    return _normal_tail((score - 1) / math.sqrt(variance))


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


def larger(sample: Sequence[float], other: Sequence[float]) -> float:
    """The probability of a sample that lies so far above another of the same distribution (Mann and Whitney 1947).

    With ties the distribution is that of their midranks (Streitberg and Roehmel 1986 count it so); for larger samples
    the normal approximation with the ties' variance and a continuity correction (Lehmann 1975).
    """
    if not sample or not other:
        return 1.0
    ranks = _doubled_midranks((*sample, *other))
    own, size, count = sum(ranks[: len(sample)]), len(sample), len(ranks)
    if len(sample) * len(other) <= EXACT_PAIRS:
        return _rank_sum_tail(ranks, size, own)
    mean = size * (count + 1)
    ties = sum(each**3 - each for each in Counter(ranks).values())
    variance = size * len(other) / 12.0 * (count + 1 - ties / (count * (count - 1)))
    if variance <= 0.0:
        return 1.0
    return _normal_tail((own / 2.0 - mean / 2.0 - 0.5) / math.sqrt(variance))


def _doubled_midranks(values: Sequence[float]) -> list[int]:
    """Twice the mean rank of each value among all: whole numbers whatever the ties."""
    sizes = Counter(values)
    below = dict(zip(sorted(sizes), accumulate((sizes[each] for each in sorted(sizes)), initial=0), strict=False))
    return [2 * below[value] + sizes[value] + 1 for value in values]


def _rank_sum_tail(ranks: Sequence[int], size: int, least: int) -> float:
    """The share of all choices of `size` ranks whose sum is at least so much."""
    choices: list[Counter[int]] = [Counter() for _ in range(size + 1)]
    choices[0][0] = 1
    for place, rank in enumerate(ranks):
        for chosen in range(min(place + 1, size), 0, -1):
            for total, ways in choices[chosen - 1].items():
                choices[chosen][total + rank] += ways
    return sum(ways for total, ways in choices[size].items() if total >= least) / math.comb(len(ranks), size)


def _normal_tail(score: float) -> float:
    return 0.5 * math.erfc(score / math.sqrt(2.0))
