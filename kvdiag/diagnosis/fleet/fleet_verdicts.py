"""The verdicts on one version of a fleet: what the common growth of its replicas' memory components means.

The growing component nearly determines the verdict, so each byte counts in one component only: the finest one that a
replica reports. Per component, in this order: too few replicas is `unknown`; growth of all replicas is `fault`, or
`suspect` while another explanation (a look-alike, a cache still warming up, rising load) is possible; growth faster
than in an older version is `suspect`; growth that multiple testing can explain is `unknown`; growth that ended, and
none, are `ok`. NVML's total does not show which part grew: its growth is the verdict that it mostly is with that
engine, and the verdict on the other part is `unknown`.
"""

import json
import math
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvdiag.diagnosis.fleet.replica import Version
from kvdiag.diagnosis.fleet.version_comparison import VersionChange, VersionGrowth
from kvdiag.diagnosis.growth.attribution import AGENT_FIRST, CULPRIT, UNDECIDED, likely_and_other
from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.growth.growth_evidence import HOUR_SECONDS
from kvdiag.diagnosis.limits import Limits
from kvdiag.formatting import format_duration, plural
from kvdiag.model import Evidence, Finding, Status
from kvdiag.stats import Interval

FILLING = "a cache can warm up for 12 h; watch the replicas for a day to rule that out"
LOAD = "the replicas do not report their load, which may have risen too"


@dataclass(frozen=True, slots=True)
class Meaning:
    """What growth of one component of all replicas means, all processes and GPUs of a replica together.

    `lookalike` is another explanation and how to rule it out; `common` where that would affect an older version as
    well. `by_nvml`: NVML cannot separate torch's memory; `verdict` is then that of engines without torch.
    """

    verdict: str
    lookalike: str | None = None
    common: bool = False
    by_nvml: bool = False


_TABLE = json.loads(pkgutil.get_data(__package__, "fleet_verdicts.json") or b"")
MEANINGS: Mapping[str, Meaning] = {component: Meaning(**row) for component, row in _TABLE["meanings"].items()}
MISSING: Mapping[str, str] = _TABLE["missing"]
"""Verdicts that every version gets, and what is missing where no replica reports a component of it."""


def findings(
    version: Version,
    compared: int,
    growths: Iterable[VersionGrowth],
    changes: Iterable[VersionChange],
    limits: Limits,
) -> tuple[Finding, ...]:
    """Every verdict on one version: also on components that no replica reports."""
    changed = {one.component: one for one in changes if one.newer == version}
    found: list[Finding] = []
    for growth in growths:
        if growth.version != version:
            continue
        meaning, change = MEANINGS[growth.component], changed.get(growth.component)
        status, summary = _judged(growth, meaning, change, limits)
        finding = Finding(meaning.verdict, status, summary, _evidence(growth, change))
        if meaning.by_nvml:
            likely, other = likely_and_other(version.engine)
            found.append(_hidden(other, finding))
            finding = replace(finding, id=likely)
            if status in ("fault", "suspect"):
                undecided = f"{summary}; culprit {CULPRIT}"
                finding = replace(finding, summary=undecided, or_id=other, likely_cause=CULPRIT, remedy=AGENT_FIRST)
        found.append(finding)
    reported = {finding.id for finding in found}
    found += [
        Finding(verdict, "unknown", _not_reported(missing, version, compared, limits))
        for verdict, missing in MISSING.items()
        if verdict not in reported
    ]
    return tuple(found)


def _judged(
    growth: VersionGrowth, meaning: Meaning, change: VersionChange | None, limits: Limits
) -> tuple[Status, str]:
    label, title = growth.component.label, growth.version.title
    replicas = plural(growth.replicas, "replica")
    needed = f"{limits.fleet.replicas} are needed, {limits.fleet.preferred_replicas} are better"
    if growth.course == "untested":
        return "unknown", f"{title}: {label} is reported for long enough by {replicas}; {needed}"
    grew = f"{title}, {replicas}: {label} grew {_rate(growth.per_hour, growth.component)}"
    faster = change is not None and change.faster
    if change is not None and faster:
        grew += f", {change.component.amount(change.per_hour.estimate)}/h more than in {change.older.version}"
    if growth.course == "grows":
        doubts = _doubts(growth, meaning, limits, faster=faster)
        return ("suspect", f"{grew}; {doubts[0]}") if doubts else ("fault", f"{grew}; nothing was released")
    if faster:
        return "suspect", f"{grew}; add replicas or watch longer to confirm a leak"
    if growth.course == "inconclusive":
        compare = f"compare {max(limits.fleet.preferred_replicas, 2 * growth.replicas)} replicas"
        return "unknown", f"{grew}, which may be a false alarm among this many comparisons; {compare}"
    if growth.course == "ended":
        return "ok", f"{grew} and stopped: warm-up or a cache that has filled, not a leak"
    return "ok", f"{title}, {replicas}: no common growth of {label} ({_rate(growth.per_hour, growth.component)})"


