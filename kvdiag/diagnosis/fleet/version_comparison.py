"""Replicas of one version together, and one version against the one before: what no single replica can show.

A slope of one replica has to be tested against its own noise, which is autocorrelated; replicas are independent, so
that their slopes can be tested by signs and ranks alone. Growth has to pass, in this order: enough replicas, the rank
test, the least growth that counts, a later half that still grows, and the share of false calls among all components and
versions. On nine kinds of synthetic server memory six replicas and a day are enough for 20 MB/h, and none of the kinds
is called more often than the significance says.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Literal

from kvdiag import stats
from kvdiag.diagnosis.fleet.replica import ReplicaGrowth, ReplicaSummary, Version
from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.growth.growth_evidence import HOUR_SECONDS
from kvdiag.diagnosis.limits import Limits
from kvdiag.stats import Interval, rank_tests

Course = Literal["grows", "inconclusive", "ended", "small", "flat", "untested"]
"""Grows: by every gate. Inconclusive: it grows, but among so many tests by chance perhaps. Ended: it grew, and stopped.
Small: it grows, by less than counts. Flat: no common growth. Untested: too few replicas report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionGrowth:
    """How one component grows over the replicas of one version.

    `per_hour` is the median replica's growth with its bounds, `later_per_hour` that of the later half of their lives.
    `p_value` is the probability of such growth without a trend, `false_discovery_ratio` the share of false calls if
    this one is called; `hours` is the observed life of the median replica, `age_hours` the whole of it;
    `load_reported` is whether most replicas report their load.
    """

    version: Version
    component: MemoryComponent
    replicas: int
    course: Course
    hours: float
    age_hours: float
    per_hour: Interval
    later_per_hour: float
    p_value: float
    false_discovery_ratio: float
    load_reported: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChange:
    """How much faster one component grows in the newer of two versions, with its bounds.

    `p_value` is the probability of such a difference between equal versions; `faster`: every gate was passed.
    """

    older: Version
    newer: Version
    component: MemoryComponent
    older_replicas: int
    newer_replicas: int
    per_hour: Interval
    later_per_hour: float
    p_value: float
    false_discovery_ratio: float
    faster: bool


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
    dotted = re.search(r"\d{1,9}(\.\d{1,9})+", text)
    numbers = tuple(int(part) for part in dotted.group().split(".")) if dotted else ()
    # A version number is not comparable with an image's hash: those without numbers stand together.
    return (model, engine, bool(numbers), numbers, 0.0 if numbers else began, text)


def version_growths(versions: dict[Version, list[ReplicaSummary]], limits: Limits) -> tuple[VersionGrowth, ...]:
    """Every component that is reported, of every version; tested where enough replicas report it."""
    reported = [
        (version, component, [(one, growth) for one in each if (growth := one.growth(component)) is not None])
        for version, each in versions.items()
        for component in MemoryComponent
    ]
    reported = [one for one in reported if one[2]]
    slopes = [_slopes([growth for _, growth in each], limits)[0] for _, _, each in reported]
    # Of figures that are all 0 none could ever be called: they are no comparison (Tarone 1990, Gilbert 2005).
    able = [2.0 ** -sum(slope != 0.0 for slope in each) <= limits.fleet.significance for each in slopes]
    p_values = [rank_tests.signed_rank_tail(each) for each in slopes]
    ratios = _false_discovery_ratios(p_values, able)
    growths = []
    for (version, component, each), p_value, ratio in zip(reported, p_values, ratios, strict=True):
        whole, late = _slopes([growth for _, growth in each], limits)
        found = VersionGrowth(
            version=version,
            component=component,
            replicas=len(each),
            course="untested",
            hours=median(one.watched_seconds for one, _ in each) / HOUR_SECONDS,
            age_hours=median(one.age_seconds for one, _ in each) / HOUR_SECONDS,
            per_hour=rank_tests.median_interval(whole, limits.fleet.bounds_ratio),
            later_per_hour=median(late),
            p_value=p_value,
            false_discovery_ratio=ratio,
            load_reported=2 * sum(growth.load_reported for _, growth in each) > len(each),
        )
        growths.append(found if len(each) < limits.fleet.replicas else replace(found, course=_course(found, limits)))
    return tuple(growths)


