"""baseline.foreign_memory at its thresholds, with its figures, and over many samples of several GPUs."""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.diagnosis.rules.baseline_foreign_memory import judge
from kvdiag.model import Device, Facts, Finding, Mark, Memory, Process, Sample, Timeline
from tests.builders.answers import ANY_TEXT, evidence, only, rows
from tests.builders.runs import of_run
from tests.builders.series import neighbour_part, timeline
from tests.builders.values import GIB, GPU_LOST, MIB, NO_NVML, device, engine, pool, process
from tests.builders.worlds import TRAINING, World

SERVER = Facts(server_pids=(100, 101))
OWN = process(100, 10 * GIB, "VLLM::EngineCore")
DRIVER = 464 * MIB
CONTEXT = 256 * MIB


def over(*readings: tuple[float, tuple[Device, ...]], of: Facts = SERVER, serving: bool = True) -> Finding:
    """The rule's one finding on devices as they were at some times."""
    samples = [Sample(at_seconds=at_seconds, devices=devices) for at_seconds, devices in readings]
    if serving:
        samples.insert(0, Sample(at_seconds=0.0, engines=(engine(),)))
    return only(judge, Timeline(samples=tuple(samples)), of)


def gpu(*listed: Process, index: int = 0, hidden: int = 0, reserved: int | None = DRIVER) -> Device:
    """A GPU of 24 GiB that holds what its processes and its driver hold, and so much more."""
    used = sum(one.used_bytes or 0 for one in listed) + DRIVER + hidden
    return device(index, used_bytes=used, driver_reserved_bytes=reserved, processes=listed)


def once(*devices: Device, of: Facts = SERVER, serving: bool = True) -> Finding:
    """The finding on a single reading."""
    return over((1.0, devices), of=of, serving=serving)


DARK = device(used_bytes=None, processes=(OWN, process(7, 20 * GIB)))
"""Another process on a GPU that does not report its size."""


def lists(*readings: tuple[float, tuple[Process, ...]]) -> Finding:
    """The finding on one GPU's process lists at some times."""
    return over(*((at_seconds, (gpu(*listed),)) for at_seconds, listed in readings))


@pytest.mark.parametrize(
    ("world", "status"),
    [
        pytest.param(World(foreign={0: (TRAINING,)}, device_bytes=48 * GIB), "fault", id="a training job"),
        pytest.param(World(), "ok", id="alone"),
        pytest.param(World(nvml=NO_NVML), "unknown", id="no NVML"),
        pytest.param(World(nvml=GPU_LOST), "unknown", id="GPU lost"),
        pytest.param(World(processes_reported=False), "unknown", id="no process list"),
        pytest.param(World(foreign={0: (process(7, None),)}), "unknown", id="process of unknown size"),
        pytest.param(
            World(server_seen=False, foreign={0: (TRAINING,)}, device_bytes=48 * GIB), "unknown", id="server not listed"
        ),
        pytest.param(World(zombie_bytes=2 * GIB), "suspect", id="bytes of no process"),
        pytest.param(World(foreign={1: (TRAINING,)}), "ok", id="another tenant's GPU"),
    ],
)
def test_runs_get_their_status(world: World, status: str) -> None:
    """Without process lists, process sizes, or the server's own processes the verdict is unknown."""
    assert status == of_run(judge, world).status


def test_the_worst_of_the_servers_gpus_is_reported() -> None:
    """Tensor parallel: a co-tenant on the second GPU is found although the first is clean."""
    world = World(gpus=2, foreign={1: (process(7, 3 * GIB),)})
    actual = of_run(judge, world)
    assert ("fault", 1) == (actual.status, evidence(actual)["gpu"])


ALONE, NOBODY = Facts(), process(99_999, 10 * GIB)
MIG = (
    device(used_bytes=None),
    device(uuid="MIG-a", mig_parent_uuid="GPU-0", used_bytes=5 * GIB, processes=(process(100, 5 * GIB),)),
    device(uuid="MIG-b", mig_parent_uuid="GPU-0", used_bytes=9 * GIB, processes=(process(7, GIB), process(8, GIB))),
)


