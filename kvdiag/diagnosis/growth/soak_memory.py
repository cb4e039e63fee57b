"""What a timeline shows of a soak: its cycles, each component of the server's memory over them, and the findings.

In this order:

1. Cycles. One counts if nothing disturbed it: it is complete, no request failed, no other client's tokens or requests
   were counted, and the engine became idle. Too few of them: not judged.
2. Samples. One for each component and cycle, from the idle interval after it, where the requests' own memory is freed.
   A device whose processes are not listed throughout is judged as a whole.
3. `soak_cycles.judge` gives the shape of each component's series over load, idle and repeated cycles.
4. `verdict` makes a status of shape and component: the same growth is a fault in torch's live memory, a suspect in its
   cache, or on the host while a short soak cannot rule out garbage, and unknown where it is another process's.

The worst component gives the finding of a leak rule. It outweighs the equal cycles of a step, which are fewer and have
no idle ones, unless it is unknown and they are not (`weightier`).
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvdiag.diagnosis.blocks.step_accounting import NOT_RUN, other_tokens
from kvdiag.diagnosis.growth.components import MemoryComponent as Part
from kvdiag.diagnosis.growth.components import torch_components
from kvdiag.diagnosis.growth.host_caches import SizeLimit, by_limit, size_limit
from kvdiag.diagnosis.growth.soak_cycles import Cycle, Soaked, judge
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import SEVERITY
from kvdiag.diagnosis.timeline_queries import IdleFloor, floor_within, server_bytes, server_devices, server_uuids
from kvdiag.formatting import format_holder, plural
from kvdiag.model import Evidence, Facts, Finding, Span, Status, Timeline

SOAK, SOAK_WARMUP = "soak", "soak_warmup"

ORDER: tuple[Part, ...] = (
    Part.KV_HELD_IDLE,
    Part.TORCH_LIVE,
    Part.TORCH_UNUSED,
    Part.OUTSIDE_TORCH,
    Part.SERVER,
    Part.DEVICE,
    Part.OTHERS,
    Part.HOST_ANONYMOUS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakedComponent:
    """One component, whose it is in words, and what the cycles say of it."""

    kind: Part
    who: str
    soaked: Soaked
    caches: SizeLimit | None = None
    """What a process's caches may take on the host; `None` where it has none, or this is no host memory."""
    grown_bytes: int = 0
    """What it holds beyond the first sample of all; only where `caches` are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """A soak: its cycles, why it cannot be judged (`None` where it can), its components in a fixed order."""

    cycles: tuple[Cycle, ...]
    problem: str | None
    components: tuple[SoakedComponent, ...] = ()
    blocks_kept: int | None = None
    """KV blocks held after the last cycle beyond those after the first; `None` where they are not reported."""

    @property
    def requests(self) -> int:
        """Requests of all clean cycles."""
        return sum(cycle.requests for cycle in self.cycles if cycle.clean)

    def of(self, *kinds: Part) -> tuple[SoakedComponent, ...]:
        """The components of some kinds."""
        return tuple(one for one in self.components if one.kind in kinds)


def soaked(timeline: Timeline, facts: Facts, limits: Limits) -> Soak:
    """What a timeline's soak shows; no cycle and no component where there was none."""
    spans = timeline.spans(SOAK)
    if not spans:
        return Soak(cycles=(), problem=NOT_RUN)
    floors = [floor_within(timeline, one.release_seconds, one.end_seconds, facts, limits) for one in spans]
    cycles = tuple(
        Cycle(
            requests=0 if span.workload is None else span.workload.requests,
            repeated=span.workload is not None and span.workload.repeated,
            problem=disturbance(timeline, span, facts)
            or (None if floor is not None else "the engine did not become idle"),
        )
        for span, floor in zip(spans, floors, strict=True)
    )
    fresh = sum(cycle.fresh for cycle in cycles)
    if fresh < limits.soak.cycles:
        few = f"{fresh} load cycles of new content can be judged, {limits.soak.cycles} are needed"
        return Soak(cycles=cycles, problem=f"{few}{_why(cycles)}")
    readings = _readings(timeline, facts, spans, floors)
    components = []
    for (kind, who), series in sorted(readings.items(), key=lambda one: (ORDER.index(one[0][0]), one[0][1])):
        found = judge(series, cycles, limits, least=_least(kind, limits), noisy=kind is Part.HOST_ANONYMOUS)
        if found is not None:
            caches = size_limit(who, facts) if kind is Part.HOST_ANONYMOUS else None
            grown = 0 if caches is None else _grown_bytes(timeline, who)
            components.append(SoakedComponent(kind=kind, who=who, soaked=found, caches=caches, grown_bytes=grown))
    problem = None if components else f"too few load and idle cycles were followed by a sample{_why(cycles)}"
    held = [floor.blocks for floor in floors if floor is not None and floor.blocks is not None]
    kept = held[-1] - held[0] if held and facts.capabilities.returns else None
    return Soak(cycles=cycles, problem=problem, components=tuple(components), blocks_kept=kept)


