"""Every threshold of the diagnosis in one frozen value, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from kvdiag.kv.calibration import DRIFT_LIMIT_RATIO

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is still normal. Every judgement takes its thresholds from here and from nowhere else."""

    idle_samples: int = 2
    """An idle floor needs this many samples in a row that agree: one alone may fall between two engine steps."""

    lost_readings: int = 3
    """Readings in a row that failed up to the end before a source counts as lost: one may be late on a busy machine."""

    process_lists_seconds: float = 15.0
    """Age of a device reading with process lists that the ledger prefers to a newer one without: they come every 5 s,
    and after three that are missing their processes may be gone."""

    load_samples: int = 2
    """A load has to be seen whole by this many samples, or its step is unknown (a blind spot is no fault)."""

    blocks_per_request_tolerance: int = 1
    """Token streams and gauge are read some milliseconds apart; meanwhile a request may enter its next block."""

    kv_excess_fault_ratio: float = 1.5
    """Measured over expected blocks: beyond it requests hold half as much again as their tokens need."""

    warmup_cycles_ratio: float = 0.25
    """Share of equal cycles (at least two) left out as first touch: lazily loaded kernels and workspaces come with the
    first requests of a shape and never return, so a before/after test of one request is wrong half of the time."""

    judged_cycles: int = 3
    """Equal cycles left after warm-up without which growth is not judged."""

    device_quantum_bytes: int = 2 * MIB
    """cudaMalloc maps whole 2 MiB pages: no smaller change is visible through NVML."""

    torch_quantum_bytes: int = 64 * 2**10
    """Torch counts to the 512 bytes; below this per cycle a run of eight cannot tell a leak from tables that fill."""

    device_rising_ratio: float = 0.75
    """Share of judged cycles in which a leak must have grown. One step among flat cycles is an event, not a leak."""

    device_deceleration_ratio: float = 0.5
    """Growth of the later judged cycles over that of the earlier: below it growth is coming to an end."""

    context_bytes: int = 1100 * MIB
    """Most that a CUDA context, loaded modules and NCCL take per process (250 to 1100 MiB in public reports)."""

    activation_ratio: float = 0.08
    """Share of the device that activations, CUDA graphs and allocator slack may take beside weights and pool."""

    foreign_suspect_bytes: int = 256 * MIB
    """The smallest CUDA context of somebody else; a desktop's display server stays below."""

    foreign_fault_ratio: float = 0.02
    """Share of the device that others may hold before it costs the server a noticeable part of its pool."""

    least_context_bytes: int = 250 * MIB
    """Lower end of the same: what is left beyond pool, weights and this has to be something else."""

    duplicate_certainty_ratio: float = 1.5
    """Weights over the overhead allowance from which a copy cannot be mistaken for activations, graphs or a drafter."""

    headroom_bytes: int = 300 * 10**6
    """Free device memory at idle below which the next transient allocation fails; 3 to 330 MiB were free in reported
    out-of-memory cases of servers that were packed too tightly."""

    over_budget_ratio: float = 0.02
    """Share of the device beyond `fraction x total` that a server may take: graphs and NCCL are not all budgeted."""

    under_budget_ratio: float = 0.5
    """Share of its own budget that a server must use; below it something else than the fraction sized the pool."""

    model_drift_ratio: float = DRIFT_LIMIT_RATIO
    """Most that the engine's own figures may differ from those that its model's config gives; rounding, and a last
    block that is not full, stay far below."""

    reserved_gap_bytes: int = 2 * 10**9
    """The rule of thumb "reserved - allocated > 2 GB": from here on the gap is shown by its parts. Cached activations
    and graph pools exceed it on healthy servers (1.3 to 37 GiB in public logs), so that it alone is no fault."""

    stranded_ratio: float = 0.1
    """Share of torch's reserved bytes that lie free beside live blocks, from which retried allocations are theirs."""

    failure_seconds: float = 3600.0
    """Age of a black box that still speaks of the server as it is: holes stay until the process is restarted, the
    requests that met them do not."""

    retry_window_seconds: float = 300.0
    """Flushes of torch's cache within five minutes count together: while a model is loaded they are normal."""

    idle_gap_seconds: float = 600.0
    """Ten minutes without a request, after which what lies unused is not between two of them."""

    idle_gap_bytes: int = GIB
    idle_gap_ratio: float = 0.02
    """What may lie unused through that time beside activations: a gigabyte, or this share of the device."""

    imbalance_ratio: float = 0.02
    """Share of the device that one rank may hold beyond the mean: as much as others may before it costs the pool."""

    waiting_samples: int = 3
    """Samples in a row with requests waiting and no room for one more before it counts: admission takes some steps."""


DEFAULT_LIMITS = Limits()
