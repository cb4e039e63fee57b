"""A timeline's figures: floors that settled, loads observed whole, and the owners of devices and bytes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.timeline_queries import (
    IdleFloor,
    assigned_uuids,
    block_bytes,
    first_devices,
    floor_within,
    gap_reason,
    held_blocks,
    idle_floors,
    most_open,
    most_requests,
    newest_devices,
    pool_tokens,
    published_since,
    readings_of,
    samples_needed,
    server_bytes,
    server_devices,
    server_uuids,
    serving_devices,
    tokens_taken,
    torch_readings,
    whole_load,
)
from kvdiag.model import (
    MAX_COUNT,
    Allocator,
    Capabilities,
    Device,
    Engine,
    Facts,
    Gap,
    Load,
    Sample,
    Timeline,
    Workload,
)
from tests.builders.values import GIB, MIB, NO_ANSWER, allocator, device, engine, holding, pool, process
from tests.unit.diagnosis import loads

KNOWN = Facts(pools=(pool(),), server_pids=(100, 101))
SPAN = replace(loads.SPAN, workload=Workload(requests=1, prompt_tokens=8, max_tokens=8), outcome=None)


def at(seconds: float, *engines: Engine, devices: tuple[Device, ...] | None = None) -> Sample:
    """A sample of engines and devices; of neither where none is named."""
    return Sample(at_seconds=seconds, engines=engines or None, devices=devices)


def timeline(*samples: Sample) -> Timeline:
    """A timeline of samples."""
    return Timeline(samples=samples)


def floor_blocks(*held: int | None) -> int | None:
    """The blocks of a floor over an idle interval's samples."""
    readings = [holding(blocks) if blocks is not None else engine(usage=None) for blocks in held]
    (floor,) = idle_floors(
        timeline(*(at(float(second), reading) for second, reading in enumerate(readings))), KNOWN, DEFAULT_LIMITS
    )
    return floor.blocks


def test_blocks_held_are_those_of_every_engine() -> None:
    """Two engines' blocks add up; without usage or a pool of one of them the sum is `None`."""
    both = Facts(pools=(pool("0"), pool("1")))
    assert 9 == held_blocks(at(0.0, holding(4), replace(holding(5), engine="1")), both)
    assert held_blocks(at(0.0, holding(4), replace(engine(usage=None), engine="1")), both) is None
    assert held_blocks(at(0.0, holding(4), replace(holding(5), engine="1")), KNOWN) is None
    assert held_blocks(at(0.0), KNOWN) is None


def test_readings_are_those_of_one_engine() -> None:
    """By its label, with their times."""
    one, other = engine(label="0"), engine(label="1")
    seen = timeline(at(1.0, one, other), at(2.0, other), at(3.0, one))
    assert ([1.0, 3.0], [one, one]) == readings_of(seen, "0")


def test_size_of_a_block_is_the_first_that_is_known() -> None:
    """Engines of one server share one shape."""
    untold = pool("0", pool_bytes=None)
    assert 2 * MIB == block_bytes(Facts(pools=(untold, pool("1"))))
    assert block_bytes(Facts(pools=(untold,))) is None


@pytest.mark.parametrize(
    ("held", "blocks"),
    [
        ((4, 4), 4),
        ((5, 4), None),  # still falling
        ((4, 5), 4),  # what becomes more while nothing runs is not on its way back
        ((0, 4), None),
        ((0, 0), 0),
        ((9, 4, 4), 4),
        ((None, 4), None),
        ((4, None), None),
        ((None, 4, 4), 4),
    ],
)
def test_floor_is_what_the_last_readings_agree_on(held: Sequence[int | None], blocks: int | None) -> None:
    """Blocks that still fall have not settled, nor have those that begin to be held at nothing."""
    assert blocks == floor_blocks(*held)


def test_every_idle_stretch_has_its_floor() -> None:
    """A busy sample ends an interval, one without engines does not; a single sample is no floor."""
    busy = at(5.0, engine(running=1))
    seen = timeline(
        at(1.0, holding(3)),
        at(2.0),
        at(3.0, holding(3)),
        busy,
        at(6.0, holding(4)),
        replace(busy, at_seconds=7.0),
        at(8.0, holding(5)),
        at(9.0, holding(5)),
    )

    actual = idle_floors(seen, KNOWN, DEFAULT_LIMITS)

    assert [(3.0, 3), (9.0, 5)] == [(floor.at_seconds, floor.blocks) for floor in actual]


def test_requests_of_our_own_are_no_idle_stretch() -> None:
    """An engine that says it is idle while a request of ours is open is not."""
    open_one, none = Load(requests=1), Load(requests=0)
    idle = [at(1.0, holding(3)), at(2.0, holding(3))]
    assert () == idle_floors(timeline(*(replace(each, load=open_one) for each in idle)), KNOWN, DEFAULT_LIMITS)
    assert 1 == len(idle_floors(timeline(*(replace(each, load=none) for each in idle)), KNOWN, DEFAULT_LIMITS))


