"""What the banks of a component say, as status, sentence and evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from kvdiag.diagnosis.banks import Watched
from kvdiag.diagnosis.history import Holder
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import number
from kvdiag.diagnosis.timeline_queries import readable_bytes
from kvdiag.diagnosis.window import HOUR_SECONDS, LEAKS, Trend, lasting
from kvdiag.model import Evidence, Finding, Status
from kvdiag.stats import Interval

MB = 10**6

MIDDLE = 0.5
"""A chance on the other side of which growth slows down rather than speeds up."""

HARDLY = 1e-6
"""A chance that nobody would believe in."""

Found = tuple[Holder, Trend]
"""The component that decides, by whose bytes it is."""


def longest_seconds(watched: Iterable[Watched]) -> float:
    """How long the longest series is."""
    return max((one.seconds for one in watched), default=0.0)


def too_short(watched: Iterable[Watched], what: str, limits: Limits) -> str:
    """What is missing for any bank, and what would decide."""
    shortest = limits.banks[0]
    minutes = longest_seconds(watched) / 60.0
    return (
        f"{what} was read over {minutes:.0f} min; {shortest.title} of readings without long gaps shows growth of "
        f"{shortest.least_bytes_per_hour / MB:.0f} MB/h, {limits.banks[-1].title} of "
        f"{limits.banks[-1].least_bytes_per_hour / MB:.0f} MB/h"
    )


def decisive(
    watched: Mapping[Holder, Watched], limits: Limits, room_bytes: Callable[[Holder], int | None]
) -> Found | None:
    """The component that decides, and its trend: the fastest leak, else what is open, else the largest gain.

    A burst decides where the room is gone before the shortest bank could tell. With more room it leaves open what
    the banks call healthy: they have hardly seen it.
    """
    trends = [(key, trend) for key, one in watched.items() if (trend := one.decides) is not None]
    bursts = [
        (key, one.burst if urgent else replace(one.burst, shape="unsteady"))
        for key, one in watched.items()
        if one.burst is not None
        and (
            (urgent := _is_urgent(one.burst, room_bytes(key), limits))
            or (one.at_record and one.trends and one.burst.certain)
        )
    ]
    order = ("flat", "ended", "event", "unsteady", "steps", "grows")
    return max(
        (*trends, *bursts),
        key=lambda one: (order.index(one[1].shape), one[1].certain, one[1].bytes_per_second, one[1].gain_bytes),
        default=None,
    )


def _is_urgent(burst: Trend, room_bytes: int | None, limits: Limits) -> bool:
    left = _left(burst, room_bytes, limits)
    return left is not None and left.middle <= limits.burst_exhaustion_seconds


def finding(
    verdict: str,
    found: Found,
    what: str,
    room_bytes: int | None,
    source: str,
    limits: Limits,
    extra: Iterable[Evidence] = (),
    cache_bytes: int = 0,
    grown_bytes: int = 0,
) -> Finding:
    """The finding of the component that decides; `what` are its bytes in words, `extra` is what else was looked at.

    `cache_bytes` is what a cache of a bound that was not told may take of it, `grown_bytes` what it holds beyond its
    first reading.
    """
    holder, trend = found
    status, summary = judged(trend, f"{holder.who}: {what}", room_bytes, limits)
    shown = (*evidence(trend, holder.who, room_bytes, source, limits), *extra)
    if status == "fault" and _may_fill_a_cache(trend, cache_bytes, grown_bytes, room_bytes, limits):
        status, full = "suspect", f"{readable_bytes(grown_bytes)} so far, of up to {readable_bytes(cache_bytes)}"
        summary = f"{summary}; a cache whose bound is not told would fill as steadily ({full})"
        shown = (
            *shown,
            number("grown_since_first_reading", grown_bytes, "bytes", source),
            number("cache_of_untold_bound", cache_bytes, "bytes", "assumed"),
        )
    return Finding(id=verdict, status=status, summary=summary, evidence=shown)


def _may_fill_a_cache(trend: Trend, cache_bytes: int, grown_bytes: int, room_bytes: int | None, limits: Limits) -> bool:
    """Whether steady growth may yet end at the bound of a cache that nobody told of.

    By its shape it is a leak until then. It is none that grows more slowly than such caches fill, or has gone through
    their bound. What leaves no room for the rest of it, or lasts for hours only, ends in the same way whatever it is.
    """
    if not cache_bytes or grown_bytes > limits.cap_passed_ratio * cache_bytes:
        return False
    if trend.bytes_per_second * limits.cache_fill_seconds < limits.cache_bytes:
        return False
    left = _left(trend, room_bytes, limits)
    if room_bytes is None or left is None:
        return True
    return room_bytes >= cache_bytes - grown_bytes and left.middle >= limits.cache_urgent_seconds


def excluded(name: str, watched: Watched | None, source: str) -> Evidence:
    """What another component grew by meanwhile: the figure that tells the verdict from the nearest other one."""
    trend = None if watched is None else watched.decides
    return number(name, None if trend is None else trend.bytes_per_second * HOUR_SECONDS, "bytes", source)


def judged(trend: Trend, subject: str, room_bytes: int | None, limits: Limits) -> tuple[Status, str]:
    """Status and sentence of a trend; `subject` is whose bytes, as the beginning of a sentence."""
    if _ends_too_late(trend, room_bytes, limits):
        trend = replace(trend, certain=True)
    status, sentence = _judged(trend, subject, limits)
    left = _left(trend, room_bytes, limits)
    if left is None:
        return status, sentence
    seconds, unit, digits = (HOUR_SECONDS, "h", 1) if left.middle >= 2.0 * HOUR_SECONDS else (60.0, "min", 0)
    latest = "unknown" if math.isinf(left.high) else f"{left.high / seconds:,.{digits}f}"
    earliest, middle = (f"{value / seconds:,.{digits}f}" for value in (left.low, left.middle))
    return status, f"{sentence}; room for {middle} {unit} ({earliest} to {latest})"


def _ends_too_late(trend: Trend, room_bytes: int | None, limits: Limits) -> bool:
    """Whether growth would use up the room even if it were coming to an end.

    A window's later half grows at half the earlier's rate at least, or growth has ended: what levels off so slowly has
    0.7 windows' worth of its rate before it.
    """
    if room_bytes is None or trend.shape != "grows" or not lasting(trend, limits):
        return False
    return room_bytes < limits.still_to_come_ratio * trend.later_bytes_per_second * trend.hours * HOUR_SECONDS


def _left(trend: Trend, room_bytes: int | None, limits: Limits) -> Interval | None:
    """How long the room lasts, of a trend that is called."""
    if room_bytes is None or trend.shape not in LEAKS:
        return None
    return trend.exhaustion_seconds(room_bytes, limits)


def _judged(trend: Trend, subject: str, limits: Limits) -> tuple[Status, str]:
    window, gain = f"{trend.hours:.3g} h", readable_bytes(trend.gain_bytes)
    rate = f"{readable_bytes(trend.bytes_per_second * HOUR_SECONDS)}/h"
    if trend.shape == "grows":
        if trend.certain:
            return "fault", f"{subject} keep growing, {rate} over {window}, and do not come back"
        return "suspect", f"{subject} grow {rate} over {window}; that they only wander is not excluded yet"
    if trend.shape == "steps":
        jumps = f"{trend.jumps_up} steps up and {trend.jumps_down} down"
        status: Status = "fault" if trend.certain else "suspect"
        return status, f"{subject} grow in {jumps} over {window}, {rate}"
    if trend.shape == "unsteady" and trend.bank == limits.burst:
        return (
            "unknown",
            f"cannot tell: {subject} rose {gain} within {trend.hours * 60.0:.0f} min; {_next(trend, limits)}",
        )
    if trend.shape == "unsteady":
        return "unknown", f"cannot tell: {subject} rose {gain} over {window}, but not steadily; {_next(trend, limits)}"
    if trend.shape == "event":
        jumps = f"in {trend.jumps_up} jumps: events" if trend.jumps_up else "at once: an event"
        return "ok", f"{subject} rose {gain} over {window} {jumps}, not a leak"
    if trend.shape == "ended":
        return "ok", f"{subject} rose {gain} over {window}, ever more slowly: warm-up or a cache that fills, not a leak"
    visible = f"{readable_bytes(trend.visible_bytes_per_second * HOUR_SECONDS)}/h"
    return "ok", f"{subject} are flat over {window}; {visible} would show"


def _next(trend: Trend, limits: Limits) -> str:
    longer = [bank for bank in limits.banks if bank.window_minutes > trend.bank.window_minutes]
    return f"{longer[0].title} of readings would decide" if longer else "the same load on an idle replica would decide"


def lookalike(trend: Trend) -> tuple[str, ...]:
    """What looks most like a growth that is called, and the figure that says it is not; empty where none is called."""
    if trend.shape not in LEAKS:
        return ()
    if trend.shape == "steps":
        return (f"level steps: {trend.jumps_up} of {trend.jumps_up + trend.jumps_down} go up, at random half would",)
    later = trend.later_bytes_per_second / trend.bytes_per_second if trend.bytes_per_second > 0.0 else 0.0
    if trend.p_steady < MIDDLE or later < 1.0:
        return (f"warm-up or a cache that fills: the later half still grows at {later:.0%} of the rate of the whole",)
    if trend.p_drift > HARDLY:
        return (f"memory that only wanders: its chance of so steady a drift is {trend.p_drift:.2g}",)
    claim = trend.bytes_per_second * trend.hours * HOUR_SECONDS * 2.0 / 3.0
    ratio = trend.gain_bytes / claim if claim > 0.0 else 0.0
    return (f"garbage or load that comes and goes: the lowest readings rose by {ratio:.0%} of what the slope says",)


def evidence(trend: Trend, who: str, room_bytes: int | None, source: str, limits: Limits) -> tuple[Evidence, ...]:
    """The figures that decided, and how long the room lasts where it is known and used up."""
    left = _left(trend, room_bytes, limits)
    times = (None, None, None) if left is None else (left.low, left.middle, left.high)
    return (
        number("holder", who, "", source),
        number("window", round(trend.hours, 2), "hours", "kvdiag"),
        number("read_while_idle", "only" if trend.idle_only else "and under load", "", "engine"),
        number("growth_per_hour", trend.bytes_per_second * HOUR_SECONDS, "bytes", source),
        number("growth_per_hour_of_later_half", trend.later_bytes_per_second * HOUR_SECONDS, "bytes", source),
        number("growth_of_the_floor", trend.gain_bytes, "bytes", source),
        number("chance_without_growth", trend.p_rising, "ratio", "computed"),
        number("chance_in_a_random_walk", trend.p_drift, "ratio", "computed"),
        number("wandering_of_a_healthy_server", round(trend.wanders, 2), "deviations", "computed"),
        number("chance_that_steady_growth_slows_so", trend.p_steady, "ratio", "computed"),
        *(number("nearest_lookalike", text, "", "computed") for text in lookalike(trend)),
        number("jumps_up", trend.jumps_up, "jumps", source),
        number("jumps_down", trend.jumps_down, "jumps", source),
        number("smallest_visible_growth", trend.visible_bytes_per_second * HOUR_SECONDS, "bytes per hour", "computed"),
        number("room", room_bytes, "bytes", source),
        *(
            number(name, None if value is None or math.isinf(value) else value, "seconds", "computed")
            for name, value in zip(
                ("time_to_exhaustion_earliest", "time_to_exhaustion", "time_to_exhaustion_latest"), times, strict=True
            )
        ),
    )
