"""The functions of torch's library that have no public name."""  # noqa: N999 - nor has the module

from __future__ import annotations

from typing import Any

from .world import WORLD, Observer


def _cuda_memorySnapshot(mempool_id: tuple[int, int, bool] | None = None) -> dict[str, Any]:  # noqa: N802 - torch's
    WORLD.need()
    WORLD.snapshots += 1
    return {
        "segments": WORLD.segments,
        "device_traces": [] if mempool_id == (0, 0, False) else [[{"action": "alloc"}]],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": WORLD.expandable,
            "roundup_power2_divisions": {"1": 0, ">": 0},
        },
        "external_annotations": [],
    }


def _cuda_isHistoryEnabled() -> bool:  # noqa: N802 - torch's name
    return WORLD.history


def _cuda_attach_out_of_memory_observer(observer: Observer) -> None:
    WORLD.need()
    if WORLD.backend != "native":
        raise RuntimeError("cudaMallocAsync does not yet support attachOutOfMemoryObserver.")
    WORLD.observers.append(observer)
