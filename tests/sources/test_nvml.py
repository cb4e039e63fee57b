"""The NVML source through nvidia-ml-py and a compiled stand-in of NVIDIA's library, in a process of its own."""

from __future__ import annotations

import ctypes.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvdiag.model import Device, Gap, GapKind, Memory, Process
from kvdiag.sources.nvml import LAST_RETRY_SECONDS, NvmlSource, parse_processes
from kvdiag.sources.patience import StillBusy
from tests.nvml_stand_in.client import Client
from tests.nvml_stand_in.stand_in import (
    LIBRARY_NAME,
    Delay,
    Failure,
    Gpu,
    Running,
    Slice,
    StandIn,
    State,
    build,
    compiler,
)
from tests.support import require

GIB = 2**30
HANG_SECONDS = 5.0
LONG_SECONDS = 30.0
MEMORY = "nvmlDeviceGetMemoryInfo*"
PROCESSES = "nvmlDeviceGetComputeRunningProcesses*"

FULL = Gpu(uuid="GPU-full", total_bytes=80 * GIB, free_bytes=4 * GIB, reserved_bytes=GIB // 2)
EMPTY = Gpu(uuid="GPU-empty", total_bytes=80 * GIB, free_bytes=79 * GIB, reserved_bytes=GIB // 2)
CUT = Gpu(
    uuid="GPU-cut",
    total_bytes=80 * GIB,
    free_bytes=60 * GIB,
    slices=(
        Slice(
            slot=0,
            uuid="MIG-busy",
            total_bytes=10 * GIB,
            free_bytes=GIB,
            processes=(Running(pid=4242, used_bytes=8 * GIB, name="vllm"),),
        ),
        Slice(slot=3, uuid="MIG-idle", total_bytes=20 * GIB, free_bytes=20 * GIB, name="NVIDIA H100 MIG 2g.20gb"),
    ),
)


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StandIn, Client]]:
    """The stand-in, and a process with a source that sees it; started once, since that is what takes the time."""
    require(compiler() is not None, "a C compiler (cc)")
    folder = tmp_path_factory.mktemp("nvml")
    stand_in = StandIn(build(folder), folder / "state")
    with Client(stand_in.environment()) as client:
        yield stand_in, client


@pytest.fixture
def stand_in(session: tuple[StandIn, Client]) -> StandIn:
    """The stand-in, with whatever state the test shows."""
    return session[0]


@pytest.fixture
def client(session: tuple[StandIn, Client]) -> Client:
    """A new source that sees the stand-in."""
    stand_in, client = session
    stand_in.show(State())
    client.renew()
    return client