def _doubts(growth: VersionGrowth, meaning: Meaning, limits: Limits, *, faster: bool) -> Sequence[str]:
    """Other explanations of the growth. A comparison with an older version rules out what affects both versions."""
    doubts = []
    if meaning.lookalike is not None and not (meaning.common and faster):
        doubts.append(meaning.lookalike)
    if growth.age_hours * HOUR_SECONDS < limits.fleet.certain_seconds and growth.component.unit == "bytes":
        doubts.append(FILLING)
    if not growth.load_reported and not faster:
        doubts.append(LOAD)
    return doubts


def _hidden(verdict: str, finding: Finding) -> Finding:
    """A flat total rules out growth of its parts; a growing total does not show which part grows."""
    if finding.status == "ok":
        return replace(finding, id=verdict)
    return Finding(verdict, "unknown", finding.summary if finding.status == "unknown" else UNDECIDED)


def _not_reported(missing: str, version: Version, compared: int, limits: Limits) -> str:
    if compared >= limits.fleet.replicas:
        return f"{version.title}: {missing}"
    # The same sentence for each such version, so that all of them stand in one line.
    uptime = format_duration(limits.fleet.first_seconds + limits.fleet.min_seconds)
    fewer = f"fewer than {limits.fleet.replicas} replicas of a version have been watched for {uptime}"
    return f"{fewer}; add replicas or watch longer, {limits.fleet.preferred_replicas} are better"


def _rate(interval: Interval, component: MemoryComponent) -> str:
    """A growth with its bounds: 18.9 MiB/h (17.1 to 20.4 MiB/h)."""
    low, estimate, high = (component.amount(each) for each in (interval.low, interval.estimate, interval.high))
    unit = high.rpartition(" ")[2]
    return f"{estimate}/h ({low.removesuffix(f' {unit}')} to {high}/h)"


def _evidence(growth: VersionGrowth, change: VersionChange | None) -> tuple[Evidence, ...]:
    unit, source = f"{growth.component.unit} per hour", growth.component.source
    figures = (
        Evidence("version", growth.version.title, "", "engine"),
        Evidence("model", growth.version.model, "", "engine"),
        Evidence("component", growth.component.label, "", source),
        Evidence("replicas", growth.replicas, "replicas", "kvdiag"),
        Evidence("watched", growth.hours, "hours", "kvdiag"),
        Evidence("replica_age", growth.age_hours, "hours", "kvdiag"),
        *_interval("growth_per_hour", growth.per_hour, unit, source),
        Evidence("growth_per_hour_of_later_half", growth.later_per_hour, unit, source),
        Evidence("p_value", growth.p_value, "p-value", "computed"),
        Evidence("false_discovery_rate", growth.false_discovery_ratio, "ratio", "computed"),
        Evidence("load_reported", "yes" if growth.load_reported else "no", "", "engine"),
    )
    if change is None:
        return figures
    return (
        *figures,
        Evidence("compared_with", change.older.title, "", "engine"),
        Evidence("compared_with_replicas", change.older_replicas, "replicas", "kvdiag"),
        *_interval("growth_beyond_older", change.per_hour, unit, source),
        Evidence("p_value_of_difference", change.p_value, "p-value", "computed"),
        Evidence("false_discovery_rate_of_difference", change.false_discovery_ratio, "ratio", "computed"),
    )


def _interval(name: str, interval: Interval, unit: str, source: str) -> tuple[Evidence, ...]:
    bounds = (("low", interval.low), ("high", interval.high))
    return (
        Evidence(name, interval.estimate, unit, source),
        *(Evidence(f"{name}_{end}", None if math.isinf(at) else at, unit, "computed") for end, at in bounds),
    )
