"""GPUs, MIG slices and processes as NVML lists them, through nvidia-ml-py and a compiled stand-in of its library."""

import ctypes.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvdiag.model import Device, Gap, GapKind, Process
from kvdiag.sources.nvml import NvmlSource, parse_processes
from tests.fixtures.require import require
from tests.stand_ins.nvml.nvml_client import Client
from tests.stand_ins.nvml.stand_in import LIBRARY_NAME, Failure, Gpu, Running, StandIn, State, build, compiler
from tests.unit.sources.nvml.nvml_devices import (
    CUT,
    EMPTY,
    FULL,
    GIB,
    MEMORY,
    PROCESSES,
    gap,
    seen,
    seen_slices,
    seen_without_reservation,
    unread,
)

Expected = tuple[tuple[Device, ...], tuple[Gap, ...]]

HELD = Running(pid=4242, used_bytes=30 * GIB, name="vllm")
SPARK = Gpu(uuid="GPU-spark", name="NVIDIA GB10", total_bytes=0, free_bytes=0, processes=(HELD,))
SAME = tuple(Running(pid=pid, used_bytes=8 * GIB) for pid in (4242, 4243, 4244))
MANY = tuple(Running(pid=pid, used_bytes=GIB, late=pid > 1) for pid in range(1, 12))


def running(*processes: Running, failures: tuple[Failure, ...] = (), stride_bytes: int = 24) -> State:
    """One GPU with these processes."""
    gpus = (replace(FULL, processes=processes),)
    return State(gpus=gpus, failures=failures, process_stride_bytes=stride_bytes)


def listed(*processes: Process, gaps: tuple[Gap, ...] = ()) -> Expected:
    """The same GPU as it is to be read."""
    return (seen(FULL, 0, processes=processes),), gaps


def damaged(gpu: Gpu, text: str) -> tuple[State, bool, Expected]:
    """A GPU whose memory figures are impossible, next to a good one."""
    return State(gpus=(gpu, EMPTY)), False, ((unread(FULL, 0), seen(EMPTY, 1)), (gap("failed", "GPU-full", text),))


def unlisted(code: int, kind: GapKind, text: str) -> tuple[State, bool, Expected]:
    """A GPU whose process list is refused."""
    return running(failures=(Failure(PROCESSES, code),)), True, ((seen(FULL, 0),), (gap(kind, "GPU-full", text),))


