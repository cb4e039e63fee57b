"""The agent's figures for a server's own code and log: callable anywhere, with or without torch; never raises."""

from __future__ import annotations

import logging
from typing import Any

from .document import Document
from .driver import Driver

_log = logging.getLogger("kvdiag")
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def memory_report() -> dict[str, Any]:
    """The memory that this process holds now, in the format that the agent publishes.

    `devices` has one entry for each GPU on which torch has had memory: torch's statistics, NVML's memory, and the split
    of the reserved bytes (`fragmentation`). It is empty until this process initialises CUDA, which this call does not
    do. `memory_stats` has all of torch's statistics by device. Takes some milliseconds: call it occasionally, not for
    each token.
    """
    document = Document(Driver())
    report = document.read(summary=True)
    return {**report, "memory_stats": document.memory_stats}


def log_memory(label: str = "", *, logger: logging.Logger | None = None, level: int = logging.INFO) -> dict[str, Any]:
    """Log one line per GPU with the bytes that torch holds, by use, and return the report."""
    report = memory_report()
    reported = logger or _log
    before = f"{label}: " if label else ""
    unread = report["errors"].get("torch")
    if unread is not None:
        reported.log(level, "%sGPU memory held by torch cannot be read: %s", before, unread)
    elif not report["devices"]:
        reported.log(level, "%sno GPU memory held by torch in this process", before)
    for device in report["devices"]:
        reported.log(level, "%sGPU %d: %s", before, device["index"], ", ".join(_amounts(device)))
    return report


def _amounts(device: dict[str, Any]) -> list[str]:
    statistics, split, driver = device["statistics"], device.get("fragmentation", {}), device.get("driver", {})
    amounts = {
        "allocated": statistics.get("allocated_bytes", {}).get("current"),
        "reserved": statistics.get("reserved_bytes", {}).get("current"),
        "releasable": split.get("releasable_bytes"),
        "stranded": split.get("stranded_bytes"),
        "private": split.get("private_bytes"),
        "free on the device": driver.get("free_bytes"),
    }
    return [f"{_size(size)} {name}" for name, size in amounts.items() if size is not None]


def _size(size: int) -> str:
    """Bytes in three significant digits, as kvdiag writes them: `24.0 GiB`, `516 MiB`."""
    unit, divisor = next((each for each in _UNITS if size >= each[1]), ("B", 1))
    value = size / divisor
    whole = divisor == 1 or value >= 99.95  # noqa: PLR2004 - three digits before the point
    return f"{value:,.0f} {unit}" if whole else f"{value:#.3g} {unit}"
