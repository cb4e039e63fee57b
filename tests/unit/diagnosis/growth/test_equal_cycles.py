"""Equal cycles, byte by byte: first touch, growth, continued growth, and the process that owns it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest

from kvdiag.diagnosis.growth.equal_cycles import (
    Owner,
    allocator_growths,
    climb_of,
    device_growths,
    floors_after_cycles,
    warmup_cycles,
)
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Allocator, Device, Facts, Mark, Outcome, Sample, Timeline
from tests.builders.values import GIB, MIB, allocator, device, holding, pool, process

KNOWN = Facts(pools=(pool(),), server_pids=(100,))
WORKED = Outcome(completed=1, failed=0, prompt_tokens=8, generated_tokens=8)


@pytest.mark.parametrize(("cycles", "warmup"), [(4, None), (5, 2), (10, 2), (11, 3), (14, 4), (20, 5)])
def test_a_quarter_of_the_cycles_is_first_touch(cycles: int, warmup: int | None) -> None:
    """At least two; three have to be left."""
    assert warmup == warmup_cycles(cycles, DEFAULT_LIMITS)


@pytest.mark.parametrize(
    ("used", "rose", "leaking", "rising", "total"),
    [
        # Two cycles of first touch, then four that are judged, in MiB.
        ((0, 50, 60, 62, 64, 66, 68), True, True, 4, 8),
        ((0, 50, 60, 61, 62, 63, 64), True, False, 0, 4),  # less than a page a cycle
        ((0, 50, 60, 62, 64, 66, 66), True, True, 3, 6),  # three quarters
        ((0, 50, 60, 62, 64, 64, 64), True, False, 2, 4),
        ((0, 50, 60, 60, 60, 60, 62), True, False, 1, 2),
        ((0, 50, 60, 60, 60, 60, 61), False, False, 0, 1),
        ((0, 50, 60, 64, 68, 70, 72), True, True, 4, 12),  # half as fast later
        ((0, 50, 60, 70, 80, 82, 85), True, False, 4, 25),
        ((0, 50, 60, 60, 60, 60, 60), False, False, 0, 0),
        ((0, 50, 60, 58, 56, 54, 52), False, False, 0, -8),
    ],
)
def test_a_climb_goes_on_in_most_of_its_cycles(
    used: Sequence[int], *, rose: bool, leaking: bool, rising: int, total: int
) -> None:
    """By a page of 2 MiB in three of four cycles, and later at least half as fast as before."""
    actual = climb_of([size * MIB for size in used], 2, 2 * MIB, DEFAULT_LIMITS)

    assert (rose, leaking, rising, total * MIB) == (
        actual.rose,
        actual.leaking,
        actual.rising_cycles,
        actual.judged_bytes,
    )
    assert (4, 60 * MIB, total * MIB / 4) == (actual.judged_cycles, actual.warmup_bytes, actual.bytes_per_cycle)


def test_an_odd_middle_cycle_belongs_to_neither_half() -> None:
    """Of five cycles the first two and the last two are compared; of one there are no halves."""
    assert climb_of([0, 4, 8, 99, 101, 103], 0, 2, DEFAULT_LIMITS).leaking
    assert not climb_of([0, 4, 8, 99, 100, 102], 0, 2, DEFAULT_LIMITS).leaking
    assert climb_of([0, 2], 0, 2, DEFAULT_LIMITS).leaking


def run(
    devices: Sequence[tuple[Device, ...] | None],
    *,
    outcomes: dict[int, Outcome] | None = None,
    allocators: Sequence[tuple[Allocator, ...]] = (),
    idle: Sequence[Device] = (),
) -> Timeline:
    """Cycles of 10 s: idle before the first and after each, with these devices; the baseline before them."""
    samples: list[Sample] = [Sample(at_seconds=1.0 + number, devices=(each,)) for number, each in enumerate(idle)]
    marks = [Mark(at_seconds=0.0, step="baseline", cycle=0, phase="begin")]
    marks.append(Mark(at_seconds=90.0, step="baseline", cycle=0, phase="end"))
    for number, each in enumerate(devices):
        begin = 100.0 + 10.0 * number
        told = allocators[number] if allocators else None
        samples += [
            Sample(at_seconds=begin + 1.0, engines=(holding(0),)),
            Sample(at_seconds=begin + 2.0, engines=(holding(0),), devices=each, allocators=told),
        ]
        if number == 0:
            marks.append(Mark(at_seconds=begin, step="single_request", cycle=0, phase="begin"))
            marks.append(Mark(at_seconds=begin + 9.0, step="single_request", cycle=0, phase="offer"))
            continue
        outcome = (outcomes or {}).get(number, WORKED)
        if number > 1:
            marks.append(Mark(at_seconds=begin - 1.0, step="single_request", cycle=number - 1, phase="begin"))
            marks.append(Mark(at_seconds=begin - 0.5, step="single_request", cycle=number - 1, phase="offer"))
        marks.append(Mark(at_seconds=begin, step="single_request", cycle=number - 1, phase="release", outcome=outcome))
        marks.append(Mark(at_seconds=begin + 3.0, step="single_request", cycle=number - 1, phase="end"))
    return Timeline(samples=tuple(samples), marks=tuple(marks))


def gpu(own: int | None, used: int, index: int = 0) -> tuple[Device, ...]:
    """A device on which the server holds so many MiB, of so many used."""
    processes = None if own is None else (process(100, own * MIB), process(7, MIB))
    return (device(index, used_bytes=used * MIB, processes=processes),)


STILL = [gpu(50, 500)] * 6


def test_floors_are_those_of_cycles_that_worked() -> None:
    """The one before the first that worked, where it was idle, and one after each; one without an end has none."""
    failed, empty = replace(WORKED, failed=1), replace(WORKED, completed=0)
    counts = [
        len(floors_after_cycles(run(STILL, outcomes=outcomes), KNOWN, DEFAULT_LIMITS))
        for outcomes in ({}, {2: failed}, {2: empty}, {1: failed})
    ]
    assert [6, 5, 5, 4] == counts
    assert [] == floors_after_cycles(run([]), KNOWN, DEFAULT_LIMITS)
    whole = run(STILL)
    cut = Timeline(samples=whole.samples, marks=whole.marks[:-1])
    assert 5 == len(floors_after_cycles(cut, KNOWN, DEFAULT_LIMITS))


@pytest.mark.parametrize(
    ("own", "used", "owner", "leaking", "judged"),
    [
        ((0, 9, 9, 11, 13, 15), (500, 509, 509, 511, 513, 515), "server", True, 6),
        ((9,) * 6, (500, 500, 500, 504, 508, 512), "another process", True, 12),
        ((9, 9, 9, 11, 13, 15), (500, 500, 500, 600, 700, 800), "server", True, 6),
        ((9,) * 6, (500,) * 6, "server", False, 0),
        ((9, 9, 9, 9, 9, None), (500, 500, 500, 504, 508, 512), "unknown", True, 12),
        ((None,) * 6, (500, 500, 500, 504, 508, 512), "unknown", True, 12),
    ],
)
def test_growth_is_the_servers_where_its_own_bytes_rise(
    own: Sequence[int | None], used: Sequence[int], owner: str, *, leaking: bool, judged: int
) -> None:
    """Growth is the server's if its own bytes rise, another process's if not, unknown if a sample omits the server."""
    seen = run([gpu(one, all_of_it) for one, all_of_it in zip(own, used, strict=True)])

    (actual,) = device_growths(seen, KNOWN, DEFAULT_LIMITS)

    assert owner in get_args(Owner)
    assert (owner, leaking, judged * MIB) == (actual.owner, actual.leaking, actual.judged_bytes)
    assert (0, "GPU-0", 3) == (actual.gpu, actual.uuid, actual.judged_cycles)
    assert (judged * MIB / 3, None) == (actual.bytes_per_cycle, actual.idle_bytes)


def test_devices_are_compared_where_every_reading_tells_them() -> None:
    """Devices are compared if each sample reports their memory and there are six floors; otherwise not at all."""
    two = (*gpu(50, 500), device(1, processes=(process(100, MIB),)))

    assert [0, 1] == [one.gpu for one in device_growths(run([two] * 6), KNOWN, DEFAULT_LIMITS)]
    assert () == device_growths(run([two] * 5 + [two[:1]]), KNOWN, DEFAULT_LIMITS)
    blind = (replace(two[0], memory=None), two[1])
    assert () == device_growths(run([two] * 5 + [blind]), KNOWN, DEFAULT_LIMITS)
    assert () == device_growths(run(STILL[:5]), KNOWN, DEFAULT_LIMITS)
    # A floor without devices is left out, as if its cycle had not been.
    assert () == device_growths(run([*STILL[:5], None]), KNOWN, DEFAULT_LIMITS)
    assert 1 == len(device_growths(run([*STILL, None]), KNOWN, DEFAULT_LIMITS))


def test_growth_at_idle_is_the_control() -> None:
    """Idle growth is the baseline's last sample minus its first; with a single sample it is `None`."""
    idle = [device(used_bytes=size * MIB) for size in (500, 900, 507)]

    for readings, expected in ((idle, 7 * MIB), (idle[:2], 400 * MIB), (idle[:1], None), ([device(1), *idle], 7 * MIB)):
        (actual,) = device_growths(run(STILL, idle=readings), KNOWN, DEFAULT_LIMITS)
        assert expected == actual.idle_bytes
    whole = run(STILL, idle=idle)
    unended = replace(whole, marks=(whole.marks[0], *whole.marks[2:]))
    assert [None] == [one.idle_bytes for one in device_growths(unended, KNOWN, DEFAULT_LIMITS)]