def test_floor_has_the_newest_devices_of_its_stretch() -> None:
    """Devices with process lists come before those without; published figures count only if from the interval."""
    listed = (device(processes=(process(100, GIB),)), device(1))
    bare = (device(used_bytes=21 * GIB),)
    published = (allocator(age_seconds=0.5),)
    stale = (allocator(age_seconds=2.5),)
    first, second = at(1.0, holding(3), devices=(device(used_bytes=GIB),)), at(2.0, holding(3), devices=listed)
    third, last = at(3.0, devices=bare), at(4.0, holding(3))

    with_lists = floor_within(timeline(first, second, third, last), 0.0, 9.0, KNOWN, DEFAULT_LIMITS)
    without = floor_within(timeline(first, at(2.0, holding(3)), third, last), 0.0, 9.0, KNOWN, DEFAULT_LIMITS)
    none = floor_within(timeline(at(1.0, holding(3)), last), 0.0, 9.0, KNOWN, DEFAULT_LIMITS)
    fresh = floor_within(
        timeline(first, replace(second, allocators=published), replace(third, allocators=stale), last),
        0.0,
        9.0,
        KNOWN,
        DEFAULT_LIMITS,
    )

    floor = IdleFloor(begin_seconds=1.0, at_seconds=4.0, blocks=3, devices=listed, usage_ratio=3 / 6144)
    assert floor == with_lists
    assert replace(floor, devices=bare) == without
    assert replace(floor, devices=None) == none
    assert fresh is not None
    assert published == fresh.allocators


def test_floor_of_a_window_is_that_of_its_end() -> None:
    """What was idle before the last busy reading does not count, nor what lies outside."""
    seen = timeline(
        at(1.0, holding(2)), at(2.0, holding(2)), at(3.0, engine(running=1)), at(4.0, holding(7)), at(5.0, holding(7))
    )
    floors = [floor_within(seen, 0.0, end, KNOWN, DEFAULT_LIMITS) for end in (2.0, 3.0, 4.0, 5.0)]
    assert [2, None, None, 7] == [None if floor is None else floor.blocks for floor in floors]


def test_published_since_a_moment_counts_the_age() -> None:
    """Read at 10 s and 4 s old is of 6 s; with one older among them it is not."""
    one = Sample(at_seconds=10.0, allocators=(allocator(age_seconds=4.0),))
    two = replace(one, allocators=(allocator(age_seconds=4.0), allocator(age_seconds=5.0)))
    assert [True, False, False] == [published_since(one, 6.0), published_since(one, 6.1), published_since(two, 6.0)]
    assert published_since(two, 5.0)


def test_whole_load_is_between_offer_and_release() -> None:
    """A span that was not released lasts to the end; without an offer, or a workload, it has no samples."""
    loads = [
        replace(at(seconds, engine(running=1)), load=Load(requests=1, resident_tokens=(8,)))
        for seconds in (19.0, 20.0, 30.0, 31.0)
    ]
    seen = timeline(*loads)
    assert tuple(loads[1:3]) == whole_load(seen, SPAN, Facts())
    assert tuple(loads[1:]) == whole_load(seen, replace(SPAN, release_seconds=None), Facts())
    assert () == whole_load(seen, replace(SPAN, offer_seconds=None), Facts())
    assert () == whole_load(seen, replace(SPAN, workload=None), Facts())


def counted(seconds: float, *counts: tuple[int | None, int | None]) -> Sample:
    """Engines by their prompt and generated tokens."""
    engines = [
        replace(engine(prompt_tokens=prompt, label=str(number)), generation_tokens_total=generated)
        for number, (prompt, generated) in enumerate(counts)
    ]
    return at(seconds, *engines)


def test_tokens_taken_are_prompts_and_answers_of_every_engine() -> None:
    """Tokens are counted from the span's begin; `None` where an engine does not report one of the counters."""
    begin, end = counted(10.0, (100, 10), (200, 20)), counted(25.0, (150, 11), (260, 22))
    assert 113 == tokens_taken(timeline(counted(9.0, (0, 0), (0, 0)), begin, end), SPAN, end)
    untold = counted(25.0, (150, None), (260, 22))
    assert tokens_taken(timeline(begin, untold), SPAN, untold) is None
    assert tokens_taken(timeline(counted(10.0, (None, 0), (0, 0)), end), SPAN, end) is None
    assert tokens_taken(timeline(at(20.0)), SPAN, at(20.0)) is None
    assert 113 == tokens_taken(timeline(at(10.0), replace(begin, at_seconds=11.0), end), SPAN, end)