@pytest.mark.parametrize(
    ("devices", "of", "serving", "status"),
    [
        pytest.param((gpu(OWN, process(7, CONTEXT - 1)),), SERVER, True, "ok", id="less than a context"),
        pytest.param((gpu(OWN, process(7, CONTEXT)),), SERVER, True, "suspect", id="a context"),
        pytest.param((gpu(OWN, process(7, 515_396_075)),), SERVER, True, "suspect", id="2 % of the GPU"),
        pytest.param((gpu(OWN, process(7, 515_396_076)),), SERVER, True, "fault", id="more than 2 %"),
        pytest.param(
            (device(total_bytes=50 * GIB, processes=(OWN, process(7, GIB))),), SERVER, True, "fault", id="2 %"
        ),
        pytest.param((DARK,), SERVER, True, "suspect", id="size not reported"),
        pytest.param((gpu(OWN, hidden=CONTEXT - 1),), SERVER, True, "ok", id="less than a context of no process"),
        pytest.param((gpu(OWN, hidden=CONTEXT),), SERVER, True, "suspect", id="a context of no process"),
        pytest.param(
            (gpu(OWN, hidden=CONTEXT - DRIVER - 1, reserved=None),), SERVER, True, "ok", id="perhaps the driver's"
        ),
        pytest.param((gpu(OWN, hidden=CONTEXT - DRIVER, reserved=None),), SERVER, True, "unknown", id="a context more"),
        pytest.param((gpu(process(1, GIB)),), ALONE, True, "ok", id="one process, answers"),
        pytest.param((gpu(NOBODY),), SERVER, True, "ok", id="one process of unknown owner"),
        pytest.param((gpu(process(1, GIB)),), Facts(pools=(pool(),)), False, "ok", id="one process, has a pool"),
        pytest.param((gpu(process(1, GIB)),), ALONE, False, "unknown", id="one process, no server"),
        pytest.param((gpu(process(1, GIB), process(2, 1)),), ALONE, True, "unknown", id="two processes"),
        pytest.param((gpu(),), SERVER, True, "unknown", id="pids known, none listed"),
        pytest.param((gpu(),), SERVER, False, "unknown", id="no engine sample either"),
        pytest.param((gpu(),), ALONE, True, "unknown", id="none listed"),
        pytest.param((gpu(OWN, process(101, 2 * GIB)),), SERVER, True, "ok", id="two of the server"),
        pytest.param(MIG, SERVER, True, "ok", id="a MIG slice of its own"),
    ],
)
def test_a_single_sample_gets_its_status(devices: tuple[Device, ...], of: Facts, serving: bool, status: str) -> None:
    """256 MiB are the smallest context; 2 % of 24 GiB are 515,396,075.52 bytes. A lone process next to a server that
    answers is the server's own; otherwise the verdict is unknown.
    """
    actual = once(*devices, of=of, serving=serving)
    assert status == actual.status
    assert ("unattributed" in evidence(actual)) <= (devices != (DARK,))


@pytest.mark.parametrize(
    ("empty", "status", "held", "reserved"),
    [
        pytest.param(gpu(hidden=CONTEXT - 1), "ok", CONTEXT - 1, DRIVER, id="less than a context"),
        pytest.param(gpu(hidden=CONTEXT), "suspect", CONTEXT, DRIVER, id="a context"),
        pytest.param(
            device(used_bytes=20 * GIB, driver_reserved_bytes=None, processes=()),
            "unknown",
            20 * GIB,
            None,
            id="no share",
        ),
        pytest.param(device(used_bytes=None, processes=()), "unknown", 0, None, id="no memory"),
    ],
)
def test_a_gpu_without_processes_or_server(empty: Device, status: str, held: int, reserved: int | None) -> None:
    """Beyond the driver's share, from a context on it is a zombie's; without that share it is unknown."""
    actual = once(empty, of=Facts(), serving=False)
    assert status == actual.status
    assert [
        ("gpu", 0, "index", "nvml"),
        ("unattributed", held, "bytes", "computed"),
        ("driver_reserved", reserved, "bytes", "nvml"),
    ] == rows(actual)


