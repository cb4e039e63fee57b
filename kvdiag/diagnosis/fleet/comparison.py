"""Replicas of one version together, and one version against the one before: what no single replica can show.

A slope of one replica has to be tested against its own noise, which remembers; replicas do not remember one another, so
that their slopes can be tested by signs and ranks alone. On nine kinds of synthetic server memory six replicas and a
day are enough for 20 MB/h, and none of the kinds is called more often than the significance says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from kvdiag import stats
from kvdiag.diagnosis.fleet.fleet_components import BY_NAME, COMPONENTS, Component
from kvdiag.diagnosis.fleet.replica import Growth, ReplicaSummary, Version
from kvdiag.diagnosis.growth.estimator import HOUR_SECONDS
from kvdiag.diagnosis.limits import Limits
from kvdiag.stats import Interval, rank_tests

Course = Literal["grows", "chance", "ended", "flat", "untested"]
"""Grows: on all gates. Chance: it grows, but among so many tests that may be chance. Ended: it grew, and does no more.
Flat: no growth that would count. Untested: too few replicas tell it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionGrowth:
    """How one component grows over the replicas of one version.

    `per_hour` is the middle replica's growth with its bounds, `later_per_hour` that of the later half of their lives.
    `chance` is that of such growth where there is none, `false_ratio` the share of false calls if this one is called;
    `hours` is what was seen of the middle replica's life, `age_hours` the whole of it; `beside_load` says whether the
    load of most was told.
    """

    version: Version
    component: str
    replicas: int
    course: Course
    hours: float
    age_hours: float
    per_hour: Interval
    later_per_hour: float
    chance: float
    false_ratio: float
    beside_load: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChange:
    """How much faster one component grows in the newer of two versions, with its bounds.

    `chance` is that of such a difference where there is none; `faster` says that every gate was passed.
    """

    older: Version
    newer: Version
    component: str
    older_replicas: int
    newer_replicas: int
    per_hour: Interval
    later_per_hour: float
    chance: float
    false_ratio: float
    faster: bool


def least_per_hour(component: Component, limits: Limits) -> float:
    """The growth from which a component counts, in its unit."""
    return limits.fleet.least_blocks_per_hour if component.unit == "blocks" else limits.fleet.least_bytes_per_hour


def by_version(summaries: Iterable[ReplicaSummary]) -> dict[Version, list[ReplicaSummary]]:
    """The replicas of each version; versions of one model from the oldest to the newest."""
    found: dict[Version, list[ReplicaSummary]] = {}
    for summary in summaries:
        found.setdefault(summary.version, []).append(summary)
    began = {version: median(one.began_seconds for one in each) for version, each in found.items()}
    return {version: found[version] for version in sorted(found, key=lambda one: _age(one, began[one]))}


def _age(version: Version, began: float) -> tuple[object, ...]:
    """Older versions first: by their numbers where they have them, else by when their replicas began."""
    model, engine, text = version.model or "", version.engine or "", version.version or ""
    dotted = re.search(r"\d+(\.\d+)+", text)
    numbers = tuple(int(part) for part in dotted.group().split(".")) if dotted else ()
    # Nobody's version number is compared with an image's hash: those without numbers stand together.
    return (model, engine, bool(numbers), numbers, 0.0 if numbers else began, text)


def version_growths(versions: dict[Version, list[ReplicaSummary]], limits: Limits) -> tuple[VersionGrowth, ...]:
    """Every component that is told, of every version; tested where enough replicas tell it."""
    told = [
        (version, component, [(one, growth) for one in each if (growth := one.growth(component.name)) is not None])
        for version, each in versions.items()
        for component in COMPONENTS
    ]
    told = [one for one in told if one[2]]
    slopes = [_slopes([growth for _, growth in each], limits)[0] for _, _, each in told]
    # Of figures that are all 0 none could ever be called: they are no comparison (Tarone 1990, Gilbert 2005).
    able = [2.0 ** -sum(slope != 0.0 for slope in each) <= limits.fleet.significance for each in slopes]
    chances = [rank_tests.signed_rank_tail(each) for each in slopes]
    ratios = _false_ratios(chances, able)
    return tuple(
        _version_growth(version, component, each, chance, ratio, limits)
        for (version, component, each), chance, ratio in zip(told, chances, ratios, strict=True)
    )


