"""The ledger adds up to what each device uses, for any processes and any reported figures."""

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.model import Device, Facts, KvPool, Memory, Process, without_mig_parents
from tests.builders.ledger_lines import lines
from tests.builders.runs import judged
from tests.builders.values import GIB
from tests.builders.worlds import WORLDS, World, facts

processes = st.lists(
    st.builds(
        Process,
        pid=st.integers(98, 106),
        used_bytes=st.none() | st.integers(0, 90 * GIB),
        name=st.none() | st.just("python3"),
    ),
    max_size=4,
).map(tuple)


@st.composite
def devices_of_a_host(draw: st.DrawFn) -> tuple[Device, ...]:
    """Any devices at all: full, empty, unreadable, with or without processes, some of them MIG slices."""
    found = []
    for index in range(draw(st.integers(0, 4))):
        total = draw(st.integers(1, 192 * GIB))
        memory = Memory(
            total_bytes=total,
            free_bytes=draw(st.integers(0, total)),
            driver_reserved_bytes=draw(st.none() | st.integers(0, min(total, GIB))),
        )
        parent = draw(st.sampled_from([None, None, "GPU-0"])) if index else None
        found.append(
            Device(
                uuid=f"GPU-{index}",
                index=0 if parent else index,
                name="any",
                memory=draw(st.sampled_from([memory, memory, None])),
                processes=draw(st.none() | processes),
                mig_parent_uuid=parent,
            )
        )
    return tuple(found)


@st.composite
def servers(draw: st.DrawFn) -> Facts:
    """Any server: with or without pools, sizes, weights and known processes."""
    pools = tuple(
        KvPool(
            engine=str(number),
            block_tokens=16,
            total_blocks=100,
            usable_blocks=99,
            usage_blocks=99,
            pool_bytes=draw(st.none() | st.integers(0, 100 * GIB)),
        )
        for number in range(draw(st.integers(0, 3)))
    )
    return Facts(
        url="http://127.0.0.1:8000",
        pools=pools,
        weights_bytes=draw(st.none() | st.integers(0, 100 * GIB)),
        server_pids=draw(st.none() | st.lists(st.integers(98, 106), max_size=4).map(tuple)),
    )


@given(devices_of_a_host(), servers())
def test_the_lines_of_every_device_add_up_to_its_used_bytes(seen: tuple[Device, ...], of: Facts) -> None:
    """For any processes, each readable device's lines add up exactly, with one explicit residual."""
    found = lines(*seen, of=of)
    readable = {one.uuid: one.memory.used_bytes for one in without_mig_parents(seen) if one.memory is not None}
    added = {
        uuid: sum(line.bytes for line in own)
        for uuid, own in groupby(found, key=lambda line: line.uuid)
        if uuid is not None
    }
    residuals = [line.uuid for line in found if line.component == "unaccounted"]

    assert readable == added
    assert list(readable) == residuals
    assert {line.component for line in found if line.bytes < 0} <= {"unaccounted", "server_other"}


@given(devices_of_a_host(), servers())
def test_no_process_is_listed_twice(seen: tuple[Device, ...], of: Facts) -> None:
    """A process is the server's or another, never both: measured lines hold no more than was measured."""
    found = lines(*seen, of=of)
    for one in without_mig_parents(seen):
        if one.memory is None:
            continue
        own = [line for line in found if line.uuid == one.uuid and line.component != "unaccounted"]
        measured = sum(line.bytes for line in own if line.component != "driver_reserved")
        listed = sum(each.used_bytes or 0 for each in one.processes or ())
        parts = {"kv_pool", "weights"} & {line.component for line in own}
        server = "server_other" in {line.component for line in own}
        assert measured == listed or (parts and not server)


@pytest.mark.parametrize("name", WORLDS)
def test_the_ledger_of_a_whole_run_adds_up(name: str) -> None:
    """The newest sample of every world's devices is accounted for to the byte."""
    world = WORLDS[name]
    diagnosis = judged(world)
    devices = {line.uuid for line in diagnosis.ledger if line.uuid is not None}
    told = world.nvml is None and world.memory_reported
    assert (set() if not told else {f"GPU-{index}" for index in range(world.gpus)}) == devices
    if told and world.processes_reported and world.server_seen:
        (unaccounted, *_) = [line.bytes for line in diagnosis.ledger if line.component == "unaccounted"]
        hidden = sum(other.used_bytes is None for others in world.foreign.values() for other in others)
        assert hidden or world.zombie_bytes == unaccounted


def test_a_newer_reading_without_process_lists_does_not_blur_the_ledger() -> None:
    """Process lists come with every fifth sample: the ledger of a run still identifies the server."""
    found = judged(World()).ledger
    assert "server_other" in {line.component for line in found}
    assert facts(World()).server_pids == (100,)
