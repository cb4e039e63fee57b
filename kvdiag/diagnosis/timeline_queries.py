"""What a timeline shows, as numbers: blocks held, idle floors, loads seen whole, device bytes. Judges nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvdiag.diagnosis.limits import Limits
from kvdiag.kv.calibration.running_server import block_bytes as served_block_bytes
from kvdiag.model import Allocator, Device, Engine, Facts, Sample, Span, Timeline, without_mig_parents


def held_blocks(sample: Sample, facts: Facts) -> int | None:
    """KV blocks that requests hold, all engines together; `None` unless every engine shows usage and pool."""
    if not sample.engines:
        return None
    held = 0
    for engine in sample.engines:
        pool = facts.pool(engine.engine)
        if pool is None or engine.kv_usage_ratio is None:
            return None
        held += pool.used_blocks(engine.kv_usage_ratio)
    return held


def readings_of(timeline: Timeline, label: str) -> Iterator[tuple[float, Engine]]:
    """The times and readings of one engine, by its label."""
    for sample in timeline.samples:
        for engine in sample.engines or ():
            if engine.engine == label:
                yield sample.at_seconds, engine


def block_bytes(facts: Facts) -> int | None:
    """Bytes of one block on one rank, as told or computed; engines of one server share one shape."""
    sizes = (served_block_bytes(facts, pool) for pool in facts.pools)
    return next((size[0] for size in sizes if size is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleFloor:
    """What was held while nothing ran: the last samples of one idle stretch that agree.

    `devices` are the newest device readings of the stretch, those with process lists before those without (they come
    with some readings only); `None` where it has none. `allocators` are the newest that were published within it.
    """

    at_seconds: float
    blocks: int | None
    devices: tuple[Device, ...] | None
    allocators: tuple[Allocator, ...] | None = None


def idle_floors(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[IdleFloor, ...]:
    """The floor of each stretch in which every engine is idle and none of our own requests is open, in order."""
    key = ("idle_floors", facts.pools, limits.idle_samples)
    return timeline.once(key, lambda: _idle_floors(timeline, facts, limits))


def _idle_floors(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[IdleFloor, ...]:
    floors: list[IdleFloor] = []
    stretch: list[Sample] = []
    for sample in (*timeline.samples, None):
        if sample is not None and sample.engines is None:
            continue  # engine not read on this tick: it ends no stretch
        if sample is not None and _is_idle(sample):
            stretch.append(sample)
            continue
        if stretch:
            floor = _floor(stretch, timeline, facts, limits)
            floors.extend([floor] if floor else [])
        stretch = []
    return tuple(floors)


def floor_within(
    timeline: Timeline, start_seconds: float, end_seconds: float, facts: Facts, limits: Limits
) -> IdleFloor | None:
    """The idle floor at the end of a window; `None` where it did not settle."""
    samples = [sample for sample in timeline.between(start_seconds, end_seconds) if sample.engines is not None]
    stretch: list[Sample] = []
    for sample in samples:
        stretch = [*stretch, sample] if _is_idle(sample) else []
    return _floor(stretch, timeline, facts, limits)


def _is_idle(sample: Sample) -> bool:
    return sample.engines_idle is True and (sample.load is None or sample.load.requests == 0)


def _floor(stretch: Sequence[Sample], timeline: Timeline, facts: Facts, limits: Limits) -> IdleFloor | None:
    if len(stretch) < limits.idle_samples:
        return None
    last = [held_blocks(sample, facts) for sample in stretch[-limits.idle_samples :]]
    within = timeline.between(stretch[0].at_seconds, stretch[-1].at_seconds)
    readings = [sample.devices for sample in reversed(within) if sample.devices is not None]
    newest = readings[0] if readings else None
    return IdleFloor(
        at_seconds=stretch[-1].at_seconds,
        blocks=_settled(last),
        devices=next((devices for devices in readings if any(one.processes is not None for one in devices)), newest),
        allocators=next(
            (
                sample.allocators
                for sample in reversed(within)
                if sample.allocators and published_since(sample, stretch[0].at_seconds)
            ),
            None,
        ),
    )


def _settled(last: Sequence[int | None]) -> int | None:
    """The blocks held at an idle stretch's end, by its last readings; `None` where they still fall, or begin to rise.

    What returns falls. Blocks that become more while nothing runs are not on their way back: the fewest of them stay.
    """
    known = [blocks for blocks in last if blocks is not None]
    if len(known) < len(last) or sorted(known) != known:
        return None
    return known[0] if known[0] or not known[-1] else None


def published_since(sample: Sample, seconds: float) -> bool:
    """Whether what a sample tells of the allocators was all published after a moment: agents have their own pace."""
    return all(sample.at_seconds - each.age_seconds >= seconds for each in sample.allocators or ())


def whole_load(timeline: Timeline, span: Span) -> tuple[Sample, ...]:
    """Samples of a span that saw all its requests resident at once."""
    if span.workload is None or span.offer_seconds is None:
        return ()
    end = span.release_seconds if span.release_seconds is not None else float("inf")
    samples = timeline.between(span.offer_seconds, end)
    return tuple(sample for sample in samples if sample.sees_whole(span.workload.requests))


def tokens_taken(timeline: Timeline, span: Span, sample: Sample) -> int | None:
    """Prompt and generated tokens that the engines counted from a span's begin to one of its samples, all together."""
    first = next((one for one in timeline.between(span.begin_seconds, sample.at_seconds) if one.engines), None)
    counts = [_tokens_counted(one) for one in (first, sample)]
    return None if counts[0] is None or counts[1] is None else counts[1] - counts[0]


