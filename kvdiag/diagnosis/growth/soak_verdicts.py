"""Render a soak's components: status and summary of each, and the findings that follow from them."""

from __future__ import annotations

from collections.abc import Sequence

from kvdiag.diagnosis.growth.components import MemoryComponent as Part
from kvdiag.diagnosis.growth.soak_memory import SoakedComponent
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import SEVERITY
from kvdiag.model import Evidence, Finding, Status

OWN = (Part.TORCH_LIVE, Part.TORCH_UNUSED, Part.OUTSIDE_TORCH, Part.SERVER)
"""Nobody but the server moves these, and no garbage collector."""


def verdict(component: SoakedComponent, limits: Limits) -> tuple[Status, str]:
    """Status and summary of one component."""
    found, kind = component.soaked, component.kind
    others = kind is Part.OTHERS
    subject = f"{component.who}: {kind.label}"
    each = kind.amount(found.per_request)
    if found.shape == "leak":
        dose = "; larger doses leave more" if follows_dose(component, limits) else ""
        status = _leak_status(component, limits)
        summary = f"{subject} grows {each} with each request and is not released{dose}"
        if kind is Part.HOST_ANONYMOUS and status == "suspect":
            summary += "; memory that is garbage-collected later would look the same: run a longer soak"
        return status, summary
    if found.shape == "content":
        summary = f"{subject} grows {each} with each request of new content and not with repeated ones"
        return "unknown" if others else "suspect", f"{summary}: content is cached; the cache's size limit decides"
    if found.shape == "background":
        idle = kind.amount(found.per_idle_cycle)
        summary = f"{subject} grows {idle} in an idle cycle and no more under load: not caused by requests"
        return "suspect" if kind in OWN else "ok" if others else "unknown", summary
    if found.shape == "ended":
        grown = kind.amount(found.first_touch + found.gain)
        return "ok", f"{subject} grew {grown} and stopped: warm-up, not a leak (detection limit {visible(component)})"
    if found.shape == "unsteady":
        summary = f"{subject} rose {kind.amount(found.gain)} over {found.load_cycles} load cycles, but not steadily"
        return ("ok", summary) if others else ("unknown", f"{summary}; run a longer soak")
    return "ok", f"{subject} is flat over {found.load_cycles} load cycles (detection limit {visible(component)})"


def visible(component: SoakedComponent) -> str:
    """The detection limit, by cycle and by request."""
    found, kind = component.soaked, component.kind
    return f"{kind.amount(found.visible_per_cycle)} per cycle, {kind.amount(found.visible_per_request)} per request"


def follows_dose(component: SoakedComponent, limits: Limits) -> bool:
    """Whether larger doses leave more behind: the best evidence that it is the requests that do."""
    p_value = component.soaked.dose_p
    return p_value is not None and p_value < limits.soak.dose_significance


def _leak_status(component: SoakedComponent, limits: Limits) -> Status:
    if component.kind is Part.OTHERS:
        return "unknown"
    # The cache may still come to its high-water mark, garbage to its collector.
    if component.kind is Part.TORCH_UNUSED:
        return "suspect"
    certain = component.kind is not Part.HOST_ANONYMOUS or component.soaked.blocks >= limits.soak.certain_blocks
    return "fault" if certain else "suspect"


def worst(components: Sequence[SoakedComponent], limits: Limits) -> SoakedComponent | None:
    """The component to report first."""
    return max(
        components,
        key=lambda one: (SEVERITY.index(verdict(one, limits)[0]), one.soaked.shape != "flat", one.soaked.per_cycle),
        default=None,
    )


def finding(verdict_id: str, components: Sequence[SoakedComponent], limits: Limits) -> Finding | None:
    """What a soak says of a leak, by the worst of its components; `None` where it read none."""
    component = worst(components, limits)
    if component is None:
        return None
    status, summary = verdict(component, limits)
    return Finding(id=verdict_id, status=status, summary=summary, evidence=evidence(component), holder=component.who)


def weightier(by_soak: Finding | None, otherwise: Finding) -> Finding:
    """The soak's finding, unless it is unknown and the other is not: it has seen more, and its own controls."""
    if by_soak is None or (by_soak.status == "unknown" and otherwise.status in ("suspect", "fault")):
        return otherwise
    return by_soak


def evidence(component: SoakedComponent) -> tuple[Evidence, ...]:
    """The figures that decided."""
    found, source, unit = component.soaked, component.kind.source, component.kind.unit
    return (
        Evidence("holder", component.who, "", source),
        Evidence("growth_per_load_cycle", found.per_cycle, unit, source),
        Evidence("growth_per_idle_cycle", found.per_idle_cycle, unit, source),
        Evidence("growth_per_request", found.per_request, unit, source),
        Evidence("first_touch_growth", found.first_touch, unit, source),
        Evidence("judged_load_cycles", found.load_cycles, "cycles", "kvdiag"),
        Evidence("judged_idle_cycles", found.idle_cycles, "cycles", "kvdiag"),
        Evidence("p_trend", found.trend_p, "ratio", "computed"),
        Evidence("p_load", found.load_p, "ratio", "computed"),
        Evidence("p_dose", found.dose_p, "ratio", "computed"),
        Evidence("detection_limit", found.visible_per_cycle, f"{unit} per cycle", "computed"),
        Evidence("detection_limit_per_request", found.visible_per_request, f"{unit} per request", "computed"),
    )
