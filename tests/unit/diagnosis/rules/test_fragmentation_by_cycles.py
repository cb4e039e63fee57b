"""fragmentation.allocator over equal cycles: cache that grows with each request while nothing more lives in it."""

from __future__ import annotations

from dataclasses import replace

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.fragmentation_allocator import judge
from kvdiag.model import Allocator, Facts, Finding, Sample, Timeline
from tests.builders.values import GIB, MIB, allocator, pool, split
from tests.unit.diagnosis.rules.cycles import cycles

SERVER = Facts(pools=(pool(),), server_pids=(100, 101, 102))
HOLES = split(
    live_bytes=5 * GIB, releasable_bytes=0, stranded_bytes=3 * GIB, largest_free_block_bytes=64 * MIB, fits=False
)


def verdict(timeline: Timeline) -> Finding:
    """The rule's one finding."""
    (found,) = judge(timeline, SERVER, DEFAULT_LIMITS)
    return found


def held(live: int, reserved: int, **changes: object) -> Allocator:
    """A process with so many bytes live of those reserved."""
    return allocator(title="Worker", allocated_bytes=live, reserved_bytes=reserved, **changes)


def figures(found: Finding) -> list[tuple[str, object, str, str]]:
    """Evidence as rows."""
    return [(one.name, one.value, one.unit, one.source) for one in found.evidence]


GROWN = 6 * MIB


def climbing(*processes: tuple[int, int]) -> Timeline:
    """Eight equal cycles in which processes reserve so many bytes more each, of which so many are live."""
    return cycles(
        [
            Sample(
                at_seconds=0.0,
                allocators=tuple(
                    held(5 * GIB + live * cycle, 6 * GIB + reserved * cycle, pid=100 + place)
                    for place, (reserved, live) in enumerate(processes)
                ),
            )
            for cycle in range(9)
        ]
    )


def test_cache_that_grows_with_each_request_has_its_figures() -> None:
    """Eight cycles, of which two are first touch: six times as much over the judged ones, of the worst process."""
    actual = verdict(climbing((GROWN, 0), (2 * GROWN, 0), (9 * GROWN, 9 * GROWN)))

    assert "suspect" == actual.status
    assert [
        ("process", "Worker 101", "", "torch"),
        ("reserved_growth_per_cycle", 12 * MIB, "bytes", "torch"),
        ("reserved_growth_over_judged_cycles", 72 * MIB, "bytes", "torch"),
        ("live_growth_over_judged_cycles", 0, "bytes", "torch"),
        ("judged_cycles", 6, "cycles", "kvdiag"),
        ("rising_cycles", 6, "cycles", "torch"),
    ] == figures(actual)


def test_cache_that_does_not_grow_alone_is_told_by_its_gap() -> None:
    """What lives in torch grows as well, or nothing does: no cache's growth; a suspect process is told before it."""
    assert ["ok", "ok"] == [verdict(climbing(one)).status for one in ((GROWN, GROWN), (0, 0))]
    last = climbing((GROWN, 0))
    ill = held(5 * GIB, 8 * GIB, pid=102, split=HOLES)
    tuple(replace(one, allocators=(*one.allocators, ill)) if one.allocators else one for one in last.samples)
    tuple(
        replace(one, allocators=(*one.allocators, replace(ill, split=None))) if one.allocators else one
        for one in last.samples
    )
