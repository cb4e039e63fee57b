"""What a reader of this machine's GPUs is: NVML's (`kvdiag.sources.nvml.NvmlSource`) is the only one.

A reader for other devices needs nothing but these two functions: docs/other-devices.md.
"""

from typing import Protocol

from kvdiag.model import Device, Gap

DeviceReading = tuple[tuple[Device, ...] | None, tuple[Gap, ...]]


class DeviceReader(Protocol):
    """Reads every GPU of this machine, on a thread of its own that is abandoned if a call hangs."""

    def read(self, *, processes: bool) -> DeviceReading:
        """The devices in order of their index, with their processes if wanted; `None` with a gap if there are none.

        No failure of the driver makes it raise, and it takes no memory on a device.
        """

    def close(self) -> None:
        """Release the devices; a later read opens them again."""
