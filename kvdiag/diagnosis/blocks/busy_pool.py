"""What the lowest samples of a pool say of a server that is never idle: leaked blocks are in use at every moment."""

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
    """The lowest samples of a pool over some hours.

    `lowest_blocks` is the lowest of the newest third, with `running` requests. `growth_per_hour` is that of the
    lowest samples at equal numbers of running requests, `visible_per_hour` what could have been missed: in blocks.
    """

    hours: float
    lowest_blocks: int
    running: int
    growth_per_hour: float
    visible_per_hour: float
    says: Says


def busy_floor(timeline: Timeline, facts: Facts, limits: Limits) -> BusyFloor | None:
    """What the lowest samples say; `None` where there are too few of them."""
    readings = _readings(timeline, facts, limits)
    if not readings:
        return None
    first, last = readings[0][2], readings[-1][2]
    hours = (last - first) / HOUR_SECONDS
    if last - first < limits.busy_floor_seconds:
        return None
    count = limits.busy_floor_bins
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
    lowest = min(cell for cell in cells[-round(limits.busy_floor_last_ratio * count) :] if cell is not None)
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


def _readings(timeline: Timeline, facts: Facts, limits: Limits) -> list[Reading]:
    found: list[Reading] = []
    due = 0.0
    for sample in timeline.samples:
        if sample.engines is None or sample.at_seconds < due or sample.asleep:
            continue
        held = held_blocks(sample, facts)
        running = sample.total("requests_running")
        if held is not None and running is not None:
            found.append((held, running, sample.at_seconds))
            due = sample.at_seconds + limits.growth.reading_seconds
    return found
