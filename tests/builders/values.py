"""Single values as kvdiag observes them: pools, engines, devices, processes, allocators and gaps.

`seen(…)` makes a timeline of single samples, for rules that need no steps.
"""

from dataclasses import replace
from typing import Any

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import (
    Allocator,
    BlockOwners,
    Device,
    Engine,
    Gap,
    KvPool,
    Memory,
    Process,
    ReservedSplit,
    Sample,
    Timeline,
)

KIB, MIB, GIB = 2**10, 2**20, 2**30

START_SECONDS = 1_000.0

SERVER_PID = 100
"""The server's process on GPU 0; its rank on GPU n has this plus n."""

OOM = (
    "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 512.00 MiB is "
    "free. Process 100 has 22.10 GiB memory in use. Of the allocated memory 21.00 GiB is allocated by PyTorch, and "
    "256.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
"""Torch's message where all that is left together is not enough."""

OOM_WITH_ROOM = OOM.replace("3.00 GiB", "2.50 GiB").replace("256.00 MiB is reserved", "2.95 GiB is reserved")
"""Torch's message where what is left would be enough in one piece."""

NO_NVML = Gap(
    "nvml",
    "absent",
    "no libnvidia-ml.so.1 here, so no NVIDIA GPU is visible; a container needs the NVIDIA runtime and "
    "NVIDIA_DRIVER_CAPABILITIES=utility",
)
GPU_LOST = Gap(source="nvml", kind="failed", reason="GPU 0 is unreachable (GPU is lost)")
NO_ANSWER = Gap(source="engine", kind="failed", reason="connection refused")


def pool(engine: str = "0", *, block_tokens: int = 16, usable_blocks: int = 6144, **changes: object) -> KvPool:
    """A pool as vLLM 0.32 reports it: 12 GiB in blocks of 2 MiB, three requests of 32,768 tokens."""
    total = usable_blocks + 1
    most = total / -(-32768 // block_tokens)
    usual = KvPool(
        engine=engine,
        block_tokens=block_tokens,
        total_blocks=total,
        usable_blocks=usable_blocks,
        usage_blocks=usable_blocks,
        capacity_tokens=int(most * 32768),
        max_concurrency=most,
        pool_bytes=total * 2 * MIB,
        cache_dtype="auto",
        memory_fraction_ratio=0.92,
        prefix_caching=True,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def engine(
    *,
    usage: float | None = 0.0,
    running: int | None = 0,
    waiting: int | None = 0,
    preemptions: int | None = 0,
    prompt_tokens: int | None = 0,
    label: str = "0",
) -> Engine:
    """One sample of an engine's metrics; idle by default."""
    return Engine(
        engine=label,
        kv_usage_ratio=usage,
        requests_running=running,
        requests_waiting=waiting,
        preemptions_total=preemptions,
        prompt_tokens_total=prompt_tokens,
        generation_tokens_total=0,
    )


def holding(blocks: int, *, of: KvPool | None = None, running: int = 0, waiting: int = 0) -> Engine:
    """An engine of which so many blocks are held."""
    return engine(usage=blocks / (of or pool()).usage_blocks, running=running, waiting=waiting)


def device(
    index: int = 0,
    *,
    used_bytes: int | None = 20 * GIB,
    total_bytes: int = 24 * GIB,
    driver_reserved_bytes: int | None = 464 * MIB,
    processes: tuple[Process, ...] | None = None,
    uuid: str | None = None,
    mig_parent_uuid: str | None = None,
) -> Device:
    """A GPU at a moment; `used_bytes` is `None` where its memory cannot be read."""
    memory = None
    if used_bytes is not None:
        memory = Memory(
            total_bytes=total_bytes, free_bytes=total_bytes - used_bytes, driver_reserved_bytes=driver_reserved_bytes
        )
    return Device(
        uuid=uuid or f"GPU-{index}",
        index=index,
        name="NVIDIA Test",
        memory=memory,
        processes=processes,
        mig_parent_uuid=mig_parent_uuid,
    )


def process(pid: int, used_bytes: int | None, name: str | None = "python3") -> Process:
    """A process on a device."""
    return Process(pid=pid, used_bytes=used_bytes, name=name)


def allocator(**changes: object) -> Allocator:
    """The server's allocator on GPU 0: 6 GiB of 8 GiB reserved are live."""
    usual = Allocator(
        device_uuid="0",
        pid=SERVER_PID,
        pid_seen=True,
        start_ticks=1,
        age_seconds=0.0,
        allocated_bytes=6 * GIB,
        reserved_bytes=8 * GIB,
        alloc_retries_total=0,
        ooms_total=0,
        backend="native",
        expandable_segments=False,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def owners(**changes: Any) -> BlockOwners:
    """A count in which all blocks have an owner, with changes that the free blocks make up for."""
    figures: dict[str, Any] = {
        "engine": "0",
        "pid": 7,
        "start_ticks": 1,
        "age_seconds": 0.2,
        "usable_blocks": 1000,
        "running_blocks": 100,
        "counts": 40,
        "closed_counts": DEFAULT_LIMITS.census_counts,
        **dict.fromkeys(
            ("waiting_blocks", "connector_blocks", "deferred_blocks", "pinned_blocks", "cached_free_blocks"), 0
        ),
        **dict.fromkeys(("orphaned_blocks", "unconfirmed_blocks"), 0),
        **changes,
    }
    held = sum(blocks for name, blocks in figures.items() if name.endswith("_blocks") and name != "usable_blocks")
    return BlockOwners(**{**figures, "free_blocks": 1000 - held})


def split(**changes: object) -> ReservedSplit:
    """The split of 8 GiB reserved, of which 6 are live and 2 releasable."""
    usual = ReservedSplit(
        age_seconds=0.0,
        reserved_bytes=8 * GIB,
        live_bytes=6 * GIB,
        pending_bytes=0,
        private_bytes=0,
        releasable_bytes=2 * GIB,
        stranded_bytes=0,
        largest_free_block_bytes=2 * GIB,
        pinned_segments=0,
        pinned_free_bytes=0,
        request_bytes=512 * MIB,
        fits=True,
        unusable_ratio=0.0,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def seen(*engines: Engine | tuple[Engine, ...] | Gap, devices: tuple[Device, ...] | Gap | None = None) -> Timeline:
    """A timeline without test steps: one reading of the devices, then one of the engines every tenth of a second."""
    samples: list[Sample] = []
    if isinstance(devices, Gap):
        samples.append(Sample(at_seconds=START_SECONDS, gaps=(devices,)))
    elif devices is not None:
        samples.append(Sample(at_seconds=START_SECONDS, devices=devices))
    for number, reading in enumerate(engines, start=1):
        at_seconds = START_SECONDS + number / 10
        if isinstance(reading, Gap):
            samples.append(Sample(at_seconds=at_seconds, gaps=(reading,)))
        else:
            page = reading if isinstance(reading, tuple) else (reading,)
            samples.append(Sample(at_seconds=at_seconds, engines=page))
    return Timeline(samples=tuple(samples))


def every_half_minute(*pages: Engine) -> Timeline:
    """A timeline of one engine's pages."""
    return Timeline(samples=tuple(Sample(at_seconds=30.0 * at, engines=(one,)) for at, one in enumerate(pages)))
