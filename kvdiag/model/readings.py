"""What the sources read: devices and processes, engines, torch's allocators, and gaps where they could not.

Torch's statistics from inside a process are the only source that can break down reserved bytes.
"""

from dataclasses import dataclass, fields
from typing import Literal

from kvdiag.model.validation import MAX_BYTES, Checked

GapKind = Literal["absent", "failed", "refused"]

NATIVE = "native"
"""torch's own caching allocator; cudaMallocAsync has neither segments nor blocks, so that holes are not observable."""

INSIDE = "GPU"
"""Name of a device that only agents report; the real name comes from NVML."""


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
    if len(devices) == 1:
        return devices
    parents = [device.mig_parent_uuid for device in devices]
    if parents.count(None) == len(devices):
        return devices
    return tuple(device for device in devices if device.uuid not in parents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine(Checked):
    """One engine (data-parallel rank), from the metrics endpoint; `engine` is its label there, "0" if it has none.

    `kv_usage_ratio` is the gauge as read: `KvPool.used_blocks` takes off a null block. `_total` is since its start.
    `running_output_tokens` have been generated so far by the requests that run.
    `media_queries_total` are images and other media looked up in the engine's cache of them.
    `open_sessions` are clients' sessions that keep `session_held_tokens` in the pool between requests.
    `state_slots_used` of recurrent layers' states are a pool of their own.
    """

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
    media_queries_total: int | None = None
    running_output_tokens: int | None = None
    open_sessions: int | None = None
    session_held_tokens: int | None = None
    state_slots_used: int | None = None
    asleep: bool | None = None

    @property
    def idle(self) -> bool | None:
        """Whether no request runs or waits; `None` if the engine does not report it."""
        if self.requests_running or self.requests_waiting:
            return False
        return None if self.requests_running is None or self.requests_waiting is None else True


ENGINE_COUNTS = tuple(field.name for field in fields(Engine) if field.type == int | None)
"""The fields of an `Engine` that are whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProcess(Checked):
    """Host memory of one of the server's processes.

    `anonymous_bytes` leaves file-backed pages out and counts those in swap, which are not resident: a leak that is
    never read again is moved there within minutes (ollama#18106).
    """

    pid: int
    name: str
    resident_bytes: int
    anonymous_bytes: int | None = None

    @property
    def who(self) -> str:
        """The process in words: its name and number."""
        return f"{self.name or 'process'} {self.pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedSplit(Checked):
    """The reserved bytes by their use; the five parts add up to `reserved_bytes` exactly.

    `pending`: freed, but another stream may still use it. `private`: free in a pool of its own, as CUDA graphs have.
    `releasable`: can be returned to the driver. `stranded`: free between live blocks. `fits` and `unusable_ratio` are
    for a request of `request_bytes`, and `None` if the device's free bytes were not known. It is made once a
    minute, `age_seconds` before the sample that holds it.
    """

    age_seconds: float
    reserved_bytes: int
    live_bytes: int
    pending_bytes: int
    private_bytes: int
    releasable_bytes: int
    stranded_bytes: int
    largest_free_block_bytes: int
    pinned_segments: int
    pinned_free_bytes: int
    request_bytes: int
    fits: bool | None = None
    unusable_ratio: float | None = None

    def _problem(self) -> str | None:
        parts = self.live_bytes, self.pending_bytes, self.private_bytes, self.releasable_bytes, self.stranded_bytes
        if sum(parts) != self.reserved_bytes:
            return f"parts of {sum(parts)} bytes for {self.reserved_bytes} reserved"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAllocation(Checked):
    """An allocation that failed in torch, by the agent's black box: the bytes requested, and those free.

    It failed `age_seconds` before the sample; `split` is `None` if the blocks could not be read.
    """

    age_seconds: float
    asked_bytes: int
    free_bytes: int
    split: ReservedSplit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocator(Checked):
    """One process's allocator on one device, as its agent published it `age_seconds` before the sample.

    `device_uuid` is CUDA's, without the kind that NVML writes before it. `pid` is the process's in its own namespace,
    which is also kvdiag's if `pid_seen`. `process_bytes` and `memory` are NVML's figures inside the process, `failure`
    is its newest failed allocation. `releasable_bytes` and `stranded_bytes` are the split's as Prometheus stores them,
    if `split` itself is missing. `unverified` is True if kvdiag cannot verify that the process wrote this. `_total`
    counts since the process began.
    """

    device_uuid: str
    pid: int
    pid_seen: bool
    start_ticks: int
    age_seconds: float
    allocated_bytes: int
    reserved_bytes: int
    active_bytes: int | None = None
    requested_bytes: int | None = None
    inactive_split_bytes: int | None = None
    releasable_bytes: int | None = None
    stranded_bytes: int | None = None
    private_pools_bytes: int | None = None
    alloc_retries_total: int | None = None
    ooms_total: int | None = None
    backend: str | None = None
    expandable_segments: bool | None = None
    process_bytes: int | None = None
    memory: Memory | None = None
    split: ReservedSplit | None = None
    failure: FailedAllocation | None = None
    title: str | None = None
    tensor_rank: int | None = None
    pipeline_rank: int | None = None
    data_rank: int | None = None
    unverified: bool | None = None

    def _problem(self) -> str | None:
        if not self.device_uuid:
            return "no device_uuid"
        active_bytes = self.reserved_bytes if self.active_bytes is None else self.active_bytes
        return self._above("active_bytes", self.reserved_bytes) or self._above("allocated_bytes", active_bytes)

    @property
    def identity(self) -> tuple[str, int, int]:
        """The process and device, by figures that are the same in every sample."""
        return self.device_uuid, self.pid, self.start_ticks

    @property
    def who(self) -> str:
        """The process in words: its title and number."""
        return f"{self.title or 'process'} {self.pid}"

    def is_on(self, device: Device) -> bool:
        """Whether it allocates on this device."""
        return cuda_uuid(device.uuid) == self.device_uuid.lower()

    def may_be_of(self, pids: tuple[int, ...] | None) -> bool:
        """Whether this can be one of a server's processes: those in another pid namespace are taken for its own."""
        return pids is None or not self.pid_seen or self.pid in pids

    @property
    def unallocated_bytes(self) -> int:
        """Reserved by torch and in no tensor: its cache, graph pools, and what is stranded."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def outside_driver(self) -> bool | None:
        """Whether torch counts more than its process holds: a pluggable allocator, or pages that sleep mode unmapped.

        Then torch's count is not the memory on the device; `None` if the process's bytes are not reported.
        """
        return None if self.process_bytes is None else self.reserved_bytes > self.process_bytes

    @property
    def outside_torch_bytes(self) -> int | None:
        """Memory of the process outside torch: context, modules, NCCL, graphs; `None` if unknown."""
        if self.process_bytes is None or self.outside_driver:
            return None
        return self.process_bytes - self.reserved_bytes
