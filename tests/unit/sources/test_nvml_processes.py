"""The processes that NVML lists: what a list may hide, and lists that cannot be had or believed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvdiag.model import GapKind, Process
from kvdiag.sources.nvml import parse_processes
from tests.stand_ins.nvml.client import Client
from tests.stand_ins.nvml.stand_in import Failure, Running, StandIn, State
from tests.unit.sources.nvml_devices import FULL, GIB, PROCESSES, gap, seen


@pytest.mark.nvml_stand_in
def test_processes_that_hide_something(stand_in: StandIn, client: Client) -> None:
    """Memory that the driver does not tell, or tells as 0, is unknown, and so are names that are missing or no text."""
    running = (
        Running(pid=1, name="untold"),
        Running(pid=2, used_bytes=0, name="elsewhere"),
        Running(pid=3, used_bytes=GIB),
        Running(pid=4, used_bytes=GIB, name="bytes \udcff"),
    )
    stand_in.show(State(gpus=(replace(FULL, processes=running),)))

    assert (
        (
            seen(
                FULL,
                0,
                processes=(
                    Process(pid=1, used_bytes=None, name="untold"),
                    Process(pid=2, used_bytes=None, name="elsewhere"),
                    Process(pid=3, used_bytes=GIB),
                    Process(pid=4, used_bytes=GIB),
                ),
            ),
        ),
        (),
    ) == client.read(processes=True)


@pytest.mark.nvml_stand_in
def test_processes_that_start_in_between(stand_in: StandIn, client: Client) -> None:
    """More processes than nvidia-ml-py made room for, started between its two calls, are listed all the same."""
    running = tuple(Running(pid=pid, used_bytes=GIB, late=pid > 1) for pid in range(1, 12))
    stand_in.show(State(gpus=(replace(FULL, processes=running),)))

    actual = client.read(processes=True)

    assert ((seen(FULL, 0, processes=tuple(Process(pid=pid, used_bytes=GIB) for pid in range(1, 12))),), ()) == actual


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [(3, "absent", "Not Supported"), (7, "failed", "Insufficient Size"), (4, "failed", "Insufficient Permissions")],
)
def test_processes_that_cannot_be_listed(
    stand_in: StandIn, client: Client, code: int, kind: GapKind, text: str
) -> None:
    """A list that is refused, however often it is asked for, is a gap beside the device's memory."""
    stand_in.show(State(gpus=(FULL,), failures=(Failure(PROCESSES, code),)))

    assert ((seen(FULL, 0),), (gap(kind, "GPU-full", text),)) == client.read(processes=True)


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize("stride_bytes", [16, 32])
def test_process_entries_of_another_size(stand_in: StandIn, client: Client, stride_bytes: int) -> None:
    """Drivers whose list has entries of another size than documented are read by the version that never changed."""
    running = tuple(Running(pid=pid, used_bytes=8 * GIB) for pid in (4242, 4243, 4244))
    gpus = (replace(FULL, processes=running),)
    stand_in.show(State(gpus=gpus, process_stride_bytes=stride_bytes))

    actual = client.read(processes=True)

    processes = tuple(Process(pid=pid, used_bytes=8 * GIB) for pid in (4242, 4243, 4244))
    assert ((seen(FULL, 0, processes=processes),), ()) == actual


@pytest.mark.nvml_stand_in
def test_process_with_more_than_there_is(stand_in: StandIn, client: Client) -> None:
    """A process that uses more than its device has makes the whole list untrustworthy: a gap, and no processes."""
    running = (Running(pid=1, used_bytes=GIB), Running(pid=2, used_bytes=81 * GIB))
    stand_in.show(State(gpus=(replace(FULL, processes=running),)))

    assert ((seen(FULL, 0),), (gap("failed", "GPU-full", f"process 2 with {81 * GIB}"),)) == client.read(processes=True)


@pytest.mark.parametrize(
    "entry",
    [{"pid": 0}, {"pid": 2**22 + 1}, {"pid": 7, "gpuInstanceId": 4243}, {"pid": 7, "computeInstanceId": 64}],
    ids=str,
)
def test_entry_that_is_part_of_its_neighbour(entry: dict[str, int]) -> None:
    """A process id or a MIG instance that cannot be gives away a list that was read at the wrong entry size."""
    outside_mig = {"usedGpuMemory": GIB, "gpuInstanceId": 2**32 - 1, "computeInstanceId": 2**32 - 1}

    with pytest.raises(ValueError, match="not laid out as documented"):
        parse_processes([SimpleNamespace(**(outside_mig | entry))], {})