def _tokens_counted(sample: Sample | None) -> int | None:
    engines = (sample.engines if sample is not None else None) or ()
    counts = [count for engine in engines for count in (engine.prompt_tokens_total, engine.generation_tokens_total)]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def most_waiting(timeline: Timeline, span: Span) -> int:
    """The most requests that any sample of a span's load saw waiting; 0 where the engines do not count them."""
    if span.offer_seconds is None:
        return 0
    end = span.release_seconds if span.release_seconds is not None else float("inf")
    return max(
        (
            sum(engine.requests_waiting or 0 for engine in sample.engines or ())
            for sample in timeline.between(span.offer_seconds, end)
        ),
        default=0,
    )


def most_open(timeline: Timeline, span: Span, in_a_row: int) -> int:
    """The most requests, whosesoever, that so many samples in a row of a span's load saw running or waiting.

    One alone may catch a request twice: data-parallel engines tell each at its own time that one ended and one began.
    0 where none is counted; fewer samples than that are taken as they are.
    """
    if span.offer_seconds is None:
        return 0
    end = span.release_seconds if span.release_seconds is not None else float("inf")
    counts = [
        sample.open_requests for sample in timeline.between(span.offer_seconds, end) if sample.engines is not None
    ]
    width = min(in_a_row, len(counts))
    return (
        max((min(counts[place : place + width]) for place in range(len(counts) - width + 1)), default=0) if width else 0
    )


def device_used_bytes(devices: tuple[Device, ...] | None) -> dict[str, int]:
    """Used bytes by device UUID, of the devices that tell."""
    return {device.uuid: device.memory.used_bytes for device in devices or () if device.memory is not None}


def server_bytes(device: Device, server_pids: tuple[int, ...] | None) -> int | None:
    """Bytes of the server's own processes on a device; `None` where one of them, or which they are, is not known."""
    if device.processes is None or server_pids is None:
        return None
    own = [process.used_bytes for process in device.processes if process.pid in server_pids]
    if not own or None in own:
        return None
    return sum(used for used in own if used is not None)


def server_uuids(timeline: Timeline, facts: Facts) -> frozenset[str]:
    """The devices on which the server's processes were ever seen; none where they cannot be told.

    Over the whole timeline, since only some readings list processes: the devices of one that does not are still known.
    """
    return timeline.once(("server_uuids", facts.server_pids), lambda: _server_uuids(timeline, facts.server_pids))


def _server_uuids(timeline: Timeline, server_pids: tuple[int, ...] | None) -> frozenset[str]:
    pids = frozenset(server_pids or ())
    own: set[str] = set()
    for sample in timeline.samples if pids else ():
        for device in sample.devices or ():
            # A day of eight GPUs has 700,000 readings, of which a fifth lists processes.
            if device.processes and device.uuid not in own and any(one.pid in pids for one in device.processes):
                own.add(device.uuid)
    return frozenset(own)


def assigned_uuids(timeline: Timeline, facts: Facts) -> frozenset[str]:
    """The devices that are the server's by its processes, else by what assigned them; none where neither tells."""
    return server_uuids(timeline, facts) or frozenset(facts.device_uuids or ())


def server_devices(devices: tuple[Device, ...] | None, own: frozenset[str]) -> tuple[Device, ...]:
    """Those of a reading's devices that are the server's; all of them where that cannot be told."""
    leaves = without_mig_parents(devices or ())
    return tuple(device for device in leaves if device.uuid in own) if own else leaves


def torch_readings(timeline: Timeline, facts: Facts) -> tuple[tuple[Allocator, Allocator], ...]:
    """The first and the last reading of each of the server's allocators that was there to the end."""
    readings = [sample.allocators for sample in timeline.samples if sample.allocators]
    first: dict[tuple[str, int, int], Allocator] = {}
    for each in (one for allocators in readings for one in allocators):
        first.setdefault(each.identity, each)
    return tuple(
        (first[each.identity], each) for each in (readings[-1] if readings else ()) if each.may_be_of(facts.server_pids)
    )


def newest_devices(timeline: Timeline) -> tuple[Device, ...] | None:
    """The last reading of the devices, `None` where there never was one."""
    return next((sample.devices for sample in reversed(timeline.samples) if sample.devices is not None), None)


def first_devices(timeline: Timeline) -> tuple[Device, ...] | None:
    """The first reading of the devices, before any load of ours; `None` where there never was one."""
    return next((sample.devices for sample in timeline.samples if sample.devices is not None), None)


def serving_devices(timeline: Timeline) -> tuple[Device, ...] | None:
    """The first reading of the devices since the engines answered awake, else of all: what a server starts with.

    Before an engine answers, its weights are still being loaded, or another server's are still there; one that sleeps
    has given its own away.
    """
    answered = next((sample.at_seconds for sample in timeline.samples if _awake(sample)), None)
    if answered is None:
        return None if any(sample.engines for sample in timeline.samples) else first_devices(timeline)
    since = (one.devices for one in timeline.samples if one.at_seconds >= answered and one.devices is not None)
    return next(since, None) or first_devices(timeline)


def _awake(sample: Sample) -> bool:
    return bool(sample.engines) and not any(engine.asleep for engine in sample.engines or ())


def gap_reason(timeline: Timeline, facts: Facts, source: str) -> str | None:
    """Why a source showed nothing, from the newest of its gaps."""
    for sample in reversed(timeline.samples):
        for gap in sample.gaps:
            if gap.source == source:
                return gap.reason
    return next((gap.reason for gap in facts.gaps if gap.source == source), None)