def test_most_waiting_is_over_all_engines_at_one_moment() -> None:
    """Between offer and release; 0 where none is counted."""
    other = engine(waiting=3, label="1")
    seen = timeline(
        at(19.0, engine(waiting=99)),
        at(20.0, engine(waiting=1), other),
        at(25.0, engine(waiting=None), other),
        at(31.0, engine(waiting=50)),
    )
    assert 4 == most_requests(seen, SPAN, "requests_waiting")
    assert 50 == most_requests(seen, replace(SPAN, release_seconds=None), "requests_waiting")
    assert 0 == most_requests(seen, replace(SPAN, offer_seconds=None), "requests_waiting")
    assert 0 == most_requests(timeline(at(20.0, engine(waiting=None))), SPAN, "requests_waiting")
    assert 0 == most_requests(timeline(), SPAN, "requests_waiting")


def test_requests_count_as_open_where_samples_in_a_row_saw_them() -> None:
    """Two in a row by their smaller number, running and waiting together; of one sample that one."""
    counts = [(20.0, 5, 0), (21.0, 1, 1), (22.0, 2, 1), (23.0, 0, 0)]
    samples = [at(seconds, engine(running=running, waiting=waiting)) for seconds, running, waiting in counts]
    assert 2 == most_open(timeline(*samples), SPAN, 2)
    assert 5 == most_open(timeline(*samples), SPAN, 1)
    assert 5 == most_open(timeline(samples[0]), SPAN, 2)
    assert 0 == most_open(timeline(*samples), SPAN, 9)
    assert 3 == most_open(timeline(samples[2], at(24.0), at(25.0, engine(running=3, waiting=None))), SPAN, 2)
    assert 0 == most_open(timeline(), SPAN, 2)
    assert 0 == most_open(timeline(*samples), replace(SPAN, offer_seconds=None), 2)
    late = at(35.0, engine(running=7, waiting=0))
    assert 0 == most_open(timeline(late), SPAN, 2)
    assert 7 == most_open(timeline(late), replace(SPAN, release_seconds=None), 2)
    two = at(20.0, engine(running=2, waiting=1), engine(running=None, waiting=4, label="1"))
    assert 7 == most_open(timeline(two), SPAN, 1)


def test_bytes_of_a_device_are_reported_by_memory_and_processes() -> None:
    """The server's own where all its processes report theirs."""
    both = device(processes=(process(100, GIB), process(101, 2 * GIB), process(7, 4 * GIB)))
    assert 3 * GIB == server_bytes(both, (100, 101))
    assert server_bytes(both, None) is None
    assert server_bytes(both, (8,)) is None
    assert server_bytes(device(), (100,)) is None
    assert server_bytes(device(processes=(process(100, GIB), process(101, None))), (100, 101)) is None


def test_devices_of_a_server_are_those_its_processes_were_ever_on() -> None:
    """Whichever reading lists them; else those assigned to it, else all, GPUs cut into slices apart."""
    on_one = device(1, processes=(process(100, GIB), process(7, GIB)))
    seen = timeline(
        at(1.0, devices=(device(0, processes=(process(7, GIB),)), on_one)), at(2.0, devices=(device(0), device(1)))
    )
    strangers = Facts(server_pids=(8,), device_uuids=("GPU-0",))

    assert frozenset({"GPU-1"}) == server_uuids(seen, KNOWN) == assigned_uuids(seen, KNOWN)
    assert frozenset() == server_uuids(seen, strangers)
    assert frozenset({"GPU-0"}) == assigned_uuids(seen, strangers)
    assert frozenset() == assigned_uuids(seen, Facts())
    slices = (device(0, uuid="MIG-a", mig_parent_uuid="GPU-0"), device(0))
    assert (slices[0],) == server_devices(slices, frozenset())
    assert (on_one,) == server_devices((device(0), on_one), frozenset({"GPU-1"}))
    assert () == server_devices(None, frozenset())


def test_torch_is_read_from_first_to_last() -> None:
    """Each server process that runs to the end has its first and last figures; a restarted one counts as another."""

    def sent(seconds: float, *each: Allocator) -> Sample:
        return Sample(at_seconds=seconds, allocators=each)

    first, last = allocator(allocated_bytes=GIB), allocator(allocated_bytes=2 * GIB)
    stranger, old, new = allocator(pid=7), allocator(pid=101), allocator(pid=101, start_ticks=2)

    actual = torch_readings(
        timeline(sent(1.0, first, stranger, old), sent(1.5, first), at(2.0), sent(3.0, last, stranger, new), at(4.0)),
        KNOWN,
    )

    assert ((first, last), (new, new)) == actual
    assert () == torch_readings(timeline(at(1.0)), KNOWN)


