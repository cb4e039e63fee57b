"""Whether prefix-cache hits fell to next to nothing while the pool had room: a cache tier behind it lost its blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvdiag.diagnosis.growth.estimator import HOUR_SECONDS
from kvdiag.diagnosis.limits import Limits
from kvdiag.model import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Collapse:
    """Prompt tokens that were looked up in the prefix cache and found, at first and at last, as shares."""

    first_ratio: float
    last_ratio: float
    queried_tokens: int
    hours: float


def hit_collapse(timeline: Timeline, limits: Limits) -> Collapse | None:
    """A share of hits that fell from piece to piece to next to nothing while the pool had room; else `None`.

    Pieces have equal numbers of looked-up tokens, so that quiet hours count for no more than their traffic.
    """
    times, queries, hits = _counted(timeline)
    if not times or queries[-1] < limits.hit_pieces * limits.hit_tokens:
        return None
    marks = [bisect_left(queries, queries[-1] * piece / limits.hit_pieces) for piece in range(limits.hit_pieces + 1)]
    shares = [
        (hits[end] - hits[begin]) / (queries[end] - queries[begin])
        for begin, end in pairwise(marks)
        if queries[end] > queries[begin]
    ]
    if len(shares) < limits.hit_pieces or times[-1] - times[0] < limits.hit_seconds:
        return None
    falls = all(later <= earlier + limits.hit_noise_ratio for earlier, later in pairwise(shares))
    if shares[0] < limits.hit_first_ratio or not falls or shares[-1] > limits.hit_left_ratio * shares[0]:
        return None
    fullest = max(
        (engine.kv_usage_ratio or 0.0 for one in timeline.samples for engine in one.engines or ()), default=0.0
    )
    if fullest >= limits.hit_full_ratio:
        return None  # a full pool evicts what it keeps: it is too small
    return Collapse(
        first_ratio=shares[0],
        last_ratio=shares[-1],
        queried_tokens=queries[-1],
        hours=(times[-1] - times[0]) / HOUR_SECONDS,
    )


def _counted(timeline: Timeline) -> tuple[Sequence[float], Sequence[int], Sequence[int]]:
    """Times, and tokens looked up and found since the first reading, all engines together, across restarts."""
    times: list[float] = []
    queries: list[int] = []
    hits: list[int] = []
    last: dict[str, tuple[int, int]] = {}
    asked = found = 0
    for sample in timeline.samples:
        for engine in sample.engines or ():
            if engine.prefix_queries_total is None or engine.prefix_hits_total is None:
                continue
            now = (engine.prefix_queries_total, engine.prefix_hits_total)
            before = last.get(engine.engine, now)
            if now[0] >= before[0] and now[1] >= before[1]:
                asked, found = asked + now[0] - before[0], found + now[1] - before[1]
            last[engine.engine] = now
        if sample.engines:
            times.append(sample.at_seconds)
            queries.append(asked)
            hits.append(found)
    return times, queries, hits