def torch(live: int, reserved: int, process_mib: int | None = None, pid: int = 100) -> Allocator:
    """A process by MiB."""
    return allocator(
        pid=pid,
        title="VLLM::Worker" if pid == 100 else None,
        allocated_bytes=live * MIB,
        reserved_bytes=reserved * MIB,
        process_bytes=None if process_mib is None else process_mib * MIB,
    )


def test_torch_is_judged_process_by_process() -> None:
    """Each process has live, reserved and non-torch growth; a process missing from one cycle is left out."""
    # A worker whose live bytes grow by 1 MiB a cycle, its reserved by 2, and nothing outside torch
    worker = [torch(10 + step, 100 + 2 * step, 200 + 2 * step) for step in range(6)]
    helper = torch(5, 50, pid=101)
    readings = [(each, helper, torch(9, 9, pid=7)) for each in worker]
    known = replace(KNOWN, server_pids=(100, 101))

    first, second = allocator_growths(run(STILL, allocators=readings), known, DEFAULT_LIMITS)

    assert ("VLLM::Worker 100", "process 101", "0") == (first.who, second.who, first.device_uuid)
    assert (3 * MIB, 6 * MIB, 0) == (
        first.live.judged_bytes,
        first.reserved.judged_bytes,
        None if first.outside is None else first.outside.judged_bytes,
    )
    assert (True, True, False) == (first.live.leaking, first.reserved.leaking, second.live.rose)
    assert second.outside is None
    partly = [*readings[:5], (worker[5],)]
    assert ["VLLM::Worker 100"] == [
        one.who for one in allocator_growths(run(STILL, allocators=partly), known, DEFAULT_LIMITS)
    ]
    untold = [*readings[:5], (replace(worker[5], process_bytes=None),)]
    (only,) = allocator_growths(run(STILL, allocators=untold), known, DEFAULT_LIMITS)
    assert only.outside is None
    assert () == allocator_growths(run(STILL[:5], allocators=readings[:5]), known, DEFAULT_LIMITS)
    assert () == allocator_growths(run(STILL), known, DEFAULT_LIMITS)


def test_torch_grows_by_64_kib_a_cycle() -> None:
    """Live bytes that grow by 64 KiB a cycle are a leak; a byte less may be a growing table and is not."""

    def growing(step_bytes: int) -> list[tuple[Allocator, ...]]:
        return [(allocator(allocated_bytes=GIB + step_bytes * step),) for step in range(6)]

    for step_bytes, leaking in ((64 * 1024, True), (64 * 1024 - 1, False)):
        seen = run(STILL, allocators=growing(step_bytes))
        (actual,) = allocator_growths(seen, KNOWN, DEFAULT_LIMITS)
        assert leaking == actual.live.leaking