def _false_ratios(chances: Sequence[float], able: Sequence[bool]) -> list[float]:
    """The share of false calls at each of the comparisons that could be called at all; 1 at the others."""
    among = iter(rank_tests.discovery_ratios([chance for chance, one in zip(chances, able, strict=True) if one]))
    return [next(among) if one else 1.0 for one in able]


def _version_growth(
    version: Version,
    component: Component,
    each: Sequence[tuple[ReplicaSummary, Growth]],
    chance: float,
    ratio: float,
    limits: Limits,
) -> VersionGrowth:
    slopes, late = _slopes([growth for _, growth in each], limits)
    later = median(late)
    middle = rank_tests.median_interval(slopes, limits.fleet.bounds_ratio)
    return VersionGrowth(
        version=version,
        component=component.name,
        replicas=len(each),
        course="untested"
        if len(each) < limits.fleet.replicas
        else _course(middle, later, chance, ratio, component, limits),
        hours=median(one.watched_seconds for one, _ in each) / HOUR_SECONDS,
        age_hours=median(one.age_seconds for one, _ in each) / HOUR_SECONDS,
        per_hour=middle,
        later_per_hour=later,
        chance=chance,
        false_ratio=ratio,
        beside_load=2 * sum(growth.beside_load for _, growth in each) > len(each),
    )


def _slopes(each: Sequence[Growth], limits: Limits) -> tuple[list[float], list[float]]:
    """The replicas' growths, whole and later; their floors' where falls are the rule, which give back what rose.

    Levels that move either way do so by chance: of all replicas together as many rise as fall.
    """
    ups, downs = sum(one.jumps_up for one in each), sum(one.jumps_down for one in each)
    if stats.binomial_tail(downs, ups + downs) < limits.fleet.falls_significance:
        return [one.floor_per_hour for one in each], [one.later_floor_per_hour for one in each]
    return [one.per_hour for one in each], [one.later_per_hour for one in each]


def _course(
    middle: Interval, later: float, chance: float, ratio: float, component: Component, limits: Limits
) -> Course:
    least = least_per_hour(component, limits)
    if chance >= limits.fleet.significance or middle.middle <= least:
        return "flat"
    if later <= max(least, limits.growth.later_ratio * middle.middle):
        return "ended"
    return "grows" if ratio <= limits.fleet.discovery_ratio else "chance"


def version_changes(versions: dict[Version, list[ReplicaSummary]], limits: Limits) -> tuple[VersionChange, ...]:
    """Each version against the one before it of the same model and engine, component by component."""
    pairs = [
        (older, newer, component.name, before, after)
        for older, newer in pairwise(versions)
        if (older.model, older.engine) == (newer.model, newer.engine) and older.version and newer.version
        for component in COMPONENTS
        if min(
            len(before := _told(versions[older], component.name)), len(after := _told(versions[newer], component.name))
        )
        >= limits.fleet.replicas
    ]
    slopes = [(_slopes(after, limits)[0], _slopes(before, limits)[0]) for _, _, _, before, after in pairs]
    chances = [rank_tests.rank_sum_tail(after, before) for after, before in slopes]
    able = [len({*after, *before}) > 1 for after, before in slopes]
    return tuple(
        _version_change(*pair, chance, ratio, limits)
        for pair, chance, ratio in zip(pairs, chances, _false_ratios(chances, able), strict=True)
    )


def _told(each: Iterable[ReplicaSummary], component: str) -> list[Growth]:
    return [growth for one in each if (growth := one.growth(component)) is not None]


def _version_change(
    older: Version,
    newer: Version,
    component: str,
    before: Sequence[Growth],
    after: Sequence[Growth],
    chance: float,
    ratio: float,
    limits: Limits,
) -> VersionChange:
    slopes_after, late_after = _slopes(after, limits)
    slopes_before, late_before = _slopes(before, limits)
    shift = rank_tests.shift_interval(slopes_after, slopes_before, limits.fleet.bounds_ratio)
    later = median(late_after) - median(late_before)
    least = least_per_hour(BY_NAME[component], limits)
    still = later > max(least, limits.growth.later_ratio * shift.middle)
    return VersionChange(
        older=older,
        newer=newer,
        component=component,
        older_replicas=len(before),
        newer_replicas=len(after),
        per_hour=shift,
        later_per_hour=later,
        chance=chance,
        false_ratio=ratio,
        faster=chance < limits.fleet.significance
        and ratio <= limits.fleet.discovery_ratio
        and shift.middle > least
        and still,
    )
