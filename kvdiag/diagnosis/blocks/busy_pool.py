"""What the lowest samples of a pool say of a server that is never idle: leaked blocks are in use at every moment.

Nor is an idle interval observed where gauges move only when a request ends: they show its last step, which holds at
least what is leaked. There only samples count whose figures are new, and the lengths of requests are compared, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvdiag import stats
from kvdiag.diagnosis.growth.growth_evidence import HOUR_SECONDS
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.timeline_queries import held_blocks
from kvdiag.formatting import format_duration, format_number, plural
from kvdiag.model import Evidence, Facts, Finding, Timeline

Says = Literal["bounded", "flat", "rising", "open"]


@dataclass(frozen=True, slots=True)
class _Reading:
    """Blocks in use, requests running, and when; tokens and requests that the engines had counted until then."""

    blocks: int
    running: int
    at_seconds: float
    tokens: int | None
    finished: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyFloor:
    """The lowest samples of a pool over some hours.

    `lowest_blocks` is the lowest of the newest third, with `running` requests. `growth_per_hour` is that of the
    lowest samples at equal numbers of running requests, and with `equal_lengths` of requests of equal length;
    `visible_per_hour` is what could have been missed: in blocks.
    """

    hours: float
    lowest_blocks: int
    running: int
    growth_per_hour: float
    visible_per_hour: float
    equal_lengths: bool
    says: Says

    def finding(self, rule_id: str, facts: Facts) -> Finding:
        """The finding of a rule: ok as far as the minimum bounds a leak, else unknown or suspect."""
        total = sum(pool.usable_blocks for pool in facts.pools)
        unit, late = facts.capabilities.unit, facts.capabilities.on_completion
        lowest = f"{format_number(self.lowest_blocks)} of {plural(total, f'KV {unit}')}"
        evidence = (
            Evidence("window", round(self.hours, 2), "hours", "kvdiag"),
            Evidence("min_blocks_under_load", self.lowest_blocks, "blocks", "engine"),
            Evidence("running_at_min", self.running, "requests", "engine"),
            Evidence("min_blocks_growth_per_hour", self.growth_per_hour, "blocks", "engine"),
            Evidence("detection_limit_per_hour", self.visible_per_hour, "blocks", "computed"),
        )
        seen = "observed only when requests end" if late else "never idle"
        equal = "equal concurrency and request length" if self.equal_lengths else "equal concurrency"
        proof = "run `kvdiag run`" if late else "pause traffic for a moment"
        if self.says == "bounded":
            most = plural(self.lowest_blocks, f"{unit} is leaked", f"{unit}s are leaked")
            leaked = f"at most {most}" if self.lowest_blocks else f"no {unit} is leaked"
            return Finding(rule_id, "ok", f"{seen}, but usage fell to {lowest}: {leaked}", evidence)
        usage = f"{seen}; minimum usage at {equal}"
        if self.says == "flat":
            window, limit = format_duration(self.hours * HOUR_SECONDS), format_number(self.visible_per_hour)
            summary = f"{usage} did not rise over {window} (detection limit {limit} {unit}s/h)"
            return Finding(rule_id, "ok", summary, evidence)
        if self.says == "rising":
            rises = f"{usage} rises by {format_number(self.growth_per_hour)} {unit}s/h"
            if self.equal_lengths:
                return Finding(rule_id, "suspect", f"{rises}; `kvdiag run` shows whether requests leave any", evidence)
            return Finding(rule_id, "unknown", f"{rises}; {proof} to rule out longer requests", evidence)
        often = "" if late else " for two samples in a row"
        summary = f"{seen}{often}, and usage never fell below {lowest} and varies too much to show growth; {proof}"
        return Finding(rule_id, "unknown", summary)


def busy_floor(timeline: Timeline, facts: Facts, limits: Limits) -> BusyFloor | None:
    """What the lowest samples say; `None` where there are too few of them."""
    readings = _readings(timeline, facts, limits)
    if not readings:
        return None
    first, last = readings[0].at_seconds, readings[-1].at_seconds
    hours = (last - first) / HOUR_SECONDS
    if last - first < limits.busy.floor_seconds:
        return None
    count = limits.busy.floor_bins
    cells: list[_Reading | None] = [None] * count
    newest: list[_Reading | None] = [None] * count
    for reading in readings:
        place = min(int((reading.at_seconds - first) / (last - first) * count), count - 1)
        known = cells[place]
        cells[place] = reading if known is None else min(known, reading, key=_by_blocks)
        newest[place] = reading
    lows, running = (
        stats.interpolated([None if cell is None else figure(cell) for cell in cells], limits.growth.filled_ratio)
        for figure in (_blocks, _running)
    )
    lengths = _lengths(newest, limits) if facts.capabilities.on_completion else None
    slope = None
    if lows is not None and running is not None:
        slope = stats.slope(lows, [running] if lengths is None else [running, lengths])
    if slope is None:
        return None
    lowest = min(
        (cell for cell in cells[-round(limits.busy.floor_last_ratio * count) :] if cell is not None), key=_by_blocks
    )
    # Less than a block in all cannot show.
    visible = max(slope.per_step, 0.0) + max(limits.busy.floor_errors * slope.error_per_step, 1.0 / count)
    total = sum(pool.usable_blocks for pool in facts.pools)
    least, explained = 1.0, 0.0
    if lengths is not None:
        # A suspect needs a rise, and blocks in use that the requests of the lowest sample do not explain.
        least = limits.late_blocks_ratio * total
        recent = max(lengths[-round(limits.busy.floor_last_ratio * count) :])
        explained = lowest.running * recent / min(pool.block_tokens for pool in facts.pools)
    grown = slope.per_step * count
    says: Says = "open"
    if lowest.blocks <= limits.late_blocks_ratio * total:
        says = "bounded"
    elif slope.p_rising < limits.busy.floor_p and grown >= 1.0:
        says = "rising" if grown >= least and lowest.blocks - explained >= least else "open"
    elif visible * count <= limits.busy.floor_ratio * total:
        says = "flat"
    per_hour = count / hours
    return BusyFloor(
        hours=hours,
        lowest_blocks=lowest.blocks,
        running=lowest.running,
        growth_per_hour=slope.per_step * per_hour,
        visible_per_hour=visible * per_hour,
        equal_lengths=lengths is not None,
        says=says,
    )


def _by_blocks(reading: _Reading) -> tuple[int, int]:
    return reading.blocks, reading.running


def _blocks(reading: _Reading) -> float:
    return float(reading.blocks)


def _running(reading: _Reading) -> float:
    return float(reading.running)


def _lengths(newest: Sequence[_Reading | None], limits: Limits) -> list[float] | None:
    """Tokens of a request, on average, in each bin; `None` where the engines do not count them."""
    means = list[float | None]()
    tokens = finished = None
    for reading in newest:
        mean = None
        if reading is not None and reading.tokens is not None and reading.finished is not None:
            if tokens is not None and finished is not None and reading.finished > finished:
                mean = (reading.tokens - tokens) / (reading.finished - finished)
            tokens, finished = reading.tokens, reading.finished
        means.append(mean)
    return stats.interpolated(means, limits.growth.filled_ratio)


def _readings(timeline: Timeline, facts: Facts, limits: Limits) -> list[_Reading]:
    found: list[_Reading] = []
    due, by_ends = 0.0, facts.capabilities.on_completion
    shown: object = None
    for sample in timeline.samples:
        # A day has 86,400 samples: without counted ends of requests, those between the ones kept say nothing.
        if sample.engines is None or (sample.at_seconds < due and not by_ends) or sample.asleep:
            continue
        if by_ends:
            before, shown = shown, [(one.kv_usage_ratio, one.requests_finished_total) for one in sample.engines]
            if shown == before:
                continue
        if sample.at_seconds < due:
            continue
        held = held_blocks(sample, facts)
        running = sample.total("requests_running")
        if held is not None and running is not None:
            # Lengths count where the gauges move by the ends of requests alone.
            tokens, finished = (
                (sample.tokens_total, sample.total("requests_finished_total")) if by_ends else (None, None)
            )
            found.append(_Reading(held, running, sample.at_seconds, tokens, finished))
            due = sample.at_seconds + limits.growth.reading_seconds
    return found
