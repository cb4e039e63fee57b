"""What a timeline shows, as numbers: blocks in use, idle floors, samples under load, device bytes. Judges nothing.

Rules share these queries so that the same word means the same everywhere: idle is idle for as many samples in a row,
a server's bytes are those of its own processes on its own devices, and what one engine or process does not report is
`None`, never a sum of the others. Parts of a sample are read at different rates, so each query takes the samples that
have its part. Results that several rules ask for are kept with the timeline (`Timeline.once`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Literal

from kvdiag.diagnosis.engine_columns import EngineColumns, engine_columns
from kvdiag.diagnosis.limits import Limits
from kvdiag.kv.calibration.running_server import block_bytes as served_block_bytes
from kvdiag.model import (
    MAX_COUNT,
    Allocator,
    Device,
    Engine,
    Facts,
    KvPool,
    Sample,
    Span,
    Timeline,
    without_mig_parents,
)

NO_POOL = "the engine does not report its KV pool; `kvdiag doctor` shows what /metrics lacks"
NO_DEVICES = "no device memory was read; run kvdiag where NVML works"


def held_blocks(sample: Sample, facts: Facts) -> int | None:
    """KV blocks in use, all engines together; `None` unless every engine reports usage and pool."""
    if not sample.engines:
        return None
    held = 0
    for engine in sample.engines:
        pool = facts.pool(engine.engine)
        if pool is None or engine.kv_usage_ratio is None:
            return None
        held += pool.used_blocks(engine.kv_usage_ratio)
    return held


def readings_of(timeline: Timeline, label: str) -> tuple[Sequence[float], Sequence[Engine]]:
    """The times and samples of one engine, by its label, side by side."""
    return timeline.once(
        ("readings_of", label),
        lambda: _readings_of(engine_columns(timeline), label),
    )


def _readings_of(columns: EngineColumns, label: str) -> tuple[Sequence[float], Sequence[Engine]]:
    if columns.only is not None and all(engine.engine == label for engine in columns.only):
        return columns.times_seconds, columns.only
    every = ((sample.at_seconds, engine) for sample in columns.samples for engine in sample.engines or ())
    found = [pair for pair in every if pair[1].engine == label]
    return [seconds for seconds, _ in found], [engine for _, engine in found]


def block_bytes(facts: Facts) -> int | None:
    """Bytes of one block on one rank, reported or computed; engines of one server share one shape."""
    return next((size[0] for pool in facts.pools if (size := served_block_bytes(facts, pool)) is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleFloor:
    """Memory in use while nothing ran: the last samples of one idle interval that agree.

    `devices` is the newest device sample of the interval, those with process lists before those without (only some
    samples have them); `None` where it has none. `allocators` are the newest that were published within it.
    """

    begin_seconds: float
    at_seconds: float
    blocks: int | None
    devices: tuple[Device, ...] | None
    allocators: tuple[Allocator, ...] | None = None
    usage_ratio: float | None = None
    """Of the fullest engine, where the interval's last samples agree."""
    state_slots: int | None = None
    """Slots of recurrent states in use, all engines together, by the newest sample that has them."""


