"""The simulated GPU's NVML: `nvml_state` is the driver's state, `RemoteNvml` replaces pynvml in another process.

kvdiag reads a simulated GPU through the same code as a real one: only functions that its NVML source calls are
simulated; constants, structs and error classes are pynvml's own, and any other function is not supported. Memory and
process lists are read over HTTP at each call, identity once. The state is checked like any input, because any server
can claim to be a drill, and a failed read is an NVML error.
"""

# ruff: noqa: N802, N815 - the names are NVML's and pynvml's
import http.client
import importlib
import json
from typing import Any
from urllib.parse import urlsplit

from kvdiag.sim.gpu import Gpu

STATE_PATH = "/drill/nvml"
ANSWER_SECONDS = 30.0
"""A slow driver is not an error; one that never answers is."""
MAX_STATE_BYTES = 2**20
NO_INSTANCE = 2**32 - 1
"""NVML's instance ids on a device without MIG."""


def nvml_state(gpu: Gpu) -> dict[str, Any]:
    """The device and its processes now, for JSON; `used_bytes` excludes the driver's reservation, as in version 2."""
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
    """Replaces the module `pynvml` for the GPU of a drill."""

    def __init__(self, base_url: str) -> None:
        """Use the GPU of the drill at `base_url`; sends no request yet."""
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
        """Succeed if the drill answers."""
        self._read()

    def nvmlShutdown(self) -> None:
        """Do nothing."""

    def nvmlDeviceGetCount(self) -> int:
        """One device."""
        return len(self._known()["devices"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        """A handle, which is the index itself."""
        if not 0 <= index < self.nvmlDeviceGetCount():
            raise self.NVMLError(self.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> Any:
        """The device's identity."""
        return self._known()["devices"][handle]["uuid"]

    def nvmlDeviceGetName(self, handle: int) -> Any:
        """The product's name."""
        return self._known()["devices"][handle]["name"]

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        """The device's memory, in struct version 2 on request."""
        device = self._read()["devices"][handle]
        total, free, reserved = device["total_bytes"], device["free_bytes"], device["reserved_bytes"]
        if version is None:
            return self.c_nvmlMemory_t(total=total, free=free, used=total - free)
        if version != self.nvmlMemory_v2:
            raise self.NVMLError(self.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        return self.c_nvmlMemory_v2_t(
            version=version, total=total, reserved=reserved, free=free, used=device["used_bytes"]
        )

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        """The processes that hold memory on the device."""
        processes = self._read()["devices"][handle]["processes"]
        return [
            self.c_nvmlProcessInfo_v2_t(process["pid"], process["used_bytes"], NO_INSTANCE, NO_INSTANCE)
            for process in processes
        ]

    nvmlDeviceGetComputeRunningProcesses_v3 = nvmlDeviceGetComputeRunningProcesses

    def nvmlSystemGetProcessName(self, pid: int) -> Any:
        """A process's name as of the last read."""
        for process in (process for device in self._known()["devices"] for process in device["processes"]):
            if process["pid"] == pid:
                return process["name"]
        raise self.NVMLError(self.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetMaxMigDeviceCount(self, _handle: int) -> int:
        """The device has no MIG."""
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
