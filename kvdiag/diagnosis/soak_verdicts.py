"""What a soak's components mean: status and sentence of each, and the findings that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import number
from kvdiag.diagnosis.soak_components import Component, Kind
from kvdiag.diagnosis.timeline_queries import readable_bytes, whole_number
from kvdiag.model import Evidence, Finding, Status

SUBJECTS: Mapping[Kind, str] = {
    "kv": "KV blocks held at idle",
    "torch_live": "torch's live bytes",
    "torch_cache": "what torch reserves beside live bytes",
    "beside_torch": "memory beside torch",
    "process": "the server's memory",
    "device": "device memory (whose is not visible)",
    "others": "other processes' memory",
    "host": "anonymous host memory",
}
SOURCES: Mapping[Kind, str] = {"kv": "engine", "host": "host", "process": "nvml", "device": "nvml", "others": "nvml"}

OWN: tuple[Kind, ...] = ("torch_live", "torch_cache", "beside_torch", "process")
"""Nobody but the server moves these, and no collector of garbage."""

TEN = 10
"""From here on a figure needs no decimals."""

SEVERITY: tuple[Status, ...] = ("ok", "unknown", "suspect", "fault")


def verdict(component: Component, limits: Limits) -> tuple[Status, str]:
    """Status and sentence of one component."""
    found, kind = component.soaked, component.kind
    subject = f"{component.who}: {SUBJECTS[kind]}"
    cycles = f"{found.load_cycles} load cycles"
    each = amount(kind, found.per_request)
    if found.shape == "leak":
        dose = "; larger doses leave more" if follows_dose(component, limits) else ""
        status = _leak_status(component, limits)
        told = f"{subject} grows {each} with each request and does not return{dose}"
        if kind == "host" and status == "suspect":
            told += "; garbage that is collected later would look the same, a longer soak decides"
        return status, told
    if found.shape == "content":
        told = f"{subject} grows {each} with each request of new content and not with repeated ones"
        return "unknown" if kind == "others" else "suspect", f"{told}: contents are kept, and their bound decides"
    if found.shape == "background":
        idle = amount(kind, found.per_idle_cycle)
        told = f"{subject} grows {idle} in an idle cycle and no more under load: not caused by requests"
        status = "suspect" if kind in OWN else "ok" if kind == "others" else "unknown"
        return status, told if status != "unknown" else f"cannot tell: {told}"
    if found.shape == "ended":
        grown = amount(kind, found.first_touch + found.gain)
        return "ok", f"{subject} grew {grown} and stopped: warm-up, not a leak; {visible(component)} would show"
    if found.shape == "unsteady":
        told = f"{subject} rose {amount(kind, found.gain)} over {cycles}, but not steadily"
        return ("ok", told) if kind == "others" else ("unknown", f"cannot tell: {told}; a longer soak would decide")
    return "ok", f"{subject} is flat over {cycles}; {visible(component)} would show"


def visible(component: Component) -> str:
    """The smallest leak that would have shown, by cycle and by request."""
    found, kind = component.soaked, component.kind
    return f"{amount(kind, found.visible_per_cycle)} a cycle ({amount(kind, found.visible_per_request)} a request)"


def follows_dose(component: Component, limits: Limits) -> bool:
    """Whether larger doses leave more behind: the best evidence that it is the requests that do."""
    chance = component.soaked.dose_p
    return chance is not None and chance < limits.soak.dose_significance


def amount(kind: Kind, value: float) -> str:
    """A component's figure in its unit."""
    if kind == "kv":
        return f"{value:.2g} blocks" if value < TEN else f"{whole_number(value)} blocks"
    return readable_bytes(value)


def _leak_status(component: Component, limits: Limits) -> Status:
    if component.kind == "others":
        return "unknown"
    # The cache may still come to its high-water mark, garbage to its collector.
    if component.kind == "torch_cache":
        return "suspect"
    certain = component.kind != "host" or component.soaked.blocks >= limits.soak.certain_blocks
    return "fault" if certain else "suspect"


def worst(components: Sequence[Component], limits: Limits) -> Component | None:
    """The one to be told first."""
    return max(
        components,
        key=lambda one: (SEVERITY.index(verdict(one, limits)[0]), one.soaked.shape != "flat", one.soaked.per_cycle),
        default=None,
    )


def finding(verdict_id: str, components: Sequence[Component], limits: Limits) -> Finding | None:
    """What a soak says of a leak, by the worst of its components; `None` where it read none."""
    component = worst(components, limits)
    if component is None:
        return None
    status, summary = verdict(component, limits)
    return Finding(id=verdict_id, status=status, summary=summary, evidence=evidence(component))


def weightier(by_soak: Finding | None, otherwise: Finding) -> Finding:
    """The soak's finding, unless it could not tell and the other could: it has seen more, and its own controls."""
    if by_soak is None or (by_soak.status == "unknown" and otherwise.status in ("suspect", "fault")):
        return otherwise
    return by_soak


def evidence(component: Component) -> tuple[Evidence, ...]:
    """The figures that decided."""
    found, kind = component.soaked, component.kind
    source, unit = SOURCES.get(kind, "torch"), "blocks" if kind == "kv" else "bytes"
    return (
        number("holder", component.who, "", source),
        number("growth_per_load_cycle", found.per_cycle, unit, source),
        number("growth_per_idle_cycle", found.per_idle_cycle, unit, source),
        number("growth_per_request", found.per_request, unit, source),
        number("first_touch_growth", found.first_touch, unit, source),
        number("judged_load_cycles", found.load_cycles, "cycles", "kvdiag"),
        number("judged_idle_cycles", found.idle_cycles, "cycles", "kvdiag"),
        number("chance_without_trend", found.trend_p, "ratio", "computed"),
        number("chance_that_load_adds_nothing", found.load_p, "ratio", "computed"),
        number("chance_that_dose_adds_nothing", found.dose_p, "ratio", "computed"),
        number("smallest_visible_leak", found.visible_per_cycle, f"{unit} per cycle", "computed"),
        number("smallest_visible_leak_per_request", found.visible_per_request, f"{unit} per request", "computed"),
    )