@pytest.mark.nvml_stand_in
def test_two_gpus_are_told_apart(stand_in: StandIn, client: Client) -> None:
    """Two GPUs come out in order, each with its own fill and processes."""
    # GIVEN
    serving = Running(pid=4242, used_bytes=75 * GIB, name="/usr/bin/python3")
    helping = Running(pid=17, used_bytes=256 * 2**20, name="/usr/bin/helper")
    stand_in.show(State(gpus=(replace(FULL, processes=(serving, helping)), EMPTY)))

    # WHEN
    actual = client.read(processes=True)

    # THEN
    processes = (
        Process(pid=17, used_bytes=256 * 2**20, name="/usr/bin/helper"),
        Process(pid=4242, used_bytes=75 * GIB, name="/usr/bin/python3"),
    )
    expected = ((seen(FULL, 0, processes=processes), seen(EMPTY, 1, processes=())), ())
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_each_read_is_new(stand_in: StandIn, client: Client) -> None:
    """Memory that changes between two reads shows in the second; without being asked for, processes are not read."""
    # GIVEN
    stand_in.show(State(gpus=(EMPTY,), failures=(Failure(PROCESSES, 999),)))
    before = client.read()

    # WHEN
    fuller = replace(EMPTY, free_bytes=3 * GIB)
    stand_in.show(State(gpus=(fuller,), failures=(Failure(PROCESSES, 999),)))
    actual = (before, client.read())

    # THEN
    expected = (((seen(EMPTY, 0),), ()), ((seen(fuller, 0),), ()))
    assert expected == actual


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize(
    ("code", "text"), [(15, "GPU is lost"), (16, "GPU requires restart"), (999, "Unknown Error")], ids=str
)
def test_lost_gpu_comes_back(stand_in: StandIn, client: Client, code: int, text: str) -> None:
    """A GPU lost in mid-run stays without memory, leaves the other alone, and is read again once it is back."""
    # GIVEN
    well = State(gpus=(FULL, EMPTY))
    stand_in.show(well)
    before = client.read()

    # WHEN
    stand_in.show(replace(well, failures=(Failure("nvmlDeviceGet*", code, uuid=FULL.uuid),)))
    lost = client.read()
    client.wait(LAST_RETRY_SECONDS)
    still_lost = client.read()
    stand_in.show(well)
    client.wait(LAST_RETRY_SECONDS)
    actual = (before, lost, still_lost, client.read())

    # THEN
    whole = ((seen(FULL, 0), seen(EMPTY, 1)), ())
    reason = f"GPU 0 (GPU-full) is out of reach ({text}); look for its Xid in `dmesg`, then reset it"
    torn = ((unread(FULL, 0), seen(EMPTY, 1)), (gap("failed", reason),))
    expected = (whole, torn, torn, whole)
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_lost_gpu_is_left_alone_for_a_while(stand_in: StandIn, client: Client) -> None:
    """A lost GPU is not asked again at once: polling what fell off the bus holds the driver's lock for all."""
    # GIVEN
    well = State(gpus=(FULL, EMPTY))
    stand_in.show(replace(well, failures=(Failure(MEMORY, 15, uuid=FULL.uuid),)))
    lost = client.read()

    # WHEN
    stand_in.show(well)
    actual = client.read()

    # THEN
    assert lost == actual


