"""fragmentation.allocator: by NVML alone, by the parts of torch's unused memory, and over equal cycles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.fragmentation_allocator import judge
from kvdiag.model import Allocator, Facts, FailedAllocation, Finding, Sample, Timeline
from tests.builders.answers import evidence, rows
from tests.builders.runs import run
from tests.builders.values import GIB, MIB, OOM, OOM_WITH_ROOM, allocator, engine, pool, split
from tests.builders.worlds import World, facts
from tests.unit.diagnosis.rules.cycles import cycles
from tests.unit.diagnosis.rules.gaps import HELD, verdict


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


def test_exhaustion_is_not_fragmentation() -> None:
    """An allocation larger than all that was left would have failed without a single hole."""
    # 3 GiB asked of 0.75 GiB
    actual = of_world(World(failing={"long_context": OOM}))
    assert "ok" == actual.status


@pytest.mark.parametrize(
    "world",
    [
        World(),
        World(failing={"concurrent": "HTTP 500: internal error"}),
        World(failing={"concurrent": "CUDA out of memory. Tried to allocate 3.00 GiB."}),
        World(lost_in="single_request"),
    ],
    ids=["nothing failed", "failed otherwise", "figures missing", "server lost"],
)
def test_without_a_failed_allocation_it_is_unknown(world: World) -> None:
    """What lies idle inside the allocator is not visible from outside, and is not guessed."""
    actual = of_world(world)
    assert "unknown" == actual.status


def test_a_failure_without_holes_does_not_hide_one_with() -> None:
    """Of two failed steps the one with room left decides, whichever came first."""
    first = of_world(World(failing={"concurrent": OOM_WITH_ROOM, "long_context": OOM}))
    second = of_world(World(failing={"concurrent": OOM, "long_context": OOM_WITH_ROOM}))
    assert ("fault", "fault") == (first.status, second.status)


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


def test_holes_that_cost_flushes_are_suspect() -> None:
    """Torch that flushes its cache to go on, while a third of what it has lies between live blocks, is fragmented."""
    actual = verdict(HELD, replace(HELD, split=HOLES, alloc_retries_total=4))
    assert "suspect" == actual.status
    assert {"stranded": 3 * GIB, "alloc_retries": 4, "unusable_ratio": 1.0}.items() <= evidence(actual).items()


def test_flushes_before_anybody_looked_are_not_counted() -> None:
    """What was retried while the server loaded its model is over."""
    since_start = replace(HELD, alloc_retries_total=9, split=replace(HOLES, fits=True))
    assert "ok" == verdict(since_start, since_start).status


def test_holes_in_which_nothing_large_fits_are_suspect() -> None:
    """Without any flush yet: 3 GiB in pieces, and 512 MiB would not fit."""
    actual = verdict(replace(HELD, split=HOLES))
    assert "suspect" == actual.status


@pytest.mark.parametrize(
    "harmless",
    [
        split(live_bytes=5 * GIB, releasable_bytes=3 * GIB),
        split(live_bytes=5 * GIB, releasable_bytes=0, private_bytes=3 * GIB),
        replace(HOLES, fits=True, unusable_ratio=0.3),
    ],
    ids=["cache", "graph pools", "holes that serve"],
)
def test_gap_that_is_of_use_is_shown_and_ok(harmless: object) -> None:
    """Beyond 2 GB the gap is shown by its parts, and is no fault where the next request finds room."""
    actual = verdict(replace(HELD, split=harmless))  # type: ignore[arg-type]
    assert "ok" == actual.status


def test_threshold_of_the_plain_rule_can_be_set() -> None:
    """Who wants to see smaller gaps by their parts lowers the limit."""
    small = replace(HELD, allocated_bytes=8 * GIB - MIB)
    usual = verdict(small)
    strict = verdict(small, limits=replace(DEFAULT_LIMITS, reserved_gap_bytes=0))
    assert "ok" == usual.status
    assert "unknown" == strict.status


@pytest.mark.parametrize(
    "held",
    [
        replace(HELD, backend="cudaMallocAsync"),
        replace(HELD, process_bytes=GIB),
        HELD,
    ],
    ids=["no blocks", "asleep", "no split"],
)
def test_what_cannot_be_seen_is_unknown(held: Allocator) -> None:
    """Without blocks, with bytes that are not there, or without their split, nothing is said of holes."""
    actual = verdict(held)
    assert "unknown" == actual.status


def test_torchs_own_count_of_holes_serves_only_where_segments_do_not_expand() -> None:
    """`inactive_split` stays 0 in expandable segments (pytorch#159564): there it says nothing."""
    fixed = replace(HELD, inactive_split_bytes=2 * GIB, alloc_retries_total=1)
    expanding = replace(fixed, expandable_segments=True)
    assert ["suspect", "unknown"] == [verdict(HELD, each).status for each in (fixed, expanding)]


def test_worst_process_speaks() -> None:
    """Of several ranks the one in trouble is told."""
    well, ill = replace(HELD, allocated_bytes=8 * GIB), replace(HELD, pid=101, split=HOLES)
    timeline = Timeline(samples=(Sample(at_seconds=1.0, allocators=(well, ill)),))
    (actual,) = judge(timeline, replace(facts(World()), server_pids=(100, 101)), DEFAULT_LIMITS)
    assert ("suspect", "VLLM::Worker_TP0 101") == (actual.status, evidence(actual)["process"])


FAILED = FailedAllocation(age_seconds=300.0, asked_bytes=512 * MIB, free_bytes=200 * MIB, split=HOLES)


def test_failure_that_had_room_in_holes_is_confirmed_by_its_black_box() -> None:
    """512 MiB failed five minutes ago with 3 GiB free in pieces of 64 MiB: no answer has to tell of it."""
    actual = verdict(replace(HELD, failure=FAILED))
    assert "fault" == actual.status
    assert {"requested": 512 * MIB, "free_on_device": 200 * MIB, "failed_seconds_ago": 300.0}.items() <= evidence(
        actual
    ).items()


@pytest.mark.parametrize(
    "failure",
    [
        replace(FAILED, asked_bytes=4 * GIB),
        replace(FAILED, asked_bytes=64 * MIB),
        replace(FAILED, split=None),
        replace(FAILED, age_seconds=2 * 3600.0),
    ],
    ids=["not enough together", "a block was there", "blocks not looked at", "long ago"],
)
def test_failure_that_holes_do_not_explain_confirms_nothing(failure: FailedAllocation) -> None:
    """Exhaustion, a block in another stream, an unseen split, a failure of hours ago: none is a hole that fits not."""
    held = replace(HELD, allocated_bytes=8 * GIB, failure=failure)
    assert "ok" == verdict(held).status


def working(*readings: Allocator, tokens: int, every_seconds: float = 60.0) -> Finding:
    """The finding on a server that generates so many tokens between two readings."""
    samples = tuple(
        Sample(
            at_seconds=1000.0 + number * every_seconds,
            allocators=(one,),
            engines=(replace(engine(), generation_tokens_total=number * tokens),),
        )
        for number, one in enumerate(readings)
    )
    (found,) = judge(Timeline(samples=samples), facts(World()), DEFAULT_LIMITS)
    return found


@pytest.mark.parametrize(
    ("tokens", "expected"), [(100, "suspect"), (0, "ok")], ids=["the server works", "the server does nothing"]
)
def test_flushes_count_while_the_server_works(tokens: int, expected: str) -> None:
    """Flushes in minutes in which nothing is generated are those of a start or an end."""
    holes = replace(HOLES, fits=True)
    flushed = replace(HELD, split=holes, alloc_retries_total=3)
    assert expected == working(replace(HELD, split=holes), flushed, tokens=tokens).status


def test_flushes_of_more_than_five_minutes_ago_are_over() -> None:
    """Retries that stopped are no sign of pressure now."""
    holes = replace(HELD, split=replace(HOLES, fits=True))
    after = [replace(holes, alloc_retries_total=7)] * 7
    assert "ok" == working(holes, *after, tokens=100).status


SERVER = Facts(pools=(pool(),), server_pids=(100, 101, 102))

SMALL_HOLES = split(
    live_bytes=5 * GIB, releasable_bytes=0, stranded_bytes=3 * GIB, largest_free_block_bytes=64 * MIB, fits=False
)


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


def test_cache_that_does_not_grow_alone_is_told_by_its_gap() -> None:
    """What lives in torch grows as well, or nothing does: no cache's growth; a suspect process is told before it."""
    assert ["ok", "ok"] == [of_cycles(climbing(one)).status for one in ((GROWN, GROWN), (0, 0))]
    last = climbing((GROWN, 0))
    ill = held(5 * GIB, 8 * GIB, pid=102, split=SMALL_HOLES)
    tuple(replace(one, allocators=(*one.allocators, ill)) if one.allocators else one for one in last.samples)
    tuple(
        replace(one, allocators=(*one.allocators, replace(ill, split=None))) if one.allocators else one
        for one in last.samples
    )
