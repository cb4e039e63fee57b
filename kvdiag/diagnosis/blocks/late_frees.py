"""What a pool shows over hours beside its idle floor: blocks released late, and a prefix cache whose hits collapse."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvdiag.diagnosis.growth.estimator import HOUR_SECONDS
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.timeline_queries import held_blocks
from kvdiag.model import Facts, Sample, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class LateFree:
    """Blocks that stayed in use for so long at least, while nothing ran and nothing waited."""

    seconds: float
    blocks: int


def late_holds(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[LateFree, ...]:
    """Every interval of idle samples with a noticeable part of the pool in use for longer than frees may take."""
    total = sum(pool.usable_blocks for pool in facts.pools)
    holds: list[LateFree] = []
    run: list[tuple[float, int]] = []
    for sample in (*timeline.samples, None):
        if sample is not None and sample.engines is None:
            continue
        held = None if sample is None else _held_idle(sample, facts)
        if sample is not None and held:
            if run and sample.at_seconds - run[-1][0] > limits.growth.reading_age_seconds:
                run = []
            run.append((sample.at_seconds, held))
            continue
        if run:
            hold = LateFree(seconds=run[-1][0] - run[0][0], blocks=min(blocks for _, blocks in run))
            if hold.seconds >= limits.late_blocks_seconds and hold.blocks >= limits.late_blocks_ratio * total:
                holds.append(hold)
        run = []
    return tuple(holds)


def _held_idle(sample: Sample, facts: Facts) -> int | None:
    """Blocks held in a reading of idle engines; `None` where they work, or do not tell."""
    # Most readings of a day are of a server that works, or that holds nothing.
    if not any(engine.kv_usage_ratio for engine in sample.engines or ()) or sample.engines_idle is not True:
        return None
    return None if sample.load is not None and sample.load.requests else held_blocks(sample, facts)


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
