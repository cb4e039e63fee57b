"""One agent's file as values: what the agent itself writes, and anything else that may stand in its place."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.agent import document
from kvdiag.model import Allocator, Device, Process
from kvdiag.sources.agents import agent_publication
from kvdiag.sources.agents.agent_publication import devices_inside, parse
from tests.builders.answers import containing
from tests.unit.agent.subject import environment, installed, run
from tests.unit.sources.agents.publications import MIB, PUBLICATION, READ, SELF, UUID, changed


def test_what_the_agent_writes_is_what_is_read(tmp_path: Path) -> None:
    """A file that the agent itself has written is understood, its split included."""
    program = (
        "import os, torch, kvdiag_agent.thread as thread; from torch.world import *; torch.cuda.init()\n"
        "WORLD.segment((512 * MIB, ACTIVE), (60 * MIB, FREE)); WORLD.expandable = True\n"
        "thread.Agent(os.environ['KVDIAG_AGENT_DIR']).publish()"
    )
    run(program, environment(installed(tmp_path / "agent"), tmp_path / "published"))
    (file,) = (tmp_path / "published").iterdir()

    (actual,) = parse(file.read_text()).allocators

    assert document.FORMAT == agent_publication.FORMAT
    assert (UUID, 512 * MIB, 572 * MIB, True) == (
        actual.device_uuid,
        actual.allocated_bytes,
        actual.reserved_bytes,
        actual.expandable_segments,
    )
    assert actual.split is not None
    assert 60 * MIB == actual.split.stranded_bytes


@pytest.mark.parametrize(
    ("uuid", "expected"), [(f"GPU-{UUID}", True), (f"MIG-{UUID}", True), (UUID.upper(), True), ("GPU-other", False)]
)
def test_allocator_is_paired_with_its_gpu(uuid: str, expected: bool) -> None:
    """CUDA's identifier is NVML's without the kind before it."""
    assert expected == READ.is_on(Device(uuid=uuid, index=3, name="NVIDIA Test", memory=None))


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        pytest.param([[7, 5], [SELF["pid"], 9]], 9, id="its own id"),
        pytest.param([[3_000_000, 9]], 9, id="a lone process, host id"),
        pytest.param([[3_000_000, 9], [3_000_001, 5]], None, id="several unknown ids"),
        pytest.param([[SELF["pid"], None]], None, id="not told"),
        pytest.param([], None, id="none listed"),
    ],
)
def test_own_bytes_are_found_among_the_drivers_processes(processes: list[Any], expected: int | None) -> None:
    """The process is the one of its own id, or the only one; otherwise its bytes are not known."""
    (actual,) = parse(json.dumps(changed("devices.0.driver.processes", processes))).allocators
    assert expected == actual.process_bytes


def test_torch_may_count_more_than_its_process_holds() -> None:
    """Under sleep mode or a pluggable allocator torch's figure is not the driver's; memory outside torch is None."""
    (asleep,) = parse(json.dumps(changed("devices.0.driver.processes", [[SELF["pid"], 900 * MIB]]))).allocators
    assert (True, None) == (asleep.outside_driver, asleep.outside_torch_bytes)
    assert (False, 500 * MIB) == (READ.outside_driver, READ.outside_torch_bytes)


def test_gpu_that_is_told_twice_counts_once() -> None:
    """Else everything that it holds would be in the ledger twice."""
    again = {**PUBLICATION["devices"][0], "uuid": UUID.upper()}
    actual = parse(json.dumps({**PUBLICATION, "devices": [*PUBLICATION["devices"], again]}))
    assert 1 == len(actual.allocators)
    assert (containing(f"GPU {UUID.upper()}"),) == actual.problems


def test_gpus_are_known_from_inside() -> None:
    """Without NVML of its own, kvdiag takes GPUs and their processes from what the agents report."""
    # Two ranks on GPUs of their own, and a third process without NVML figures
    second = replace(READ, device_uuid="0", pid=8, age_seconds=0.5)
    mute = replace(READ, device_uuid="5", memory=None)

    actual = devices_inside((READ, second, mute))

    assert actual is not None
    assert [("GPU-0", 0), (f"GPU-{UUID}", 1)] == [(device.uuid, device.index) for device in actual]
    assert {READ.memory} == {device.memory for device in actual}
    assert (Process(pid=8, used_bytes=1500 * MIB, name="VLLM::Worker_TP1"),) == actual[0].processes
    assert (None, None) == (devices_inside(()), devices_inside((mute,)))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def paths(value: object, before: str = "") -> list[str]:
    """Every place in the publication."""
    if isinstance(value, dict):
        return [
            path for name, inner in value.items() for path in (f"{before}{name}", *paths(inner, f"{before}{name}."))
        ]
    if isinstance(value, list):
        return [
            path for name, inner in enumerate(value) for path in (f"{before}{name}", *paths(inner, f"{before}{name}."))
        ]
    return []


@settings(deadline=None, max_examples=400)
@given(path=st.sampled_from(paths(PUBLICATION)), value=JUNK, cut=st.none() | st.integers(0, 1500))
def test_no_file_does_harm(path: str, value: object, cut: int | None) -> None:
    """With anything in any place, or cut anywhere, a file is a publication or a ValueError."""
    try:
        actual = parse(json.dumps(changed(path, value))[:cut])
    except ValueError:
        return
    assert all(isinstance(each, Allocator) for each in actual.allocators)
    assert all(problem.isprintable() for problem in actual.problems)
