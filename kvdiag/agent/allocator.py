"""torch's allocator statistics of one device, read without waiting for the GPU or initialising CUDA.

`memory_stats_as_nested_dict` copies a struct under the allocator's mutex (13 us); the flat form takes ten times as
long, and `mem_get_info` makes a CUDA context: neither is called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

ARRAYS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
COUNTS = (
    "num_alloc_retries",
    "num_ooms",
    "num_oom_rejections",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
)
PRIVATE = "reserved_bytes_by_private_pools"

MAX_BLOCKS = 20_000
"""A snapshot builds a Python object per block while it holds the GIL: about 50 ms for this many."""

MAX_SETTINGS = 32
MAX_SETTING_CHARACTERS = 200


class TooManyBlocksError(Exception):
    """A snapshot would stall the server; the message says why."""


def cuda() -> Any:
    """`torch.cuda` if this process has imported it and initialised CUDA, else `None`."""
    found = sys.modules.get("torch.cuda")
    return found if found is not None and found.is_initialized() else None


def statistics(reported: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `memory_stats_as_nested_dict` that kvdiag judges, under torch's names; absent ones are left out.

    Of each array only the current value, of all pools and of the large one: encoding peaks, sums and pools too would
    double the time that a publication holds the interpreter. `whole` has them.
    """
    if not reported:
        return {}
    found: dict[str, Any] = {name: {"current": reported[name]["all"]["current"]} for name in ARRAYS if name in reported}
    found["large_pool"] = {name: reported[name]["large_pool"]["current"] for name in ARRAYS if name in reported}
    found.update((name, reported[name]) for name in COUNTS if name in reported)
    if PRIVATE in reported:
        pools = [pool["all"]["current"] for pool in reported[PRIVATE].values()]
        found["private_pools"] = {"count": len(pools), "reserved_bytes": sum(pools)}
    return found


def whole(reported: Mapping[str, Any]) -> dict[str, Any]:
    """All of `memory_stats_as_nested_dict` except the private pools one by one; CUDA graphs create dozens."""
    return {name: value for name, value in reported.items() if name != PRIVATE}


def holds(reported: Mapping[str, Any]) -> bool:
    """Whether the process has ever had memory on the device, by `memory_stats_as_nested_dict`."""
    reserved = reported["reserved_bytes"]["all"] if "reserved_bytes" in reported else {}
    return bool(reserved.get("current") or reserved.get("allocated"))


def snapshot(
    cuda: Any, statistics: Mapping[str, Any], *, history: bool = False
) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """Every segment of every device, and the allocator's settings, if that does not stall the server.

    `history`: accept a memory history in the result, which is then known to be short.

    Raises:
        TooManyBlocksError: there are too many blocks, or a memory history that the snapshot would include.
    """
    blocks = sum(int(statistics.get(name, {}).get("current", 0)) for name in ("active", "inactive_split"))
    if blocks > MAX_BLOCKS:
        raise TooManyBlocksError(f"{blocks} blocks are too many to inspect in a running server")
    library = sys.modules["torch._C"]
    accepted = inspect.signature(cuda.memory_snapshot).parameters
    if "include_traces" in accepted:
        whole = library._cuda_memorySnapshot((0, 0, False))  # noqa: SLF001 - memory_snapshot leaves the settings out
    elif not history and library._cuda_isHistoryEnabled():  # noqa: SLF001 - torch has no public name for it
        raise TooManyBlocksError("torch records a memory history, which this version would return with the blocks")
    else:
        whole = library._cuda_memorySnapshot(*([None] if "mempool_id" in accepted else []))  # noqa: SLF001 - as above
    return whole["segments"], _settings(whole.get("allocator_settings", {}))


def _settings(reported: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in list(reported.items())[:MAX_SETTINGS]:
        plain = value is None or isinstance(value, (bool, int, float))
        found[str(name)[:MAX_SETTING_CHARACTERS]] = value if plain else str(value)[:MAX_SETTING_CHARACTERS]
    return found