def test_first_and_newest_devices_are_readings_that_were_there() -> None:
    """Samples without devices do not count."""
    early, late = (device(used_bytes=GIB),), (device(used_bytes=2 * GIB),)
    seen = timeline(at(0.0), at(1.0, devices=early), at(2.0, devices=late), at(3.0))
    assert (early, late) == (first_devices(seen), newest_devices(seen))
    assert (None, None) == (first_devices(timeline(at(0.0))), newest_devices(timeline(at(0.0))))


def test_a_server_begins_with_what_its_devices_held_when_it_answered_awake() -> None:
    """Neither what was there while it loaded nor what it gave away asleep."""
    loading, asleep, awake = ((device(used_bytes=size * GIB),) for size in (1, 2, 3))
    sleeping = replace(engine(), asleep=True)
    before = (at(1.0, devices=loading), at(2.0, sleeping, engine(label="1"), devices=asleep))

    assert awake == serving_devices(timeline(*before, at(3.0, engine()), at(4.0, devices=awake)))
    assert awake == serving_devices(timeline(*before, at(3.0, engine(), devices=awake)))
    assert serving_devices(timeline(*before)) is None
    assert loading == serving_devices(timeline(before[0]))
    assert loading == serving_devices(timeline(*before, at(3.0, engine())))


def test_reason_is_that_of_the_newest_gap() -> None:
    """Of the source that is asked for; else what was known beforehand."""
    older = replace(NO_ANSWER, reason="timeout")
    beforehand = Facts(gaps=(Gap(source="engine", kind="absent", reason="no page"),))
    seen = timeline(
        Sample(at_seconds=1.0, gaps=(older,)),
        Sample(at_seconds=2.0, gaps=(Gap(source="nvml", kind="failed", reason="lost"), NO_ANSWER)),
        Sample(at_seconds=3.0),
    )
    assert "connection refused" == gap_reason(seen, beforehand, "engine")
    assert "no page" == gap_reason(timeline(), beforehand, "engine")
    assert gap_reason(timeline(), beforehand, "nvml") is None


def test_tokens_of_a_pool_are_a_count_that_a_document_can_hold() -> None:
    """A page may claim blocks of any size: their product stays within what counts are."""
    assert MAX_COUNT == pool_tokens(replace(pool(capacity_tokens=None), block_tokens=2**50))
    assert 16 * 6144 == pool_tokens(pool(capacity_tokens=None))


def test_late_figures_count_once_they_are_of_the_idle_interval() -> None:
    """Where usage may be 30 s old while idle, what an interval shows before that is of the load before it."""
    late = replace(KNOWN, capabilities=Capabilities(late_seconds=30.0))
    samples = timeline(
        at(0.0, holding(9, running=1)), *(at(float(s), holding(9 if s < 35 else 0)) for s in range(5, 60, 5))
    )
    (whole,) = idle_floors(samples, late, DEFAULT_LIMITS)
    assert (35.0, 0) == (whole.begin_seconds, whole.blocks)
    ends = {end: floor_within(samples, 5.0, end, late, DEFAULT_LIMITS) for end in (35.0, 40.0)}
    assert (None, 0) == (ends[35.0], ends[40.0] and ends[40.0].blocks)
    # What was idle before a window makes its figures current from its begin.
    assert floor_within(samples, 45.0, 55.0, late, DEFAULT_LIMITS) is not None


TIMED = replace(KNOWN, capabilities=Capabilities(late_seconds=11.0, renewed_seconds=10.0))
"""An engine whose figures a timer renews, as LMDeploy's."""


def test_figures_of_a_timer_are_of_the_load_when_they_changed() -> None:
    """In between they are as old as the last renewal: of a load that had fewer tokens, or of none."""
    shown = [(20.0, 0), (21.0, 3), (22.0, 3), (30.0, 5)]
    seen = timeline(
        *(
            replace(at(seconds, holding(blocks, running=1)), load=Load(requests=1, resident_tokens=(8,)))
            for seconds, blocks in shown
        )
    )
    assert [21.0, 30.0] == [one.at_seconds for one in whole_load(seen, SPAN, TIMED)]
    assert (1, 2) == (samples_needed(TIMED, DEFAULT_LIMITS), samples_needed(KNOWN, DEFAULT_LIMITS))


def test_a_renewal_that_ends_work_is_current_at_once() -> None:
    """The count of running requests fell together with the usage; where none was counted, the figures are older."""
    busy = timeline(at(0.0, holding(9, running=1)), at(10.0, holding(0)), at(11.0, holding(0)))
    (floor,) = idle_floors(busy, TIMED, DEFAULT_LIMITS)
    assert (10.0, 0) == (floor.begin_seconds, floor.blocks)
    within = floor_within(busy, 5.0, 11.0, TIMED, DEFAULT_LIMITS)
    assert within is not None
    assert 0 == within.blocks
    assert () == idle_floors(timeline(*busy.samples[1:]), TIMED, DEFAULT_LIMITS)
