"""Judge the memory of a server that keeps being restarted: lives too short for a window, taken together.

One life of half an hour is all warm-up to the estimator. Where three or more such lives climb to their ends, three
quarters of all and not ever more slowly, the same thing uses up the memory of each: a suspect, whose rate is the median
of the lives. Nothing here is certain, because nothing but the next restart ended the growth.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from kvdiag import stats
from kvdiag.diagnosis.growth.attribution import NON_TORCH, undecided
from kvdiag.diagnosis.growth.components import MemoryComponent as Part
from kvdiag.diagnosis.growth.growth_evidence import HOUR_SECONDS
from kvdiag.diagnosis.growth.growth_limits import GrowthLimits
from kvdiag.diagnosis.growth.memory_series import Points, memory_series
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.lives import Lifetime
from kvdiag.formatting import format_duration, format_rate
from kvdiag.model import Evidence, Finding, GrowthFigures

HOST = "leak.host"
BINS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class _Climb:
    """What a component of one life did after the life's first quarter; `later_ratio` is of its halves' rates."""

    who: str
    gain_bytes: float
    bytes_per_second: float
    later_ratio: float
    rises: bool


def with_short_lives(findings: tuple[Finding, ...], lives: Sequence[Lifetime], limits: Limits) -> tuple[Finding, ...]:
    """The findings of the present life, its leaks suspect where its short lives climb together.

    Args:
        findings: those of the present life.
        lives: all lives, the present one last.
        limits: `growth` has how many lives, and how much of a climb, count.

    Returns:
        The findings; those that call a leak already stay as they are.
    """
    short = [one for one in lives if _seconds(one) < limits.growth.short_life_seconds]
    if len(short) < limits.growth.short_lives:
        return findings
    pooled: dict[str, Finding] = {}
    for parts, verdict in (((Part.HOST_ANONYMOUS,), HOST), ((Part.SERVER, Part.DEVICE), NON_TORCH)):
        climbs = [climb for one in short if (climb := _climb(one, parts, limits)) is not None]
        found = _together(climbs, verdict, parts[-1], limits.growth)
        if found is not None:
            named = undecided(found, lives[-1].facts) if verdict == NON_TORCH else (found,)
            pooled |= {one.id: one for one in named}
    quiet = ("ok", "unknown")
    return tuple(pooled[one.id] if one.id in pooled and one.status in quiet else one for one in findings)


def _seconds(one: Lifetime) -> float:
    end = one.timeline.samples[-1].at_seconds if one.life.end_seconds is None and one.timeline.samples else None
    return (one.life.end_seconds or end or one.life.start_seconds) - one.life.start_seconds


def _climb(one: Lifetime, parts: Iterable[Part], limits: Limits) -> _Climb | None:
    """The component's owner that gained the most in a life; `None` where no part of it was read often enough."""
    series = memory_series(one.timeline, one.facts, limits)
    begin, seconds = one.life.start_seconds, _seconds(one)
    lines = next((lines for part in parts if (lines := series.points[part])), {})
    found = [
        climb
        for owner, line in lines.items()
        if (climb := _climb_of(line, begin + seconds / 4.0, begin + seconds, owner.who, limits.growth)) is not None
    ]
    return max(found, key=lambda climb: climb.gain_bytes, default=None)


def _climb_of(line: Points, begin: float, end: float, who: str, limits: GrowthLimits) -> _Climb | None:
    if end <= begin:
        return None
    inside = [(seconds, size) for seconds, size in zip(*line, strict=True) if begin <= seconds <= end]
    times, sizes = [seconds for seconds, _ in inside], [size for _, size in inside]
    cells = stats.binned(times, sizes, end + 1.0, (end + 1.0 - begin) / BINS, BINS)
    level = stats.interpolated([median(cell) if cell else None for cell in cells], limits.filled_ratio)
    if level is None:
        return None
    third, half = BINS // 3, BINS // 2
    thirds = [median(level[place * third : (place + 1) * third]) for place in range(3)]
    earlier, later = stats.theil_sen(level[:half]), stats.theil_sen(level[-half:])
    per_bin = stats.theil_sen(level)
    return _Climb(
        who=who,
        gain_bytes=per_bin * BINS,
        bytes_per_second=per_bin * BINS / (end - begin),
        later_ratio=later / earlier if earlier > 0.0 else 1.0 if later > 0.0 else 0.0,
        rises=thirds[0] < thirds[1] < thirds[2] and per_bin * BINS >= limits.burst_gain_bytes,
    )


def _together(climbs: Sequence[_Climb], verdict: str, part: Part, limits: GrowthLimits) -> Finding | None:
    climbing = [climb for climb in climbs if climb.rises]
    if len(climbing) < max(limits.short_lives, limits.climbing_ratio * len(climbs)):
        return None
    ratio = median(climb.later_ratio for climb in climbing)
    if ratio < limits.later_ratio:
        return None
    rate = median(climb.bytes_per_second for climb in climbing)
    who = climbing[-1].who
    summary = (
        f"{who}: {part.label} climbs {format_rate(rate * HOUR_SECONDS)} to the end of {len(climbing)} of {len(climbs)} "
        f"lives shorter than {format_duration(limits.short_life_seconds)}"
    )
    evidence = (
        Evidence("holder", who, "holder", part.source),
        Evidence("short_lives", len(climbs), "lives", "engine"),
        Evidence("growing_lives", len(climbing), "lives", part.source),
        Evidence("growth_per_hour", rate * HOUR_SECONDS, "bytes per hour", part.source),
        Evidence("growth_per_life", median(climb.gain_bytes for climb in climbing), "bytes", part.source),
        Evidence("later_half_ratio", ratio, "ratio", "computed"),
    )
    return Finding(verdict, "suspect", summary, evidence, holder=who, growth=GrowthFigures(bytes_per_second=rate))
