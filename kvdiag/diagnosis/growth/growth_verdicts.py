"""Render a component's growth as a finding: status, summary, typed figures and the evidence of every gate.

The estimator knows bytes and time alone. Here its answers meet the room that is left: growth that would use it up even
if it were ending is certain, a burst counts only where it would fill the room within the hour, and growth of host
memory that a cache without a known size limit could explain stays a suspect until it exceeds what such a cache takes.
"""

import json
import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.growth.growth_evidence import HOUR_SECONDS, MINUTE_SECONDS, Assessment, GrowthEvidence, Reason
from kvdiag.diagnosis.growth.growth_limits import GrowthLimits
from kvdiag.diagnosis.growth.memory_series import MemoryOwner
from kvdiag.formatting import format_bytes, format_duration, format_holder, format_rate, plural
from kvdiag.model import Evidence, Finding, GrowthFigures, Status

Decisive = tuple[MemoryOwner, GrowthEvidence]
"""The owner whose growth decides, and that growth."""

_ORDER = ("none", "unknown", "suspect", "fault")


def too_short(assessed: Iterable[Assessment], what: str, limits: GrowthLimits) -> str:
    """What is missing where no window is full, and how to get it."""
    seconds = max((one.seconds for one in assessed), default=0.0)
    sampled = f"only {format_duration(seconds)}" if seconds >= MINUTE_SECONDS else "less than a minute"
    hours = limits.window_hours[0]
    rate = format_rate(limits.min_gain_bytes / hours)
    how = f"to detect growth of {rate} or more, sample {format_duration(hours * HOUR_SECONDS)} without gaps"
    return f"{what} was sampled for {sampled}; {how} (`kvdiag serve`), or run `kvdiag run --soak`"


def decisive(
    assessed: Mapping[MemoryOwner, Assessment], limits: GrowthLimits, room_bytes: Callable[[MemoryOwner], int | None]
) -> Decisive | None:
    """The owner that decides: the fastest leak, else what is undecided, else the largest gain."""
    found: list[Decisive] = []
    for owner, one in assessed.items():
        room = room_bytes(owner)
        if one.decides is not None:
            found.append((owner, _by_room(one.decides, room, limits)))
        if one.burst is not None:
            found.append((owner, _burst(one.burst, room, limits)))
    return max(
        found,
        key=lambda one: (_ORDER.index(one[1].status), one[1].bytes_per_second, one[1].gain_bytes),
        default=None,
    )


def _by_room(growth: GrowthEvidence, room_bytes: int | None, limits: GrowthLimits) -> GrowthEvidence:
    """Growth that slows down is a fault where the room ends before it does.

    What levels off exponentially, and has not ended, still has half a window at its later rate before it.
    """
    if growth.reason != "slowing" or room_bytes is None:
        return growth
    to_come = limits.still_to_come_ratio * growth.later_bytes_per_second * growth.window_hours * HOUR_SECONDS
    return replace(growth, status="fault", reason="grows") if room_bytes < to_come else growth


def _burst(burst: GrowthEvidence, room_bytes: int | None, limits: GrowthLimits) -> GrowthEvidence:
    """A burst counts where it would fill the room within the hour; elsewhere it is unknown until the hour is full."""
    left = None if room_bytes is None else burst.exhaustion_seconds(room_bytes, limits)
    if left is not None and left.estimate <= limits.burst_exhaustion_seconds:
        return burst
    return replace(burst, status="unknown", reason="recent")


def finding(
    verdict: str,
    found: Decisive,
    component: MemoryComponent,
    room_bytes: int | None,
    limits: GrowthLimits,
    *,
    who: str | None = None,
    extra: Iterable[Evidence] = (),
    cache_bytes: int = 0,
    grown_bytes: int = 0,
) -> Finding:
    """The finding of the owner that decides; `who` replaces its name, `extra` is what else was looked at.

    `cache_bytes` is what a cache whose size limit is not reported may take of it, `grown_bytes` what it holds beyond
    its first sample.
    """
    owner, growth = found
    name = who or owner.who
    status, summary = _judged(growth, f"{format_holder(name)}: {component.label}", limits.slowing_hours)
    left = growth.exhaustion_seconds(room_bytes, limits) if growth.grows and room_bytes is not None else None
    latest = None if left is None or math.isinf(left.high) else left.high
    if left is not None:
        low, until = format_duration(left.low), "unknown" if latest is None else format_duration(latest)
        between = "" if low == until else f" ({low} to {until})"
        summary = f"{summary}; memory is exhausted in {format_duration(left.estimate)}{between}"
    spread = limits.exhaustion_errors * growth.error_bytes_per_second
    figures = GrowthFigures(
        bytes_per_second=growth.bytes_per_second,
        low_bytes_per_second=max(growth.bytes_per_second - spread, 0.0),
        high_bytes_per_second=growth.bytes_per_second + spread,
        room_bytes=room_bytes,
        exhaustion_seconds=None if left is None else left.estimate,
        exhaustion_low_seconds=None if left is None else left.low,
        exhaustion_high_seconds=latest,
    )
    shown = (*_evidence(growth, name, component, figures), *extra)
    if status == "fault" and _may_fill_a_cache(figures, cache_bytes, grown_bytes, limits):
        status, full = "suspect", f"{format_bytes(grown_bytes)} so far, of up to {format_bytes(cache_bytes)}"
        summary = f"{summary}; a cache of unknown size limit would fill as steadily ({full})"
        shown += (
            Evidence("grown_since_first_sample", grown_bytes, "bytes", component.source),
            Evidence("cache_of_unknown_limit", cache_bytes, "bytes", "assumed"),
        )
    return Finding(verdict, status, summary, shown, holder=name, growth=figures, since_seconds=growth.since_seconds)


