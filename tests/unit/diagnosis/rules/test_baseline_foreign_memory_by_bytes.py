"""baseline.foreign_memory at its thresholds, with its figures, and over many readings of several GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.baseline_foreign_memory import judge
from kvdiag.model import Device, Facts, Finding, Mark, Memory, Process, Sample, Timeline
from tests.builders.answers import ANY_TEXT, evidence, rows
from tests.builders.series import neighbour_part, timeline
from tests.builders.values import GIB, MIB, NO_NVML, device, engine, pool, process

SERVER = Facts(server_pids=(100, 101))
OWN = process(100, 10 * GIB, "VLLM::EngineCore")
DRIVER = 464 * MIB
CONTEXT = 256 * MIB


def over(*readings: tuple[float, tuple[Device, ...]], of: Facts = SERVER, serving: bool = True) -> Finding:
    """The rule's one finding on devices as they were at some times."""
    samples = [Sample(at_seconds=at_seconds, devices=devices) for at_seconds, devices in readings]
    if serving:
        samples.insert(0, Sample(at_seconds=0.0, engines=(engine(),)))
    (found,) = judge(Timeline(samples=tuple(samples)), of, DEFAULT_LIMITS)
    return found


def gpu(*listed: Process, index: int = 0, hidden: int = 0, reserved: int | None = DRIVER) -> Device:
    """A GPU of 24 GiB that holds what its processes and its driver hold, and so much more."""
    used = sum(one.used_bytes or 0 for one in listed) + DRIVER + hidden
    return device(index, used_bytes=used, driver_reserved_bytes=reserved, processes=listed)


def once(*devices: Device, of: Facts = SERVER, serving: bool = True) -> Finding:
    """The finding on a single reading."""
    return over((1.0, devices), of=of, serving=serving)


def lists(*readings: tuple[float, tuple[Process, ...]]) -> Finding:
    """The finding on one GPU's process lists at some times."""
    return over(*((at_seconds, (gpu(*listed),)) for at_seconds, listed in readings))


@pytest.mark.parametrize(
    ("size", "status"),
    [(CONTEXT - 1, "ok"), (CONTEXT, "suspect"), (515_396_075, "suspect"), (515_396_076, "fault")],
)
def test_others_count_from_a_context_and_cost_from_a_fiftieth_of_the_device(size: int, status: str) -> None:
    """256 MiB are the smallest context; 2 % of 24 GiB are 515,396,075.52 bytes."""
    actual = once(gpu(OWN, process(7, size)))
    assert ("python3 (pid 7)" in actual.summary) == (status != "ok")
    assert status == actual.status


def test_others_on_a_device_that_does_not_tell_its_size_are_suspect() -> None:
    """Whether they cost the server a fiftieth of it is not known."""
    dark = device(used_bytes=None, processes=(OWN, process(7, 20 * GIB)))
    assert "suspect" == once(dark).status
    assert "unattributed" not in evidence(once(dark))


def test_all_others_are_added_up_and_three_are_named() -> None:
    """Four processes of 100 MiB are 400 MiB together; a name that is not told is none."""
    actual = once(gpu(OWN, *(process(pid, 100 * MIB, None if pid == 8 else "job") for pid in (7, 8, 9, 10))))

    assert ("baseline.foreign_memory", "suspect") == (actual.id, actual.status)
    assert [
        ("gpu", 0, "index", "nvml"),
        ("foreign_bytes", 400 * MIB, "bytes", "nvml"),
        ("process 7", 100 * MIB, "bytes", "nvml: job"),
        ("process 8", 100 * MIB, "bytes", "nvml: name unknown"),
        ("process 9", 100 * MIB, "bytes", "nvml: job"),
        ("process 10", 100 * MIB, "bytes", "nvml: job"),
        ("unattributed", 0, "bytes", "computed"),
    ] == rows(actual)


