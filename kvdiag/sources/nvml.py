"""Reads GPUs through NVIDIA's management library: the only module that uses nvidia-ml-py (module `pynvml`).

Rules of this module: it creates no CUDA context, so that kvdiag takes no GPU memory; it makes only calls that cost
microseconds (MangoHud#2104 measured 4.5 ms of the driver's global lock for the graphics process list, 0.1 ms for a fan,
12 us for memory); pynvml's exceptions do not leave `NvmlSource._call`; `parse_*` only convert NVML's structs.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, NamedTuple

from kvdiag.model import Device, Gap, GapKind, Memory, Process
from kvdiag.sources.device_reader import DeviceReading
from kvdiag.sources.host import program

FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0
"""Starting NVML takes a second per GPU without a persistence daemon: retry rarely."""

MAX_GPUS = 256
MAX_SLICES = 8
"""Upper limit per GPU; tried one by one if the driver does not report how many there may be."""

LARGEST_PID = 2**22
"""PID_MAX_LIMIT of Linux (include/linux/threads.h)."""

NO_INSTANCE = 2**32 - 1
LARGEST_INSTANCE = 63
"""Ids of MIG instances are small, and NO_INSTANCE outside MIG (nvml.h, nvmlProcessInfo_t)."""

# nvidia-ml-py's preferred version; the one whose struct never changed; the name without a version.
PROCESS_LISTS = tuple(f"nvmlDeviceGetComputeRunningProcesses{version}" for version in ("_v3", "_v2", ""))
LIST_ATTEMPTS = 3


class _Code(IntEnum):
    """The values of nvmlReturn_t (nvml.h) that need an answer of their own."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    ARGUMENT_VERSION_MISMATCH = 25
    UNKNOWN = 999


_UNSUPPORTED = {_Code.NOT_SUPPORTED, _Code.FUNCTION_NOT_FOUND, _Code.ARGUMENT_VERSION_MISMATCH}
_DRIVER_LOST = {_Code.UNINITIALIZED, _Code.DRIVER_NOT_LOADED, _Code.LIB_RM_VERSION_MISMATCH}
_GPU_LOST = {_Code.GPU_IS_LOST, _Code.RESET_REQUIRED, _Code.UNKNOWN}
# The numbering of slices has gaps, and a container does not see slices that are not its own.
_NO_SLICE = {*_UNSUPPORTED, _Code.NOT_FOUND, _Code.NO_PERMISSION, _Code.INVALID_ARGUMENT}

_WHY_NO_DRIVER: dict[int, str] = {
    _Code.LIBRARY_NOT_FOUND: "no libnvidia-ml.so.1 here, so no NVIDIA GPU is visible; a container needs the NVIDIA "
    "runtime and NVIDIA_DRIVER_CAPABILITIES=utility",
    _Code.DRIVER_NOT_LOADED: "the NVIDIA kernel module is not loaded; look for the cause in `dmesg`",
    _Code.NO_PERMISSION: "the NVIDIA driver refuses this user; check the permissions of /dev/nvidia*",
    # A container keeps the library of the driver at its start.
    _Code.LIB_RM_VERSION_MISMATCH: "the NVIDIA driver was replaced while its old library is in use; restart this "
    "container, or reboot",
    # `systemctl daemon-reload` removes the devices of running containers (nvidia-container-toolkit#48).
    _Code.UNKNOWN: "the NVIDIA driver answers Unknown Error; recreate a container that lost its GPUs",
}


class _NvmlError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _RefusedError(_NvmlError):
    """A call that failed."""


class _DriverLostError(_NvmlError):
    """A call that failed, as all others will until NVML is restarted."""


_PROBLEMS = (_RefusedError, ValueError)
"""Failures of one device: a refused call, or impossible figures or texts."""


class _Gpu(NamedTuple):
    handle: Any
    identity: Device
    label: str
    slots: int = 0


def parse_memory(reading: Any) -> Memory:
    """NVML's memory struct as a value; only version 2 has the driver's reservation. ValueError if impossible."""
    reserved = getattr(reading, "reserved", None)
    return Memory(
        total_bytes=int(reading.total),
        free_bytes=int(reading.free),
        driver_reserved_bytes=None if reserved is None else int(reserved),
    )