@pytest.mark.nvml_stand_in
def test_gpu_lost_before_it_has_a_name(stand_in: StandIn, client: Client) -> None:
    """A GPU that never told its uuid is a gap that names its index, until it tells."""
    # GIVEN
    well = State(gpus=(FULL, EMPTY))
    stand_in.show(replace(well, failures=(Failure("nvmlDeviceGetHandleByIndex*", 15, uuid=EMPTY.uuid),)))

    # WHEN
    nameless = client.read()
    stand_in.show(well)
    client.wait(LAST_RETRY_SECONDS)
    actual = (nameless, client.read())

    # THEN
    reason = "GPU 1 is out of reach (GPU is lost); look for its Xid in `dmesg`, then reset it"
    expected = (((seen(FULL, 0),), (gap("failed", reason),)), ((seen(FULL, 0), seen(EMPTY, 1)), ()))
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_refused_memory_is_asked_again_each_time(stand_in: StandIn, client: Client) -> None:
    """An error code that nvidia-ml-py has no name for costs one device's memory, and only while it lasts."""
    # GIVEN
    stand_in.show(State(gpus=(FULL, EMPTY), failures=(Failure(MEMORY, 46, uuid=EMPTY.uuid),)))

    # WHEN
    refused = client.read()
    stand_in.show(State(gpus=(FULL, EMPTY)))
    actual = (refused, client.read())

    # THEN
    text = "an error of the stand-in"
    reason = f"GPU 1 (GPU-empty): its memory cannot be told ({text}); compare `nvidia-smi -q -d MEMORY`"
    expected = (
        ((seen(FULL, 0), unread(EMPTY, 1)), (gap("failed", reason),)),
        ((seen(FULL, 0), seen(EMPTY, 1)), ()),
    )
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_unified_memory_is_not_told(stand_in: StandIn, client: Client) -> None:
    """A GB10, whose memory NVML does not support, is a device without memory whose processes are read all the same."""
    # GIVEN
    spark = Gpu(
        uuid="GPU-spark",
        name="NVIDIA GB10",
        total_bytes=0,
        free_bytes=0,
        processes=(Running(pid=4242, used_bytes=30 * GIB, name="vllm"),),
    )
    stand_in.show(State(gpus=(spark,), failures=(Failure(MEMORY, 3),)))

    # WHEN
    actual = client.read(processes=True)

    # THEN
    processes = (Process(pid=4242, used_bytes=30 * GIB, name="vllm"),)
    reason = (
        "GPU 0 (GPU-spark), NVIDIA GB10, does not tell its memory (Not Supported), "
        "as GPUs do that share the host's; watch the host's available memory"
    )
    expected = ((unread(spark, 0, processes=processes),), (gap("absent", reason),))
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_hidden_mig_parent_shows_its_slices(stand_in: StandIn, client: Client) -> None:
    """Where a container may not read a GPU cut by MIG, its two slices are devices, whatever numbers they have."""
    # GIVEN
    stand_in.show(
        State(
            gpus=(FULL, CUT),
            failures=(
                Failure(MEMORY, 4, uuid=CUT.uuid),
                Failure("nvmlDeviceGetMaxMigDeviceCount", 4, uuid=CUT.uuid),
                Failure(PROCESSES, 4, uuid=CUT.uuid),
            ),
        )
    )

    # WHEN
    actual = client.read(processes=True)

    # THEN
    reason = "GPU 1 (GPU-cut) is not read as a whole (Insufficient Permissions) but in its 2 MIG slices"
    expected = (
        (seen(FULL, 0, processes=()), unread(CUT, 1), *seen_slices(CUT, 1, processes=True)),
        (gap("absent", reason),),
    )
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_readable_mig_parent_comes_with_its_slices(stand_in: StandIn, client: Client) -> None:
    """Where a GPU cut by MIG may be read, it stands before its slices, and slices that are made anew are seen."""
    # GIVEN
    stand_in.show(State(gpus=(CUT,)))
    before = client.read()

    # WHEN
    recut = replace(CUT, slices=(replace(CUT.slices[0], uuid="MIG-new", free_bytes=10 * GIB),))
    stand_in.show(State(gpus=(recut,)))
    actual = (before, client.read())

    # THEN
    expected = (
        ((seen(CUT, 0), *seen_slices(CUT, 0)), ()),
        ((seen(recut, 0), *seen_slices(recut, 0)), ()),
    )
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_slices_fail_alone(stand_in: StandIn, client: Client) -> None:
    """A slice that cannot be read, or told, takes neither its GPU nor the other slice with it."""
    # GIVEN
    stand_in.show(
        State(
            gpus=(CUT,),
            failures=(Failure(MEMORY, 999, uuid="MIG-busy"), Failure("nvmlDeviceGetUUID", 999, uuid="MIG-idle")),
        )
    )

    # WHEN
    actual = client.read()

    # THEN
    busy, _ = seen_slices(CUT, 0)
    reasons = (
        "MIG slice 3 of GPU 0 does not tell what it is (Unknown Error); see `nvidia-smi -L`",
        "MIG slice 0 of GPU 0 (MIG-busy): its memory cannot be told (Unknown Error); compare `nvidia-smi -q -d MEMORY`",
    )
    expected = ((seen(CUT, 0), replace(busy, memory=None)), tuple(gap("failed", reason) for reason in reasons))
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_hidden_gpu_without_slices(stand_in: StandIn, client: Client) -> None:
    """A GPU that may not be read and shows no slice has failed: nothing is left to see its memory by."""
    # GIVEN
    stand_in.show(State(gpus=(FULL,), failures=(Failure(MEMORY, 4),)))

    # WHEN
    actual = client.read()

    # THEN
    text = "Insufficient Permissions"
    reason = f"GPU 0 (GPU-full): its memory cannot be told ({text}); compare `nvidia-smi -q -d MEMORY`"
    expected = ((unread(FULL, 0),), (gap("failed", reason),))
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_hang_is_noticed_and_gets_over(stand_in: StandIn, client: Client) -> None:
    """A driver call that hangs is noticed in time, also when asked again, and read afresh once it came back."""
    # GIVEN
    stand_in.show(State(gpus=(FULL,)))
    before = client.ask(LONG_SECONDS)

    # WHEN
    stand_in.show(State(gpus=(FULL,), delays=(Delay(MEMORY, HANG_SECONDS),)))
    for _ in range(2):
        with pytest.raises(StillBusy):
            client.ask(0.1)
    fuller = replace(FULL, free_bytes=GIB)
    stand_in.show(State(gpus=(fuller,)))
    actual = (before, client.ask(LONG_SECONDS))

    # THEN
    expected = (((seen(FULL, 0),), ()), ((seen(fuller, 0),), ()))
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_hang_does_not_keep_the_process(stand_in: StandIn) -> None:
    """A process with a hung driver call closes its source and ends, without waiting for either."""
    # GIVEN
    stand_in.show(State(gpus=(FULL,), delays=(Delay(MEMORY, 1000 * LONG_SECONDS),)))

    # WHEN
    with Client(stand_in.environment()) as client:
        with pytest.raises(StillBusy):
            client.ask(0.1)
        client.close()
        actual = client.end()

    # THEN
    expected = 0
    assert expected == actual


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (4, "the NVIDIA driver refuses this user; check the permissions of /dev/nvidia*"),
        (9, "the NVIDIA kernel module is not loaded; look for the cause in `dmesg`"),
        (
            18,
            "the NVIDIA driver was replaced while its old library is in use here; restart this container, or reboot",
        ),
        (20, "the NVIDIA driver fails (Insufficient Memory); see `nvidia-smi`"),
        (999, "the NVIDIA driver answers Unknown Error; a container that lost its GPUs has to be recreated"),
    ],
    ids=str,
)
def test_driver_that_does_not_start(stand_in: StandIn, client: Client, code: int, reason: str) -> None:
    """A driver that fails at the start is one gap that says what to do, and heals by itself."""
    # GIVEN
    stand_in.show(State(gpus=(FULL,), failures=(Failure("nvmlInit*", code),)))

    # WHEN
    down = client.read()
    stand_in.show(State(gpus=(FULL,)))
    still_down = client.read()
    client.wait(LAST_RETRY_SECONDS)
    actual = (down, still_down, client.read())

    # THEN
    nothing = (None, (gap("failed", reason),))
    expected = (nothing, nothing, ((seen(FULL, 0),), ()))
    assert expected == actual


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize("function", ["nvml*", MEMORY])
def test_driver_lost_in_mid_run(stand_in: StandIn, client: Client, function: str) -> None:
    """A driver that is replaced under a running source takes all devices with it, until its library fits again."""
    # GIVEN
    stand_in.show(State(gpus=(FULL, EMPTY)))
    before = client.read()

    # WHEN
    stand_in.show(State(gpus=(FULL, EMPTY), failures=(Failure(function, 18),)))
    lost = client.read()
    stand_in.show(State(gpus=(FULL, EMPTY)))
    client.wait(LAST_RETRY_SECONDS)
    actual = (before, lost, client.read())

    # THEN
    whole = ((seen(FULL, 0), seen(EMPTY, 1)), ())
    reason = "the NVIDIA driver was replaced while its old library is in use here; restart this container, or reboot"
    expected = (whole, (None, (gap("failed", reason),)), whole)
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_reloaded_driver_costs_no_reading(stand_in: StandIn, client: Client) -> None:
    """A driver that was reloaded is started anew within the same read, and its GPUs are identified anew."""
    # GIVEN
    stand_in.show(State(gpus=(FULL, EMPTY)))
    client.read()

    # WHEN
    stand_in.show(State(gpus=(EMPTY,), generation=2))
    actual = client.read()

    # THEN
    expected = ((seen(EMPTY, 0),), ())
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_closed_source_starts_anew(stand_in: StandIn, client: Client) -> None:
    """After close NVML is started again by the next read."""
    # GIVEN
    stand_in.show(State(gpus=(FULL,)))
    client.read()

    # WHEN
    client.close()
    stand_in.show(State(gpus=(FULL,), failures=(Failure("nvmlInit*", 9),)))
    actual = client.read()

    # THEN
    expected = (None, (gap("failed", "the NVIDIA kernel module is not loaded; look for the cause in `dmesg`"),))
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_processes_that_hide_something(stand_in: StandIn, client: Client) -> None:
    """Memory that the driver does not tell, or tells as 0, is unknown, and so are names that are missing or no text."""
    # GIVEN
    running = (
        Running(pid=1, name="no memory told"),
        Running(pid=2, used_bytes=0, name="seen from another pid namespace"),
        Running(pid=3, used_bytes=GIB),
        Running(pid=4, used_bytes=GIB, name="bytes \udcff"),
    )
    stand_in.show(State(gpus=(replace(FULL, processes=running),)))

    # WHEN
    actual = client.read(processes=True)

    # THEN
    processes = (
        Process(pid=1, used_bytes=None, name="no memory told"),
        Process(pid=2, used_bytes=None, name="seen from another pid namespace"),
        Process(pid=3, used_bytes=GIB),
        Process(pid=4, used_bytes=GIB),
    )
    expected = ((seen(FULL, 0, processes=processes),), ())
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_processes_that_start_in_between(stand_in: StandIn, client: Client) -> None:
    """More processes than nvidia-ml-py made room for, started between its two calls, are listed all the same."""
    # GIVEN
    running = tuple(Running(pid=pid, used_bytes=GIB, late=pid > 1) for pid in range(1, 12))
    stand_in.show(State(gpus=(replace(FULL, processes=running),)))

    # WHEN
    actual = client.read(processes=True)

    # THEN
    processes = tuple(Process(pid=pid, used_bytes=GIB) for pid in range(1, 12))
    expected = ((seen(FULL, 0, processes=processes),), ())
    assert expected == actual


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [(3, "absent", "Not Supported"), (7, "failed", "Insufficient Size"), (4, "failed", "Insufficient Permissions")],
)
def test_processes_that_cannot_be_listed(
    stand_in: StandIn, client: Client, code: int, kind: GapKind, text: str
) -> None:
    """A list that is refused, however often it is asked for, is a gap beside the device's memory."""
    # GIVEN
    stand_in.show(State(gpus=(FULL,), failures=(Failure(PROCESSES, code),)))

    # WHEN
    actual = client.read(processes=True)

    # THEN
    reason = f"GPU 0 (GPU-full): its processes cannot be told ({text}); compare `nvidia-smi`"
    expected = ((seen(FULL, 0),), (gap(kind, reason),))
    assert expected == actual


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize("stride_bytes", [16, 32])
def test_process_entries_of_another_size(stand_in: StandIn, client: Client, stride_bytes: int) -> None:
    """Drivers whose list has entries of another size than documented are read by the version that never changed."""
    # GIVEN
    running = tuple(Running(pid=pid, used_bytes=8 * GIB) for pid in (4242, 4243, 4244))
    gpus = (replace(FULL, processes=running),)
    stand_in.show(State(gpus=gpus, process_stride_bytes=stride_bytes))

    # WHEN
    actual = client.read(processes=True)

    # THEN
    processes = tuple(Process(pid=pid, used_bytes=8 * GIB) for pid in (4242, 4243, 4244))
    expected = ((seen(FULL, 0, processes=processes),), ())
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_process_with_more_than_there_is(stand_in: StandIn, client: Client) -> None:
    """A process that uses more than its device has makes the whole list untrustworthy: a gap, and no processes."""
    # GIVEN
    running = (Running(pid=1, used_bytes=GIB), Running(pid=2, used_bytes=81 * GIB))
    stand_in.show(State(gpus=(replace(FULL, processes=running),)))

    # WHEN
    actual = client.read(processes=True)

    # THEN
    text = f"process 2 with {81 * GIB} of {80 * GIB} bytes"
    reason = f"GPU 0 (GPU-full): its processes cannot be told ({text}); compare `nvidia-smi`"
    expected = ((seen(FULL, 0),), (gap("failed", reason),))
    assert expected == actual


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize(
    ("garbage", "text"),
    [
        (
            replace(FULL, free_bytes=81 * GIB),
            f"Memory: free_bytes is {81 * GIB}, not within 0..{80 * GIB}",
        ),
        (replace(FULL, total_bytes=0, free_bytes=0), "Memory: total_bytes is 0"),
        (replace(FULL, total_bytes=2**64 - 1), f"Memory: total_bytes is {2**64 - 1}"),
    ],
    ids=["more free than there is", "no memory", "not available"],
)
def test_impossible_memory_is_a_gap(stand_in: StandIn, client: Client, garbage: Gpu, text: str) -> None:
    """Figures that cannot be are said to be so; the device stays, and so does the other one."""
    # GIVEN
    stand_in.show(State(gpus=(garbage, EMPTY)))

    # WHEN
    actual = client.read()

    # THEN
    reason = f"GPU 0 (GPU-full): its memory cannot be told ({text}); compare `nvidia-smi -q -d MEMORY`"
    expected = ((unread(FULL, 0), seen(EMPTY, 1)), (gap("failed", reason),))
    assert expected == actual


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize("code", [3, 13, 25])
def test_second_memory_version_is_refused(stand_in: StandIn, client: Client, code: int) -> None:
    """Where version 2 of the memory struct is refused, version 1 tells all but the driver's reservation."""
    # GIVEN
    stand_in.show(State(gpus=(FULL,), failures=(Failure("nvmlDeviceGetMemoryInfo_v2", code),)))

    # WHEN
    actual = client.read()

    # THEN
    expected = ((seen_without_reservation(FULL),), ())
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_old_driver(tmp_path: Path) -> None:
    """A driver from before memory version 2 and process version 3 is read by what it has."""
    # GIVEN
    require(compiler() is not None, "a C compiler (cc)")
    missing = ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3")
    stand_in = StandIn(build(tmp_path, without=missing), tmp_path / "state")
    stand_in.show(State(gpus=(replace(FULL, processes=(Running(pid=1, used_bytes=GIB),)),)))

    # WHEN
    with Client(stand_in.environment()) as client:
        actual = client.read(processes=True)

    # THEN
    processes = (Process(pid=1, used_bytes=GIB),)
    expected = ((replace(seen_without_reservation(FULL), processes=processes),), ())
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_driver_from_before_mig(stand_in: StandIn, client: Client) -> None:
    """A driver that knows neither MIG nor the process lists nor the process names of today is still read."""
    # GIVEN
    missing = (PROCESSES, "nvmlDeviceGetMaxMigDeviceCount", "nvmlSystemGetProcessName")
    stand_in.show(State(gpus=(FULL,), failures=tuple(Failure(function, 13) for function in missing)))

    # WHEN
    actual = client.read(processes=True)

    # THEN
    reason = "GPU 0 (GPU-full): its processes cannot be told (Function Not Found); compare `nvidia-smi`"
    expected = ((seen(FULL, 0),), (gap("absent", reason),))
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_driver_without_gpus(stand_in: StandIn, client: Client) -> None:
    """A driver that lists nothing gives an empty tuple, and a gap that says why that may be."""
    # GIVEN
    stand_in.show(State())

    # WHEN
    actual = client.read()

    # THEN
    reason = "the NVIDIA driver lists no GPU here; a container has to be given its GPUs"
    expected = ((), (gap("absent", reason),))
    assert expected == actual


