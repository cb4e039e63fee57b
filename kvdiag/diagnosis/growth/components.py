"""The parts of a server's memory whose growth is judged: one name for each, in series, soaks and fleets alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Literal

from kvdiag.formatting import format_bytes, format_count
from kvdiag.model import Allocator

Unit = Literal["bytes", "blocks"]


class MemoryComponent(StrEnum):
    """A part of a server's memory; `torch_live + torch_unused = torch_reserved`, `+ outside_torch = server`."""

    TORCH_LIVE = "torch_live"
    TORCH_RESERVED = "torch_reserved"
    TORCH_UNUSED = "torch_unused"
    OUTSIDE_TORCH = "outside_torch"
    DEVICE_OUTSIDE_TORCH = "device_outside_torch"
    SERVER = "server"
    DEVICE = "device"
    OTHERS = "others"
    UNLISTED = "unlisted"
    KV_HELD_IDLE = "kv_held_idle"
    HOST_ANONYMOUS = "host_anonymous"
    HOST_TOGETHER = "host_together"
    HOST_RESIDENT = "host_resident"

    @property
    def label(self) -> str:
        """The component as the subject of a sentence."""
        return _TITLES[self]

    @property
    def source(self) -> str:
        """The data source that reports it."""
        return _SOURCES.get(self, "nvml")

    @property
    def unit(self) -> Unit:
        """Bytes, but for KV blocks."""
        return "blocks" if self is MemoryComponent.KV_HELD_IDLE else "bytes"

    def amount(self, value: float) -> str:
        """A figure of the component in its unit, as text: `1.50 GiB`, `0.12 blocks`, `1,234 blocks`."""
        if self.unit == "bytes":
            return format_bytes(value)
        return f"{value:.2g} blocks" if value < 10 else f"{format_count(value)} blocks"  # noqa: PLR2004 - no decimals

    @property
    def collected(self) -> bool:
        """Whether a garbage collector, or the C library, may return it in one go after hours of growth."""
        return self.source == "host"


def torch_components(process: Allocator) -> Iterator[tuple[MemoryComponent, int]]:
    """The components of one process on one device that its agent reports, in bytes."""
    yield MemoryComponent.TORCH_LIVE, process.allocated_bytes
    yield MemoryComponent.TORCH_RESERVED, process.reserved_bytes
    yield MemoryComponent.TORCH_UNUSED, process.reserved_bytes - process.allocated_bytes
    if process.outside_torch_bytes is not None:
        yield MemoryComponent.OUTSIDE_TORCH, process.outside_torch_bytes


_TITLES: Mapping[MemoryComponent, str] = {
    MemoryComponent.KV_HELD_IDLE: "KV blocks in use while idle",
    MemoryComponent.TORCH_LIVE: "torch's allocated memory",
    MemoryComponent.TORCH_RESERVED: "torch's reserved memory",
    MemoryComponent.TORCH_UNUSED: "torch's reserved but unallocated memory",
    MemoryComponent.OUTSIDE_TORCH: "memory outside torch",
    MemoryComponent.DEVICE_OUTSIDE_TORCH: "device memory outside torch",
    MemoryComponent.SERVER: "the server's device memory",
    MemoryComponent.DEVICE: "device memory",
    MemoryComponent.OTHERS: "device memory of other processes",
    MemoryComponent.UNLISTED: "device memory of no listed process",
    MemoryComponent.HOST_ANONYMOUS: "anonymous host memory",
    MemoryComponent.HOST_TOGETHER: "anonymous host memory",
    MemoryComponent.HOST_RESIDENT: "resident host memory",
}

_SOURCES: Mapping[MemoryComponent, str] = {
    MemoryComponent.KV_HELD_IDLE: "engine",
    MemoryComponent.TORCH_LIVE: "torch",
    MemoryComponent.TORCH_RESERVED: "torch",
    MemoryComponent.TORCH_UNUSED: "torch",
    MemoryComponent.OUTSIDE_TORCH: "torch",
    MemoryComponent.HOST_ANONYMOUS: "host",
    MemoryComponent.HOST_TOGETHER: "host",
    MemoryComponent.HOST_RESIDENT: "host",
}
