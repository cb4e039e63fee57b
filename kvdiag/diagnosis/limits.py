"""Every threshold that judges, each with its reason: `Limits`, with a section for each rule.

Those of growth are nested (growth/growth_limits.py), as are those of a fleet; admission has its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvdiag.diagnosis.growth import growth_limits
from kvdiag.diagnosis.growth.growth_limits import GIB, KIB, MIB
from kvdiag.kv.calibration.predicted_vs_reported import DRIFT_LIMIT_RATIO
from kvdiag.model import PressureThresholds

PRESSURE = PressureThresholds(warning_ratio=0.8, critical_ratio=0.9)
"""A fifth that is free takes a burst; with a tenth the next requests wait. The figures of the alerts' own rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """From when on replicas are compared, and what growth of theirs counts."""

    replicas: int = 6
    """Replicas of one version without which it is not judged: five that all grow are 1 in 32 by chance, six 1 in 64."""

    preferred_replicas: int = 12
    """From here on 20 MB/h show among level steps and wandering memory, too, and among many components."""

    first_seconds: float = 3600.0
    """Life of each replica that is left out: after an hour 9 % of a warm-up of 25 minutes are still to come."""

    least_seconds: float = 6 * 3600.0
    """Life after that hour without which a replica is not compared: the later half of a warm-up is flat by then."""

    certain_seconds: float = 20 * 3600.0
    """Age for a fault: bounded caches fill at a steady rate for 6 to 12 hours, which half a day cannot distinguish."""

    idle_settle_seconds: float = 5.0
    """A reading counts as idle so long after the last request: freed memory is returned late."""

    blocks: int = 48
    """Medians that stand for a replica's life: half hours of a day, each of 60 readings at a scrape in 30 s."""

    idle_blocks_ratio: float = 0.25
    """Share of them that must hold idle readings, for blocks held at idle: they are exact, and nights are enough."""

    least_bytes_per_hour: float = 2e6
    """Growth of the later half from which it counts: what wanders for a day stays below it in the middle of six."""

    least_blocks_per_hour: float = 0.25
    """The same for KV blocks held at idle: six in a day, of a count that must be 0."""

    steps_p: float = 0.01
    """p-value of so many steps up and so few down from which they are the growth, and not events beside it."""

    significance: float = 0.02
    """Chance of as many replicas growing as much where either direction is as likely (signed ranks)."""

    falls_significance: float = 0.1
    """Chance of so many falls beside the rises of all replicas up to which they are the rule: garbage that is collected
    every few hours only rises once its falls are taken for jumps."""

    discovery_ratio: float = 0.05
    """Share of false ones among the components of all versions that are called (Benjamini and Hochberg)."""

    bounds_ratio: float = 0.9
    """Probability that the bounds beside a version's growth hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """When a request is admitted, waits or is shed (kvdiag/admission.py)."""

    caution_ratio: float = 0.9
    """Output length assumed for the new request, as a quantile of finished ones; other requests count with the mean."""

    reserve_ratio: float = 0.05
    """Share of the pool that stays free: requests finish in bursts, and the newest sample is a second old."""

    least_finished: int = 20
    """Finished requests needed before their lengths are used: with fewer, one long request decides the quantile."""

    most_queued_ratio: float = 1.0
    """Shed when the queue needs more than this share of the pool: a request would wait for a whole turnover."""

    stale_seconds: float = 5.0
    """Samples older than this are ignored: requests start and finish in less."""


ADMISSION_LIMITS = AdmissionLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is still normal. Every judgement takes its thresholds from here and from nowhere else."""

    # Every rule: what counts as a sample
    idle_samples: int = 2
    """An idle floor needs this many samples in a row that agree: one alone may fall between two engine steps."""

    load_samples: int = 2
    """Samples with all requests of a load in the pool without which its step is unknown."""

    lost_readings: int = 3
    """Readings in a row that failed up to the end before a source counts as lost: one may be late on a busy machine."""

    process_lists_seconds: float = 15.0
    """Age of a device reading with process lists that the ledger prefers to a newer one without: they come every 5 s,
    and after three that are missing their processes may be gone."""

    # leak.kv_blocks
    late_blocks_seconds: float = 60.0
    """Time in which blocks of finished requests are released: transfers to another instance take seconds."""

    late_blocks_ratio: float = 0.02
    """Share of the pool that is noticed when it is released later."""

    late_blocks_fault_ratio: float = 0.25
    """Share of the pool that is a fault when it is released later twice: a server of three quarters, for minutes."""

    connector_timeout_seconds: float = 480.0
    """Until then a KV connector may hold blocks of finished requests (VLLM_NIXL_ABORT_REQUEST_TIMEOUT,
    VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT).
    """

    busy_floor_seconds: float = 6.0 * 3600.0
    """Least time by which a server that is never idle is judged under its load: a few hours may be one of its loads."""

    busy_floor_p: float = 0.01
    """p-value of a rise of its lowest readings as steep without growth, under autocorrelation."""

    busy_floor_ratio: float = 0.05
    """Share of the pool that a leak below the detection limit may have taken from a busy server that is called flat."""

    busy_floor_cells: int = 60
    """Bins of that time, each with its lowest sample: enough to test a slope, wide enough to hold a low one."""

    busy_floor_errors: float = 2.0
    """Standard errors of a slope, within which it lies with 95 %."""

    hit_pieces: int = 8
    """Pieces of equal traffic over which the share of prefix hits has to fall, one after the other."""

    hit_tokens: int = 100_000
    """Prompt tokens looked up in each of them: fewer are a handful of prompts, and those differ."""

    hit_seconds: float = 7200.0
    """Least time over which that is looked at: a batch of other prompts is over within an hour or two."""

    hit_noise_ratio: float = 0.03
    """Share by which a piece may be above the one before."""

    hit_first_ratio: float = 0.2
    """Share of hits at first, below which prompts share too little for a fall to say anything."""

    hit_left_ratio: float = 0.1
    """What is left of it at last: traffic that changes lowers it, and seldom to a tenth, step by step."""

    hit_full_ratio: float = 0.9
    """Usage of the pool from which kept prefixes make room for requests."""

    # leak.device_*, leak.host, benign.warmup
    device_quantum_bytes: int = 2 * MIB
    """cudaMalloc maps whole 2 MiB pages: no smaller change is visible through NVML."""

    torch_quantum_bytes: int = 64 * KIB
    """Torch counts to the 512 bytes; below this per cycle eight cycles cannot separate a leak from tables that fill."""

    growth: growth_limits.GrowthLimits = growth_limits.GROWTH_LIMITS
    """When readings over hours keep growing."""

    cycles: growth_limits.CycleLimits = growth_limits.CYCLE_LIMITS
    """When readings after equal test cycles keep growing."""

    soak: growth_limits.SoakLimits = growth_limits.SOAK_LIMITS
    """When readings after a soak's load and idle cycles keep growing."""

    fleet: FleetLimits = FleetLimits()
    """What the replicas of one version, taken together, have to show."""

    # fragmentation.kv_waste and the steps' blocks
    blocks_per_request_tolerance: int = 1
    """Token streams and gauge are read some milliseconds apart; meanwhile a request may enter its next block."""

    kv_excess_fault_ratio: float = 1.5
    """Measured over expected blocks: beyond it requests hold half as much again as their tokens need."""

    metrics_window_seconds: float = 3600.0
    """Window in which one request's blocks are compared with the counters: traffic of one kind, many requests."""

    metrics_changes: int = 8
    """Readings after which more or fewer requests run, without which their median says nothing of one request."""

    metrics_prompts: int = 8
    """Prompts that must have come at least: fewer may all be still resident."""

    metrics_tail_factor: float = 10.0
    """Most that a request generates over the mean: lengths of answers are spread over one order of magnitude."""

    metrics_waste_ratio: float = 4.0
    """Blocks of a request over the most it can need, by the metrics: the usual padding of hybrid pages stays below."""

    metrics_waste_fault_ratio: float = 10.0
    """The same for a fault, where a second counter of the engine agrees on the prompts' tokens."""

    metrics_windows: int = 3
    """Windows in a row that must all show such waste for a fault, where it is less than that."""

    metrics_agreement_ratio: float = 2.0
    """How far that counter may be off: it counts again what is looked up again, and leaves out what was not."""

    # fragmentation.allocator
    large_request_bytes: int = 512 * MIB
    """A block that should still find room in torch's holes, as the agents look for one (activations of a batch)."""

    reserved_gap_bytes: int = 2 * 10**9
    """The rule of thumb "reserved - allocated > 2 GB": from here on the gap is shown by its parts. Cached activations
    and graph pools exceed it on healthy servers (1.3 to 37 GiB in public logs), so that it alone is no fault."""

    stranded_ratio: float = 0.1
    """Share of torch's reserved bytes that lie free beside live blocks, from which retried allocations are theirs."""

    holes_ratio: float = 0.01
    """Share of the device that torch's message has to call unallocated before holes are the cause. Servers that fill a
    device die with 0.1 to 0.8 % of it unallocated, now and then more than was asked for; those that holes killed, with
    2 % and more (public threads, tests/fixtures/failures)."""

    async_rest_ratio: float = 0.5
    """Share of the device in use and not counted by torch from which cudaMallocAsync's pool is suspect."""

    failure_seconds: float = 3600.0
    """Age of a black box that still speaks of the server as it is: holes stay until the process is restarted, the
    requests that met them do not."""

    retry_window_seconds: float = 300.0
    """Flushes of torch's cache within five minutes count together: while a model is loaded they are normal."""

    idle_gap_seconds: float = 600.0
    """Ten minutes without a request, after which what lies unused is not between two of them."""

    window_margin_seconds: float = 60.0
    """A window is complete with a sample up to this much before its start: the slowest agents publish by then."""

    idle_gap_bytes: int = GIB
    idle_gap_ratio: float = 0.02
    """What may lie unused through that time beside activations: a gigabyte, or this share of the device."""

    left_over_seconds: float = 3600.0
    """An hour since a server's start in which no request used what its loading left: from then on it is a fault."""

    begun_seconds: float = 300.0
    """What a server may have served at the first sample, in time at its later rate, to count as observed from its
    start."""

    # baseline.*: what a server may use
    context_bytes: int = 1100 * MIB
    """Most that a CUDA context, loaded modules and NCCL take per process (250 to 1100 MiB in public reports)."""

    least_context_bytes: int = 250 * MIB
    """Lower end of the same: what is left beyond pool, weights and this has to be something else."""

    activation_ratio: float = 0.08
    """Share of the device that activations, CUDA graphs and allocator slack may take beside weights and pool."""

    driver_reserved_bytes: int = GIB
    """Most that a driver keeps of a device, where it is not reported (464 to 640 MiB observed)."""

    # baseline.foreign_memory
    foreign_suspect_bytes: int = 256 * MIB
    """The smallest CUDA context of somebody else; a desktop's display server stays below."""

    foreign_fault_ratio: float = 0.02
    """Share of the device that others may hold before it costs the server a noticeable part of its pool."""

    neighbour_seconds: float = 60.0
    """A process counts as a neighbour that two process lists so far apart show: what starts a server comes and goes."""

    unlisted_bytes: int = 2 * GIB
    unlisted_ratio: float = 0.1
    """Unexplained memory that counts as other processes' without a list of them: libraries took up to 10 GiB."""

    # baseline.duplicate_model
    duplicate_certainty_ratio: float = 1.5
    """Weights over the overhead allowance from which a copy cannot be mistaken for activations, graphs or a drafter."""

    level_samples: int = 2
    """Equal samples that make a level of memory; more of them add nothing."""

    copy_size_ratio: float = 0.03
    """How far a step may be from the checkpoint's size to be a copy of it: padding, scales, and pages."""

    # baseline.misconfigured, spike.*
    headroom_bytes: int = 300 * 10**6
    """Free device memory at idle below which the next transient allocation fails; 3 to 330 MiB were free in reported
    out-of-memory cases of servers that were packed too tightly."""

    over_budget_ratio: float = 0.02
    """Share of the device beyond `fraction x total`, and beyond a context for each process, that a server may take:
    graphs and NCCL are not all budgeted."""

    under_budget_ratio: float = 0.5
    """Share of its own budget that a server must use; below it something else than the fraction sized the pool."""

    model_drift_ratio: float = DRIFT_LIMIT_RATIO
    """Most that the engine's own figures may differ from those that its model's config gives; rounding, and a last
    block that is not full, stay far below."""

    exit_freed_ratio: float = 0.1
    """Share of a device that comes free with a server that ends; a context and activations alone are less."""

    max_fraction_ratio: float = 0.97
    """Largest memory fraction that is advised: beyond it, what libraries take outside any budget does not fit."""

    # capacity.*
    waiting_samples: int = 3
    """Samples in a row with requests waiting and no room for one more before it counts: admission takes some steps."""

    queue_seconds: float = 600.0
    """Time with requests that wait for room, and time without, from which the work done in both is compared."""

    queue_collapse_ratio: float = 0.5
    """Work done while requests wait for room, over that at other times: a full server does more, not half."""

    stuck_seconds: float = 120.0
    """Time without a token in which a request that has all of the pool is stuck: a step of the longest prefill takes
    seconds."""

    # imbalance.rank
    imbalance_ratio: float = 0.02
    """Share of the device that one rank may hold beyond the others: as much as others may before it costs the pool."""

    imbalance_fault_ratio: float = 0.05
    """The same for a fault, beside ranks that agree: more than any two contexts and their libraries."""

    agreeing_ranks: int = 3
    """Ranks that hold the same, to less than a context, beside which another stands out with less."""

    standing_out_bytes: int = GIB
    """What it then may hold beyond them: a context and its libraries, once."""

    uneven_pools_ratio: float = 0.1
    """Share of the largest pool that another engine's may lack: profiles of equal ranks differ by some hundred MiB."""

    uneven_pools_fault_ratio: float = 0.25
    """The same for a fault, on GPUs of one size: a quarter of an engine's requests have nowhere to go."""

    # isolation.prefix_cache
    isolation_rounds: int = 3
    """Requests of each kind of the isolation probe without which it does not decide: one that comes to another replica
    or engine misses whatever the cache does."""

    isolation_significance: float = 0.01
    """p-value of times to first token that far apart where hits and misses are alike (Mann-Whitney): with six new
    prompts and six repeated ones it can reach 1 in 924."""

    # Post-mortem
    same_ratio: float = 0.01
    same_bytes: int = 11 * MIB
    """How far figures of one failure may differ between sources: texts print two decimals, of GiB ten MiB."""

    last_seconds: float = 600.0
    """The end of a trace that may show what led to a crash."""

    # Alerts
    pressure: PressureThresholds = PRESSURE
    """Memory pressure that is not normal any more: shown, and for alerts; no verdict rests on it."""


DEFAULT_LIMITS = Limits()