def _false_discovery_ratios(p_values: Sequence[float], able: Sequence[bool]) -> list[float]:
    """The share of false calls at each of the comparisons that could be called at all; 1 at the others."""
    among = iter(rank_tests.discovery_ratios([p_value for p_value, one in zip(p_values, able, strict=True) if one]))
    return [next(among) if one else 1.0 for one in able]


def _slopes(each: Sequence[ReplicaGrowth], limits: Limits) -> tuple[list[float], list[float]]:
    """The replicas' growths, whole and later; their floors' where falls are the rule, which give back what rose.

    Levels that move either way do so by chance: of all replicas together as many rise as fall.
    """
    ups, downs = sum(one.jumps_up for one in each), sum(one.jumps_down for one in each)
    if stats.binomial_tail(downs, ups + downs) < limits.fleet.falls_significance:
        return [one.floor_per_hour for one in each], [one.later_floor_per_hour for one in each]
    return [one.per_hour for one in each], [one.later_per_hour for one in each]


def _least_per_hour(component: MemoryComponent, limits: Limits) -> float:
    return limits.fleet.min_blocks_per_hour if component.unit == "blocks" else limits.fleet.min_bytes_per_hour


def _continues(later_per_hour: float, per_hour: Interval, least: float, limits: Limits) -> bool:
    """Whether the later half still grows, by what counts and by a share of the whole."""
    return later_per_hour > max(least, limits.growth.later_ratio * per_hour.estimate)


def _course(growth: VersionGrowth, limits: Limits) -> Course:
    least = _least_per_hour(growth.component, limits)
    if growth.p_value >= limits.fleet.significance:
        return "flat"
    if growth.per_hour.estimate <= least:
        return "small"
    if not _continues(growth.later_per_hour, growth.per_hour, least, limits):
        return "ended"
    return "grows" if growth.false_discovery_ratio <= limits.fleet.discovery_ratio else "inconclusive"


def version_changes(versions: dict[Version, list[ReplicaSummary]], limits: Limits) -> tuple[VersionChange, ...]:
    """Each version against the one before it of the same model and engine, component by component."""
    pairs = []
    for older, newer in pairwise(versions):
        if (older.model, older.engine) != (newer.model, newer.engine) or not older.version or not newer.version:
            continue
        for component in MemoryComponent:
            before, after = (
                [growth for one in versions[version] if (growth := one.growth(component)) is not None]
                for version in (older, newer)
            )
            if min(len(before), len(after)) >= limits.fleet.replicas:
                pairs.append((older, newer, component, _slopes(before, limits), _slopes(after, limits)))
    p_values = [rank_tests.rank_sum_tail(after, before) for *_, (before, _), (after, _) in pairs]
    able = [len({*after, *before}) > 1 for *_, (before, _), (after, _) in pairs]
    ratios, changes = _false_discovery_ratios(p_values, able), []
    for (older, newer, component, old, new), p_value, ratio in zip(pairs, p_values, ratios, strict=True):
        shift = rank_tests.shift_interval(new[0], old[0], limits.fleet.bounds_ratio)
        later, least = median(new[1]) - median(old[1]), _least_per_hour(component, limits)
        called = p_value < limits.fleet.significance and ratio <= limits.fleet.discovery_ratio
        change = VersionChange(
            older=older,
            newer=newer,
            component=component,
            older_replicas=len(old[0]),
            newer_replicas=len(new[0]),
            per_hour=shift,
            later_per_hour=later,
            p_value=p_value,
            false_discovery_ratio=ratio,
            faster=called and shift.estimate > least and _continues(later, shift, least, limits),
        )
        changes.append(change)
    return tuple(changes)