@pytest.mark.parametrize(("hidden", "status"), [(CONTEXT - 1, "ok"), (CONTEXT, "suspect")])
def test_bytes_of_no_process_count_from_a_context(hidden: int, status: str) -> None:
    """What neither a process nor the driver holds, in a single reading."""
    actual = once(gpu(OWN, hidden=hidden))
    assert (status, hidden) == (actual.status, evidence(actual)["unattributed"])


@pytest.mark.parametrize(("hidden", "status"), [(CONTEXT - DRIVER - 1, "ok"), (CONTEXT - DRIVER, "unknown")])
def test_bytes_that_may_be_the_drivers_are_left_open_from_a_context(hidden: int, status: str) -> None:
    """Where the driver's share is not ANY_TEXT, what no process holds is the driver's or somebody's."""
    actual = once(gpu(OWN, hidden=hidden, reserved=None))
    assert status == actual.status


def test_sizes_that_are_not_told_are_left_open() -> None:
    """Of three others two do not tell: nobody is cleared by the third, and what is known to be large is told first."""
    untold = (process(7, None), process(8, None))
    small = once(gpu(OWN, *untold, process(9, MIB)))
    assert "unknown" == small.status
    assert {"gpu": 0, "foreign_bytes": MIB, "process 7": None, "process 8": None, "process 9": MIB} == evidence(small)
    assert "fault" == once(gpu(OWN, *untold, process(9, 2 * GIB))).status
    # what the server's own process does not tell may be all that is there
    assert "unknown" == once(gpu(process(100, None), hidden=10 * GIB)).status


@pytest.mark.parametrize(
    ("of", "serving", "listed", "status"),
    [
        (Facts(), True, (process(1, GIB),), "ok"),
        (Facts(pools=(pool(),)), False, (process(1, GIB),), "ok"),
        (Facts(), False, (process(1, GIB),), "unknown"),
        (Facts(), True, (process(1, GIB), process(2, 1)), "unknown"),
        (SERVER, True, (), "unknown"),
        (SERVER, False, (), "unknown"),
        (Facts(), True, (), "unknown"),
    ],
    ids=["answers", "has a pool", "no server", "two", "pids known, none listed", "no page either", "none listed"],
)
def test_whose_a_process_is_where_the_servers_are_not_listed(
    of: Facts, serving: bool, listed: tuple[Process, ...], status: str
) -> None:
    """One alone beside a server that answers is its own; anything else is left open."""
    assert status == once(gpu(*listed), of=of, serving=serving).status


@pytest.mark.parametrize(("hidden", "status"), [(CONTEXT - 1, "ok"), (CONTEXT, "suspect")])
def test_a_gpu_without_processes_or_server(hidden: int, status: str) -> None:
    """Beyond the driver's share, from a context on it is a zombie's."""
    actual = once(gpu(hidden=hidden), of=Facts(), serving=False)
    assert status == actual.status
    assert [
        ("gpu", 0, "index", "nvml"),
        ("unattributed", hidden, "bytes", "computed"),
        ("driver_reserved", DRIVER, "bytes", "nvml"),
    ] == rows(actual)


@pytest.mark.parametrize(
    ("empty", "held"),
    [
        (device(2, used_bytes=20 * GIB, driver_reserved_bytes=None, processes=()), 20 * GIB),
        (device(2, used_bytes=None, processes=()), 0),
    ],
    ids=["driver's share not told", "memory not told"],
)
def test_a_gpu_without_processes_whose_figures_are_missing_is_unknown(empty: Device, held: int) -> None:
    """What the driver keeps would be called a zombie's."""
    actual = once(empty, of=Facts(), serving=False)
    assert "unknown" == actual.status
    assert {"gpu": 2, "unattributed": held, "driver_reserved": None} == evidence(actual)


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        ((Sample(at_seconds=1.0),), ANY_TEXT),
        ((Sample(at_seconds=1.0, gaps=(NO_NVML,)),), NO_NVML.reason),
        ((Sample(at_seconds=1.0, devices=(device(),)),), ANY_TEXT),
        ((Sample(at_seconds=1.0, devices=(device(),)), Sample(at_seconds=2.0, gaps=(NO_NVML,))), NO_NVML.reason),
        ((), ANY_TEXT),
    ],
    ids=["nothing", "no NVML", "no lists", "no lists any more", "no samples"],
)
def test_why_nothing_is_seen_is_told(samples: tuple[Sample, ...], told: str) -> None:
    """The reason of the newest gap, else what is missing."""
    (actual,) = judge(Timeline(samples=samples), SERVER, DEFAULT_LIMITS)
    assert Finding(id="baseline.foreign_memory", status="unknown", summary=ANY_TEXT) == actual