def test_all_others_are_added_up_and_three_are_named() -> None:
    """Four processes of 100 MiB are 400 MiB together; a process of unknown name is listed without one."""
    actual = once(gpu(OWN, *(process(pid, 100 * MIB, None if pid == 8 else "job") for pid in (7, 8, 9, 10))))

    assert actual.summary.endswith("job (pid 7), process (pid 8), job (pid 9)")
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


def test_sizes_that_are_not_reported_are_left_open() -> None:
    """Two of three other processes report no size: a small third leaves it unknown, a large third is a fault."""
    unsized = (process(7, None), process(8, None))
    small = once(gpu(OWN, *unsized, process(9, MIB)))
    assert 0 == evidence(once(gpu(OWN, process(9, 0))))["foreign_bytes"]
    assert "unknown" == small.status
    assert "of 2 other processes" in small.summary
    assert {"gpu": 0, "foreign_bytes": MIB, "process 7": None, "process 8": None, "process 9": MIB} == evidence(small)
    assert "fault" == once(gpu(OWN, *unsized, process(9, 2 * GIB))).status
    # What the server's own process does not report may be all that is there.
    assert "unknown" == once(gpu(process(100, None), hidden=10 * GIB)).status


@pytest.mark.parametrize(
    "samples",
    [
        (Sample(at_seconds=1.0),),
        (Sample(at_seconds=1.0, gaps=(NO_NVML,)),),
        (Sample(at_seconds=1.0, devices=(device(),)),),
        (Sample(at_seconds=1.0, devices=(device(),)), Sample(at_seconds=2.0, gaps=(NO_NVML,))),
        (),
    ],
    ids=["nothing", "no NVML", "no lists", "no lists any more", "no samples"],
)
def test_without_process_lists_it_is_unknown(samples: tuple[Sample, ...]) -> None:
    """With a reason or without."""
    actual = only(judge, Timeline(samples=samples), SERVER)
    assert Finding(id="baseline.foreign_memory", status="unknown", summary=ANY_TEXT) == actual


def test_the_worst_gpu_is_reported_and_of_equals_the_first() -> None:
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
    """A sample without a process list clears nothing; a GPU that never has a list is unknown."""
    # GPU 0 listed once, GPU 1 never, both the server's by what its slices say
    listed, dark = gpu(OWN, process(7, GIB)), device(0, processes=None)
    assert "fault" == over((1.0, (listed,)), (2.0, (dark,))).status
    assert "unknown" == once(gpu(OWN), device(1, processes=None), of=Facts(server_pids=(5,))).status
    assert "unknown" == once(gpu(process(1, GIB)), device(1, processes=None), of=Facts()).status


ORPHAN, SMALL = process(7, 6 * GIB), process(8, 100 * MIB)
CONTEXTS = (process(7, CONTEXT - 1), process(7, CONTEXT))


@pytest.mark.parametrize(
    ("readings", "status"),
    [
        pytest.param(((0, OWN, ORPHAN), (60, OWN, ORPHAN), (120, OWN)), "suspect", id="a minute apart"),
        pytest.param(((0, OWN, ORPHAN), (59, OWN, ORPHAN), (120, OWN)), "ok", id="less"),
        pytest.param(((0, OWN, ORPHAN), (30, OWN, ORPHAN), (90, OWN)), "ok", id="less, before the last minute"),
        pytest.param(((0, OWN, ORPHAN), (31, OWN, ORPHAN), (90, OWN)), "suspect", id="in the last minute"),
        pytest.param(((0, OWN, ORPHAN), (60, OWN), (120, OWN)), "ok", id="in the first list"),
        pytest.param(((0, OWN), (60, OWN), (120, OWN, ORPHAN)), "ok", id="in the last list"),
        pytest.param(((0, ORPHAN), (60, OWN, ORPHAN), (120, OWN, ORPHAN)), "fault", id="there before the server"),
        *(
            pytest.param(((0, OWN, one), (60, OWN, one), (120, OWN), (180, OWN)), status, id=f"{one.used_bytes} bytes")
            for one, status in zip(CONTEXTS, ("ok", "suspect"), strict=True)
        ),
        pytest.param(
            ((0, OWN, SMALL), (60, OWN, SMALL, ORPHAN), (120, OWN, SMALL)), "ok", id="once beside a small one"
        ),
        pytest.param(((0, ORPHAN), (60, ORPHAN), (120, OWN), (180, OWN)), "ok", id="before the server"),
        pytest.param(((0, OWN), (60, OWN), (120, ORPHAN), (180, ORPHAN)), "ok", id="after the server"),
    ],
)
def test_two_lists_a_minute_apart_show_another_process(readings: tuple[tuple[Any, ...], ...], status: str) -> None:
    """What starts a server comes and goes within a minute; the newest two lists count, however near. While none of the
    server's processes is listed, every process is foreign and decides nothing.
    """
    assert status == lists(*((at, tuple(listed)) for at, *listed in readings)).status


