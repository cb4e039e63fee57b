"""What a timeline shows of a soak: its cycles, and each component of the server's memory over them, judged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvdiag.diagnosis.blocks.step_accounting import other_tokens
from kvdiag.diagnosis.growth.components import MemoryComponent as Part
from kvdiag.diagnosis.growth.components import torch_components
from kvdiag.diagnosis.growth.soak_cycles import Cycle, Soaked, judge
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.timeline_queries import IdleFloor, floor_within, server_bytes, server_devices, server_uuids
from kvdiag.model import Facts, Span, Timeline

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


def soaked(timeline: Timeline, facts: Facts, limits: Limits) -> Soak | None:
    """What a timeline's soak shows; `None` where there was none."""
    spans = timeline.spans(SOAK)
    if not spans:
        return Soak(cycles=(), problem="it did not run") if timeline.spans(SOAK_WARMUP) else None
    floors = [_floor(timeline, facts, span, limits) for span in spans]
    cycles = tuple(
        Cycle(
            requests=0 if span.workload is None else span.workload.requests,
            repeated=span.workload is not None and span.workload.repeated,
            problem=disturbance(timeline, span) or (None if floor is not None else "the engine did not become idle"),
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
            components.append(SoakedComponent(kind=kind, who=who, soaked=found))
    problem = None if components else f"nothing was read after enough load and idle cycles{_why(cycles)}"
    held = [floor.blocks for floor in floors if floor is not None and floor.blocks is not None]
    kept = held[-1] - held[0] if held else None
    return Soak(cycles=cycles, problem=problem, components=tuple(components), blocks_kept=kept)


def disturbance(timeline: Timeline, span: Span) -> str | None:
    """Why a cycle shows nothing of its own requests, in a clause; `None` where it does."""
    outcome = span.outcome
    if not span.complete:
        return "it was cut short"
    if outcome is not None and outcome.failed:
        reason = outcome.errors[0] if outcome.errors else "no reason given"
        return f"requests failed: {reason}"
    ours = 0 if span.workload is None else span.workload.requests
    seen = timeline.between(span.begin_seconds, span.end_seconds or math.inf)
    if other_tokens(timeline, span) or max((sample.open_requests for sample in seen), default=0) > ours:
        return "other traffic"
    return None


def _why(cycles: Sequence[Cycle]) -> str:
    """What disturbed most of the cycles, as the end of a sentence."""
    reasons = Counter(cycle.problem for cycle in cycles if cycle.problem is not None).most_common(1)
    return f": {reasons[0][0]} (in {reasons[0][1]} of {len(cycles)} cycles)" if reasons else "; a longer soak has more"


def _floor(timeline: Timeline, facts: Facts, span: Span, limits: Limits) -> IdleFloor | None:
    if span.release_seconds is None or span.end_seconds is None:
        return None
    return floor_within(timeline, span.release_seconds, span.end_seconds, facts, limits)


def _least(kind: Part, limits: Limits) -> float:
    if kind is Part.KV_HELD_IDLE:
        return 0.0
    if kind is Part.HOST_ANONYMOUS:
        return limits.soak.host_bytes
    return limits.torch_quantum_bytes if kind is Part.TORCH_LIVE else limits.soak.device_bytes


Key = tuple[Part, str]
Readings = dict[Key, list[float | None]]


def _readings(timeline: Timeline, facts: Facts, spans: Sequence[Span], floors: Sequence[IdleFloor | None]) -> Readings:
    """Every component's reading after each cycle, `None` where it was not read."""
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
            who = f"GPU {device.index}" if device.mig_parent_uuid is None else f"GPU {device.index} {device.uuid}"
            used, mine = device.memory.used_bytes, server_bytes(device, facts.server_pids)
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