def test_the_worst_gpu_is_told_and_of_equals_the_first() -> None:
    """Fault before suspect before unknown before ok."""
    clean, open_ = gpu(process(101, GIB), index=0), gpu(process(101, GIB), process(7, None), index=1)
    some, much = (
        gpu(process(101, GIB), process(7, size), index=size // CONTEXT) for size in (2 * CONTEXT - 99 * MIB, 3 * GIB)
    )

    assert ["unknown", "suspect", "fault"] == [
        once(*devices).status for devices in ((clean, open_), (clean, open_, some), (much, some, open_, clean))
    ]
    twice = once(gpu(OWN, process(7, GIB), index=3), gpu(OWN, process(7, GIB), index=2))
    assert 3 == evidence(twice)["gpu"]


def test_a_gpu_of_the_server_that_lists_nobody_any_more_is_known_by_its_last_list() -> None:
    """A reading without a process list takes nothing back; a GPU that never has one is left open."""
    # GPU 0 listed once, GPU 1 never, both the server's by what its slices say
    listed, dark = gpu(OWN, process(7, GIB)), device(0, processes=None)
    assert "fault" == over((1.0, (listed,)), (2.0, (dark,))).status
    beside = once(gpu(OWN), device(1, processes=None), of=Facts(server_pids=(5,)))
    assert "unknown" == beside.status
    never = once(gpu(process(1, GIB)), device(1, processes=None), of=Facts())
    assert "unknown" == never.status


ORPHAN = process(7, 6 * GIB)


@pytest.mark.parametrize(
    ("times", "status"),
    [
        ((0.0, 60.0, 120.0), "suspect"),
        ((0.0, 59.0, 120.0), "ok"),
        ((0.0, 30.0, 90.0), "ok"),
        ((0.0, 31.0, 90.0), "suspect"),
    ],
    ids=["a minute apart", "less", "less, before the last minute", "in the last minute"],
)
def test_two_lists_a_minute_apart_show_a_neighbour(times: tuple[float, ...], status: str) -> None:
    """What starts a server comes and goes within a minute; the newest two lists count, however near."""
    first, second, last = times
    assert status == lists((first, (OWN, ORPHAN)), (second, (OWN, ORPHAN)), (last, (OWN,))).status


@pytest.mark.parametrize(("size", "status"), [(CONTEXT - 1, "ok"), (CONTEXT, "suspect")])
def test_a_neighbour_that_is_gone_counts_from_a_context(size: int, status: str) -> None:
    """As one that is there does."""
    beside = (OWN, process(7, size))
    assert status == lists((0.0, beside), (60.0, beside), (120.0, (OWN,)), (180.0, (OWN,))).status


def test_a_neighbour_is_gone_since_it_held_half() -> None:
    """Six GiB until a minute, half of that until two, less until three, and nothing at five."""
    actual = lists(
        (0.0, (OWN, ORPHAN)),
        (60.0, (OWN, ORPHAN)),
        (120.0, (OWN, process(7, 3 * GIB))),
        (180.0, (OWN, process(7, 3 * GIB - 1))),
        (240.0, (OWN, process(7, CONTEXT // 2))),
        (300.0, (OWN, process(7, 9 * MIB))),
    )

    assert ("baseline.foreign_memory", "suspect") == (actual.id, actual.status)
    assert [
        ("gpu", 0, "index", "nvml"),
        ("foreign_bytes", 6 * GIB, "bytes", "nvml"),
        ("foreign_bytes_now", 9 * MIB, "bytes", "nvml"),
        ("ended_seconds_ago", 180.0, "seconds", "nvml"),
    ] == rows(actual)


def test_a_process_seen_once_is_not_added_to_its_neighbours() -> None:
    """Beside a neighbour of 100 MiB one comes and goes with 6 GiB: what stays is of no note."""
    small = process(8, 100 * MIB)
    assert "ok" == lists((0.0, (OWN, small)), (60.0, (OWN, small, ORPHAN)), (120.0, (OWN, small))).status


def test_a_neighbour_where_the_servers_processes_are_not_known_is_not_told_after_it_left() -> None:
    """Of a lone process nobody knows whether another was its neighbour, or itself before a restart."""
    one, other = gpu(process(1, 10 * GIB)), gpu(process(1, 10 * GIB), process(2, 6 * GIB))
    readings = ((0.0, (other,)), (60.0, (other,)), (120.0, (one,)), (180.0, (one,)))
    assert "ok" == over(*readings, of=Facts()).status


def test_bytes_between_two_readings_are_nobodys_only_if_both_show_them() -> None:
    """Memory and process list are two questions: a server that starts takes gigabytes between them."""
    odd, even = gpu(OWN, hidden=GIB), gpu(OWN)
    untold = gpu(process(100, None), hidden=10 * GIB)

    assert ["ok", "ok", "suspect", "suspect"] == [
        over(*((60.0 * at, (one,)) for at, one in enumerate(told))).status
        for told in ((odd, even), (even, odd), (odd, odd), (even, odd, odd))
    ]
    assert "unattributed" not in evidence(over((0.0, (untold,)), (60.0, (even,))))
    # the smaller of the two is told
    two = over((0.0, (gpu(OWN, hidden=GIB),)), (60.0, (gpu(OWN, hidden=2 * GIB),)))
    assert GIB == evidence(two)["unattributed"]


def test_readings_before_the_server_and_after_it_decide_nothing() -> None:
    """While none of its processes is listed, everybody is a stranger."""
    assert "ok" == lists((0.0, (ORPHAN,)), (60.0, (ORPHAN,)), (120.0, (OWN,)), (180.0, (OWN,))).status
    assert "ok" == lists((0.0, (OWN,)), (60.0, (OWN,)), (120.0, (ORPHAN,)), (180.0, (ORPHAN,))).status


def smaller(whole: Device, less: int) -> Device:
    """A device with so many bytes less, all of them free ones."""
    assert whole.memory is not None
    memory = Memory(total_bytes=whole.memory.total_bytes - less, free_bytes=whole.memory.free_bytes - less)
    return replace(whole, memory=memory)


@pytest.mark.parametrize(
    ("total_gib", "steps", "status"),
    [
        (80, False, "fault"),
        (80, True, "suspect"),
        (40, False, "fault"),
    ],
    ids=["watched", "in a run of steps", "a fault already"],
)
def test_growth_of_others_is_told_where_it_says_more(total_gib: int, steps: bool, status: str) -> None:
    """500 MB/h for three hours: on 80 GiB suspect by what is there now, by which a run of steps is judged."""
    seen = timeline("pool", hours=3.0, leak_mb_per_hour=500.0, part=neighbour_part)
    less = (80 - total_gib) * GIB
    samples = tuple(
        replace(sample, devices=tuple(smaller(one, less) for one in sample.devices or ())) for sample in seen.samples
    )
    marks = (Mark(at_seconds=0.0, step="baseline", cycle=0, phase="begin"),) if steps else ()
    (actual,) = judge(Timeline(samples=samples, marks=marks), SERVER, DEFAULT_LIMITS)

    assert status == actual.status
