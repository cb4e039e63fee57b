"""The pool of a server that is never idle, by its lowest readings: what can have stayed held, and whether it grows.

Blocks that nobody returns are held at every moment: the lowest reading bounds them exactly, and where they grow, the
lowest readings beside equal numbers of running requests rise. That proves no leak, since requests may have become
longer, but where they do not rise there is none. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvdiag import stats
from kvdiag.diagnosis.growth.estimator import HOUR_SECONDS
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.timeline_queries import held_blocks
from kvdiag.model import Facts, Timeline

Reading = tuple[int, int, float]
"""Blocks in use, requests running, and when."""

Says = Literal["bounded", "flat", "rising", "open"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyFloor:
    """The lowest readings of a pool over some hours.

    `lowest_blocks` is the lowest of the newest third, beside `running` requests. `growth_per_hour` is that of the
    lowest readings at equal numbers of running requests, `visible_per_hour` what could have been missed: in blocks.
    """

    hours: float
    lowest_blocks: int
    running: int
    growth_per_hour: float
    visible_per_hour: float
    says: Says


def busy_floor(timeline: Timeline, facts: Facts, limits: Limits, since_seconds: float) -> BusyFloor | None:
    """What the lowest readings say; `None` where there are too few of them since a moment."""
    readings = _readings(timeline, facts, limits, since_seconds)
    if not readings:
        return None
    first, last = readings[0][2], readings[-1][2]
    hours = (last - first) / HOUR_SECONDS
    if last - first < limits.busy_floor_seconds:
        return None
    count = limits.busy_floor_cells
    cells: list[Reading | None] = [None] * count
    for reading in readings:
        place = min(int((reading[2] - first) / (last - first) * count), count - 1)
        known = cells[place]
        cells[place] = reading if known is None else min(known, reading)
    lows, running = (
        stats.interpolated([None if cell is None else float(cell[part]) for cell in cells], limits.growth.filled_ratio)
        for part in (0, 1)
    )
    slope = None if lows is None or running is None else stats.slope(lows, [running])
    if slope is None:
        return None
    lowest = min(cell for cell in cells[-count // 3 :] if cell is not None)
    # Less than a block in all cannot show.
    visible = max(slope.per_step, 0.0) + max(limits.busy_floor_errors * slope.error_per_step, 1.0 / count)
    total = sum(pool.usable_blocks for pool in facts.pools)
    says: Says = "open"
    if lowest[0] <= limits.late_blocks_ratio * total:
        says = "bounded"
    elif slope.p_rising < limits.busy_floor_p and slope.per_step * count >= 1.0:
        says = "rising"
    elif visible * count <= limits.busy_floor_ratio * total:
        says = "flat"
    per_hour = count / hours
    return BusyFloor(
        hours=hours,
        lowest_blocks=lowest[0],
        running=lowest[1],
        growth_per_hour=slope.per_step * per_hour,
        visible_per_hour=visible * per_hour,
        says=says,
    )


def _readings(timeline: Timeline, facts: Facts, limits: Limits, since_seconds: float) -> list[Reading]:
    found: list[Reading] = []
    due = since_seconds
    for sample in timeline.samples:
        if sample.engines is None or sample.at_seconds < due or any(engine.asleep for engine in sample.engines):
            continue
        held = held_blocks(sample, facts)
        running = [engine.requests_running for engine in sample.engines]
        if held is not None and None not in running:
            found.append((held, sum(count or 0 for count in running), sample.at_seconds))
            due = sample.at_seconds + limits.growth.reading_seconds
    return found
