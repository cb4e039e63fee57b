"""The test steps: each is a workload as data, and a pure judge over the span that the workload left in the timeline.

1. Baseline: nothing runs. Blocks in use while idle are a fault, suspect where only a share is reported; used bytes
   beyond what pool, weights and an allowance explain are suspect; memory that a GPU failed to report makes it unknown.
2. One request, several times: its blocks must match its tokens and all be released, and device memory must stay flat,
   as the leak rules judge it. Judged on the later cycles: the first ones load kernels and workspaces lazily that are
   never released, so comparing memory before and after a single request is wrong for 47 to 100 % of healthy servers.
3. Ten requests of 2K tokens at once: blocks in use must match what their tokens need.
4. One request of 16K tokens: usage must grow linearly; for windowed layers it must follow their own curve.

Two run only where they are asked for. The soak (`kvdiag run --soak`) detects slow growth per request by alternating
load and idle cycles, for minutes. The isolation step (`kvdiag run --isolation`) runs alone: two tenants send the same
prompts, and neither may be answered from the other's cache (kvdiag/diagnosis/rules/isolation_prefix_cache.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvdiag.diagnosis.blocks.expected import blocks_needed, grows_with_every_token
from kvdiag.diagnosis.blocks.refill import with_refill
from kvdiag.diagnosis.blocks.state_slots import slots_in_use, slots_kept
from kvdiag.diagnosis.blocks.step_accounting import (
    CUT_SHORT,
    NOT_RUN,
    blind_spot,
    compare,
    floor_after,
    floor_before,
    highest_blocks,
    judge_load,
    kept_by_requests,
    last_span,
    load_figures,
    measure,
    not_settled,
    refused,
    tolerated_blocks,
    unknown,
    unsettled,
)
from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.growth.soak_memory import ORDER, Soak, soaked, visible, worst
from kvdiag.diagnosis.growth.soak_memory import SOAK as SOAK_ID
from kvdiag.diagnosis.growth.soak_memory import verdict as soak_verdict
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import SEVERITY
from kvdiag.diagnosis.rules.isolation_prefix_cache import ISOLATION as ISOLATION_ID
from kvdiag.diagnosis.rules.isolation_prefix_cache import probed, timing
from kvdiag.diagnosis.rules.isolation_prefix_cache import verdict as isolation_verdict
from kvdiag.diagnosis.rules.leak_device import leak_of_cycles
from kvdiag.diagnosis.timeline_queries import (
    floor_within,
    gap_reason,
    open_sessions,
    server_devices,
    server_uuids,
)
from kvdiag.formatting import format_bytes, format_count, format_number, plural
from kvdiag.kv.calibration.running_server import all_pools_bytes
from kvdiag.model import (
    Device,
    Facts,
    MeasuredFigures,
    Probe,
    Status,
    StepFigures,
    StepResult,
    Timeline,
    Workload,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One of the test steps. `cycles` is how often its workload is offered, each time on its own span.

    `judge` is pure, and finds its spans by `id`; what was cut short or not observed makes its result `unknown`.
    """

    id: str
    title: str
    workload: Workload
    cycles: int
    judge: Callable[[Timeline, Facts, Limits], StepResult]


