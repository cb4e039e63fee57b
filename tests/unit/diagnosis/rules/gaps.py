"""What one process tells of torch's memory, and what fragmentation.allocator makes of it."""

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.fragmentation_allocator import judge
from kvdiag.model import Allocator, Finding, Sample, Timeline
from tests.builders.values import GIB, allocator
from tests.builders.worlds import World, facts

WHO = "VLLM::Worker_TP0 100"
HELD = allocator(title="VLLM::Worker_TP0", allocated_bytes=5 * GIB)


def verdict(*readings: Allocator, limits: object = None) -> Finding:
    """The rule's one finding on what one process told, reading by reading."""
    samples = tuple(Sample(at_seconds=float(number), allocators=(one,)) for number, one in enumerate(readings, start=1))
    (found,) = judge(Timeline(samples=samples), facts(World()), limits or DEFAULT_LIMITS)  # type: ignore[arg-type]
    return found
