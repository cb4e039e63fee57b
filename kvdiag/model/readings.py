"""What the sources read: devices and their processes, engines, host processes, and gaps where they could not."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from kvdiag.model.validation import MAX_BYTES, Checked

GapKind = Literal["absent", "failed", "refused"]


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that could not be read.

    `absent`: it does not exist here (no GPU, no such metric). `failed`: it should be there and did not answer.
    `refused`: it answered, and its answer was not used (too large, malformed, no permission).
    """

    source: str
    kind: GapKind
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Checked):
    """One device's memory as NVML reports it.

    `used_bytes` is `total - free`, one denominator for everything: NVIDIA's documents disagree on whether NVML's own
    `used` holds the driver's reservation (release notes of R525 against the struct comment of R590), `free` is the same
    in every version.
    """

    total_bytes: int
    free_bytes: int
    driver_reserved_bytes: int | None = None

    def _problem(self) -> str | None:
        if not 0 < self.total_bytes < MAX_BYTES:
            return f"total_bytes is {self.total_bytes}"
        return self._above("free_bytes", self.total_bytes) or self._above("driver_reserved_bytes", self.total_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes in use (total minus free), including the driver's reservation."""
        return self.total_bytes - self.free_bytes

    @property
    def occupied_ratio(self) -> float:
        """Share of the device that is taken, 0..1."""
        return self.used_bytes / self.total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Process(Checked):
    """A process that NVML lists on a device. `used_bytes` is `None` if the driver does not report it."""

    pid: int
    used_bytes: int | None
    name: str | None = None

    @property
    def who(self) -> str:
        """The process in words: its name and number."""
        return f"{self.name or 'process'} {self.pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device(Checked):
    """A GPU or a MIG slice. `memory` and `processes` are `None` if they were not or could not be read.

    `index` is the GPU's as `nvidia-smi -L` counts, so that slices of one GPU share it; `uuid` alone is unique.
    """

    uuid: str
    index: int
    name: str
    memory: Memory | None
    processes: tuple[Process, ...] | None = None
    mig_parent_uuid: str | None = None

    @property
    def who(self) -> str:
        """The device in words: its index, and the UUID of a MIG slice."""
        return f"GPU {self.index}" if self.mig_parent_uuid is None else f"GPU {self.index} {self.uuid}"

    def _problem(self) -> str | None:
        return None if self.uuid else "no uuid"


def cuda_uuid(nvml_uuid: str) -> str:
    """The identifier that CUDA has for a device: NVML writes "GPU-" or "MIG-" before it."""
    return nvml_uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def without_mig_parents(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """The devices whose bytes may be added up: a GPU cut into MIG slices repeats what its slices hold."""
    parents = {device.mig_parent_uuid for device in devices}
    if parents <= {None}:
        return devices
    return tuple(device for device in devices if device.uuid not in parents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine(Checked):
    """One engine (data-parallel rank), from the metrics endpoint; `engine` is its label there, "0" if it has none."""

    engine: str
    kv_usage_ratio: float | None = None
    requests_running: int | None = None
    requests_waiting: int | None = None
    requests_waiting_for_capacity: int | None = None
    preemptions_total: int | None = None
    prompt_tokens_total: int | None = None
    generation_tokens_total: int | None = None
    requests_finished_total: int | None = None
    prefix_queries_total: int | None = None
    prefix_hits_total: int | None = None
    asleep: bool | None = None

    @property
    def idle(self) -> bool | None:
        """Whether no request runs or waits; `None` if the engine does not report it."""
        if self.requests_running is None or self.requests_waiting is None:
            return None
        return self.requests_running == 0 and self.requests_waiting == 0


ENGINE_COUNTS = tuple(field.name for field in fields(Engine) if field.type == "int | None")
"""The fields of an `Engine` that are whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProcess(Checked):
    """Host memory of one of the server's processes; `anonymous_bytes` leaves file-backed pages out."""

    pid: int
    name: str
    resident_bytes: int
    anonymous_bytes: int | None = None

    def _problem(self) -> str | None:
        return self._above("anonymous_bytes", self.resident_bytes)

    @property
    def who(self) -> str:
        """The process in words: its name and number."""
        return f"{self.name or 'process'} {self.pid}"