@pytest.mark.parametrize("content", [None, b"not a library"], ids=["no file", "no library in it"])
def test_machine_without_nvml(tmp_path: Path, content: bytes | None) -> None:
    """Without NVIDIA's library there are no GPUs here: absent, not failed, and what to do about it in a container."""
    # GIVEN
    if content is not None:
        (tmp_path / LIBRARY_NAME).write_bytes(content)
    elif ctypes.util.find_library("nvidia-ml"):
        pytest.skip("this machine has an NVIDIA driver")
    nothing = StandIn(tmp_path / LIBRARY_NAME, tmp_path / "state")

    # WHEN
    with Client(nothing.environment()) as client:
        actual = client.read()

    # THEN
    reason = (
        "no libnvidia-ml.so.1 here, so no NVIDIA GPU can be seen; "
        "a container needs the NVIDIA runtime and NVIDIA_DRIVER_CAPABILITIES=utility"
    )
    expected = (None, (gap("absent", reason),))
    assert expected == actual


def test_library_object_needs_only_what_it_has() -> None:
    """An object with a few of pynvml's names stands for it: what it lacks is what its driver lacks."""
    # GIVEN
    library = SimpleNamespace(
        NVMLError=LookupError,
        nvmlMemory_v2=2,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: FULL.uuid,
        nvmlDeviceGetName=lambda handle: FULL.name,
        nvmlDeviceGetMemoryInfo=lambda handle, version=None: SimpleNamespace(total=80 * GIB, free=4 * GIB),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=7, usedGpuMemory=GIB)],
    )

    # WHEN
    actual = NvmlSource(library).read(processes=True)

    # THEN
    expected = ((replace(seen_without_reservation(FULL), processes=(Process(pid=7, used_bytes=GIB),)),), ())
    assert expected == actual