def _judge_baseline(timeline: Timeline, facts: Facts, limits: Limits) -> StepResult:
    """Compare blocks in use while idle with 0, and used device bytes with what can be explained."""
    span = next(iter(timeline.spans("baseline")), None)
    if span is None or span.end_seconds is None:
        return unknown("baseline", CUT_SHORT if span else NOT_RUN, span)
    floor = floor_within(timeline, span.begin_seconds, span.end_seconds, facts, limits)
    samples = timeline.between(span.begin_seconds, span.end_seconds)
    if floor is None:
        return unknown("baseline", not_settled(samples, gap_reason(timeline, facts, "engine"), limits), span)
    own = server_uuids(timeline, facts)
    devices = server_devices(floor.devices, own)
    dark = [device for device in devices if device.memory is None]
    used = sum(device.memory.used_bytes for device in devices if device.memory is not None)
    # Where the server's GPUs are not known, other tenants' bytes cannot be explained.
    explained = explained_bytes(devices, facts, limits) if own or len(devices) == 1 else None
    expected = StepFigures(blocks=0, device_used_bytes=explained)
    measured = MeasuredFigures(blocks=floor.blocks, device_used_bytes=used if devices and not dark else None)
    status: Status = "ok"
    parts: list[str] = []
    unit = facts.capabilities.unit
    if floor.blocks is None:
        status, parts = "unknown", ["the pool's usage is not reported or did not settle; check the engine's /metrics"]
    elif floor.blocks > 0:
        sessions, kept = open_sessions(timeline, floor, facts)
        in_use = f"{plural(floor.blocks, f'{unit} is', f'{unit}s are')} in use while idle"
        if not sessions:
            # Of a pool that is reported as a share alone, it is not known what the engine itself keeps.
            status, parts = ("fault" if facts.capabilities.blocks else "suspect"), [in_use]
        elif kept == floor.blocks:
            parts = [f"{in_use}: {plural(sessions, 'streaming session holds', 'streaming sessions hold')} all of them"]
        else:
            keeping = plural(sessions, "streaming session is", "streaming sessions are")
            status, parts = (
                "unknown",
                [f"{in_use}, and {keeping} open, which keep theirs; close them and repeat the run"],
            )
    elif floor.state_slots and not open_sessions(timeline, floor, facts)[0]:
        status, parts = "fault", [f"no {unit} is in use", slots_in_use(floor.state_slots)]
    else:
        parts = [f"no {unit} is in use"]
    # Memory that a GPU never reports is no failure.
    if dark and any(gap.source == "nvml" and gap.kind == "failed" for sample in samples for gap in sample.gaps):
        status = "unknown" if status == "ok" else status
        parts.append(f"GPU {dark[0].index}'s memory could not be read")
    elif dark:
        parts.append(f"GPU {dark[0].index} does not report its memory")
    elif not devices:
        parts.append("device memory is not visible")
    elif explained is not None and used > explained:
        status = "suspect" if status == "ok" else status
        most = f"at least {format_bytes(used - explained)} more than pool, weights and overhead explain"
        parts.append(f"{format_bytes(used)} of GPU memory used, {most}")
    else:
        parts.append(f"{format_bytes(used)} of GPU memory used")
    return StepResult("baseline", status, "; ".join(parts), expected=expected, measured=measured, notes=span.notes)


