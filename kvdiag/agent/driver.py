"""The GPU's memory as NVML reports it inside this process, where it is always permitted and always the right GPU.

By ctypes, because nvidia-ml-py may not be installed. NVML creates no CUDA context, and `ctypes.CDLL` releases the GIL
during calls. Structs as in nvml.h of CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

FUNCTION_NOT_FOUND = 13
MAX_PROCESSES = 64
UNKNOWN_BYTES = 2**64 - 1
RETRY_SECONDS = 60.0
WHY = {3: "not supported", 4: "no permission", 9: "driver not loaded", 15: "GPU is lost", 18: "driver was replaced"}


class DriverError(Exception):
    """NVML does not answer; the message goes into the publication."""


class _MemoryV2(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _ProcessInfo(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Driver:
    """NVML, loaded and initialised at the first call."""

    def __init__(self) -> None:
        """Touch nothing yet."""
        self._library: Any = None
        self._why_not = ""
        self._retry_at_seconds = float("-inf")
        self._handles: dict[str, ctypes.c_void_p] = {}

    def memory(self, uuid: str) -> dict[str, int]:
        """Total, free and driver-reserved bytes of a device.

        Raises:
            DriverError: NVML is not installed, or does not report it.
        """
        handle = self._handle(uuid)
        second = _MemoryV2(version=ctypes.sizeof(_MemoryV2) | 2 << 24)
        if self._ask("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(second)) == 0:
            return {"total_bytes": second.total, "free_bytes": second.free, "driver_reserved_bytes": second.reserved}
        first = _Memory()
        code = self._ask("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(first))
        if code:
            # A reloaded driver has other handles.
            del self._handles[uuid]
        _check("memory", code)
        return {"total_bytes": first.total, "free_bytes": first.free}

    def processes(self, uuid: str) -> list[list[int | None]]:
        """Each process on a device with its bytes, `None` where the driver does not report them.

        Raises:
            DriverError: NVML is not installed, does not report it, or lists more than 64.
        """
        count = ctypes.c_uint(MAX_PROCESSES)
        entries = (_ProcessInfo * MAX_PROCESSES)()
        code = self._ask(
            "nvmlDeviceGetComputeRunningProcesses_v3", self._handle(uuid), ctypes.byref(count), ctypes.byref(entries)
        )
        _check("process list", code)
        return [
            # 0 bytes: the driver has found the process, and not its memory in this pid namespace (HAMi-core#112).
            [entry.pid, entry.used if 0 < entry.used < UNKNOWN_BYTES else None]
            for entry in entries[: min(count.value, MAX_PROCESSES)]
        ]

    def _handle(self, uuid: str) -> ctypes.c_void_p:
        if uuid not in self._handles:
            if self._library is None:
                self._load()
            handle = ctypes.c_void_p()
            code = 0
            # CUDA's identifier lacks the prefix that NVML requires.
            for kind in ("GPU-", "MIG-"):
                code = self._ask("nvmlDeviceGetHandleByUUID", f"{kind}{uuid}".encode(), ctypes.byref(handle))
                if code == 0:
                    break
            _check("device", code)
            self._handles[uuid] = handle
        return self._handles[uuid]

    def _load(self) -> None:
        # A failed look-up of the library takes longer than the rest of a publication.
        if time.monotonic() < self._retry_at_seconds:
            raise DriverError(self._why_not)
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            _check("start", library.nvmlInit_v2())
        except (OSError, DriverError) as error:
            self._why_not = str(error) if isinstance(error, DriverError) else "no libnvidia-ml.so.1 here"
            self._retry_at_seconds = time.monotonic() + RETRY_SECONDS
            raise DriverError(self._why_not) from error
        self._library = library

    def _ask(self, name: str, *arguments: Any) -> int:
        function = getattr(self._library, name, None)
        return int(function(*arguments)) if function is not None else FUNCTION_NOT_FOUND


def _check(what: str, code: int) -> None:
    if code:
        raise DriverError(f"{what}: {WHY.get(code, 'refused')} (NVML error {code})")