def _may_fill_a_cache(growth: GrowthFigures, cache_bytes: int, grown_bytes: int, limits: GrowthLimits) -> bool:
    """Whether steady growth may yet end at the size limit of a cache that nothing reports.

    By its shape it is a leak until then. It is none that grows more slowly than such caches fill, or has exceeded
    their limit. What leaves no room for the rest of it, or lasts for hours only, ends in the same way in either case.
    """
    if not cache_bytes or grown_bytes > limits.cache_passed_ratio * cache_bytes:
        return False
    if growth.bytes_per_second * limits.cache_fill_seconds < limits.cache_bytes:
        return False
    if growth.room_bytes is None or growth.exhaustion_seconds is None:
        return True
    fits = growth.room_bytes >= cache_bytes - grown_bytes
    return fits and growth.exhaustion_seconds >= limits.cache_urgent_seconds


_REASONS: Mapping[str, Mapping[Reason, str]] = json.loads(pkgutil.get_data(__package__, "growth_verdicts.json") or b"")


def _judged(growth: GrowthEvidence, subject: str, hours: float) -> tuple[Status, str]:
    window = format_duration(growth.window_hours * HOUR_SECONDS)
    gain = format_bytes(max(growth.gain_bytes, growth.floor_gain_bytes))
    rate = format_rate(growth.bytes_per_second * HOUR_SECONDS)
    if growth.grows:
        only_up = growth.steps_up >= 2 and not growth.steps_down  # noqa: PLR2004 - a plural
        steps = f" in {plural(growth.steps_up, 'step')} up, none down," if only_up else ""
        if growth.reason == "held":
            ago = format_duration(growth.age_seconds)
            return "fault", f"{subject} grew {rate}{steps} over {window} until {ago} ago and has not been released"
        if growth.status == "fault":
            return "fault", f"{subject} grows {rate}{steps} over {window} and is not released"
        doubt = "random drift or one-time loading" if growth.reason == "grows" else "garbage collection"
        return "suspect", f"{subject} grows {rate}{steps} over {window}; {doubt} cannot be ruled out yet"
    if growth.status == "unknown":
        window_seconds = growth.window_hours * HOUR_SECONDS
        later, longer = format_duration(window_seconds / 3.0), format_duration(2.0 * window_seconds)
        enough = format_duration(hours * HOUR_SECONDS)
        missing = _REASONS["undecided"][growth.reason].format(later=later, hours=enough, longer=longer)
        return "unknown", f"{subject} rose {gain} over {window}, {missing} would decide"
    if growth.reason == "flat":
        limit = format_rate(growth.detection_limit_bytes_per_second * HOUR_SECONDS)
        return "ok", f"{subject} is flat over {window} (detection limit {limit})"
    return "ok", f"{subject} {_REASONS['no_leak'][growth.reason].format(gain=gain, window=window)}"


def _evidence(
    growth: GrowthEvidence, who: str, component: MemoryComponent, figures: GrowthFigures
) -> tuple[Evidence, ...]:
    """The figure of every gate, and how long the room lasts where it is known and used up."""
    source = component.source
    rows = (
        ("holder", who, "holder", source),
        ("window", round(growth.window_hours, 2), "hours", "kvdiag"),
        ("decided_by", growth.reason, "", "computed"),
        ("load_removed", "yes" if growth.load_removed else "no", "", "engine"),
        ("judged_over", "work" if growth.over_work else "time", "", "computed"),
        ("growth_per_hour", growth.bytes_per_second * HOUR_SECONDS, "bytes per hour", source),
        ("growth_per_hour_of_later_half", growth.later_bytes_per_second * HOUR_SECONDS, "bytes per hour", source),
        ("growth_of_the_floor", growth.floor_gain_bytes, "bytes", source),
        ("slope_over_error", round(growth.strength, 1), "", "computed"),
        ("later_half_ratio", growth.later_ratio, "ratio", "computed"),
        ("later_half_keeps_up", "yes" if growth.keeps_up else "no", "", "computed"),
        ("p_drift", growth.p_drift, "p-value", "computed"),
        ("p_steps", growth.p_steps, "p-value", "computed"),
        ("beyond_past", None if growth.beyond_past is None else round(growth.beyond_past, 2), "times", "computed"),
        ("steps_up", growth.steps_up, "steps", source),
        ("steps_down", growth.steps_down, "steps", source),
        ("detection_limit", growth.detection_limit_bytes_per_second * HOUR_SECONDS, "bytes per hour", "computed"),
        ("time_since_growth", growth.age_seconds, "seconds", source),
        ("room", figures.room_bytes, "bytes", source),
        ("time_to_exhaustion_earliest", figures.exhaustion_low_seconds, "seconds", "computed"),
        ("time_to_exhaustion", figures.exhaustion_seconds, "seconds", "computed"),
        ("time_to_exhaustion_latest", figures.exhaustion_high_seconds, "seconds", "computed"),
    )
    # How long ago a window ended is evidence where it did.
    return tuple(Evidence(*row) for row in rows if growth.reason == "held" or row[0] != "time_since_growth")
