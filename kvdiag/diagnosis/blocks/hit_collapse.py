"""Whether prefix-cache hits fell to next to nothing while the pool had room: a cache tier behind it lost its blocks.

In this order: enough tokens were looked up, over long enough; the hits' share falls from piece to piece of equally many
looked-up tokens; it began high enough and ended next to zero; and the pool was never full, since a full pool evicts by
itself. A change of traffic lowers the share too: repeating the same prompts rules it out.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from kvdiag.diagnosis.engine_columns import engine_columns
from kvdiag.diagnosis.growth.growth_evidence import HOUR_SECONDS
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
    return timeline.once(("hit_collapse", limits), lambda: _hit_collapse(timeline, limits))


def _hit_collapse(timeline: Timeline, limits: Limits) -> Collapse | None:
    columns = engine_columns(timeline)
    figures = zip(
        columns.times_seconds, columns.total("prefix_queries_total"), columns.total("prefix_hits_total"), strict=True
    )
    counted = [(seconds, asked, found) for seconds, asked, found in figures if asked is not None and found is not None]
    if not counted:
        return None
    times, queries, hits = zip(*counted, strict=True)
    asked = queries[-1] - queries[0]
    if asked < limits.busy.hit_pieces * limits.busy.hit_tokens:
        return None
    pieces = (queries[0] + asked * piece / limits.busy.hit_pieces for piece in range(limits.busy.hit_pieces + 1))
    marks = [bisect_left(queries, piece) for piece in pieces]
    shares = [
        (hits[end] - hits[begin]) / (queries[end] - queries[begin])
        for begin, end in pairwise(marks)
        if queries[end] > queries[begin]
    ]
    if len(shares) < limits.busy.hit_pieces or times[-1] - times[0] < limits.busy.hit_seconds:
        return None
    falls = all(later <= earlier + limits.busy.hit_noise_ratio for earlier, later in pairwise(shares))
    if shares[0] < limits.busy.hit_first_ratio or not falls or shares[-1] > limits.busy.hit_left_ratio * shares[0]:
        return None
    if max((usage or 0.0 for usage in columns.usages), default=0.0) >= limits.busy.hit_full_ratio:
        return None  # a full pool evicts what it keeps: it is too small
    return Collapse(
        first_ratio=shares[0],
        last_ratio=shares[-1],
        queried_tokens=asked,
        hours=(times[-1] - times[0]) / HOUR_SECONDS,
    )