def idle_floors(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[IdleFloor, ...]:
    """The floor of each interval in which every engine is idle and none of our own requests is open, in order."""

    def floors() -> tuple[IdleFloor, ...]:
        # A tick on which no engine was read ends no interval.
        columns = engine_columns(timeline)
        if True not in columns.idle:
            return ()
        read, end, found = columns.samples, 0, []
        # An interval at the end ends before the first of these two, and there is one after all others.
        idle = [*map(_no_request, columns.idle, read), False, True]
        while (begin := idle.index(True, end)) < len(read):
            end = idle.index(False, begin)
            interval = _current(read[begin:end], facts, read[begin - 1] if begin else None)
            if (floor := _floor(interval, timeline, facts, limits)) is not None:
                found.append(floor)
        return tuple(found)

    return timeline.once(("idle_floors", facts.pools, facts.capabilities, limits.idle_samples), floors)


def floor_within(
    timeline: Timeline, start_seconds: float | None, end_seconds: float | None, facts: Facts, limits: Limits
) -> IdleFloor | None:
    """The idle floor at the end of a window; `None` where it did not settle, or the window was not reached."""
    if start_seconds is None or end_seconds is None:
        return None
    late_seconds = facts.capabilities.late_seconds
    looked_at = timeline.between(start_seconds - late_seconds, end_seconds)
    newest_first = [one for one in reversed(looked_at) if one.engines is not None]
    idle = tuple(takewhile(is_idle, newest_first))
    interval = _current(idle[::-1], facts, newest_first[len(idle)] if len(idle) < len(newest_first) else None)
    return _floor([one for one in interval if one.at_seconds >= start_seconds], timeline, facts, limits)


def _current(interval: Sequence[Sample], facts: Facts, before: Sample | None) -> Sequence[Sample]:
    """The samples of an idle interval whose figures are of the interval itself, where the engine reports them late.

    Short requests may never show as running there: the interval begins when the last tokens were counted. Where the
    engine renews all figures together, those that end an interval of work are of the new one.
    """
    late_seconds = facts.capabilities.late_seconds
    if not late_seconds or not interval:
        return interval
    worked = [later for earlier, later in pairwise(interval) if later.tokens_total != earlier.tokens_total]
    if facts.capabilities.renewed_seconds and not worked and before is not None and before.engines_idle is False:
        return interval
    since_seconds = (worked or interval[:1])[-1].at_seconds
    return [one for one in interval if one.at_seconds >= since_seconds + late_seconds]


def is_idle(sample: Sample) -> bool:
    """Whether every engine is idle, and no request of ours is open."""
    return _no_request(sample.engines_idle, sample)


def _no_request(engines_idle: bool | None, sample: Sample) -> bool:
    return engines_idle is True and (sample.load is None or sample.load.requests == 0)


def open_sessions(timeline: Timeline, floor: IdleFloor, facts: Facts) -> tuple[int, int | None]:
    """Sessions of clients that were open at an idle interval's end, 0 where none is reported; the blocks they hold.

    Blocks that they lock beyond these no engine reports (SGLang 0.5.23: 240 tokens in use, 144 of them held). Every
    data-parallel engine opens each session (managers/data_parallel_controller.py::send_control_message).
    """
    last = next((one for one in reversed(timeline.between(floor.begin_seconds, floor.at_seconds)) if one.engines), None)
    engines = (last.engines or ()) if last else ()
    held: int | None = 0
    for engine in engines:
        pool, tokens = facts.pool(engine.engine), engine.session_held_tokens
        held = None if held is None or pool is None or tokens is None else held + -(-tokens // pool.block_tokens)
    return max((engine.open_sessions or 0 for engine in engines), default=0), held


def _floor(interval: Sequence[Sample], timeline: Timeline, facts: Facts, limits: Limits) -> IdleFloor | None:
    if len(interval) < limits.idle_samples:
        return None
    begin_seconds, end_seconds = interval[0].at_seconds, interval[-1].at_seconds
    newest_first = timeline.between(begin_seconds, end_seconds)[::-1]
    devices = [sample.devices for sample in newest_first if sample.devices is not None]
    listing = devices if lists_processes(timeline) else ()
    listed = (each for each in listing if any(device.processes is not None for device in each))
    published = (one.allocators for one in newest_first if one.allocators and published_since(one, begin_seconds))
    usages = {sample_usage(sample) for sample in interval[-limits.idle_samples :]}
    slotted = newest_first if engine_columns(timeline).have_state_slots else ()
    return IdleFloor(
        begin_seconds=begin_seconds,
        at_seconds=end_seconds,
        blocks=_settled([own_blocks(sample, facts, limits) for sample in interval[-limits.idle_samples :]]),
        devices=next(listed, devices[0] if devices else None),
        allocators=next(published, None),
        usage_ratio=usages.pop() if len(usages) == 1 else None,
        state_slots=next((slots for one in slotted if (slots := _state_slots(one)) is not None), None),
    )


def _state_slots(sample: Sample) -> int | None:
    counts = [one.state_slots_used for one in sample.engines or ()]
    return None if set(counts) <= {None} else sum(count or 0 for count in counts)


def sample_usage(sample: Sample) -> float | None:
    """The usage of a sample's fullest engine; `None` unless every engine reports it."""
    usages = [engine.kv_usage_ratio for engine in sample.engines or ()]
    return None if None in usages else max(usages, default=None)  # type: ignore[type-var]  # none is missing


def own_blocks(sample: Sample, facts: Facts, limits: Limits) -> int | None:
    """Blocks in use, without those of the small request whose end made the gauges move, where that is needed."""
    held = held_blocks(sample, facts)
    if held is None or not facts.capabilities.on_completion:
        return held
    return max(held - small_request_blocks(facts, limits), 0)


def small_request_blocks(facts: Facts, limits: Limits) -> int:
    """The most blocks of a small request that makes gauges move."""
    return sum(-(-limits.refresh_tokens // pool.block_tokens) for pool in facts.pools)


def _settled(last: Sequence[int | None]) -> int | None:
    """The blocks in use at an idle interval's end; `None` while they fall, or begin to rise.

    Blocks that are being released fall. Those that rise while nothing runs are not: the fewest of them stay.
    """
    known = [blocks for blocks in last if blocks is not None]
    if len(known) < len(last) or sorted(known) != known:
        return None
    return known[0] if known[0] or not known[-1] else None


def published_since(sample: Sample, seconds: float) -> bool:
    """Whether a sample's allocators were all published after a moment: agents have their own period."""
    return all(sample.at_seconds - each.age_seconds >= seconds for each in sample.allocators or ())


def whole_load(timeline: Timeline, span: Span, facts: Facts) -> tuple[Sample, ...]:
    """Samples of a span in which all its requests were resident at once."""
    if span.workload is None:
        return ()
    requests = span.workload.requests
    return tuple(one for one in renewed(under_load(timeline, span), facts) if one.sees_whole(requests))


def samples_needed(facts: Facts, limits: Limits) -> int:
    """Samples of a whole load that its step needs: a figure that was just renewed is not between two engine steps."""
    return 1 if facts.capabilities.renewed_seconds else limits.load_samples


def renewed(samples: Sequence[Sample], facts: Facts) -> Sequence[Sample]:
    """The samples whose figures are of their own time: of an engine that renews them seldom, those that changed."""
    if not facts.capabilities.renewed_seconds:
        return samples
    read = [one for one in samples if one.engines]
    figures = [[(one.kv_usage_ratio, one.requests_running) for one in sample.engines or ()] for sample in read]
    return [sample for sample, now, before in zip(read[1:], figures[1:], figures[:-1], strict=True) if now != before]


def under_load(timeline: Timeline, span: Span) -> tuple[Sample, ...]:
    """Samples between a span's offer and its release, or the timeline's end; none where nothing was offered."""
    if span.offer_seconds is None:
        return ()
    end = span.release_seconds if span.release_seconds is not None else float("inf")
    return timeline.between(span.offer_seconds, end)


def tokens_taken(timeline: Timeline, span: Span, sample: Sample) -> int | None:
    """Prompt and generated tokens that the engines counted from a span's begin to one of its samples, all together.

    Where the engines count those of the running requests, and all of the span's run, the count is of the same moment.
    """
    if span.workload is not None and (outputs := sample.total("running_output_tokens")) is not None:
        return span.workload.requests * span.workload.prompt_tokens + outputs
    first = next((one for one in timeline.between(span.begin_seconds, sample.at_seconds) if one.engines), None)
    begun, ended = None if first is None else first.tokens_total, sample.tokens_total
    return None if begun is None or ended is None else ended - begun


def most_requests(timeline: Timeline, span: Span, gauge: Literal["requests_running", "requests_waiting"]) -> int:
    """The most requests by a gauge in any sample of a span's load; 0 where the engines do not count them."""
    counts = (sum(getattr(one, gauge) or 0 for one in sample.engines or ()) for sample in under_load(timeline, span))
    return max(counts, default=0)


def beside_others(timeline: Timeline, span: Span) -> bool:
    """Whether more requests ran during a span's load than its own."""
    own = span.workload.requests if span.workload else 0
    return most_requests(timeline, span, "requests_running") > own


def began_busy(timeline: Timeline, span: Span) -> bool:
    """Whether requests ran in the last sample before a span's load: of others, or of kvdiag that it had given up on."""
    begin = span.begin_seconds if span.offer_seconds is None else span.offer_seconds
    before = (sample for sample in reversed(timeline.samples) if sample.engines and sample.at_seconds <= begin)
    return (next((sample.total("requests_running") for sample in before), 0) or 0) > 0


def most_open(timeline: Timeline, span: Span, in_a_row: int) -> int:
    """The most requests of all clients that ran or waited in so many samples in a row of a span's load.

    One sample may count a request twice: data-parallel engines report each at its own time that one ended and one
    began. 0 where none is counted; fewer samples than that are taken as they are.
    """
    counts = [sample.open_requests for sample in under_load(timeline, span) if sample.engines is not None]
    width = max(min(in_a_row, len(counts)), 1)
    return max((min(counts[place : place + width]) for place in range(len(counts) - width + 1)), default=0)


def server_bytes(device: Device, server_pids: tuple[int, ...] | None) -> int | None:
    """Bytes of the server's own processes on a device; `None` where one of them, or which they are, is not known."""
    if device.processes is None or server_pids is None:
        return None
    total: int | None = None
    for process in device.processes:
        if process.pid in server_pids:
            if process.used_bytes is None:
                return None
            total = process.used_bytes if total is None else total + process.used_bytes
    return total


def server_uuids(timeline: Timeline, facts: Facts) -> frozenset[str]:
    """The devices that ever listed one of the server's processes; none where these are not known.

    Over the whole timeline, since only some samples list processes.
    """
    pids = frozenset(facts.server_pids or ())

    def uuids() -> frozenset[str]:
        own: set[str] = set()
        for sample in timeline.samples if pids else ():
            for device in sample.devices or ():
                # A day of eight GPUs has 700,000 samples, of which a fifth lists processes.
                if device.processes and device.uuid not in own and any(one.pid in pids for one in device.processes):
                    own.add(device.uuid)
        return frozenset(own)

    return timeline.once(("server_uuids", facts.server_pids), uuids)


def assigned_uuids(timeline: Timeline, facts: Facts) -> frozenset[str]:
    """The devices that are the server's by its processes, else by assignment; none where neither is known."""
    return server_uuids(timeline, facts) or frozenset(facts.device_uuids or ())


def lists_processes(timeline: Timeline) -> bool:
    """Whether any sample lists the processes of a device."""

    def lists() -> bool:
        before: tuple[Device, ...] | None = None
        for sample in timeline.samples:
            if sample.devices is not before:
                before = sample.devices
                if any(device.processes is not None for device in before or ()):
                    return True
        return False

    return timeline.once("lists_processes", lists)


def server_devices(devices: tuple[Device, ...] | None, own: frozenset[str]) -> tuple[Device, ...]:
    """Those of a sample's devices that are the server's; all of them where the server's are not known."""
    leaves = without_mig_parents(devices or ())
    return tuple([device for device in leaves if device.uuid in own]) if own else leaves


def torch_readings(timeline: Timeline, facts: Facts) -> tuple[tuple[Allocator, Allocator], ...]:
    """The first and the last sample of each of the server's allocators that was there to the end."""
    readings = [sample.allocators for sample in timeline.samples if sample.allocators]
    first = {each.identity: each for allocators in reversed(readings) for each in reversed(allocators)}
    return tuple((first[one.identity], one) for one in (readings or [()])[-1] if one.may_be_of(facts.server_pids))


def pool_tokens(pool: KvPool) -> int:
    """Tokens that a pool's usable blocks hold, by the reported capacity, else by their size; at most MAX_COUNT."""
    tokens = pool.capacity_tokens or pool.total_blocks * pool.block_tokens
    return min(tokens * pool.usable_blocks // pool.total_blocks, MAX_COUNT)


def newest_devices(timeline: Timeline) -> tuple[Device, ...] | None:
    """The last sample of the devices, `None` where there never was one."""
    return next((sample.devices for sample in reversed(timeline.samples) if sample.devices is not None), None)


def first_devices(timeline: Timeline) -> tuple[Device, ...] | None:
    """The first sample of the devices, before any load of ours; `None` where there never was one."""
    return next((sample.devices for sample in timeline.samples if sample.devices is not None), None)


def serving_devices(timeline: Timeline) -> tuple[Device, ...] | None:
    """The first sample of the devices since the engines answered awake, else of all: what a server starts with."""
    begin_seconds = awake_since(timeline)
    if begin_seconds is None:
        answered = any(sample.engines for sample in timeline.samples)
        return None if answered else first_devices(timeline)
    since = (one.devices for one in timeline.samples if one.at_seconds >= begin_seconds and one.devices is not None)
    return next(since, None) or first_devices(timeline)


def awake_since(timeline: Timeline) -> float | None:
    """When the engines first answered awake; `None` where they never did.

    Before an engine answers, its weights are still being loaded, or another server's are still there; one that sleeps
    has given its own away.
    """
    return next((one.at_seconds for one in timeline.samples if one.engines and not one.asleep), None)


def gap_reason(timeline: Timeline, facts: Facts, source: str) -> str | None:
    """Why a source reported nothing, from the newest of its gaps."""
    of_samples = timeline.once("gaps", lambda: [sample.gaps for sample in reversed(timeline.samples) if sample.gaps])
    return next((gap.reason for gaps in (*of_samples, facts.gaps) for gap in gaps if gap.source == source), None)
