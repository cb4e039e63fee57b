"""Which of the two leaks on a device it is called where NVML alone shows growth: the same in every mode. Pure."""

from __future__ import annotations

TORCH, NON_TORCH = "leak.device_torch", "leak.device_non_torch"

TORCH_ENGINES = ("vllm", "sglang")
"""Engines whose device memory torch allocates, but for context, graphs and NCCL: of six reported leaks of theirs that
NVML alone saw, four were torch's."""

UNDECIDED = "torch's allocator statistics would tell its allocations from others of the process"


def likely_and_other(engine_name: str | None) -> tuple[str, str]:
    """The verdict that growth of an engine's process is, as far as NVML can tell, and the one that it may be."""
    return (TORCH, NON_TORCH) if engine_name in TORCH_ENGINES else (NON_TORCH, TORCH)
