"""The verdicts on one version of a fleet: what the common growth of its replicas' memory components means.

Per component, in this order: too few replicas is `unknown`; growth of all replicas is `fault`, or `suspect` while
another explanation (a look-alike, a cache still warming up, rising load) is possible; growth faster than in an older
version is `suspect`; growth that multiple testing can explain is `unknown`; growth that ended, and none, are `ok`.
A growing total does not say which part grew, so the verdicts on its parts stay `unknown`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvdiag.diagnosis.fleet.comparison import VersionChange, VersionGrowth
from kvdiag.diagnosis.fleet.fleet_components import ALWAYS, BY_NAME, MISSING, Component, Unit
from kvdiag.diagnosis.fleet.replica import Version
from kvdiag.diagnosis.growth.attribution import UNDECIDED, likely_and_other
from kvdiag.diagnosis.growth.estimator import HOUR_SECONDS
from kvdiag.diagnosis.limits import Limits
from kvdiag.formatting import format_bytes
from kvdiag.model import Evidence, Finding, Status
from kvdiag.stats import Interval

FILLING = "a cache can warm up for 12 h; watch the replicas for a day to rule that out"
LOAD = "the replicas do not report their load, which may have risen too"


def findings(
    version: Version,
    replicas: int,
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
        component = BY_NAME[growth.component]
        finding = _finding(growth, component, changed.get(growth.component), limits)
        if component.by_nvml:
            likely, other = likely_and_other(version.engine)
            finding = replace(finding, id=likely)
            found.append(_hidden(other, finding))
        found.append(finding)
    reported = {finding.id for finding in found}
    return (
        *found,
        *(_not_reported(verdict, version, replicas, compared, limits) for verdict in ALWAYS if verdict not in reported),
    )


def _finding(growth: VersionGrowth, component: Component, change: VersionChange | None, limits: Limits) -> Finding:
    status, summary = _judged(growth, component, change, limits)
    return Finding(
        id=component.verdict,
        status=status,
        summary=summary,
        evidence=_evidence(growth, component, change),
    )


def _judged(
    growth: VersionGrowth, component: Component, change: VersionChange | None, limits: Limits
) -> tuple[Status, str]:
    faster = change is not None and change.faster
    who = f"{growth.version.title}, {_replicas(growth.replicas)}: {component.title}"
    rate = _rate(growth.per_hour, component.unit)
    more = "" if change is None or not faster else _more(change, component.unit)
    if growth.course == "untested":
        needed = f"{limits.fleet.replicas} are needed, {limits.fleet.preferred_replicas} are better"
        report = "reports" if growth.replicas == 1 else "report"
        enough = f"{_replicas(growth.replicas)} of {growth.version.title} {report} {component.title} for long enough"
        return "unknown", f"{enough}; {needed}"
    if growth.course == "grows":
        doubts = _doubts(growth, component, limits, faster=faster)
        grow = f"{who} keep growing, {rate}{more}"
        return ("suspect", f"{grow}; {doubts[0]}") if doubts else ("fault", f"{grow}, and are not released")
    if faster:
        return "suspect", f"{who} grow {rate}{more}; add replicas or watch longer to confirm a leak"
    if growth.course == "chance":
        needed = f"compare {max(limits.fleet.preferred_replicas, 2 * growth.replicas)} replicas"
        return "unknown", f"{who} grow {rate}, within the false-alarm rate of this many comparisons; {needed}"
    if growth.course == "ended":
        return "ok", f"{who} grew {rate} and stopped: warm-up or a cache that has filled, not a leak"
    return "ok", f"{who} show no common growth: {rate}"


def _doubts(growth: VersionGrowth, component: Component, limits: Limits, *, faster: bool) -> Sequence[str]:
    """Other explanations of the growth. A comparison with an older version rules out what affects both versions."""
    doubts = []
    if component.lookalike is not None and not (component.around and faster):
        doubts.append(component.lookalike)
    if growth.age_hours * HOUR_SECONDS < limits.fleet.certain_seconds and component.unit == "bytes":
        doubts.append(FILLING)
    if not growth.beside_load and not faster:
        doubts.append(LOAD)
    return doubts


def _hidden(verdict: str, finding: Finding) -> Finding:
    """A flat total rules out growth of its parts; a growing total does not show which part grows."""
    if finding.status == "ok":
        return Finding(id=verdict, status="ok", summary=finding.summary, evidence=finding.evidence)
    summary = finding.summary if finding.status == "unknown" else UNDECIDED
    return Finding(id=verdict, status="unknown", summary=summary)


def _not_reported(verdict: str, version: Version, replicas: int, compared: int, limits: Limits) -> Finding:
    summary = f"{version.title}: {MISSING[verdict]}"
    if compared < limits.fleet.replicas:
        hours = (limits.fleet.first_seconds + limits.fleet.least_seconds) / HOUR_SECONDS
        have = "has" if compared == 1 else "have"
        watched = f"{compared} of {_replicas(replicas)} of {version.title} {have} been watched for {hours:.0f} h"
        summary = f"{watched}; {limits.fleet.replicas} are needed, {limits.fleet.preferred_replicas} are better"
    return Finding(id=verdict, status="unknown", summary=summary)


def _replicas(count: int) -> str:
    return f"{count:,} replica{'' if count == 1 else 's'}"


def _rate(interval: Interval, unit: Unit) -> str:
    """A growth with its bounds: 18.9 MiB/h (17.1 to 20.4)."""
    middle = f"{amount(interval.middle, unit)}/h"
    if math.isinf(interval.low) or math.isinf(interval.high):
        return middle
    return f"{middle} ({amount(interval.low, unit)} to {amount(interval.high, unit)})"


def _more(change: VersionChange, unit: Unit) -> str:
    return f", {amount(change.per_hour.middle, unit)}/h more than in {change.older.version}"


def amount(value: float, unit: Unit) -> str:
    """Bytes or blocks in words."""
    return format_bytes(value) if unit == "bytes" else f"{value:,.3g} blocks"


def _evidence(growth: VersionGrowth, component: Component, change: VersionChange | None) -> tuple[Evidence, ...]:
    unit, source = component.unit, component.source
    figures = (
        Evidence("version", growth.version.title, "", "engine"),
        Evidence("model", growth.version.model, "", "engine"),
        Evidence("component", component.title, "", source),
        Evidence("replicas", growth.replicas, "replicas", "kvdiag"),
        Evidence("observed", growth.hours, "hours", "kvdiag"),
        Evidence("age", growth.age_hours, "hours", "kvdiag"),
        Evidence("growth_per_hour", growth.per_hour.middle, unit, source),
        Evidence("growth_per_hour_low", _finite(growth.per_hour.low), unit, "computed"),
        Evidence("growth_per_hour_high", _finite(growth.per_hour.high), unit, "computed"),
        Evidence("growth_per_hour_of_later_half", growth.later_per_hour, unit, source),
        Evidence("p_without_growth", growth.chance, "ratio", "computed"),
        Evidence("false_discoveries", growth.false_ratio, "ratio", "computed"),
        Evidence("load_reported", "yes" if growth.beside_load else "no", "", "engine"),
    )
    if change is None:
        return figures
    return (
        *figures,
        Evidence("compared_with", change.older.title, "", "engine"),
        Evidence("compared_with_replicas", change.older_replicas, "replicas", "kvdiag"),
        Evidence("growth_beyond_older", change.per_hour.middle, unit, source),
        Evidence("growth_beyond_older_low", _finite(change.per_hour.low), unit, "computed"),
        Evidence("growth_beyond_older_high", _finite(change.per_hour.high), unit, "computed"),
        Evidence("p_without_difference", change.chance, "ratio", "computed"),
        Evidence("false_discoveries_of_the_difference", change.false_ratio, "ratio", "computed"),
    )


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value
