"""States in which reserved bytes that are not live are, or may become, a problem. Pure.

A, confirmed: an allocation failed, its size is known, what was free, stranded and releasable was enough for it, and no
free block was. B, likely: torch flushed its cache to continue within five minutes in which the server worked, and more
than a tenth of what it has reserved lies stranded. C, to be watched: through ten minutes without a request more lies
unused, graph pools apart, than activations explain and a gigabyte (or 2 % of the device) beyond. The three are in the
order of their certainty. Besides, `kept_since_start`: bytes that no request has used since the server began, which
loading the weights left behind and the pool lacks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvdiag.diagnosis.limits import Limits
from kvdiag.model import Allocator, FailedAllocation, Memory, Sample, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentReadings:
    """One process's samples with their times, the samples of the engines at that time, and its device's memory."""

    readings: tuple[tuple[float, Allocator], ...]
    engines: tuple[Sample, ...]
    memory: Memory | None

    def since(self, seconds: float) -> tuple[tuple[float, Allocator], ...]:
        """The samples of the last so many seconds."""
        end_seconds = self.readings[-1][0]
        return tuple(each for each in self.readings if end_seconds - each[0] <= seconds)

    def retries(self, limits: Limits) -> int | None:
        """How often torch flushed its cache within the window; `None` where it does not count that."""
        within = self.since(limits.retry_window_seconds)
        first, last = within[0][1].alloc_retries_total, within[-1][1].alloc_retries_total
        return None if first is None or last is None else max(last - first, 0)

    def tokens(self, seconds: float) -> int | None:
        """Tokens that the engines generated within so many seconds of the last sample; `None` where not counted."""
        end_seconds = self.readings[-1][0]
        counts = [
            count
            for sample in self.engines
            if 0 <= end_seconds - sample.at_seconds <= seconds
            and (count := sample.total("generation_tokens_total")) is not None
        ]
        return counts[-1] - counts[0] if len(counts) > 1 else None


def recent_readings(timeline: Timeline, last: Allocator, limits: Limits) -> RecentReadings:
    """What is known of the process that a sample is of, as far back as any state looks."""
    end_seconds = next(sample.at_seconds for sample in reversed(timeline.samples) if sample.allocators)
    # A day of eight GPUs has 86,400 samples, of which the last minutes count.
    back_seconds = max(limits.retry_window_seconds, limits.idle_gap_seconds) + limits.window_margin_seconds
    samples = timeline.between(end_seconds - back_seconds, end_seconds)
    readings = tuple(
        (sample.at_seconds - each.age_seconds, each)
        for sample in samples
        for each in sample.allocators or ()
        if each.identity == last.identity
    )
    device = (each.memory for sample in reversed(samples) for each in sample.devices or () if last.is_on(each))
    return RecentReadings(
        readings=readings,
        engines=tuple(sample for sample in samples if sample.engines),
        memory=last.memory or next((memory for memory in device if memory is not None), None),
    )


def recent_failure(last: Allocator, limits: Limits) -> FailedAllocation | None:
    """The newest allocation that failed, where it is not long ago."""
    failure = last.failure
    return failure if failure is not None and failure.age_seconds <= limits.failure_seconds else None


def room_bytes(failure: FailedAllocation) -> int:
    """Bytes that were free on the device and, where the blocks are known, unused in torch."""
    split = failure.split
    return failure.free_bytes + (0 if split is None else split.stranded_bytes + split.releasable_bytes)


def confirmed(failure: FailedAllocation) -> bool:
    """State A."""
    split = failure.split
    return split is not None and room_bytes(failure) >= failure.asked_bytes > split.largest_free_block_bytes


def likely(last: Allocator, recent: RecentReadings, limits: Limits) -> bool:
    """State B."""
    stranded, retries = stranded_bytes(last), recent.retries(limits)
    if not retries or stranded is None or recent.tokens(limits.retry_window_seconds) == 0:
        return False
    return stranded > limits.stranded_ratio * last.reserved_bytes


def watched(recent: RecentReadings, limits: Limits) -> bool:
    """State C."""
    end_seconds = recent.readings[-1][0]
    begin_seconds = end_seconds - limits.idle_gap_seconds
    memory = recent.memory
    if recent.readings[0][0] > begin_seconds or memory is None:
        return False
    idle = [sample for sample in recent.engines if begin_seconds <= sample.at_seconds <= end_seconds]
    if not idle or any(engine.requests_running != 0 for sample in idle for engine in sample.engines or ()):
        return False
    gaps = [_shared_gap_bytes(each) for _, each in recent.since(limits.idle_gap_seconds)]
    return all(gap is not None and gap > _usual_bytes(memory, limits) for gap in gaps)


def kept_since_start(timeline: Timeline, last: Allocator, limits: Limits) -> tuple[int, float] | None:
    """The least that a process had reserved and unused since its server began, where that is more than usual.

    With the seconds over which it was. What was there before the first requests was left by loading the weights; what
    requests never used is no cache of theirs either. `None` where the start was not observed, or requests explain it.
    """
    readings = [
        (sample.at_seconds, each)
        for sample in timeline.samples
        for each in sample.allocators or ()
        if each.identity == last.identity
    ]
    begin_seconds, end_seconds = readings[0][0], readings[-1][0]
    if last.memory is None or end_seconds - begin_seconds < limits.idle_gap_seconds:
        return None
    gaps = [_shared_gap_bytes(each) for _, each in readings if each.split is not None]
    known = [gap for gap in gaps if gap is not None]
    if not known or min(known) <= _usual_bytes(last.memory, limits):
        return None
    if not _begins(timeline.between(begin_seconds, end_seconds), limits):
        return None
    return min(known), end_seconds - begin_seconds


def _begins(samples: Sequence[Sample], limits: Limits) -> bool:
    """Whether the engines had served next to nothing at first, by the rate at which they did later."""
    counted = [
        (sample.at_seconds, count) for sample in samples if (count := sample.total("prompt_tokens_total")) is not None
    ]
    if not counted:
        return False
    (begin, before), (end, after) = counted[0], counted[-1]
    return end > begin and after > before and before <= (after - before) / (end - begin) * limits.begun_seconds


def _usual_bytes(memory: Memory, limits: Limits) -> float:
    """What may lie unused in addition to activations."""
    total = memory.total_bytes
    return limits.activation_ratio * total + max(limits.idle_gap_bytes, limits.idle_gap_ratio * total)


def _shared_gap_bytes(allocator: Allocator) -> int | None:
    """Reserved and not live, without the pools of graphs, which nothing else can use."""
    if allocator.split is None:
        # What is pending passes, and is of no account.
        releasable, stranded = allocator.releasable_bytes, allocator.stranded_bytes
        return None if releasable is None or stranded is None else releasable + stranded
    return allocator.unallocated_bytes - allocator.split.private_bytes


def stranded_bytes(allocator: Allocator) -> int | None:
    """Free bytes between live ones: by the blocks, or by torch's count, which leaves expandable segments out."""
    if allocator.split is not None:
        return allocator.split.stranded_bytes
    if allocator.stranded_bytes is not None:
        return allocator.stranded_bytes
    return allocator.inactive_split_bytes if allocator.expandable_segments is False else None


def releasable_bytes(allocator: Allocator) -> int | None:
    """Cached bytes that the driver could have back."""
    return allocator.releasable_bytes if allocator.split is None else allocator.split.releasable_bytes
