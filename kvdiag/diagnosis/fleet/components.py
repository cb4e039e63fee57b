"""Which parts of a replica's memory are compared over a fleet, and which verdict each of them means when it grows.

The growing component names the verdict nearly alone, so that each byte is looked at in one component only: the finest
that a replica tells. A total is watched where nobody tells its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvdiag.diagnosis.growth.components import MemoryComponent, Unit

__all__ = ["ALWAYS", "BY_NAME", "COMPONENTS", "WANTED", "Component", "Unit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One part of a replica's memory, all its processes and GPUs together.

    `lookalike` is what else a growth of it may be, and what would tell; `None` where it can be nothing else.
    `around` says that this would be around an older version as well. `by_nvml`: whether growth is torch's cannot be
    told, so that the engine names the verdict; `verdict` is that of engines without torch.
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
        title="bytes that torch reserves and nothing lives in",
        verdict="fragmentation.allocator",
        source="torch",
        lookalike="cache that still reaches its largest shape looks the same; torch's `empty_cache()` gives it back",
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
        lookalike="a neighbour on every device would look the same; NVML's list of processes would tell",
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
        lookalike="a neighbour on every device would look the same; NVML's list of processes would tell",
        around=True,
        by_nvml=True,
    ),
    Component(
        name=MemoryComponent.UNLISTED,
        title="device bytes that no listed process holds",
        verdict="baseline.foreign_memory",
        source="nvml",
        lookalike="processes of other containers are not listed; NVML on the host would tell",
    ),
    Component(
        name=MemoryComponent.KV_HELD_IDLE, title="KV blocks held at idle", verdict="leak.kv_blocks", source="engine"
    ),
    Component(name=MemoryComponent.HOST_ANONYMOUS, title="anonymous host bytes", verdict="leak.host", source="host"),
    Component(
        name=MemoryComponent.HOST_RESIDENT,
        title="resident host bytes",
        verdict="leak.host",
        source="host",
        lookalike="mapped files count as resident, too; anonymous bytes would tell",
    ),
)

BY_NAME: Mapping[str, Component] = {one.name: one for one in COMPONENTS}

ALWAYS = ("leak.device_torch", "leak.device_non_torch", "leak.kv_blocks", "leak.host")
"""Verdicts that a fleet answers for every version, with `unknown` where no replica tells what decides."""

WANTED: Mapping[str, str] = {
    "leak.device_torch": "no replica tells what torch holds; the agent in the server would",
    "leak.device_non_torch": "no replica tells what its GPUs hold; DCGM's or kvdiag's device memory would",
    "leak.kv_blocks": "no replica was seen idle often enough with its pool told",
    "leak.host": "no replica tells its processes' host memory; cAdvisor's or kvdiag's would",
}
"""What is missing where no component of a verdict is told."""
