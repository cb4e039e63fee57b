"""NVML's GPUs, and their memory, through nvidia-ml-py and a compiled stand-in of NVIDIA's library."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.model import Process
from tests.stand_ins.nvml.client import Client
from tests.stand_ins.nvml.stand_in import Failure, Gpu, Running, StandIn, State
from tests.unit.sources.nvml_devices import EMPTY, FULL, GIB, MEMORY, PROCESSES, gap, seen, unread


@pytest.mark.nvml_stand_in
def test_two_gpus_are_told_apart(stand_in: StandIn, client: Client) -> None:
    """Two GPUs come out in order, each with its own fill and processes."""
    serving = Running(pid=4242, used_bytes=75 * GIB, name="/usr/bin/python3")
    helping = Running(pid=17, used_bytes=256 * 2**20, name="/usr/bin/helper")
    stand_in.show(State(gpus=(replace(FULL, processes=(serving, helping)), EMPTY)))

    assert (
        (
            seen(
                FULL,
                0,
                processes=(
                    Process(pid=17, used_bytes=256 * 2**20, name="/usr/bin/helper"),
                    Process(pid=4242, used_bytes=75 * GIB, name="/usr/bin/python3"),
                ),
            ),
            seen(EMPTY, 1, processes=()),
        ),
        (),
    ) == client.read(processes=True)


@pytest.mark.nvml_stand_in
def test_each_read_is_new(stand_in: StandIn, client: Client) -> None:
    """Memory that changes between two reads shows in the second; without being asked for, processes are not read."""
    stand_in.show(State(gpus=(EMPTY,), failures=(Failure(PROCESSES, 999),)))
    before = client.read()

    fuller = replace(EMPTY, free_bytes=3 * GIB)
    stand_in.show(State(gpus=(fuller,), failures=(Failure(PROCESSES, 999),)))
    assert (((seen(EMPTY, 0),), ()), ((seen(fuller, 0),), ())) == (before, client.read())


@pytest.mark.nvml_stand_in
def test_refused_memory_is_asked_again_each_time(stand_in: StandIn, client: Client) -> None:
    """An error code that nvidia-ml-py has no name for costs one device's memory, and only while it lasts."""
    stand_in.show(State(gpus=(FULL, EMPTY), failures=(Failure(MEMORY, 46, uuid=EMPTY.uuid),)))

    refused = client.read()
    stand_in.show(State(gpus=(FULL, EMPTY)))
    assert (
        ((seen(FULL, 0), unread(EMPTY, 1)), (gap("failed", "GPU-empty", "an error of the stand-in"),)),
        ((seen(FULL, 0), seen(EMPTY, 1)), ()),
    ) == (refused, client.read())


@pytest.mark.nvml_stand_in
def test_unified_memory_is_not_told(stand_in: StandIn, client: Client) -> None:
    """A GB10, whose memory NVML does not support, is a device without memory whose processes are read all the same."""
    spark = Gpu(
        uuid="GPU-spark",
        name="NVIDIA GB10",
        total_bytes=0,
        free_bytes=0,
        processes=(Running(pid=4242, used_bytes=30 * GIB, name="vllm"),),
    )
    stand_in.show(State(gpus=(spark,), failures=(Failure(MEMORY, 3),)))

    actual = client.read(processes=True)

    processes = (Process(pid=4242, used_bytes=30 * GIB, name="vllm"),)
    expected = ((unread(spark, 0, processes=processes),), (gap("absent", "GPU-spark", "NVIDIA GB10", "Not Supported"),))
    assert expected == actual


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize(
    ("garbage", "text"),
    [
        (replace(FULL, free_bytes=81 * GIB), f"Memory: free_bytes is {81 * GIB}, not within 0..{80 * GIB}"),
        (replace(FULL, total_bytes=0, free_bytes=0), "Memory: total_bytes is 0"),
        (replace(FULL, total_bytes=2**64 - 1), f"Memory: total_bytes is {2**64 - 1}"),
    ],
    ids=["more free than there is", "no memory", "not available"],
)
def test_impossible_memory_is_a_gap(stand_in: StandIn, client: Client, garbage: Gpu, text: str) -> None:
    """Figures that cannot be are said to be so; the device stays, and so does the other one."""
    stand_in.show(State(gpus=(garbage, EMPTY)))

    assert ((unread(FULL, 0), seen(EMPTY, 1)), (gap("failed", "GPU-full", text),)) == client.read()
