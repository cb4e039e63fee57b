"""The part of torch.cuda that reports memory. Any call that would make a context is recorded as a touch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .. import _C, driver  # noqa: TID252 - it is a package of another name here than where it runs
from ..tensors import CUDAGraph, graph  # noqa: TID252 - as above
from ..world import WORLD  # noqa: TID252 - as above

__all__ = ["CUDAGraph", "graph"]


def is_initialized() -> bool:
    """Whether the server has initialised CUDA."""
    return WORLD.initialised


def init() -> None:
    """The server initialises CUDA."""
    WORLD.initialised = True


def device_count() -> int:
    """How many GPUs the process sees."""
    return WORLD.devices


def memory_stats_as_nested_dict(device: int | None = None) -> dict[str, Any]:
    """Empty before CUDA is initialised, as torch's."""
    return WORLD.statistics(device or 0) if WORLD.initialised else {}


def memory_snapshot(mempool_id: tuple[int, int] | None = None, include_traces: bool = True) -> Any:  # noqa: FBT002 - torch's
    """The segments."""
    return _C._cuda_memorySnapshot((*(mempool_id or (0, 0)), include_traces))["segments"]  # noqa: SLF001 - ours


def get_allocator_backend() -> str:
    """The allocator in use."""
    return WORLD.backend


def is_available() -> bool:
    """Whether there is a GPU to use."""
    return WORLD.devices > 0


def get_device_name(device: int) -> str:
    """What a device is called."""
    return "NVIDIA Stand-in"


def get_device_properties(device: int) -> SimpleNamespace:
    """What a device is."""
    WORLD.need()
    return SimpleNamespace(name="NVIDIA Test", uuid=WORLD.uuids[device])


def mem_get_info(device: int | None = None) -> tuple[int, int]:
    """Makes a context where there is none, and may wait for the GPU: a touch in any case."""
    WORLD.touches.append("mem_get_info")
    return driver.free_bytes(), WORLD.total_bytes


def synchronize(device: int | None = None) -> None:
    """Wait for the GPU: a touch."""
    WORLD.touches.append("synchronize")


def _record_memory_history(
    enabled: str | None = "all", context: str | None = "all", stacks: str = "all", max_entries: int = 2**31
) -> None:
    """Record the stack of each block that is allocated from now on; with `None`, no longer."""
    WORLD.history = enabled is not None


memory = SimpleNamespace(_record_memory_history=_record_memory_history)
