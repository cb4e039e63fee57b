"""A search for a server that a test decides."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvdiag.feeds.daemon.server_tracker import FoundServer
from kvdiag.sources.device_reader import DeviceReading
from kvdiag.sources.worker_thread import ThreadedReader


@dataclass(slots=True)
class Finding:
    """Finds what `find` returns; `nvml` shows this machine's GPUs."""

    find: Callable[[], Awaitable[FoundServer]]
    nvml: ThreadedReader[DeviceReading]