def parse_processes(
    entries: Sequence[Any], names: Mapping[int, str], total_bytes: int | None = None
) -> tuple[Process, ...]:
    """NVML's process entries as values, in order of their ids. ValueError if impossible.

    Early R535 drivers widened an entry under an unchanged name (nvitop#79, #88), a 550 shortened it (nvitop#226): read
    at the documented size, the first entry is right and the next ones show parts of others. 0 bytes mean unknown: a
    driver reports them if it cannot read the process's memory in this pid namespace (HAMi-core#112).
    """
    processes = []
    for entry in entries:
        pid, used = int(entry.pid), entry.usedGpuMemory
        instances = (getattr(entry, name, NO_INSTANCE) for name in ("gpuInstanceId", "computeInstanceId"))
        if not 0 < pid <= LARGEST_PID or any(LARGEST_INSTANCE < each != NO_INSTANCE for each in instances):
            raise ValueError(f"entries not laid out as documented; one names process {pid}")
        if used is not None and total_bytes is not None and used > total_bytes:
            raise ValueError(f"process {pid} with {used} of {total_bytes} bytes")
        processes.append(Process(pid=pid, used_bytes=int(used) if used else None, name=names.get(pid) or None))
    return tuple(sorted(processes, key=lambda process: process.pid))


class NvmlSource:
    """Reads every GPU and MIG slice that NVML lists; no failure of NVML makes it raise.

    `library` is pynvml or an object with functions, constants and an `NVMLError` of the same names (a missing function
    counts as one that the driver lacks). Without one, pynvml is imported at the first read.
    """

    def __init__(self, library: Any = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Touch nothing yet."""
        self._library = library
        self._clock = clock
        self._reading = threading.Lock()
        self._started = False
        self._gpus: dict[int, _Gpu] = {}
        self._lost: dict[int, Gap] = {}
        self._down: Gap | None = None
        self._pause_seconds = 0.0
        self._retry_at_seconds = 0.0

    def read(self, *, processes: bool) -> DeviceReading:
        """Every device in order of index, a GPU before its slices; `None` if the driver does not answer at all.

        A known GPU that cannot be read stays listed, without memory and with a gap. Lost devices are retried by
        restarting NVML: at once if the whole driver was lost, otherwise after increasing pauses.
        """
        with self._reading:
            now_seconds = self._clock()
            if (self._down or self._lost) and now_seconds >= self._retry_at_seconds:
                self._stop()
            if self._down:
                return None, (self._down,)
            return self._read(now_seconds, processes=processes)

    def close(self) -> None:
        """Release the GPUs, which cannot be reset while a process has handles (cadvisor#2035).

        A later read restarts NVML. A read that hangs in the driver keeps the handles: nvmlShutdown would wait for
        it, and the end of the process releases them.
        """
        if self._reading.acquire(blocking=False):
            self._stop()
            self._gpus.clear()
            self._lost.clear()
            self._reading.release()

    def _read(self, now_seconds: float, *, processes: bool) -> DeviceReading:
        restarted, lost_before = not self._started, set(self._lost)
        try:
            if restarted:
                self._start()
            reading = self._read_all(processes=processes, restarted=restarted)
        except _NvmlError as loss:
            self._stop()
            if not restarted:
                return self._read(now_seconds, processes=processes)
            kind: GapKind = "absent" if loss.code == _Code.LIBRARY_NOT_FOUND else "failed"
            why = _WHY_NO_DRIVER.get(loss.code, f"the NVIDIA driver fails ({loss}); see `nvidia-smi`")
            self._down = Gap("nvml", kind, why)
            self._pause(now_seconds)
            return None, (self._down,)
        if not self._lost:
            self._pause_seconds = 0.0
        elif restarted or set(self._lost) != lost_before:
            self._pause(now_seconds)
        return reading

    def _pause(self, now_seconds: float) -> None:
        self._pause_seconds = min(max(2 * self._pause_seconds, FIRST_RETRY_SECONDS), LAST_RETRY_SECONDS)
        self._retry_at_seconds = now_seconds + self._pause_seconds

    def _start(self) -> None:
        if self._library is None:
            # Costs 0.15 s and 18 MiB, which `--help` and a run without GPUs do not need.
            import pynvml  # noqa: PLC0415

            self._library = pynvml
        self._call("nvmlInit")
        self._started = True

    def _stop(self) -> None:
        if self._started:
            with contextlib.suppress(_NvmlError):
                self._call("nvmlShutdown")
        self._started = False
        self._down = None

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the library; its errors become this module's exceptions.

        pynvml's own are awkward: `NVMLError` has `__eq__` without `__hash__`, unknown codes have no class, and the
        unversioned process list raises an exception that is not an NVMLError.
        """
        function = getattr(self._library, name, None)
        if function is None:
            raise _RefusedError(_Code.FUNCTION_NOT_FOUND, "Function Not Found")
        mismatch = getattr(self._library, "NVMLLibraryMismatchError", self._library.NVMLError)
        try:
            return function(*args, **kwargs)
        except (self._library.NVMLError, mismatch) as error:
            code = int(getattr(error, "value", _Code.FUNCTION_NOT_FOUND))
            kind = _DriverLostError if code in _DRIVER_LOST else _RefusedError
            raise kind(code, str(error).rstrip(".")) from None

    def _read_all(self, *, processes: bool, restarted: bool) -> tuple[tuple[Device, ...], tuple[Gap, ...]]:
        devices: list[Device] = []
        gaps: list[Gap] = []
        if restarted:
            self._lost.clear()
        for index in range(min(int(self._call("nvmlDeviceGetCount")), MAX_GPUS)):
            if index not in self._lost:
                try:
                    if restarted or index not in self._gpus:
                        self._gpus[index] = self._identify(index)
                    self._read_gpu(self._gpus[index], devices, gaps, processes=processes)
                except _PROBLEMS as problem:
                    label = self._gpus[index].label if index in self._gpus else f"GPU {index}"
                    reason = f"{label} is unreachable ({problem}); look for its Xid in `dmesg`, then reset it"
                    self._lost[index] = Gap("nvml", "failed", reason)
            if index in self._lost:
                gaps.append(self._lost[index])
                devices += [self._gpus[index].identity] if index in self._gpus else []
        if not devices and not gaps:
            gaps.append(Gap("nvml", "absent", "the NVIDIA driver lists no GPU here; pass GPUs to the container"))
        return tuple(devices), tuple(gaps)

    def _identify(self, index: int) -> _Gpu:
        handle = self._call("nvmlDeviceGetHandleByIndex", index)
        uuid, name, slots = self._call("nvmlDeviceGetUUID", handle), "unknown GPU", 0
        with contextlib.suppress(*_PROBLEMS):
            name = self._call("nvmlDeviceGetName", handle)
            slots = min(int(self._call("nvmlDeviceGetMaxMigDeviceCount", handle)), MAX_SLICES)
        return _Gpu(handle, Device(uuid=uuid, index=index, name=name, memory=None), f"GPU {index} ({uuid})", slots)

    def _read_gpu(self, gpu: _Gpu, devices: list[Device], gaps: list[Gap], *, processes: bool) -> None:
        memory, problem = self._memory(gpu)
        if problem and _code(problem) in _GPU_LOST:
            raise problem
        hidden = _code(problem) == _Code.NO_PERMISSION
        slices = self._slices(gpu, gpu.slots or (MAX_SLICES if hidden else 0), gaps)
        if problem:
            gaps.append(_memory_gap(gpu, problem, slices=len(slices)))
        # With MIG, the GPU's list repeats the processes of its slices, without their memory.
        running = self._processes(gpu, memory, gaps) if processes and not slices else None
        devices.append(replace(gpu.identity, memory=memory, processes=running))
        for part in slices:
            memory, problem = self._memory(part)
            if problem:
                gaps.append(_memory_gap(part, problem))
            running = self._processes(part, memory, gaps) if processes else None
            devices.append(replace(part.identity, memory=memory, processes=running))

    def _slices(self, gpu: _Gpu, slots: int, gaps: list[Gap]) -> list[_Gpu]:
        """The GPU's MIG devices, which have its index, as `nvidia-smi -L` shows them.

        Looked up each time: "Handles may be reused and their properties can change in the process" when instances are
        created and destroyed (NVML documentation of nvmlDeviceGetMigDeviceHandleByIndex).
        """
        slices = []
        for slot in range(slots):
            label = f"MIG slice {slot} of GPU {gpu.identity.index}"
            try:
                handle = self._call("nvmlDeviceGetMigDeviceHandleByIndex", gpu.handle, slot)
                uuid, name = self._call("nvmlDeviceGetUUID", handle), self._call("nvmlDeviceGetName", handle)
                identity = replace(gpu.identity, uuid=uuid, name=name, mig_parent_uuid=gpu.identity.uuid)
                slices.append(_Gpu(handle, identity, f"{label} ({uuid})"))
            except _PROBLEMS as problem:
                if _code(problem) not in _NO_SLICE:
                    gaps.append(
                        Gap("nvml", "failed", f"{label} does not report its identity ({problem}); see `nvidia-smi -L`")
                    )
        return slices

    def _memory(self, gpu: _Gpu) -> tuple[Memory | None, Exception | None]:
        try:
            try:
                reading = self._call("nvmlDeviceGetMemoryInfo", gpu.handle, version=self._library.nvmlMemory_v2)
            except _RefusedError as refusal:
                if refusal.code not in _UNSUPPORTED:
                    raise
                reading = self._call("nvmlDeviceGetMemoryInfo", gpu.handle)
            return parse_memory(reading), None
        except _PROBLEMS as problem:
            return None, problem

    def _processes(self, gpu: _Gpu, memory: Memory | None, gaps: list[Gap]) -> tuple[Process, ...] | None:
        why: Exception | None = None
        for function in PROCESS_LISTS:
            try:
                entries = self._listed(function, gpu.handle)
                names = {int(entry.pid): self._process_name(int(entry.pid)) for entry in entries}
                return parse_processes(entries, names, memory.total_bytes if memory else None)
            except _PROBLEMS as problem:
                why = why or problem
                if isinstance(problem, _RefusedError) and problem.code not in _UNSUPPORTED:
                    break
        kind: GapKind = "absent" if _code(why) in _UNSUPPORTED else "failed"
        gaps.append(Gap("nvml", kind, f"{gpu.label}: its processes are unknown ({why}); check `nvidia-smi`"))
        return None

    def _listed(self, function: str, handle: Any) -> Sequence[Any]:
        """The list; retried if processes started between pynvml's sizing call and the one that fetches it."""
        for attempt in range(1, LIST_ATTEMPTS + 1):
            try:
                return tuple(self._call(function, handle))
            except _RefusedError as refusal:
                if refusal.code != _Code.INSUFFICIENT_SIZE or attempt == LIST_ATTEMPTS:
                    raise
        return ()

    def _process_name(self, pid: int) -> str:
        try:
            return program(str(self._call("nvmlSystemGetProcessName", pid)))
        except _PROBLEMS:
            return ""


def _code(problem: Exception | None) -> int | None:
    return getattr(problem, "code", None)


def _memory_gap(gpu: _Gpu, problem: Exception, *, slices: int = 0) -> Gap:
    if slices:
        return Gap(
            "nvml", "absent", f"{gpu.label} cannot be read as a whole ({problem}), only as its {slices} MIG slices"
        )
    if _code(problem) in _UNSUPPORTED:
        why = "which is normal for GPUs that share the host's memory; watch the host's available memory"
        return Gap("nvml", "absent", f"{gpu.label}, {gpu.identity.name}, does not report its memory ({problem}), {why}")
    return Gap("nvml", "failed", f"{gpu.label}: its memory is unknown ({problem}); check `nvidia-smi -q -d MEMORY`")