READINGS: dict[str, tuple[State, bool, Expected]] = {
    "two GPUs, their processes in order": (
        State(gpus=(replace(FULL, processes=(HELD, Running(pid=17, used_bytes=GIB, name="/usr/bin/helper"))), EMPTY)),
        True,
        (
            (
                seen(
                    FULL,
                    0,
                    processes=(
                        Process(pid=17, used_bytes=GIB, name="/usr/bin/helper"),
                        Process(pid=4242, used_bytes=30 * GIB, name="vllm"),
                    ),
                ),
                seen(EMPTY, 1, processes=()),
            ),
            (),
        ),
    ),
    "a GB10 does not support memory, its processes are listed": (
        State(gpus=(SPARK,), failures=(Failure(MEMORY, 3),)),
        True,
        (
            (unread(SPARK, 0, processes=(Process(pid=4242, used_bytes=30 * GIB, name="vllm"),)),),
            (gap("absent", "GPU-spark", "NVIDIA GB10", "Not Supported"),),
        ),
    ),
    "more free than there is": damaged(
        replace(FULL, free_bytes=81 * GIB), f"Memory: free_bytes is {81 * GIB}, not within 0..{80 * GIB}"
    ),
    "no memory": damaged(replace(FULL, total_bytes=0, free_bytes=0), "Memory: total_bytes is 0"),
    "memory not available": damaged(replace(FULL, total_bytes=2**64 - 1), f"Memory: total_bytes is {2**64 - 1}"),
    **{
        f"memory version 2 refused with {code}: no reservation": (
            State(gpus=(FULL,), failures=(Failure("nvmlDeviceGetMemoryInfo_v2", code),)),
            False,
            ((seen_without_reservation(FULL),), ()),
        )
        for code in (3, 13, 25)
    },
    "a driver without MIG, process lists and names": (
        State(
            gpus=(FULL,),
            failures=tuple(
                Failure(function, 13)
                for function in (PROCESSES, "nvmlDeviceGetMaxMigDeviceCount", "nvmlSystemGetProcessName")
            ),
        ),
        True,
        ((seen(FULL, 0),), (gap("absent", "GPU-full", "Function Not Found"),)),
    ),
    "no GPU": (State(), False, ((), (gap("absent", "no GPU"),))),
    "memory unknown or 0, names missing or no text": (
        running(
            Running(pid=1, name="untold"),
            Running(pid=2, used_bytes=0, name="elsewhere"),
            Running(pid=3, used_bytes=GIB),
            Running(pid=4, used_bytes=GIB, name="bytes \udcff"),
        ),
        True,
        listed(
            Process(pid=1, used_bytes=None, name="untold"),
            Process(pid=2, used_bytes=None, name="elsewhere"),
            Process(pid=3, used_bytes=GIB),
            Process(pid=4, used_bytes=GIB),
        ),
    ),
    "processes that start between the two calls": (
        running(*MANY),
        True,
        listed(*(Process(pid=pid, used_bytes=GIB) for pid in range(1, 12))),
    ),
    "list not supported": unlisted(3, "absent", "Not Supported"),
    "list that never fits": unlisted(7, "failed", "Insufficient Size"),
    "list not permitted": unlisted(4, "failed", "Insufficient Permissions"),
    **{
        f"entries of {stride_bytes} bytes": (
            running(*SAME, stride_bytes=stride_bytes),
            True,
            listed(*(Process(pid=one.pid, used_bytes=8 * GIB) for one in SAME)),
        )
        for stride_bytes in (16, 32)
    },
    "a process with more than its device has": (
        running(Running(pid=1, used_bytes=GIB), Running(pid=2, used_bytes=81 * GIB)),
        True,
        ((seen(FULL, 0),), (gap("failed", "GPU-full", f"process 2 with {81 * GIB}"),)),
    ),
    "a MIG parent that may not be read": (
        State(
            gpus=(FULL, CUT),
            failures=tuple(
                Failure(function, 4, uuid=CUT.uuid)
                for function in (MEMORY, "nvmlDeviceGetMaxMigDeviceCount", PROCESSES)
            ),
        ),
        True,
        (
            (seen(FULL, 0, processes=()), unread(CUT, 1), *seen_slices(CUT, 1, processes=True)),
            (gap("absent", "GPU-cut", "Insufficient Permissions", "2 MIG slices"),),
        ),
    ),
    "slices fail alone": (
        State(
            gpus=(CUT,),
            failures=(Failure(MEMORY, 999, uuid="MIG-busy"), Failure("nvmlDeviceGetUUID", 999, uuid="MIG-idle")),
        ),
        False,
        (
            (seen(CUT, 0), replace(seen_slices(CUT, 0)[0], memory=None)),
            (gap("failed", "MIG slice 3", "Unknown Error"), gap("failed", "MIG-busy", "Unknown Error")),
        ),
    ),
    "a GPU that may not be read and has no slices": (
        State(gpus=(FULL,), failures=(Failure(MEMORY, 4),)),
        False,
        ((unread(FULL, 0),), (gap("failed", "GPU-full", "Insufficient Permissions"),)),
    ),
}


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize(("state", "processes", "expected"), READINGS.values(), ids=READINGS)
def test_one_reading(stand_in: StandIn, client: Client, state: State, processes: bool, expected: Expected) -> None:
    """The devices that a driver shows, and a gap for each thing that it does not."""
    stand_in.show(state)
    assert expected == client.read(processes=processes)


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize(
    ("first", "before", "second", "after"),
    [
        pytest.param(
            State(gpus=(EMPTY,), failures=(Failure(PROCESSES, 999),)),
            ((seen(EMPTY, 0),), ()),
            State(gpus=(replace(EMPTY, free_bytes=3 * GIB),), failures=(Failure(PROCESSES, 999),)),
            ((seen(replace(EMPTY, free_bytes=3 * GIB), 0),), ()),
            id="memory changes; processes are read only on request",
        ),
        pytest.param(
            State(gpus=(FULL, EMPTY), failures=(Failure(MEMORY, 46, uuid=EMPTY.uuid),)),
            ((seen(FULL, 0), unread(EMPTY, 1)), (gap("failed", "GPU-empty", "an error of the stand-in"),)),
            State(gpus=(FULL, EMPTY)),
            ((seen(FULL, 0), seen(EMPTY, 1)), ()),
            id="an unknown error code costs one device, while it lasts",
        ),
        pytest.param(
            State(gpus=(CUT,)),
            ((seen(CUT, 0), *seen_slices(CUT, 0)), ()),
            State(gpus=(replace(CUT, slices=(replace(CUT.slices[0], uuid="MIG-new"),)),)),
            ((seen(CUT, 0), replace(seen_slices(CUT, 0)[0], uuid="MIG-new")), ()),
            id="slices are looked up anew",
        ),
    ],
)
def test_each_reading_is_new(
    stand_in: StandIn, client: Client, first: State, before: Expected, second: State, after: Expected
) -> None:
    """A second read returns the second state alone."""
    stand_in.show(first)
    assert before == client.read()
    stand_in.show(second)
    assert after == client.read()


