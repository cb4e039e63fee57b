"""What the growth of a component over a version's replicas means, and what it could be besides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvdiag.diagnosis.fleet.comparison import VersionChange, VersionGrowth
from kvdiag.diagnosis.fleet.components import ALWAYS, BY_NAME, WANTED, Component, Unit
from kvdiag.diagnosis.fleet.replica import Version
from kvdiag.diagnosis.growth.attribution import UNDECIDED, likely_and_other
from kvdiag.diagnosis.growth.estimator import HOUR_SECONDS
from kvdiag.diagnosis.limits import Limits
from kvdiag.formatting import format_bytes
from kvdiag.model import Evidence, Finding, Status
from kvdiag.stats import Interval

FILLING = "a bounded cache fills for up to 12 h and would look the same; a day of age would tell"
LOAD = "the replicas' load was not told, and may have risen with it"


def findings(
    version: Version,
    replicas: int,
    compared: int,
    growths: Iterable[VersionGrowth],
    changes: Iterable[VersionChange],
    limits: Limits,
) -> tuple[Finding, ...]:
    """Every verdict on one version: of each component that its replicas tell, and of those that none tells."""
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
    told = {finding.id for finding in found}
    return (
        *found,
        *(_untold(verdict, version, replicas, compared, limits) for verdict in ALWAYS if verdict not in told),
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
        tell = "tells" if growth.replicas == 1 else "tell"
        told = f"{_replicas(growth.replicas)} of {growth.version.title} {tell} {component.title} for long enough"
        return "unknown", f"cannot tell: {told}; {needed}"
    if growth.course == "grows":
        doubts = _doubts(growth, component, limits, faster=faster)
        grow = f"{who} keep growing, {rate}{more}"
        return ("suspect", f"{grow}; {doubts[0]}") if doubts else ("fault", f"{grow}, and do not come back")
    if faster:
        return "suspect", f"{who} grow {rate}{more}; more replicas or a longer life would tell whether that is a leak"
    if growth.course == "chance":
        needed = f"{max(limits.fleet.preferred_replicas, 2 * growth.replicas)} replicas would decide"
        return "unknown", f"cannot tell: {who} grow {rate}, which may be chance among so many comparisons; {needed}"
    if growth.course == "ended":
        return "ok", f"{who} grew, {rate}, and have come to an end: warm-up or a cache that fills, not a leak"
    return "ok", f"{who} do not grow together: {rate}"


def _doubts(growth: VersionGrowth, component: Component, limits: Limits, *, faster: bool) -> Sequence[str]:
    """What else it may be. An older version beside it shows what is around both, and not what comes with age."""
    doubts = []
    if component.lookalike is not None and not (component.around and faster):
        doubts.append(component.lookalike)
    if growth.age_hours * HOUR_SECONDS < limits.fleet.certain_seconds and component.unit == "bytes":
        doubts.append(FILLING)
    if not growth.beside_load and not faster:
        doubts.append(LOAD)
    return doubts


def _hidden(verdict: str, finding: Finding) -> Finding:
    """A total that is flat leaves no room for a part that grows; one that grows does not tell which part."""
    if finding.status == "ok":
        return Finding(id=verdict, status="ok", summary=finding.summary, evidence=finding.evidence)
    reason = finding.summary if finding.status == "unknown" else f"cannot tell: {UNDECIDED}"
    return Finding(id=verdict, status="unknown", summary=reason)


def _untold(verdict: str, version: Version, replicas: int, compared: int, limits: Limits) -> Finding:
    summary = f"{version.title}: {WANTED[verdict]}"
    if compared < limits.fleet.replicas:
        hours = (limits.fleet.first_seconds + limits.fleet.least_seconds) / HOUR_SECONDS
        have = "has" if compared == 1 else "have"
        lived = f"{compared} of {_replicas(replicas)} of {version.title} {have} been watched for {hours:.0f} h"
        summary = f"{lived}; {limits.fleet.replicas} are needed, {limits.fleet.preferred_replicas} are better"
    return Finding(id=verdict, status="unknown", summary=f"cannot tell: {summary}")


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
        Evidence("watched", growth.hours, "hours", "kvdiag"),
        Evidence("age", growth.age_hours, "hours", "kvdiag"),
        Evidence("growth_per_hour", growth.per_hour.middle, unit, source),
        Evidence("growth_per_hour_low", _finite(growth.per_hour.low), unit, "computed"),
        Evidence("growth_per_hour_high", _finite(growth.per_hour.high), unit, "computed"),
        Evidence("growth_per_hour_of_later_half", growth.later_per_hour, unit, source),
        Evidence("chance_without_growth", growth.chance, "ratio", "computed"),
        Evidence("false_discoveries", growth.false_ratio, "ratio", "computed"),
        Evidence("load_told", "yes" if growth.beside_load else "no", "", "engine"),
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
        Evidence("chance_of_the_difference", change.chance, "ratio", "computed"),
        Evidence("false_discoveries_of_the_difference", change.false_ratio, "ratio", "computed"),
    )


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value