def explained_bytes(devices: Sequence[Device], facts: Facts, limits: Limits) -> int | None:
    """Most bytes that can be explained over all of a server's devices; `None` where pool or weights are not known.

    Weights are counted once over all ranks, the pool once per rank. The allowance is a CUDA context and a share of the
    device for activations, CUDA graphs and allocator cache. It is never more than there is.
    """
    memories = [device.memory for device in devices if device.memory is not None]
    pools = all_pools_bytes(facts)
    if not memories or facts.weights_bytes is None or pools is None:
        return None
    copies = len(facts.pools)
    # One engine on several devices is tensor parallel, each rank with a pool of this size; engines share devices out.
    pool_bytes = pools[0] * max(len(memories) // copies, 1)
    reserved = sum(memory.driver_reserved_bytes or 0 for memory in memories)
    allowance = sum(limits.context_bytes + int(limits.activation_ratio * memory.total_bytes) for memory in memories)
    room_bytes = sum(memory.total_bytes for memory in memories)
    return min(pool_bytes + copies * facts.weights_bytes + reserved + allowance, room_bytes)


BASELINE = Step(
    id="baseline",
    title="Baseline: no requests, the pool must be empty",
    workload=Workload(requests=0, prompt_tokens=0, max_tokens=0, hold_seconds=4.0),
    cycles=1,
    judge=_judge_baseline,
)


def _judge_single_request(timeline: Timeline, facts: Facts, limits: Limits) -> StepResult:
    """Compare the peak with the blocks that the tokens need, and count unreleased blocks, after the first cycle."""
    spans = timeline.spans("single_request")
    later = spans[1:] if len(spans) > 1 else spans
    problems = [blind_spot(timeline, facts, span, limits) for span in later]
    judged = [span for span, problem in zip(later, problems, strict=True) if problem is None]
    if not judged:
        return unknown("single_request", next(filter(None, problems), NOT_RUN), spans[-1] if spans else None)
    first, last = floor_before(timeline, facts, judged[0], limits), floor_after(timeline, facts, judged[-1], limits)
    peaks = [
        peak
        for span in judged
        if (floor := floor_before(timeline, facts, span, limits)) is not None
        and (peak := measure(timeline, facts, span, floor, limits)) is not None
    ]
    if first is None or last is None or not peaks:
        return unknown("single_request", unsettled(timeline), judged[-1])
    peak = max(peaks, key=lambda peak: abs(peak.excess_blocks))
    status, sentence = compare(peak, facts, limits)
    kept = last - first
    shown = facts.capabilities.returns
    # Cycles in between whose load was not observed may have leaked as well: their requests count.
    between = later[later.index(judged[0]) : later.index(judged[-1]) + 1]
    outcomes = [span.outcome for span in between if span.outcome]
    requests = sum(outcome.completed + outcome.refreshes for outcome in outcomes)
    by_each = kept_by_requests(kept, outcomes, facts, limits)
    unit = facts.capabilities.unit
    if not shown:
        sentence = f"{sentence}; this engine's metrics do not show lost {unit}s; step 4 tests for them"
    elif kept > 0:
        status = "fault"
        each_blocks = by_each.each_blocks
        kept_each = "" if each_blocks is None else f", {by_each.at_least}{format_number(each_blocks)} each"
        sentence = f"{plural(kept, unit)} not released after {by_each.requests}{kept_each}; {sentence}"
    elif kept < 0:
        # Blocks in use before the step were released: other requests held them.
        sentence = f"all {unit}s released, and {format_count(-kept)} that were in use before; {sentence}"
    else:
        sentence = f"all {unit}s released (detection limit 1 {unit} over {by_each.requests} after warm-up); {sentence}"
    if slots := slots_kept(timeline, facts, judged[0], judged[-1], limits):
        status, sentence = "fault", f"{plural(slots, 'state slot')} not released after {by_each.requests}; {sentence}"
    if (leak := leak_of_cycles(timeline, facts, limits)) is not None:
        status = "fault"
        each = sum(float(one.value or 0) for one in leak.evidence if one.name.endswith("growth_per_request"))
        sentence = f"device memory grows {format_bytes(each)} with each request ({leak.title}); {sentence}"
    expected, measured = load_figures(facts, peak)
    return StepResult(
        "single_request",
        status,
        sentence,
        expected=replace(expected, blocks_kept=0 if shown else None),
        measured=replace(
            measured,
            blocks_kept=kept if shown else None,
            cycles_judged=len(judged),
            # Detection limit: one block over all requests.
            smallest_detectable_leak=round(1 / max(requests, 1), 3) if shown else None,
        ),
        notes=judged[-1].notes,
    )


SINGLE_REQUEST = Step(
    id="single_request",
    title="One request, several times: memory must be released",
    workload=Workload(requests=1, prompt_tokens=512, max_tokens=128, hold_seconds=0.5),
    cycles=8,
    judge=_judge_single_request,
)


CONCURRENT = Step(
    id="concurrent",
    title="Ten concurrent requests of 2K tokens: growth must match their tokens",
    workload=Workload(requests=10, prompt_tokens=2048, max_tokens=256, hold_seconds=2.0),
    cycles=1,
    judge=lambda timeline, facts, limits: judge_load("concurrent", timeline, facts, limits),
)


def _judge_long_context(timeline: Timeline, facts: Facts, limits: Limits) -> StepResult:
    """Compare the peak with what the tokens need, and usage at any time with what the finished request needs.

    Linear growth never exceeds its end: a duplicate or a leak on the way shows as an overshoot even where the end is
    right. Windowed layers hold a prefill chunk on top of their window, so only their end is judged.
    """
    load = judge_load("long_context", timeline, facts, limits)
    span = last_span(timeline, "long_context")
    if span is None or span.workload is None or span.outcome is None:
        return load
    result = with_refill(load, timeline, facts)
    if load.status == "unknown" or refused(span) is not None:
        return result
    finished = [span.workload.tokens_per_request] * span.workload.requests
    highest, most = highest_blocks(timeline, facts, span, limits), blocks_needed(finished, facts)
    if highest is None or most is None or not grows_with_every_token(facts):
        return result
    overshoot = highest - most.most_blocks
    linear = overshoot <= tolerated_blocks(span.workload.requests, most.most_blocks, facts, limits)
    above = (
        f"usage during prefill peaked {plural(overshoot, facts.capabilities.unit)} above the finished request's need"
    )
    sentence = "growth is linear" if linear else above
    return replace(
        result,
        status=result.status if linear or result.status == "fault" else "suspect",
        summary=f"{result.summary}; {sentence}",
        expected=replace(result.expected, highest_blocks=most.most_blocks),
        measured=replace(result.measured, highest_blocks=highest),
    )


LONG_CONTEXT = Step(
    id="long_context",
    title="One request of 16K tokens: growth must be linear",
    workload=Workload(requests=1, prompt_tokens=16384, max_tokens=128, hold_seconds=1.5),
    cycles=1,
    judge=_judge_long_context,
)


def _judge_isolation(timeline: Timeline, facts: Facts, limits: Limits) -> StepResult:
    """Hit ratios by who had sent the prompts before, and what time to first token reveals."""
    found = probed(timeline, facts)
    spans = timeline.spans(ISOLATION_ID)
    if found is None:
        return unknown(ISOLATION_ID, NOT_RUN, spans[0] if spans else None)
    status, summary = isolation_verdict(found, limits)
    note = timing(found, limits)
    return StepResult(
        ISOLATION_ID,
        status,
        summary,
        expected=StepFigures(other_salt_hit_ratio=0.0, other_unsalted_hit_ratio=0.0),
        measured=MeasuredFigures(
            requests=sum(one.problem is None for one in found.answers),
            own_hit_ratio=found.own.hit_ratio,
            other_salt_hit_ratio=found.salted.hit_ratio,
            other_unsalted_hit_ratio=found.unsalted.hit_ratio,
        ),
        notes=(*spans[0].notes, *(() if note is None else (note,))),
    )


ISOLATION = Step(
    id=ISOLATION_ID,
    title="Prefix isolation: the same prompts from two tenants",
    workload=Workload(requests=1, prompt_tokens=2048, max_tokens=1, probe=Probe(kind="first")),
    cycles=30,
    judge=_judge_isolation,
)


def _judge_soak(timeline: Timeline, facts: Facts, limits: Limits) -> StepResult:
    """The worst verdict of all components; a note per kind gives its verdict or its detection limit."""
    found = soaked(timeline, facts, limits)
    spans = timeline.spans(SOAK_ID)
    if found.problem is not None:
        return unknown(SOAK_ID, found.problem, spans[0] if spans else None)
    first = worst(found.components, limits)
    judged = [soak_verdict(one, limits) for one in found.components]
    status = max((one for one, _ in judged), key=SEVERITY.index)
    most = max(one.soaked.load_cycles for one in found.components)
    summary = f"no leak found over {_length(found)}; judged: {most} load cycles; warm-up and repeats left out"
    if first is not None and status != "ok":
        summary = soak_verdict(first, limits)[1]
    kept = found.blocks_kept
    if kept is not None and kept > 0:
        status, summary = (
            "fault",
            f"{format_count(kept)} KV {facts.capabilities.unit}s are still in use after {_length(found)}",
        )
    measured = MeasuredFigures(
        requests=found.requests,
        blocks_kept=kept,
        cycles_judged=most,
        idle_cycles_judged=max(one.soaked.idle_cycles for one in found.components),
    )
    expected = StepFigures(blocks_kept=0)
    notes = (*spans[0].notes, *_notes(found, facts, limits))
    return StepResult(SOAK_ID, status, summary, expected=expected, measured=measured, notes=notes)


def _length(found: Soak) -> str:
    load = sum(cycle.clean and cycle.requests > 0 for cycle in found.cycles)
    idle = sum(cycle.clean and not cycle.requests for cycle in found.cycles)
    return f"{load} load and {idle} idle cycles, {format_count(found.requests)} requests"


def _notes(found: Soak, facts: Facts, limits: Limits) -> tuple[str, ...]:
    """The worst verdict of each kind; the detection limit where all are flat."""
    notes = []
    if found.blocks_kept == 0:
        unit, over = facts.capabilities.unit, f"{format_count(found.requests)} requests"
        notes.append(f"KV {unit}s: all released (detection limit 1 {unit} over {over})")
    problems = [cycle.problem for cycle in found.cycles if cycle.problem is not None]
    if problems:
        notes.append(f"{len(problems)} of {len(found.cycles)} cycles left out: {problems[0]}")
    for kind in ORDER:
        first = worst(found.of(kind), limits)
        if first is None or kind is MemoryComponent.KV_HELD_IDLE:
            continue
        if first.soaked.shape == "flat":
            least = max(found.of(kind), key=lambda one: one.soaked.visible_per_cycle)
            notes.append(f"{kind.label}: flat (detection limit {visible(least)})")
        else:
            notes.append(soak_verdict(first, limits)[1])
    return tuple(notes)


SOAK = Step(
    id=SOAK_ID,
    title="Soak: alternating load and idle cycles, memory must stay flat",
    workload=Workload(requests=4, prompt_tokens=2048, max_tokens=16),
    cycles=30,
    judge=_judge_soak,
)

STEPS = (BASELINE, SINGLE_REQUEST, CONCURRENT, LONG_CONTEXT)
"""In the order in which they run."""
