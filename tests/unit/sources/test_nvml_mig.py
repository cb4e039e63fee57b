"""GPUs that are cut by MIG: which slices are seen, with and without their whole GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.stand_ins.nvml.client import Client
from tests.stand_ins.nvml.stand_in import Failure, StandIn, State
from tests.unit.sources.nvml_devices import CUT, FULL, GIB, MEMORY, PROCESSES, gap, seen, seen_slices, unread


@pytest.mark.nvml_stand_in
def test_hidden_mig_parent_shows_its_slices(stand_in: StandIn, client: Client) -> None:
    """Where a container may not read a GPU cut by MIG, its two slices are devices, whatever numbers they have."""
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

    assert (
        (seen(FULL, 0, processes=()), unread(CUT, 1), *seen_slices(CUT, 1, processes=True)),
        (gap("absent", "GPU-cut", "Insufficient Permissions", "2 MIG slices"),),
    ) == client.read(processes=True)


@pytest.mark.nvml_stand_in
def test_readable_mig_parent_comes_with_its_slices(stand_in: StandIn, client: Client) -> None:
    """Where a GPU cut by MIG may be read, it stands before its slices, and slices that are made anew are seen."""
    stand_in.show(State(gpus=(CUT,)))
    before = client.read()

    recut = replace(CUT, slices=(replace(CUT.slices[0], uuid="MIG-new", free_bytes=10 * GIB),))
    stand_in.show(State(gpus=(recut,)))
    actual = (before, client.read())

    assert (((seen(CUT, 0), *seen_slices(CUT, 0)), ()), ((seen(recut, 0), *seen_slices(recut, 0)), ())) == actual


@pytest.mark.nvml_stand_in
def test_slices_fail_alone(stand_in: StandIn, client: Client) -> None:
    """A slice that cannot be read, or told, takes neither its GPU nor the other slice with it."""
    stand_in.show(
        State(
            gpus=(CUT,),
            failures=(Failure(MEMORY, 999, uuid="MIG-busy"), Failure("nvmlDeviceGetUUID", 999, uuid="MIG-idle")),
        )
    )

    actual = client.read()

    busy, _ = seen_slices(CUT, 0)
    gaps = (gap("failed", "MIG slice 3", "Unknown Error"), gap("failed", "MIG-busy", "Unknown Error"))
    assert ((seen(CUT, 0), replace(busy, memory=None)), gaps) == actual


@pytest.mark.nvml_stand_in
def test_hidden_gpu_without_slices(stand_in: StandIn, client: Client) -> None:
    """A GPU that may not be read and shows no slice has failed: nothing is left to see its memory by."""
    stand_in.show(State(gpus=(FULL,), failures=(Failure(MEMORY, 4),)))

    assert ((unread(FULL, 0),), (gap("failed", "GPU-full", "Insufficient Permissions"),)) == client.read()
