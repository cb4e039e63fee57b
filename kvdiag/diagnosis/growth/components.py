"""The parts of a server's memory whose growth is judged: one name for each, in series, soaks and fleets alike.

A part is judged by itself and not in a sum, because parts behave differently: torch's live memory has no reason to
grow, its cache has, and what NVML lists for a process holds both. Each has the source that reports it, which decides
whose absence makes it unknown.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Literal, Self

from kvdiag.formatting import format_bytes, format_number
from kvdiag.model import Allocator

Unit = Literal["bytes", "blocks"]


class MemoryComponent(StrEnum):
    """A part of a server's memory; `torch_live + torch_unused = torch_reserved`, `+ outside_torch = server`."""

    TORCH_LIVE = "torch_live", "torch's allocated memory", "torch"
    TORCH_RESERVED = "torch_reserved", "torch's reserved memory", "torch"
    TORCH_UNUSED = "torch_unused", "torch's reserved but unallocated memory", "torch"
    OUTSIDE_TORCH = "outside_torch", "memory outside torch", "torch"
    DEVICE_OUTSIDE_TORCH = "device_outside_torch", "device memory outside torch", "nvml"
    SERVER = "server", "the server's device memory", "nvml"
    DEVICE = "device", "device memory", "nvml"
    OTHERS = "others", "device memory of other processes", "nvml"
    UNLISTED = "unlisted", "device memory of no listed process", "nvml"
    KV_HELD_IDLE = "kv_held_idle", "KV blocks in use while idle", "engine"
    HOST_ANONYMOUS = "host_anonymous", "anonymous host memory", "host"
    HOST_TOGETHER = "host_together", "anonymous host memory", "host"
    HOST_RESIDENT = "host_resident", "resident host memory", "host"

    label: str
    """The component as the subject of a sentence."""

    source: str
    """The data source that reports it."""

    def __new__(cls, value: str, label: str = "", source: str = "") -> Self:
        """A component is its name; label and source are attributes."""
        member = str.__new__(cls, value)
        member._value_, member.label, member.source = value, label, source
        return member

    @property
    def unit(self) -> Unit:
        """Bytes, but for KV blocks."""
        return "blocks" if self is MemoryComponent.KV_HELD_IDLE else "bytes"

    def amount(self, value: float) -> str:
        """A figure of the component in its unit, as text: `1.50 GiB`, `0.12 blocks`, `1,234 blocks`."""
        return format_bytes(value) if self.unit == "bytes" else f"{format_number(value)} blocks"

    @property
    def collected(self) -> bool:
        """Whether a garbage collector, or the C library, may return it in one go after hours of growth."""
        return self.source == "host"


def torch_components(process: Allocator) -> Iterator[tuple[MemoryComponent, int]]:
    """The components of one process on one device that its agent reports, in bytes."""
    yield MemoryComponent.TORCH_LIVE, process.allocated_bytes
    yield MemoryComponent.TORCH_RESERVED, process.reserved_bytes
    yield MemoryComponent.TORCH_UNUSED, process.unallocated_bytes
    if process.outside_torch_bytes is not None:
        yield MemoryComponent.OUTSIDE_TORCH, process.outside_torch_bytes