def test_absent_driver_is_asked_ever_more_rarely() -> None:
    """NVML that does not start is tried again after 1 s, then after pauses that double up to a minute."""
    # GIVEN
    now_seconds = 0.0
    tried: list[float] = []

    class Error(Exception):
        value = 12

    def init() -> None:
        tried.append(now_seconds)
        raise Error

    source = NvmlSource(SimpleNamespace(NVMLError=Error, nvmlInit=init), clock=lambda: now_seconds)

    # WHEN
    for second in range(250):
        now_seconds = float(second)
        source.read(processes=False)

    # THEN
    expected = [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 123.0, 183.0, 243.0]
    assert expected == tried


def test_pauses_begin_anew_after_an_outage() -> None:
    """Once NVML has answered again the next outage is tried after a second, however long the last one was."""
    # GIVEN
    now_seconds = 0.0
    tried: list[float] = []

    class Error(Exception):
        value = 9

    def init() -> None:
        tried.append(now_seconds)
        if now_seconds not in works_at:
            raise Error

    def count() -> int:
        if now_seconds not in works_at:
            raise Error
        return 0

    works_at = {7.0, 8.0}
    source = NvmlSource(
        SimpleNamespace(NVMLError=Error, nvmlInit=init, nvmlDeviceGetCount=count), clock=lambda: now_seconds
    )

    # WHEN
    for second in range(13):
        now_seconds = float(second)
        source.read(processes=False)

    # THEN
    expected = [0.0, 1.0, 3.0, 7.0, 9.0, 10.0, 12.0]
    assert expected == tried


