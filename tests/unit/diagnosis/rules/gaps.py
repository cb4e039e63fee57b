"""Torch's memory in one process, and the verdict of fragmentation.allocator on it."""

from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits
from kvdiag.diagnosis.rules.fragmentation_allocator import judge
from kvdiag.model import Allocator, Facts, FailedAllocation, Finding, ReservedSplit, Sample, Timeline
from tests.builders.answers import only
from tests.builders.values import GIB, MIB, allocator, pool, split

HELD = allocator(title="VLLM::Worker_TP0", allocated_bytes=5 * GIB)
SERVER = Facts(pools=(pool(),), server_pids=(100, 101, 102))


def held(live: int, reserved: int, **changes: object) -> Allocator:
    """A process with so many bytes live of those reserved."""
    changes = {"title": "Worker", **changes}
    return allocator(allocated_bytes=live, reserved_bytes=reserved, **changes)


def parts(live: int, **sizes: object) -> ReservedSplit:
    """The split of what is live and some free parts, in bytes."""
    free = dict.fromkeys(("pending_bytes", "private_bytes", "releasable_bytes", "stranded_bytes"), 0)
    free |= {name: size for name, size in sizes.items() if name in free}  # type: ignore[misc]
    return split(reserved_bytes=live + sum(free.values()), live_bytes=live, **{**sizes, **free})


HOLES = parts(
    5 * GIB,
    private_bytes=640 * MIB,
    releasable_bytes=320 * MIB,
    stranded_bytes=2 * GIB,
    pending_bytes=64 * MIB,
    largest_free_block_bytes=96 * MIB,
    fits=False,
    unusable_ratio=0.75,
)
"""3 GiB unused of 8 reserved."""

FAILED = FailedAllocation(age_seconds=300.0, asked_bytes=512 * MIB, free_bytes=200 * MIB, split=HOLES)


def of_timeline(timeline: Timeline, of: Facts = SERVER) -> Finding:
    """The rule's one finding."""
    return only(judge, timeline, of)


def verdict(*readings: Allocator, limits: Limits = DEFAULT_LIMITS) -> Finding:
    """The rule's one finding on the samples of one process."""
    samples = tuple(Sample(at_seconds=float(number), allocators=(one,)) for number, one in enumerate(readings, start=1))
    (found,) = judge(Timeline(samples=samples), SERVER, limits)
    return found
