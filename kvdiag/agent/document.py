"""The document of one process, which the publication, the black box and `memory_report` share.

Parts are read at the pace at which they change, because the server pays for each: allocator statistics and the driver's
free bytes every time, ranks, unused devices and process lists every `SLOW_SECONDS`, the summary of the blocks so rarely
that it takes 0.05 % of the time. NVML's list is read together with changed statistics, or torch would seem to have more
than its process. A part that cannot be read is left out and `errors` has the reason; nothing here raises.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from . import allocator, fragmentation, process
from .driver import Driver
from .publication import encode

FORMAT = 1
"""Increased when an older reader could misread a figure."""

SLOW_SECONDS = 5.0
"""Interval of what changes rarely or costs more: ranks, title, unused devices, NVML's process list, all statistics."""

SUMMARY_SECONDS = 60.0
SUMMARY_PAUSE_RATIO = 2000.0
"""Interval of block summaries: at least a minute, and long enough that they take 0.05 % of the time."""

ASKED_PAUSE_SECONDS = 10.0
MAX_DEVICES = 64
MAX_ERROR_CHARACTERS = 160


class Document:
    """Reads each part at its own interval and keeps the parts that are not due."""

    def __init__(self, driver: Driver | None) -> None:
        """Read nothing yet; without a `driver`, NVML is not called, which may hang."""
        self._driver = driver
        self._errors: dict[str, str] = {}
        self._process: dict[str, Any] = {}
        self._ranks: dict[str, int] = {}
        self._devices: dict[int, dict[str, Any]] = {}
        self.memory_stats: dict[str, Any] = {}
        """All of `memory_stats_as_nested_dict` by device, as of `at_monotonic_seconds`."""

        self.memory_stats_json = "{}"
        """The same as JSON, encoded only when it is read: that takes as long as all the rest."""

        self._settings: dict[str, Any] = {}
        self._listed_at: dict[int, tuple[int | None, int]] = {}
        self._slow_at_seconds = float("-inf")
        self.summarised_at_seconds = float("-inf")
        self._summary_pause_seconds = 0.0

    def read(self, *, summary: bool | None = None) -> dict[str, Any]:
        """The document as of now.

        The split of the reserved bytes is renewed when it is due; sooner with `summary`, within limits; never if that
        is False.
        """
        now_seconds = time.monotonic()
        slow = now_seconds - self._slow_at_seconds >= SLOW_SECONDS
        if slow:
            self._slow_at_seconds = now_seconds
            self._part("process", lambda: self._process.update(process.identity(), title=process.title()))
            self._part("ranks", self._read_ranks)
        self._part("host", lambda: self._process.update(process.host_bytes()))
        self._part("torch", self._read_devices, now_seconds, slow, summary)
        return {
            "kvdiag_agent": FORMAT,
            "wall_seconds": time.time(),
            "monotonic_seconds": now_seconds,
            "process": self._process,
            "ranks": self._ranks,
            "torch": self._torch(),
            "devices": list(self._devices.values()),
            "errors": dict(self._errors),
        }

    def summarise(self, cuda: Any, device: dict[str, Any], free_bytes: int | None, request_bytes: int) -> None:
        """Put the split of one device's reserved bytes into its part of the document.

        Raises:
            Exception: any error of torch, and TooManyBlocksError; the previous split stays.
        """
        began_seconds = time.monotonic()
        segments, self._settings = allocator.snapshot(cuda, device["statistics"])
        page = self._settings.get("large_segment_size")
        device["fragmentation"] = fragmentation.summarise(
            segments,
            device=device["index"],
            device_free_bytes=free_bytes,
            request_bytes=request_bytes,
            large_page_bytes=page if isinstance(page, int) and page > 0 else fragmentation.LARGE_PAGE_BYTES,
        )
        ended_seconds = time.monotonic()
        device["fragmentation"]["at_monotonic_seconds"] = ended_seconds
        self._summary_pause_seconds = max((ended_seconds - began_seconds) * SUMMARY_PAUSE_RATIO, ASKED_PAUSE_SECONDS)

    def _part(self, name: str, read: Callable[..., None], *arguments: Any) -> None:
        try:
            read(*arguments)
        except Exception as error:  # noqa: BLE001 - the other parts continue and the reader is informed
            self._errors[name] = short(error)
        else:
            self._errors.pop(name, None)

    def _read_ranks(self) -> None:
        self._ranks = process.ranks()

    def _torch(self) -> dict[str, Any] | None:
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        found: dict[str, Any] = {"version": str(getattr(torch, "__version__", ""))[:32], "settings": self._settings}
        self._part("initialised", lambda: found.update(cuda_initialised=allocator.cuda() is not None))
        if self._devices:
            self._part("backend", lambda: found.update(backend=str(sys.modules["torch.cuda"].get_allocator_backend())))
        return found

    def _read_devices(self, now_seconds: float, slow: bool, summary: bool | None) -> None:
        cuda = allocator.cuda()
        if cuda is None:
            self._devices, self.memory_stats, self.memory_stats_json = {}, {}, "{}"
            return
        # A worker sees every GPU of its host but uses one.
        every = slow or not self._devices
        whole = {}
        for index in range(min(cuda.device_count(), MAX_DEVICES)) if every else list(self._devices):
            reported = cuda.memory_stats_as_nested_dict(index)
            statistics = allocator.statistics(reported)
            if index in self._devices:
                self._devices[index]["statistics"] = statistics
            elif allocator.holds(reported):
                self._devices[index] = {"index": index, "uuid": None, "statistics": statistics}
            if every and index in self._devices:
                whole[str(index)] = allocator.whole(reported)
        if every:
            self.memory_stats = {"at_monotonic_seconds": now_seconds, "devices": whole}
            self._part("memory_stats", self._encode_memory_stats)
        pause_seconds = max(self._summary_pause_seconds, 0.0 if summary else SUMMARY_SECONDS)
        due = summary is not False and now_seconds - self.summarised_at_seconds >= pause_seconds
        devices = list(self._devices.values())
        nameless = [device for device in devices if slow or device["uuid"] is None]
        if nameless:
            self._part("uuid", _each, nameless, lambda device: _read_uuid(cuda, device))
        self._part("driver", _each, devices, lambda device: self._read_driver(device, slow))
        if due and devices:
            self.summarised_at_seconds = now_seconds
            self._part("fragmentation", _each, devices, lambda device: self._summarise(cuda, device))

    def _summarise(self, cuda: Any, device: dict[str, Any]) -> None:
        free_bytes = device.get("driver", {}).get("free_bytes")
        self.summarise(cuda, device, free_bytes, fragmentation.REFERENCE_BYTES)

    def _encode_memory_stats(self) -> None:
        self.memory_stats_json = "{}"
        self.memory_stats_json = encode(self.memory_stats)

    def _read_driver(self, device: dict[str, Any], slow: bool) -> None:
        known: Mapping[str, Any] = device.pop("driver", {})
        if self._driver is None or device["uuid"] is None:
            return
        found = {**known, **self._driver.memory(device["uuid"])}
        # Read together with changed statistics, or torch would seem to hold more than its process.
        moment = (device["statistics"].get("reserved_bytes", {}).get("current"), found["free_bytes"])
        if slow or self._listed_at.get(device["index"]) != moment:
            found["processes"] = self._driver.processes(device["uuid"])
            self._listed_at[device["index"]] = moment
        device["driver"] = found


def _each(devices: list[dict[str, Any]], read: Callable[[dict[str, Any]], None]) -> None:
    """Read a part of every device, then raise the first error, if any."""
    failed: Exception | None = None
    for device in devices:
        try:
            read(device)
        except Exception as error:  # noqa: BLE001 - as of any part
            failed = failed or error
    if failed is not None:
        raise failed


def short(error: BaseException) -> str:
    """An error as publications write it."""
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]


def _read_uuid(cuda: Any, device: dict[str, Any]) -> None:
    """CUDA's identifier of a device, as NVML writes it after "GPU-"; torch before 2.4 does not report it."""
    reported = getattr(cuda.get_device_properties(device["index"]), "uuid", None)
    device["uuid"] = None if reported is None else str(reported)[:64]