@pytest.mark.parametrize(
    "entry",
    [
        {"pid": 0},
        {"pid": 2**22 + 1},
        {"pid": 7, "gpuInstanceId": 4243},
        {"pid": 7, "computeInstanceId": 64},
    ],
    ids=str,
)
def test_entry_that_is_part_of_its_neighbour(entry: dict[str, int]) -> None:
    """A process id or a MIG instance that cannot be gives away a list that was read at the wrong entry size."""
    # GIVEN
    outside_mig = {"usedGpuMemory": GIB, "gpuInstanceId": 2**32 - 1, "computeInstanceId": 2**32 - 1}

    # THEN
    with pytest.raises(ValueError, match="not laid out as documented"):
        parse_processes([SimpleNamespace(**(outside_mig | entry))], {})


def seen(gpu: Gpu, index: int, *, processes: tuple[Process, ...] | None = None) -> Device:
    """The device that a GPU of the stand-in is to be read as."""
    memory = Memory(total_bytes=gpu.total_bytes, free_bytes=gpu.free_bytes, driver_reserved_bytes=gpu.reserved_bytes)
    return Device(uuid=gpu.uuid, index=index, name=gpu.name, memory=memory, processes=processes)


def seen_slices(gpu: Gpu, index: int, *, processes: bool = False) -> tuple[Device, ...]:
    """The devices that its slices are to be read as."""
    return tuple(
        Device(
            uuid=part.uuid,
            index=index,
            name=part.name,
            memory=Memory(total_bytes=part.total_bytes, free_bytes=part.free_bytes, driver_reserved_bytes=0),
            processes=tuple(Process(pid=p.pid, used_bytes=p.used_bytes, name=p.name) for p in part.processes)
            if processes
            else None,
            mig_parent_uuid=gpu.uuid,
        )
        for part in gpu.slices
    )


def seen_without_reservation(gpu: Gpu) -> Device:
    """The device where only version 1 of the memory struct is to be had."""
    return replace(seen(gpu, 0), memory=Memory(total_bytes=gpu.total_bytes, free_bytes=gpu.free_bytes))


def unread(gpu: Gpu, index: int, *, processes: tuple[Process, ...] | None = None) -> Device:
    """The device where no memory is to be had."""
    return Device(uuid=gpu.uuid, index=index, name=gpu.name, memory=None, processes=processes)


def gap(kind: GapKind, reason: str) -> Gap:
    """A gap as the source words it."""
    return Gap(source="nvml", kind=kind, reason=reason)