def disturbance(timeline: Timeline, span: Span, facts: Facts) -> str | None:
    """Why a cycle shows nothing of its own requests, in a clause; `None` where it does."""
    outcome = span.outcome
    if not span.complete:
        return "the cycle was cut short"
    if outcome is not None and outcome.failed:
        reason = outcome.errors[0] if outcome.errors else "no reason given"
        return f"requests failed: {reason}"
    ours = 0 if span.workload is None else span.workload.requests
    # One more is the small request that makes the gauges move.
    ours += facts.capabilities.on_completion if ours else 0
    seen = timeline.between(span.begin_seconds, span.end_seconds or math.inf)
    if other_tokens(timeline, span) or max((sample.open_requests for sample in seen), default=0) > ours:
        return "other traffic"
    return None


def _why(cycles: Sequence[Cycle]) -> str:
    """What disturbed most of the cycles, as the end of a sentence."""
    reasons = Counter(cycle.problem for cycle in cycles if cycle.problem is not None).most_common(1)
    return f": {reasons[0][0]} (in {reasons[0][1]} of {len(cycles)} cycles)" if reasons else "; a longer soak has more"


def _least(kind: Part, limits: Limits) -> float:
    if kind is Part.KV_HELD_IDLE:
        return 0.0
    if kind is Part.HOST_ANONYMOUS:
        return limits.soak.host_bytes
    return limits.torch_quantum_bytes if kind is Part.TORCH_LIVE else limits.soak.device_bytes


Readings = dict[tuple[Part, str], list[float | None]]


def _readings(timeline: Timeline, facts: Facts, spans: Sequence[Span], floors: Sequence[IdleFloor | None]) -> Readings:
    """Every component's sample after each cycle, `None` where it was not read."""
    own = server_uuids(timeline, facts)
    readings: Readings = {}
    for place, (span, floor) in enumerate(zip(spans, floors, strict=True)):
        for part, who, value in (*_of_floor(floor, facts, own), *_of_host(timeline, span)):
            readings.setdefault((part, who), [None] * len(spans))[place] = value
    # Whose a device's bytes are has to be reported throughout.
    for who in [who for part, who in readings if part is Part.SERVER]:
        server, device = readings[Part.SERVER, who], readings[Part.DEVICE, who]
        partly = any(mine is None and whole is not None for mine, whole in zip(server, device, strict=True))
        for part in (Part.SERVER, Part.OTHERS) if partly else (Part.DEVICE,):
            readings.pop((part, who), None)
    return readings


def _of_floor(floor: IdleFloor | None, facts: Facts, own: frozenset[str]) -> Iterator[tuple[Part, str, float]]:
    if floor is None:
        return
    if floor.blocks is not None:
        yield Part.KV_HELD_IDLE, "the pool", floor.blocks
    for each in floor.allocators or ():
        if each.may_be_of(facts.server_pids):
            yield from ((part, each.who, size) for part, size in torch_components(each) if part in ORDER)
    for device in server_devices(floor.devices, own):
        if device.memory is not None:
            who, used, mine = device.who, device.memory.used_bytes, server_bytes(device, facts.server_pids)
            yield Part.DEVICE, who, used
            if mine is not None:
                yield Part.SERVER, who, mine
                yield Part.OTHERS, who, used - mine


def _of_host(timeline: Timeline, span: Span) -> Iterator[tuple[Part, str, float]]:
    if span.release_seconds is None or span.end_seconds is None:
        return
    within = timeline.between(span.release_seconds, span.end_seconds)
    for process in next((sample.host for sample in reversed(within) if sample.host), ()):
        if process.anonymous_bytes is not None:
            yield Part.HOST_ANONYMOUS, process.who, process.anonymous_bytes


