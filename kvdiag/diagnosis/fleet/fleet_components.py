"""The memory components that are compared across a fleet, and the verdict that growth of each one means.

The growing component nearly determines the verdict, so each byte counts in one component only: the finest one that a
replica reports. A total is compared only where no replica reports its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvdiag.diagnosis.growth.components import MemoryComponent, Unit

__all__ = ["ALWAYS", "BY_NAME", "COMPONENTS", "MISSING", "Component", "Unit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One part of a replica's memory, all its processes and GPUs together.

    `lookalike` is another explanation of its growth and how to rule it out; `None` where there is no other.
    `around` is true where that explanation would affect an older version as well. `by_nvml` is true where NVML cannot
    separate torch's memory, so that the engine decides the verdict; `verdict` is that of engines without torch.
    """

    name: MemoryComponent
    title: str
    verdict: str
    source: str
    lookalike: str | None = None
    around: bool = False
    by_nvml: bool = False

    @property
    def unit(self) -> Unit:
        """Bytes, but for KV blocks."""
        return self.name.unit


COMPONENTS: tuple[Component, ...] = (
    Component(name=MemoryComponent.TORCH_LIVE, title="torch's live bytes", verdict="leak.device_torch", source="torch"),
    Component(
        name=MemoryComponent.TORCH_UNUSED,
        title="bytes that torch reserves and does not use",
        verdict="fragmentation.allocator",
        source="torch",
        lookalike="torch's cache may still grow to its largest shape; `torch.cuda.empty_cache()` would release it",
    ),
    Component(
        name=MemoryComponent.OUTSIDE_TORCH,
        title="bytes of the server's processes outside torch",
        verdict="leak.device_non_torch",
        source="nvml",
    ),
    Component(
        name=MemoryComponent.DEVICE_OUTSIDE_TORCH,
        title="device bytes outside torch",
        verdict="leak.device_non_torch",
        source="nvml",
        lookalike="it may belong to other processes on each GPU; check NVML's process list",
        around=True,
    ),
    Component(
        name=MemoryComponent.SERVER,
        title="device bytes of the server's processes",
        verdict="leak.device_non_torch",
        source="nvml",
        by_nvml=True,
    ),
    Component(
        name=MemoryComponent.DEVICE,
        title="device bytes",
        verdict="leak.device_non_torch",
        source="nvml",
        lookalike="it may belong to other processes on each GPU; check NVML's process list",
        around=True,
        by_nvml=True,
    ),
    Component(
        name=MemoryComponent.UNLISTED,
        title="device bytes of no listed process",
        verdict="baseline.foreign_memory",
        source="nvml",
        lookalike="processes of other containers are not listed; check NVML on the host",
    ),
    Component(
        name=MemoryComponent.KV_HELD_IDLE,
        title="KV blocks in use while idle",
        verdict="leak.kv_blocks",
        source="engine",
    ),
    Component(name=MemoryComponent.HOST_ANONYMOUS, title="anonymous host bytes", verdict="leak.host", source="host"),
    Component(
        name=MemoryComponent.HOST_RESIDENT,
        title="resident host bytes",
        verdict="leak.host",
        source="host",
        lookalike="resident bytes include mapped files; check anonymous bytes",
    ),
)

BY_NAME: Mapping[str, Component] = {one.name: one for one in COMPONENTS}

ALWAYS = ("leak.device_torch", "leak.device_non_torch", "leak.kv_blocks", "leak.host")
"""Verdicts that every version gets; `unknown` where no replica reports the deciding component."""

MISSING: Mapping[str, str] = {
    "leak.device_torch": "no replica reports torch's memory; install the kvdiag agent in the server",
    "leak.device_non_torch": "no replica reports its GPU memory; collect it with DCGM or kvdiag",
    "leak.kv_blocks": "no replica was idle often enough while reporting its KV pool; record some idle time",
    "leak.host": "no replica reports its processes' host memory; collect it with cAdvisor or kvdiag",
}
"""What is missing, and how to get it, where no replica reports a component of the verdict."""