def test_another_process_is_gone_since_it_held_half() -> None:
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


def test_another_process_where_the_servers_processes_are_not_known_is_not_reported_after_it_left() -> None:
    """A second process that exited may have been the server before a restart: with unknown server pids it is ok."""
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
    # the smaller of the two is reported
    two = over((0.0, (gpu(OWN, hidden=GIB),)), (60.0, (gpu(OWN, hidden=2 * GIB),)))
    assert GIB == evidence(two)["unattributed"]


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
def test_growth_of_others_is_reported_where_it_says_more(total_gib: int, steps: bool, status: str) -> None:
    """500 MB/h for three hours: on 80 GiB suspect by what is there now, by which a run of steps is judged."""
    seen = timeline("pool", hours=3.0, leak_mb_per_hour=500.0, part=neighbour_part)
    less = (80 - total_gib) * GIB
    samples = tuple(
        replace(sample, devices=tuple(smaller(one, less) for one in sample.devices or ())) for sample in seen.samples
    )
    marks = (Mark(at_seconds=0.0, step="baseline", cycle=0, phase="begin"),) if steps else ()
    actual = only(judge, Timeline(samples=samples, marks=marks), SERVER)

    assert status == actual.status


ASSIGNED = Facts(device_uuids=("GPU-0",), pools=(pool(pool_bytes=None, memory_fraction_ratio=0.5),))
BUDGET = int(0.5 * (80 * GIB - DRIVER))


def beyond(*held: int) -> Finding:
    """The finding on a server's GPU without a process list, an hour at each of these bytes above the budget."""
    samples = [
        Sample(
            at_seconds=60.0 * minute,
            engines=(engine(),),
            devices=(
                device(
                    total_bytes=80 * GIB,
                    used_bytes=BUDGET + DRIVER + held[minute // 60],
                    driver_reserved_bytes=DRIVER,
                ),
            ),
        )
        for minute in range(60 * len(held))
    ]
    return only(judge, Timeline(samples=tuple(samples)), ASSIGNED)


@pytest.mark.parametrize(
    ("held", "status", "shown"),
    [
        pytest.param((GIB, GIB, GIB), "unknown", None, id="context and graphs"),
        pytest.param((GIB, 9 * GIB, 9 * GIB), "suspect", (9 * GIB, 8 * GIB), id="at once"),
        pytest.param((GIB, 9 * GIB, GIB), "unknown", None, id="released"),
        pytest.param((9 * GIB, 9 * GIB), "unknown", (9 * GIB, 0), id="from the start"),
        pytest.param(tuple(GIB * (1 + step) for step in range(9)), "unknown", (9 * GIB, GIB), id="in steps"),
    ],
)
def test_bytes_beyond_the_budget_are_anothers_where_they_came_at_once(
    held: tuple[int, ...], status: str, shown: tuple[int, int] | None
) -> None:
    """An engine takes its memory at its start, and a leak comes in many steps; without a list the rest is unknown."""
    found = beyond(*held)
    figures = {one.name: one.value for one in found.evidence}
    assert status == found.status
    assert shown == (None if not figures else (figures["over_budget"], figures["largest_step"]))
