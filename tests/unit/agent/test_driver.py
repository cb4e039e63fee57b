"""NVML by ctypes, through a compiled stand-in of NVIDIA's library."""

from typing import Any

import pytest

from tests.builders.answers import containing
from tests.fixtures.require import require
from tests.stand_ins.nvml.stand_in import (
    NVML_UNKNOWN_BYTES,
    Failure,
    Gpu,
    Running,
    Slice,
    StandIn,
    State,
    build,
    compiler,
)
from tests.unit.agent.subject import run

GIB = 2**30
UUID = "01234567-89ab-cdef-0123-456789abcdef"
GPU = Gpu(
    uuid=f"GPU-{UUID}",
    total_bytes=80 * GIB,
    free_bytes=4 * GIB,
    reserved_bytes=GIB // 2,
    processes=(Running(pid=7, used_bytes=70 * GIB), Running(pid=8, used_bytes=NVML_UNKNOWN_BYTES)),
)
READ = """
import json, sys
from kvdiag.agent.driver import Driver, DriverError
driver = Driver()
def tell(read):
    try:
        return read({uuid!r})
    except DriverError as error:
        return str(error)
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    """The library in the state that the test sets."""
    require(compiler() is not None, "a C compiler (cc)")
    folder = tmp_path_factory.mktemp("nvml")
    return StandIn(build(folder), folder / "state")


def told(stand_in: StandIn, state: State, uuid: str = UUID) -> Any:
    """Memory and processes of a device, or why not."""
    stand_in.show(state)
    program = READ.format(uuid=uuid) + "print(json.dumps([tell(driver.memory), tell(driver.processes)]))"
    return run(program, stand_in.environment())


def test_memory_and_processes_are_those_of_the_device(stand_in: StandIn) -> None:
    """A device is found by CUDA's identifier; its memory includes the driver's reservation and each process's usage."""
    actual = told(stand_in, State(gpus=(Gpu(uuid="GPU-other", total_bytes=GIB, free_bytes=0), GPU)))
    memory = {"total_bytes": 80 * GIB, "free_bytes": 4 * GIB, "driver_reserved_bytes": GIB // 2}
    assert [memory, [[7, 70 * GIB], [8, None]]] == actual


def test_slice_is_found_too(stand_in: StandIn) -> None:
    """The identifier of a MIG slice means the slice and not its GPU."""
    part = Slice(slot=0, uuid="MIG-slice", total_bytes=10 * GIB, free_bytes=GIB)
    memory, _ = told(
        stand_in, State(gpus=(Gpu(uuid="GPU-cut", total_bytes=80 * GIB, free_bytes=0, slices=(part,)),)), "slice"
    )
    assert (10 * GIB, GIB) == (memory["total_bytes"], memory["free_bytes"])


def test_older_drivers_tell_memory_without_their_reservation(stand_in: StandIn) -> None:
    """Where the second version of the struct is not known the first one serves."""
    memory, _ = told(stand_in, State(gpus=(GPU,), failures=(Failure("nvmlDeviceGetMemoryInfo_v2", 25),)))
    assert {"total_bytes": 80 * GIB, "free_bytes": 4 * GIB} == memory


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (State(failures=(Failure("nvmlInit*", 9),)), [containing("start: ", "NVML error 9")] * 2),
        (State(), ["device: refused (NVML error 6)"] * 2),
        (
            State(gpus=(GPU,), failures=(Failure("nvmlDeviceGetMemory*", 3), Failure("nvmlDeviceGetCompute*", 4))),
            [containing("memory: ", "NVML error 3"), containing("process list: ", "NVML error 4")],
        ),
    ],
    ids=["no driver", "no such device", "nothing told"],
)
def test_refusals_are_short_sentences(stand_in: StandIn, state: State, expected: list[str]) -> None:
    """Every NVML refusal becomes one error that names the call and the reason."""
    assert expected == told(stand_in, state)
