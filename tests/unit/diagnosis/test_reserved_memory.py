"""The states in which torch's unused memory is a problem, at the edge of each condition."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.reserved_memory import (
    RecentReadings,
    confirmed,
    kept_since_start,
    likely,
    recent_failure,
    recent_readings,
    releasable_bytes,
    room_bytes,
    stranded_bytes,
    watched,
)
from kvdiag.model import Allocator, FailedAllocation, Memory, Sample, Timeline
from tests.builders.values import GIB, MIB, allocator, device, engine, split

MEMORY = Memory(total_bytes=100 * GIB, free_bytes=GIB)
"""Of 100 GiB, 8 % may lie unused for activations, and 2 % beyond."""

USUAL_BYTES = 10 * GIB


def failure(**changes: object) -> FailedAllocation:
    """512 MiB were asked for, 100 were free, 300 stranded and 112 releasable, in pieces of 200 at most."""
    holes = split(
        live_bytes=8 * GIB - 412 * MIB,
        releasable_bytes=112 * MIB,
        stranded_bytes=300 * MIB,
        largest_free_block_bytes=200 * MIB,
    )
    usual = FailedAllocation(age_seconds=0.0, asked_bytes=512 * MIB, free_bytes=100 * MIB, split=holes)
    return replace(usual, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked_bytes", "expected"),
    [(512 * MIB, True), (512 * MIB + 1, False), (200 * MIB, False), (200 * MIB + 1, True)],
)
def test_holes_are_confirmed_by_what_was_enough_in_pieces(asked_bytes: int, *, expected: bool) -> None:
    """100 MiB free, 300 between live blocks and 112 releasable are 512; the largest block was of 200."""
    assert expected == confirmed(failure(asked_bytes=asked_bytes))
    assert not confirmed(failure(asked_bytes=asked_bytes, split=None))
    assert (512 * MIB, 100 * MIB) == (room_bytes(failure()), room_bytes(failure(split=None)))


def test_failure_of_an_hour_ago_still_speaks() -> None:
    """An older one does not."""
    held = allocator(failure=failure(age_seconds=3600.0))
    assert held.failure == recent_failure(held, DEFAULT_LIMITS)
    assert recent_failure(allocator(failure=failure(age_seconds=3600.1)), DEFAULT_LIMITS) is None
    assert recent_failure(allocator(), DEFAULT_LIMITS) is None


def past(
    *readings: tuple[float, Allocator], engines: Sequence[Sample] = (), memory: Memory | None = MEMORY
) -> RecentReadings:
    """What is known of a process."""
    return RecentReadings(readings=readings, engines=tuple(engines), memory=memory)


def served(seconds: float, generated: int | None, running: int | None = 0) -> Sample:
    """An engine that has generated so many tokens."""
    return Sample(at_seconds=seconds, engines=(replace(engine(running=running), generation_tokens_total=generated),))


def test_flushes_count_within_five_minutes() -> None:
    """Retries count from the first sample of five minutes, are never below 0, and `None` if torch reports none."""
    early, first, last = (allocator(alloc_retries_total=count) for count in (0, 5, 9))
    untold = allocator(alloc_retries_total=None)

    assert 4 == past((0.0, early), (100.0, first), (400.0, last)).retries(DEFAULT_LIMITS)
    assert 0 == past((100.0, first), (400.5, last)).retries(DEFAULT_LIMITS)
    assert 9 == past((100.0, early), (400.0, last)).retries(DEFAULT_LIMITS)
    assert 0 == past((100.0, last), (400.0, first)).retries(DEFAULT_LIMITS)
    assert past((100.0, first), (400.0, untold)).retries(DEFAULT_LIMITS) is None
    assert past((100.0, untold), (400.0, first)).retries(DEFAULT_LIMITS) is None


def test_tokens_count_where_two_readings_tell_them() -> None:
    """Within so many seconds of the last publication, and not after it."""
    partly = Sample(at_seconds=100.0, engines=(engine(), replace(engine(), generation_tokens_total=None)))
    engines = [served(99.0, 1), partly, served(100.0, 10), served(200.0, None), served(300.0, 25), served(400.0, 30)]
    assert 20 == past((400.0, allocator()), engines=[*engines, served(401.0, 99)]).tokens(300.0)
    assert past((400.0, allocator()), engines=[*engines[5:], served(401.0, 99)]).tokens(300.0) is None
    assert past((400.0, allocator()), engines=(served(400.0, None), served(400.0, None))).tokens(300.0) is None
    assert past((400.0, allocator())).tokens(300.0) is None


@pytest.mark.parametrize(
    ("stranded", "flushes", "tokens", "expected"),
    [
        (1024 * MIB, 1, 5, True),  # an eighth of 8 GiB
        (819 * MIB, 1, 5, False),  # a tenth is 819.2 MiB
        (820 * MIB, 1, 5, True),
        (1024 * MIB, 0, 5, False),
        (1024 * MIB, None, 5, False),
        (1024 * MIB, 1, 0, False),  # it did not serve meanwhile
        (1024 * MIB, 1, None, True),
        (None, 1, 5, False),
    ],
)
def test_holes_are_likely_where_torch_flushes_and_a_tenth_is_stranded(
    stranded: int | None, flushes: int | None, tokens: int | None, *, expected: bool
) -> None:
    """While the server works; what it does not count does not excuse it."""
    first = allocator(alloc_retries_total=0, stranded_bytes=stranded)
    last = replace(first, alloc_retries_total=flushes)
    engines = (served(100.0, 0), served(200.0, tokens))
    assert expected == likely(last, past((100.0, first), (200.0, last), engines=engines), DEFAULT_LIMITS)


def gap(size_bytes: int) -> Allocator:
    """A process with so much reserved and not live."""
    return allocator(
        allocated_bytes=20 * GIB - size_bytes, reserved_bytes=20 * GIB, stranded_bytes=size_bytes, releasable_bytes=0
    )


@pytest.mark.parametrize(
    ("first_seconds", "size_bytes", "memory", "running", "expected"),
    [
        (0.0, USUAL_BYTES + 1, MEMORY, 0, True),
        (0.0, USUAL_BYTES, MEMORY, 0, False),
        (0.1, USUAL_BYTES + 1, MEMORY, 0, False),  # ten minutes are not whole
        (0.0, USUAL_BYTES + 1, None, 0, False),
        (0.0, USUAL_BYTES + 1, MEMORY, 1, False),
        (0.0, USUAL_BYTES + 1, MEMORY, None, False),
        # 8 % and a gigabyte of 10 GiB
        (0.0, int(0.08 * 10 * GIB) + GIB, Memory(total_bytes=10 * GIB, free_bytes=0), 0, False),
        (0.0, int(0.08 * 10 * GIB) + GIB + 1, Memory(total_bytes=10 * GIB, free_bytes=0), 0, True),
    ],
)
def test_what_lies_unused_for_ten_idle_minutes_is_watched(
    first_seconds: float, size_bytes: int, memory: Memory | None, running: int | None, *, expected: bool
) -> None:
    """Beyond activations and 2 % of the device, or a gigabyte, without any request in the ten minutes."""
    readings = ((first_seconds, gap(size_bytes)), (600.0, gap(size_bytes)))
    engines = (served(0.0, 0, running), served(600.0, 0))
    assert expected == watched(past(*readings, engines=engines, memory=memory), DEFAULT_LIMITS)


def test_what_came_and_went_is_not_watched() -> None:
    """The gap must be in every sample of the last ten minutes, and the engines sampled and idle."""
    large, small, untold = gap(USUAL_BYTES + 1), gap(GIB), allocator()
    idle = (served(0.0, 0), served(600.0, 0))

    before = (replace(idle[0], at_seconds=10.0), replace(idle[1], at_seconds=610.0))
    assert watched(past((9.0, small), (10.0, large), (610.0, large), engines=before), DEFAULT_LIMITS)
    assert not watched(past((0.0, large), (300.0, small), (600.0, large), engines=idle), DEFAULT_LIMITS)
    assert not watched(past((0.0, large), (300.0, untold), (600.0, large), engines=idle), DEFAULT_LIMITS)
    for half_told in (replace(large, releasable_bytes=None), replace(large, stranded_bytes=None)):
        assert not watched(past((0.0, large), (600.0, half_told), engines=idle), DEFAULT_LIMITS)
    assert not watched(past((0.0, large), (600.0, large)), DEFAULT_LIMITS)
    busy_at_the_end = (idle[0], served(600.0, 0, 1))
    assert not watched(past((0.0, large), (600.0, large), engines=busy_at_the_end), DEFAULT_LIMITS)
    busy_outside = (served(9.0, 0, 1), *before, served(611.0, 0, 1))
    assert watched(past((10.0, large), (610.0, large), engines=busy_outside), DEFAULT_LIMITS)


def test_pools_of_graphs_are_not_to_be_shared() -> None:
    """Of 12 GiB that are not live 3 in graph pools leave 9, which is usual."""
    idle = (served(0.0, 0), served(600.0, 0))

    def of(private: int) -> Allocator:
        parts = split(
            reserved_bytes=20 * GIB,
            live_bytes=8 * GIB,
            private_bytes=private,
            releasable_bytes=12 * GIB - private,
            largest_free_block_bytes=GIB,
        )
        return allocator(allocated_bytes=8 * GIB, reserved_bytes=20 * GIB, split=parts)

    assert watched(past((0.0, of(GIB)), (600.0, of(GIB)), engines=idle), DEFAULT_LIMITS)
    assert not watched(past((0.0, of(3 * GIB)), (600.0, of(3 * GIB)), engines=idle), DEFAULT_LIMITS)


def test_history_is_of_one_process_and_goes_back_eleven_minutes() -> None:
    """The history has the engines' samples and the device's memory, as the process publishes it or NVML reads it."""
    own, other, anew = allocator(age_seconds=2.0), allocator(pid=7), allocator(start_ticks=9)
    early = Sample(at_seconds=339.9, allocators=(own,))
    first = Sample(at_seconds=340.0, allocators=(other, own, anew), engines=(engine(),))
    devices = (device(1), device(0, uuid="GPU-0"))
    last = Sample(at_seconds=1000.0, allocators=(own,), devices=devices)
    later = Sample(at_seconds=1001.0, engines=(engine(),), devices=devices)

    actual = recent_readings(Timeline(samples=(early, first, last, later)), own, DEFAULT_LIMITS)

    assert ((338.0, own), (998.0, own)) == actual.readings
    assert (first,) == actual.engines
    assert devices[1].memory == actual.memory
    told = replace(own, memory=MEMORY)
    assert (
        MEMORY == recent_readings(Timeline(samples=(replace(last, allocators=(told,)),)), told, DEFAULT_LIMITS).memory
    )


def loaded(
    *gaps: int | None, served_first: int | None = 0, served_last: int | None = 3600, step: float = 600.0
) -> Timeline:
    """A process with these unused bytes at each sample, and prompt tokens of one engine next to an idle one."""
    samples = []
    for number, size in enumerate(gaps):
        one = allocator(memory=MEMORY) if size is None else split_of(size)
        prompts = served_first if number == 0 else served_last
        page = (replace(engine(), prompt_tokens_total=prompts), engine(label="1"))
        samples.append(Sample(at_seconds=1000.0 + step * number, allocators=(one,), engines=page))
    return Timeline(samples=tuple(samples))


def split_of(size_bytes: int) -> Allocator:
    """A process whose blocks were looked at."""
    parts = split(
        reserved_bytes=20 * GIB,
        live_bytes=20 * GIB - size_bytes,
        releasable_bytes=size_bytes,
        largest_free_block_bytes=min(size_bytes, GIB),
    )
    return allocator(allocated_bytes=20 * GIB - size_bytes, reserved_bytes=20 * GIB, split=parts, memory=MEMORY)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (loaded(USUAL_BYTES + 9, USUAL_BYTES + 1), (USUAL_BYTES + 1, 600.0)),
        (loaded(USUAL_BYTES + 9, USUAL_BYTES), None),
        (loaded(USUAL_BYTES + 9, None, USUAL_BYTES + 5), (USUAL_BYTES + 5, 1200.0)),  # not looked at each time
        (loaded(USUAL_BYTES + 9, USUAL_BYTES + 1, step=599.9), None),
        # 3,600 tokens in 10 min are 6 a second: 1,800 in the first five minutes
        (loaded(USUAL_BYTES + 9, USUAL_BYTES + 1, served_first=1200), (USUAL_BYTES + 1, 600.0)),
        (loaded(USUAL_BYTES + 9, USUAL_BYTES + 1, served_first=1201), None),
        (loaded(USUAL_BYTES + 9, USUAL_BYTES + 1, served_first=3600), None),
        (loaded(USUAL_BYTES + 9, USUAL_BYTES + 1, served_first=None), None),
        (loaded(USUAL_BYTES + 9, USUAL_BYTES + 1, served_first=None, served_last=None), None),
        (loaded(None, None), None),
    ],
)
def test_what_loading_left_is_what_no_request_came_to_use(seen: Timeline, expected: tuple[int, float] | None) -> None:
    """The result is the least unused since the start; `None` if over 5 min of requests came before the first sample."""
    last = seen.samples[-1].allocators
    assert last is not None
    assert expected == kept_since_start(seen, last[0], DEFAULT_LIMITS)
    assert kept_since_start(seen, replace(last[0], memory=None), DEFAULT_LIMITS) is None


def test_tokens_of_one_moment_tell_no_rate() -> None:
    """Two engine samples of the same instant give no token rate, so the start counts as not observed."""
    held = split_of(USUAL_BYTES + 1)
    twice = [replace(engine(), prompt_tokens_total=count) for count in (0, 5)]
    seen = Timeline(
        samples=(
            Sample(at_seconds=0.0, allocators=(held,)),
            Sample(at_seconds=600.0, engines=(twice[0],)),
            Sample(at_seconds=600.0, engines=(twice[1],), allocators=(held,)),
        )
    )

    assert kept_since_start(seen, held, DEFAULT_LIMITS) is None


def test_stranded_bytes_are_reported_by_blocks_else_by_torchs_count() -> None:
    """Torch's own count omits expandable segments, so with them stranded bytes are unknown."""
    counted = allocator(inactive_split_bytes=5 * MIB)
    assert 5 * MIB == stranded_bytes(counted)
    assert stranded_bytes(replace(counted, expandable_segments=True)) is None
    assert stranded_bytes(replace(counted, expandable_segments=None)) is None
    assert 7 * MIB == stranded_bytes(replace(counted, stranded_bytes=7 * MIB))
    parts = split(releasable_bytes=2 * GIB - 9 * MIB, stranded_bytes=9 * MIB)
    both = replace(counted, stranded_bytes=7 * MIB, releasable_bytes=MIB, split=parts)
    assert (9 * MIB, 2 * GIB - 9 * MIB) == (stranded_bytes(both), releasable_bytes(both))
    assert MIB == releasable_bytes(replace(both, split=None))