@pytest.mark.nvml_stand_in
def test_old_driver(tmp_path: Path) -> None:
    """A driver from before memory version 2 and process version 3 is read by what it has."""
    require(compiler() is not None, "a C compiler (cc)")
    missing = ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3")
    stand_in = StandIn(build(tmp_path, without=missing), tmp_path / "state")
    stand_in.show(running(Running(pid=1, used_bytes=GIB)))
    with Client(stand_in.environment()) as client:
        actual = client.read(processes=True)
    assert ((replace(seen_without_reservation(FULL), processes=(Process(pid=1, used_bytes=GIB),)),), ()) == actual


@pytest.mark.parametrize("content", [None, b"not a library"], ids=["no file", "no library in it"])
def test_machine_without_nvml(tmp_path: Path, content: bytes | None) -> None:
    """Without NVIDIA's library there are no GPUs here: absent, not failed, and what to do about it in a container."""
    if content is not None:
        (tmp_path / LIBRARY_NAME).write_bytes(content)
    elif ctypes.util.find_library("nvidia-ml"):
        pytest.skip("NVIDIA driver present")
    with Client(StandIn(tmp_path / LIBRARY_NAME, tmp_path / "state").environment()) as client:
        actual = client.read()
    assert (None, (gap("absent", "libnvidia-ml.so.1", "NVIDIA_DRIVER_CAPABILITIES=utility"),)) == actual


def test_library_object_needs_only_what_it_has() -> None:
    """An object with a few of pynvml's names stands for it: what it lacks is what its driver lacks."""
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
    expected = replace(seen_without_reservation(FULL), processes=(Process(pid=7, used_bytes=GIB),))
    assert ((expected,), ()) == NvmlSource(library).read(processes=True)


@pytest.mark.parametrize(
    "entry",
    [{"pid": 0}, {"pid": 2**22 + 1}, {"pid": 7, "gpuInstanceId": 4243}, {"pid": 7, "computeInstanceId": 64}],
    ids=str,
)
def test_entry_that_is_part_of_its_neighbour(entry: dict[str, int]) -> None:
    """An impossible process id or MIG instance shows that a list was read at the wrong entry size."""
    outside_mig = {"usedGpuMemory": GIB, "gpuInstanceId": 2**32 - 1, "computeInstanceId": 2**32 - 1}
    with pytest.raises(ValueError, match="not laid out as documented"):
        parse_processes([SimpleNamespace(**(outside_mig | entry))], {})
