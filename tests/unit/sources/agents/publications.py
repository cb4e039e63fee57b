"""A publication as an agent writes it, what is read of it, and changed copies."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvdiag.agent.process import identity
from kvdiag.model import Allocator, Memory, ReservedSplit
from kvdiag.sources.agents import allocator_files as agents
from kvdiag.sources.agents.allocator_files import TorchAllocatorSource

MIB = 2**20
UUID = "01234567-89ab-cdef-0123-456789abcdef"
SELF = identity()

PUBLICATION: dict[str, Any] = {
    "kvdiag_agent": 1,
    "wall_seconds": 1_800_000_000.0,
    "monotonic_seconds": 500.0,
    "sequence": 17,
    "period_seconds": 1.0,
    "publish_seconds": 6e-05,
    "process": {**SELF, "title": "VLLM::Worker_TP1", "resident_bytes": 10**9, "anonymous_bytes": 10**8},
    "ranks": {"global": 1, "world": 2, "tensor": 1, "pipeline": 0},
    "torch": {"version": "2.13.0", "backend": "native", "settings": {"expandable_segments": False}},
    "devices": [
        {
            "index": 0,
            "uuid": UUID,
            "statistics": {
                "allocated_bytes": {
                    "current": 600 * MIB,
                    "peak": 700 * MIB,
                    "allocated": 900 * MIB,
                    "freed": 300 * MIB,
                },
                "reserved_bytes": {"current": 1000 * MIB, "peak": 1000 * MIB, "allocated": 1000 * MIB, "freed": 0},
                "active_bytes": {"current": 620 * MIB, "peak": 0, "allocated": 0, "freed": 0},
                "num_alloc_retries": 2,
                "num_ooms": 1,
                "private_pools": {"count": 1, "reserved_bytes": 30 * MIB},
            },
            "driver": {
                "total_bytes": 80_000 * MIB,
                "free_bytes": 70_000 * MIB,
                "driver_reserved_bytes": 500 * MIB,
                "processes": [[SELF["pid"], 1500 * MIB], [1, None]],
            },
            "fragmentation": {
                "at_monotonic_seconds": 470.0,
                "reserved_bytes": 1000 * MIB,
                "live_bytes": 600 * MIB,
                "pending_bytes": 20 * MIB,
                "private_bytes": 30 * MIB,
                "releasable_bytes": 100 * MIB,
                "stranded_bytes": 250 * MIB,
                "largest_free_block_bytes": 64 * MIB,
                "pinned_segments": 1,
                "pinned_free_bytes": 19 * MIB,
                "request_bytes": 512 * MIB,
                "fits": True,
                "unusable_ratio": 0.1,
            },
        }
    ],
    "errors": {},
}
CENSUS_PUBLICATION: dict[str, Any] = {
    "at_monotonic_seconds": 498.5,
    "engine": "0",
    "usable_blocks": 1000,
    "owners": {
        "running": 100,
        "waiting": 0,
        "connector": 20,
        "deferred": 0,
        "pinned": 0,
        "cached_free": 300,
        "free": 574,
        "orphaned": 6,
        "unconfirmed": 0,
    },
    "groups": [120],
    "counts": 40,
    "closed_counts": 12,
    "connector": "NixlConnector",
    "connector_oldest_seconds": 3.5,
    "pinned_oldest_seconds": None,
    "orphans": [7, 8, 9, 10, 11, 12],
    "culprits": [{"id": "cmpl-1-0", "blocks": 4, "prompt_tokens": 30, "output_tokens": 5, "end": "aborted"}],
}
"""What the agent in an engine core adds."""

REQUESTS_PUBLICATION: dict[str, Any] = {
    "at_monotonic_seconds": 497.5,
    "requests": 12,
    "tail_tokens": 90,
    "tail_largest_tokens": 15,
    "longest_requests": 10,
    "longest_blocks": 95,
    "stalled_requests": 1,
    "stalled_blocks": 8,
    "stalled_oldest_seconds": 75.0,
}
"""How the requests of this engine core use their blocks."""

READ = Allocator(
    device_uuid=UUID,
    pid=SELF["pid"],
    pid_seen=True,
    start_ticks=SELF["start_ticks"],
    age_seconds=0.0,
    allocated_bytes=600 * MIB,
    reserved_bytes=1000 * MIB,
    active_bytes=620 * MIB,
    private_pools_bytes=30 * MIB,
    alloc_retries_total=2,
    ooms_total=1,
    backend="native",
    expandable_segments=False,
    process_bytes=1500 * MIB,
    memory=Memory(total_bytes=80_000 * MIB, free_bytes=70_000 * MIB, driver_reserved_bytes=500 * MIB),
    split=ReservedSplit(
        age_seconds=30.0,
        reserved_bytes=1000 * MIB,
        live_bytes=600 * MIB,
        pending_bytes=20 * MIB,
        private_bytes=30 * MIB,
        releasable_bytes=100 * MIB,
        stranded_bytes=250 * MIB,
        largest_free_block_bytes=64 * MIB,
        pinned_segments=1,
        pinned_free_bytes=19 * MIB,
        request_bytes=512 * MIB,
        fits=True,
        unusable_ratio=0.1,
    ),
    title="VLLM::Worker_TP1",
    tensor_rank=1,
    pipeline_rank=0,
)


def changed(path: str, value: object) -> dict[str, Any]:
    """The publication with another value at a path of names and numbers; `...` takes what is there away."""
    told = copy.deepcopy(PUBLICATION)
    *way, last = (int(step) if step.isdigit() else step for step in path.split("."))
    inner: Any = told
    for step in way:
        inner = inner[step]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return told


NAME = f"agent-{SELF['pid']}-{SELF['start_ticks']}.json"


def write(folder: Path, told: object = PUBLICATION, name: str = NAME) -> Path:
    """A file as the agent leaves it."""
    path = folder / name
    path.write_text(told if isinstance(told, str) else json.dumps(told))
    path.chmod(0o640)
    return path


def read(folder: Path) -> tuple[tuple[Allocator, ...] | None, list[str]]:
    """One reading: the allocators with no age, and what each gap says."""
    found, gaps, _ = TorchAllocatorSource(folder).read()
    assert all(each.age_seconds < agents.MIN_STALE_SECONDS for each in found or ())
    young = None if found is None else tuple(replace(each, age_seconds=0.0) for each in found)
    return young, [f"{gap.kind}: {gap.reason}" for gap in gaps]