def _grown_bytes(timeline: Timeline, who: str) -> int:
    processes = (process for sample in timeline.samples for process in sample.host or () if process.who == who)
    sizes = [one.anonymous_bytes for one in processes if one.anonymous_bytes is not None]
    return max(sizes[-1] - sizes[0], 0)


OWN = (Part.TORCH_LIVE, Part.TORCH_UNUSED, Part.OUTSIDE_TORCH, Part.SERVER)
"""Only the server moves these, and no garbage collector."""


def verdict(component: SoakedComponent, limits: Limits) -> tuple[Status, str]:
    """Status and summary of one component; a host cache grows with new content alone."""
    status, summary = _by_shape(component, limits)
    caches, shape = component.caches, component.soaked.shape
    if caches is None or shape not in ("leak", "content", "unsteady"):
        return status, summary
    subject = f"{format_holder(component.who)}: {component.kind.label}"
    return by_limit(status, summary, subject, component.grown_bytes, caches, limits, cached=shape != "leak")


def _by_shape(component: SoakedComponent, limits: Limits) -> tuple[Status, str]:
    found, kind = component.soaked, component.kind
    others = kind is Part.OTHERS
    subject = f"{format_holder(component.who)}: {kind.label}"
    each = kind.amount(found.per_request)
    if found.shape == "leak":
        dose = "; growth is larger in cycles with more requests" if follows_dose(component, limits) else ""
        status = _leak_status(component, limits)
        summary = f"{subject} grows {each} with each request and is not released{dose}"
        if kind is Part.HOST_ANONYMOUS and status == "suspect":
            summary += "; memory that is garbage-collected later would look the same: run a longer soak"
        return status, summary
    if found.shape == "content":
        summary = f"{subject} grows {each} with each request of new content and not with repeated ones"
        return "unknown" if others else "suspect", f"{summary}: content is cached; compare with the cache's size limit"
    if found.shape == "background":
        idle = kind.amount(found.per_idle_cycle)
        summary = f"{subject} grows {idle} in an idle cycle and no faster under load: not caused by requests"
        return "suspect" if kind in OWN else "ok" if others else "unknown", summary
    if found.shape == "ended":
        grown = kind.amount(found.first_touch + found.gain)
        return "ok", f"{subject} grew {grown} and stopped: warm-up, not a leak (detection limit {visible(component)})"
    if found.shape == "unsteady":
        summary = f"{subject} rose {kind.amount(found.gain)} over {found.load_cycles} load cycles, but not steadily"
        return ("ok", summary) if others else ("unknown", f"{summary}; run a longer soak")
    judged = f"{found.load_cycles} judged load cycles with {plural(found.requests, 'request')}"
    return "ok", f"{subject} is flat over {judged} (detection limit {visible(component)})"


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
    certain = component.kind is not Part.HOST_ANONYMOUS or component.soaked.bins >= limits.soak.certain_bins
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
    """The soak's finding, unless it is unknown and the other is not: it observed more, and its own controls."""
    if by_soak is None or (by_soak.status == "unknown" and otherwise.status in ("suspect", "fault")):
        return otherwise
    return by_soak


def evidence(component: SoakedComponent) -> tuple[Evidence, ...]:
    """The figures that decided."""
    found, source, unit = component.soaked, component.kind.source, component.kind.unit
    return (
        Evidence("holder", component.who, "holder", source),
        Evidence("growth_per_load_cycle", found.per_cycle, unit, source),
        Evidence("growth_per_idle_cycle", found.per_idle_cycle, unit, source),
        Evidence("growth_per_request", found.per_request, unit, source),
        Evidence("warmup_growth", found.first_touch, unit, source),
        Evidence("judged_load_cycles", found.load_cycles, "cycles", "kvdiag"),
        Evidence("judged_idle_cycles", found.idle_cycles, "cycles", "kvdiag"),
        Evidence("p_trend", found.trend_p, "p-value", "computed"),
        Evidence("p_load", found.load_p, "p-value", "computed"),
        Evidence("p_dose", found.dose_p, "p-value", "computed"),
        Evidence("detection_limit", found.visible_per_cycle, f"{unit} per cycle", "computed"),
        Evidence("detection_limit_per_request", found.visible_per_request, f"{unit} per request", "computed"),
    )
