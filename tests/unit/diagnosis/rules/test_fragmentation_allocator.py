"""fragmentation.allocator: by NVML alone, by the parts of torch's unused memory, and over equal cycles."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.fragmentation_allocator import judge
from kvdiag.model import Allocator, Facts, FailedAllocation, Finding, Sample, Timeline
from tests.builders.answers import evidence, rows
from tests.builders.runs import run
from tests.builders.values import GIB, MIB, OOM, OOM_WITH_ROOM, allocator, engine, pool, split
from tests.builders.worlds import World, facts
from tests.unit.diagnosis.rules.gaps import HELD, verdict
from tests.unit.diagnosis.rules.leaks.cycles import cycles

CUT = "CUDA out of memory. Tried to allocate 3.00 GiB."


def of_world(world: World) -> Finding:
    """The rule's one finding."""
    (found,) = judge(run(world), facts(world), DEFAULT_LIMITS)
    return found


def test_an_allocation_that_failed_with_room_left_is_a_fault() -> None:
    """2.5 GiB failed although 3.45 GiB were free or unused: no hole was large enough."""
    actual = of_world(World(failing={"concurrent": OOM_WITH_ROOM}))
    assert ("fragmentation.allocator", "fault") == (actual.id, actual.status)
    assert [
        ("requested", 5 * GIB // 2, "bytes", "torch's message"),
        ("free_on_device", 512 * MIB, "bytes", "torch's message"),
        ("reserved_but_unallocated", int(2.95 * GIB), "bytes", "torch's message"),
        ("failed_requests", 10, "requests", "step concurrent"),
    ] == rows(actual)


@pytest.mark.parametrize(
    ("world", "status"),
    [
        pytest.param(World(), "unknown", id="nothing failed"),
        pytest.param(World(failing={"concurrent": "HTTP 500: internal error"}), "unknown", id="failed otherwise"),
        pytest.param(World(failing={"concurrent": CUT}), "unknown", id="figures missing"),
        pytest.param(World(lost_in="single_request"), "unknown", id="server lost"),
        pytest.param(World(failing={"long_context": OOM}), "ok", id="exhausted"),
        pytest.param(World(failing={"concurrent": OOM_WITH_ROOM, "long_context": OOM}), "fault", id="holes, then none"),
        pytest.param(World(failing={"concurrent": OOM, "long_context": OOM_WITH_ROOM}), "fault", id="none, then holes"),
    ],
)
def test_runs_get_their_status(world: World, status: str) -> None:
    """What lies unused inside the allocator is not visible from outside; 3 GiB of 0.75 would have failed anyway."""
    assert status == of_world(world).status


HOLES = split(
    reserved_bytes=8 * GIB,
    live_bytes=5 * GIB,
    releasable_bytes=0,
    stranded_bytes=3 * GIB,
    largest_free_block_bytes=64 * MIB,
    fits=False,
    unusable_ratio=1.0,
)
"""Forty-eight holes of 64 MiB, where 512 MiB are asked for."""


FAILED = FailedAllocation(age_seconds=300.0, asked_bytes=512 * MIB, free_bytes=200 * MIB, split=HOLES)
NO_GAP = replace(HELD, allocated_bytes=8 * GIB)
SERVES = replace(HELD, split=replace(HOLES, fits=True))
COUNTED = replace(HELD, inactive_split_bytes=2 * GIB, alloc_retries_total=1)


@pytest.mark.parametrize(
    ("readings", "status"),
    [
        pytest.param((HELD, replace(HELD, split=HOLES, alloc_retries_total=4)), "suspect", id="flushes"),
        pytest.param((replace(SERVES, alloc_retries_total=9),) * 2, "ok", id="flushes before the first sample"),
        pytest.param((replace(HELD, split=HOLES),), "suspect", id="nothing large fits"),
        pytest.param((replace(HELD, split=split(live_bytes=5 * GIB, releasable_bytes=3 * GIB)),), "ok", id="cache"),
        pytest.param(
            (replace(HELD, split=split(live_bytes=5 * GIB, releasable_bytes=0, private_bytes=3 * GIB)),),
            "ok",
            id="graph pools",
        ),
        pytest.param((replace(HELD, split=replace(HOLES, fits=True, unusable_ratio=0.3)),), "ok", id="a block fits"),
        pytest.param((replace(HELD, backend="cudaMallocAsync"),), "unknown", id="no blocks"),
        pytest.param((replace(HELD, process_bytes=GIB),), "unknown", id="asleep"),
        pytest.param((HELD,), "unknown", id="no split"),
        pytest.param((HELD, COUNTED), "suspect", id="torch's own count"),
        pytest.param((HELD, replace(COUNTED, expandable_segments=True)), "unknown", id="expandable segments"),
        pytest.param((replace(HELD, failure=FAILED),), "fault", id="failed with room in pieces"),
        *(
            pytest.param((replace(NO_GAP, failure=replace(FAILED, **changes)),), "ok", id=f"failure {name}")
            for name, changes in (
                ("of more than all", {"asked_bytes": 4 * GIB}),
                ("beside a block that fits", {"asked_bytes": 64 * MIB}),
                ("of unknown blocks", {"split": None}),
                ("of two hours ago", {"age_seconds": 2 * 3600.0}),
            )
        ),
    ],
)
def test_processes_get_their_status(readings: tuple[Allocator, ...], status: str) -> None:
    """Holes count where torch flushes its cache, where a large block would not fit, or where an allocation failed.
    `inactive_split` stays 0 in expandable segments (pytorch#159564): there it says nothing.
    """
    assert status == verdict(*readings).status


def test_threshold_of_the_plain_rule_can_be_set() -> None:
    """A lower limit breaks down smaller gaps."""
    small = replace(HELD, allocated_bytes=8 * GIB - MIB)
    strict = verdict(small, limits=replace(DEFAULT_LIMITS, reserved_gap_bytes=0))
    assert ("ok", "unknown") == (verdict(small).status, strict.status)


@pytest.mark.parametrize(
    ("flushed", "tokens", "status"),
    [(1, 100, "suspect"), (1, 0, "ok"), (7, 100, "ok")],
    ids=["the server works", "the server is idle", "more than five minutes ago"],
)
def test_flushes_count_while_the_server_works(flushed: int, tokens: int, status: str) -> None:
    """Flushes in minutes in which nothing is generated are those of a start or an end; old ones are over."""
    readings = (SERVES, *[replace(SERVES, alloc_retries_total=7)] * flushed)
    pages = [replace(engine(), generation_tokens_total=number * tokens) for number in range(len(readings))]
    samples = tuple(
        Sample(at_seconds=60.0 * number, allocators=(one,), engines=(page,))
        for number, (one, page) in enumerate(zip(readings, pages, strict=True))
    )
    (actual,) = judge(Timeline(samples=samples), facts(World()), DEFAULT_LIMITS)
    assert status == actual.status


def test_worst_process_speaks() -> None:
    """Of several ranks the one in trouble is told."""
    well, ill = replace(HELD, allocated_bytes=8 * GIB), replace(HELD, pid=101, split=HOLES)
    timeline = Timeline(samples=(Sample(at_seconds=1.0, allocators=(well, ill)),))
    (actual,) = judge(timeline, replace(facts(World()), server_pids=(100, 101)), DEFAULT_LIMITS)
    assert ("suspect", "VLLM::Worker_TP0 101") == (actual.status, evidence(actual)["process"])


SERVER = Facts(pools=(pool(),), server_pids=(100, 101, 102))


def of_cycles(timeline: Timeline) -> Finding:
    """The rule's one finding."""
    (found,) = judge(timeline, SERVER, DEFAULT_LIMITS)
    return found


def held(live: int, reserved: int, **changes: object) -> Allocator:
    """A process with so many bytes live of those reserved."""
    return allocator(title="Worker", allocated_bytes=live, reserved_bytes=reserved, **changes)


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
    actual = of_cycles(climbing((GROWN, 0), (2 * GROWN, 0), (9 * GROWN, 9 * GROWN)))

    assert "suspect" == actual.status
    assert [
        ("process", "Worker 101", "", "torch"),
        ("reserved_growth_per_cycle", 12 * MIB, "bytes", "torch"),
        ("reserved_growth_over_judged_cycles", 72 * MIB, "bytes", "torch"),
        ("live_growth_over_judged_cycles", 0, "bytes", "torch"),
        ("judged_cycles", 6, "cycles", "kvdiag"),
        ("rising_cycles", 6, "cycles", "torch"),
    ] == rows(actual)


@pytest.mark.parametrize("growth", [(GROWN, GROWN), (0, 0)], ids=["live bytes grow as well", "nothing grows"])
def test_cache_that_does_not_grow_alone_is_judged_by_its_gap(growth: tuple[int, int]) -> None:
    """It is no cache's growth."""
    assert "ok" == of_cycles(climbing(growth)).status
