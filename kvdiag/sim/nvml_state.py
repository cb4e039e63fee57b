"""The simulated GPU's NVML: `nvml_state` says what the driver sees, `RemoteNvml` is pynvml for another process.

Only functions that kvdiag's NVML source calls are here; constants, structs and error classes are pynvml's own.
"""

# ruff: noqa: N802 - the names are NVML's and pynvml's
from __future__ import annotations

import http.client
import importlib
import json
from typing import Any
from urllib.parse import urlsplit

from kvdiag.sim.gpu import Gpu

STATE_PATH = "/drill/nvml"
ANSWER_SECONDS = 30.0
"""A driver that is slow is slow, not lost: only one that never answers is an error."""
MAX_STATE_BYTES = 2**20
NO_INSTANCE = 2**32 - 1
"""What NVML gives as instance ids where the device is not sliced."""


def nvml_state(gpu: Gpu) -> dict[str, Any]:
    """The device and its processes now, JSON-able, in bytes; `used` leaves the driver's reservation out, as v2 does."""
    return {
        "devices": [
            {
                "index": 0,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "total_bytes": gpu.total_bytes,
                "free_bytes": gpu.free_bytes,
                "used_bytes": gpu.usable_bytes - gpu.free_bytes,
                "reserved_bytes": gpu.driver_reserved_bytes,
                "processes": [
                    {"pid": process.pid, "name": process.name, "used_bytes": process.used_bytes}
                    for process in gpu.processes
                ],
            }
        ]
    }


class RemoteNvml:
    """The module `pynvml` with a drill's GPU behind it.

    Memory and process lists are read anew from `GET /drill/nvml` each time; what cannot change is read once.
    """

    def __init__(self, base_url: str) -> None:
        """Read the GPU of the drill at `base_url`; no request is made yet."""
        parts = urlsplit(base_url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._latest: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        """Find constants, structs and errors in pynvml; a function that is not simulated answers NOT_SUPPORTED."""
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(importlib.import_module("pynvml"), name)
        return value if name.startswith(("NVML", "c_nvml")) or not callable(value) else self._not_supported

    def nvmlInit(self) -> None:
        """Succeeds when the drill answers."""
        self._read()

    def nvmlShutdown(self) -> None:
        """Nothing to give back."""

    def nvmlDeviceGetCount(self) -> int:
        """One device."""
        return len(self._known()["devices"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        """A handle, which here is the index itself."""
        if not 0 <= index < self.nvmlDeviceGetCount():
            raise self.NVMLError(self.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        """The device's identity."""
        uuid: str = self._known()["devices"][handle]["uuid"]
        return uuid

    def nvmlDeviceGetName(self, handle: int) -> str:
        """The product's name."""
        name: str = self._known()["devices"][handle]["name"]
        return name

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        """The device's memory, of structure version 2 where asked for."""
        device = self._read()["devices"][handle]
        total, free, reserved = device["total_bytes"], device["free_bytes"], device["reserved_bytes"]
        if version is None:
            return self.c_nvmlMemory_t(total=total, free=free, used=total - free)
        if version != self.nvmlMemory_v2:
            raise self.NVMLError(self.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        return self.c_nvmlMemory_v2_t(
            version=version, total=total, reserved=reserved, free=free, used=device["used_bytes"]
        )

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: int) -> list[Any]:
        """As nvmlDeviceGetComputeRunningProcesses, by its versioned name."""
        return self.nvmlDeviceGetComputeRunningProcesses(handle)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        """The processes that hold memory of the device."""
        processes = self._read()["devices"][handle]["processes"]
        return [
            self.c_nvmlProcessInfo_v2_t(process["pid"], process["used_bytes"], NO_INSTANCE, NO_INSTANCE)
            for process in processes
        ]

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        """A process's name as of the last reading."""
        for device in self._known()["devices"]:
            for process in device["processes"]:
                if process["pid"] == pid:
                    name: str = process["name"]
                    return name
        raise self.NVMLError(self.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetMaxMigDeviceCount(self, _handle: int) -> int:
        """The device cannot be sliced."""
        return 0

    def _not_supported(self, *_arguments: Any, **_named: Any) -> Any:
        raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)

    def _known(self) -> dict[str, Any]:
        return self._latest or self._read()

    def _read(self) -> dict[str, Any]:
        connection = http.client.HTTPConnection(*self._address, timeout=ANSWER_SECONDS)
        try:
            connection.request("GET", STATE_PATH)
            state = _state(connection.getresponse().read(MAX_STATE_BYTES))
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            raise self.NVMLError(self.NVML_ERROR_UNKNOWN) from error
        finally:
            connection.close()
        self._latest = state
        return state


def _state(text: bytes) -> dict[str, Any]:
    """The state that `nvml_state` wrote at the other end, checked: any server can claim to be a drill."""
    state = json.loads(text)
    try:
        return {
            "devices": [
                {
                    **{name: str(device[name]) for name in ("uuid", "name")},
                    **{f"{name}_bytes": int(device[f"{name}_bytes"]) for name in ("total", "free", "used", "reserved")},
                    "processes": [
                        {"pid": int(one["pid"]), "name": str(one["name"]), "used_bytes": int(one["used_bytes"])}
                        for one in device["processes"]
                    ],
                }
                for device in state["devices"]
            ]
        }
    except (LookupError, TypeError) as error:
        raise ValueError("not the state of a simulated driver") from error
