"""Every threshold that judges, each with its reason: `Limits`, with a section for each rule.

They stand together so that two rules cannot use two figures for one thing, and are passed to every rule, so that tests
and benchmarks can vary them; users set only the few of `commands/options/thresholds`. A docstring says what a value
separates and where it comes from: the engine's source, a measurement, or reports. Those of growth, of a busy
pool, of a fleet and of a server's lives are nested (*_limits.py); kvdiag/admission.py has its own.
"""

from dataclasses import dataclass

from kvdiag.diagnosis.blocks.busy_limits import BUSY_LIMITS, BusyLimits
from kvdiag.diagnosis.fleet_limits import FLEET_LIMITS, FleetLimits
from kvdiag.diagnosis.growth import growth_limits
from kvdiag.diagnosis.growth.growth_limits import GIB, KIB, MIB
from kvdiag.diagnosis.life_limits import LIFE_LIMITS, LifeLimits
from kvdiag.kv.calibration.engine_report import DRIFT_LIMIT_RATIO
from kvdiag.model import PressureThresholds

PRESSURE = PressureThresholds(warning_ratio=0.8, critical_ratio=0.9)
"""A free fifth absorbs a burst; with a free tenth the next requests wait. The alerts use the same figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is still normal. Every verdict takes its thresholds from here."""

    # All rules: samples, and where a life of the server ends
    idle_samples: int = 2
    """An idle floor needs this many samples in a row that agree: one alone may fall between two engine steps."""

    unproven_ratio: float = 0.1
    """Share of a pool that need not be filled again to show that nothing of it is lost."""

    refresh_tokens: int = 17
    """Prompt and output of the request that a run sends to an engine whose gauges move only when a request ends."""

    load_samples: int = 2
    """Samples with all requests of a load in the pool without which its step is unknown."""

    lost_readings: int = 3
    """Failed samples in a row at the end from which a source counts as lost: one may be late on a busy machine."""

    process_lists_seconds: float = 15.0
    """Age up to which the ledger prefers a device sample with process lists to a newer one without: they come every 5
    s, and after three missing ones the processes may have exited."""

    # leak.kv_blocks
    kv_growth_intervals: int = 3
    """Idle intervals without which growth of the blocks in use has no bounds, and no time to exhaustion."""

    late_blocks_seconds: float = 60.0
    """Time in which blocks of finished requests are released: transfers to another instance take seconds."""

    late_blocks_ratio: float = 0.02
    """Share of the pool that is reported if it is released later, or stays in use at a busy server's lowest load."""

    late_blocks_fault_ratio: float = 0.25
    """Share of the pool that is a fault if it is released later twice: three quarters are left for minutes."""

    census_counts: int = 3
    """Counts of all owners in a row that must add up to the pool: one may fall between two engine steps."""

    connector_timeout_seconds: float = 480.0
    """Until then a KV connector may hold blocks of finished requests (VLLM_NIXL_ABORT_REQUEST_TIMEOUT,
    VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT)."""

    stalled_seconds: float = 300.0
    """Time without a token or a change of usage after which open requests count as stalled: engines end a step that
    hangs by then (--watchdog-timeout, VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS), and a pause for new weights is shorter."""

    busy: BusyLimits = BUSY_LIMITS
    """When a pool loses blocks by what a server that is never idle shows."""

    # leak.device_*, leak.host, benign.warmup
    device_quantum_bytes: int = 2 * MIB
    """cudaMalloc maps whole 2 MiB pages: no smaller change is visible through NVML."""

    torch_quantum_bytes: int = 64 * KIB
    """Torch counts to the 512 bytes; below this per cycle eight cycles cannot separate a leak from tables that fill."""

    lives: LifeLimits = LIFE_LIMITS
    """When a life of the server begins and ends, and when its end counts."""

    growth: growth_limits.GrowthLimits = growth_limits.GROWTH_LIMITS
    """When memory over hours counts as growing."""

    cycles: growth_limits.CycleLimits = growth_limits.CYCLE_LIMITS
    """When memory after equal test cycles counts as growing."""

    soak: growth_limits.SoakLimits = growth_limits.SOAK_LIMITS
    """When memory after a soak's load and idle cycles counts as growing."""

    fleet: FleetLimits = FLEET_LIMITS
    """When the replicas of one version, taken together, count as growing."""

    # fragmentation.kv_waste and the steps' blocks
    requests_age_seconds: float = 180.0
    """Of the agent's look at requests, which it takes once a minute."""

    blocks_per_request_tolerance: int = 1
    """Token streams and gauge are read some milliseconds apart; meanwhile a request may enter its next block."""

    tokens_per_request_tolerance: int = 16
    """The same for pools of smaller blocks: a busy machine reads a stream some tokens after the gauge counted them."""

    completion_tokens_tolerance: int = 128
    """Of gauges that show the step before a request ended: after it the other requests continue."""

    share_error_ratio: float = 0.05
    """Of a pool whose size was measured by the single request's share: a block or two of that request's thirty."""

    kv_excess_fault_ratio: float = 1.5
    """Measured over expected blocks: beyond it requests hold half as much again as their tokens need."""

    metrics_window_seconds: float = 3600.0
    """Window in which one request's blocks are compared with the counters: traffic of one kind, many requests."""

    metrics_changes: int = 8
    """Samples at which the number of running requests changed, without which their median is not used."""

    metrics_prompts: int = 8
    """Prompts that must have come at least: fewer may all still be resident."""

    metrics_tail_factor: float = 10.0
    """Most that a request generates over the mean: lengths of answers are spread over one order of magnitude."""

    metrics_waste_ratio: float = 4.0
    """Blocks of a request over the most it can need, by the metrics: the usual padding of hybrid pages stays below."""

    metrics_waste_fault_ratio: float = 10.0
    """The same for a fault, where a second counter of the engine agrees on the prompts' tokens."""

    metrics_windows: int = 3
    """Windows in a row that must all show such waste for a fault, if it is less than that."""

    metrics_agreement_ratio: float = 2.0
    """Tolerance of that counter: it counts repeated look-ups again, and leaves out prompts without a look-up."""

    # fragmentation.allocator
    large_request_bytes: int = 512 * MIB
    """Block size for which the agents look for room between live blocks (activations of a batch)."""

    reserved_gap_bytes: int = 2 * 10**9
    """The rule of thumb "reserved - allocated > 2 GB": above it the gap is broken down into its parts. Cached
    activations and graph pools exceed it on healthy servers (1.3 to 37 GiB in public logs), so that it alone is no
    fault."""

    stranded_ratio: float = 0.1
    """Share of torch's reserved bytes free between live blocks, from which they explain retried allocations."""

    holes_ratio: float = 0.01
    """Unallocated share of the device in torch's message from which fragmentation is the cause. Servers that fill a
    device run out of memory with 0.1 to 0.8 % unallocated, sometimes more than requested; fragmented ones with 2 % and
    more (public threads, tests/fixtures/failures)."""

    async_rest_ratio: float = 0.5
    """Share of the device in use and not counted by torch from which cudaMallocAsync's pool is suspect."""

    failure_seconds: float = 3600.0
    """Age up to which a black box describes the present server: fragmentation lasts until a restart, the requests that
    failed by it do not."""

    retry_window_seconds: float = 300.0
    """Flushes of torch's cache within five minutes count together: while a model is loaded they are normal."""

    idle_gap_seconds: float = 600.0
    """Time without a request after which unused memory is not just between two requests."""

    window_margin_seconds: float = 60.0
    """A window is complete with a sample up to this much before its start: the slowest agents publish by then."""

    idle_gap_bytes: int = GIB
    idle_gap_ratio: float = 0.02
    """Normal unused memory through that time, on top of activations: a gigabyte, or this share of the device."""

    left_over_seconds: float = 3600.0
    """Time since the start from which memory left over from loading, unused by any request, is a fault."""

    begun_seconds: float = 300.0
    """Traffic before the first sample, as time at the later rate, up to which a server was observed from its start."""

    # baseline.*: what a server may use
    context_bytes: int = 1100 * MIB
    """Most that a CUDA context, loaded modules and NCCL take per process (250 to 1100 MiB in public reports)."""

    min_context_bytes: int = 250 * MIB
    """Lower end of the same: memory beyond pool, weights and this is something else."""

    activation_ratio: float = 0.08
    """Share of the device that activations, CUDA graphs and allocator slack may take on top of weights and pool."""

    driver_reserved_bytes: int = GIB
    """Largest reservation of a driver, if it is not reported (464 to 640 MiB observed)."""

    # baseline.foreign_memory
    foreign_suspect_bytes: int = 256 * MIB
    """The smallest CUDA context of another process; a desktop's display server stays below."""

    foreign_fault_ratio: float = 0.02
    """Share of the device that other processes may use before it costs the server a noticeable part of its pool."""

    process_lists_apart_seconds: float = 60.0
    """Time between two process lists that must both show another process: launchers of a server exit soon."""

    unlisted_bytes: int = 2 * GIB
    unlisted_ratio: float = 0.1
    """Unexplained memory that counts as other processes' without a list of them: libraries took up to 10 GiB."""

    # baseline.duplicate_model
    duplicate_certainty_ratio: float = 1.5
    """Weights over the overhead allowance from which a copy cannot be mistaken for activations, graphs or a drafter."""

    max_extra_copies: int = 4
    """Copies of the weights beyond the first that are plausible; memory of more of them is something else."""

    copy_size_ratio: float = 0.03
    """How far a step may differ from the checkpoint's size and still be a copy of it: padding, scales, and pages."""

    # baseline.misconfigured, spike.*
    headroom_bytes: int = 300 * 10**6
    """Free device memory at idle below which the next transient allocation fails; 3 to 330 MiB were free in reported
    out-of-memory cases of servers that were packed too tightly."""

    over_budget_ratio: float = 0.02
    """Share of the device beyond `fraction x total`, and beyond a context for each process, that a server may take:
    graphs and NCCL are not all budgeted."""

    under_budget_ratio: float = 0.8
    """Share of its budget that a server must use on its fullest device at some time; below it something else than the
    fraction sized the pool. An engine sizes its pool by what the budget leaves, some percent less where it
    overestimates activations."""

    raised_at_once_ratio: float = 0.75
    """Share of the bytes beyond a budget that came at once, from which they are another process's: an engine takes
    its memory at its start, and a leak comes in many steps."""

    beyond_budget_seconds: float = 600.0
    """Time over which bytes beyond a budget must have stayed: a step's activations are released within seconds."""

    long_samples: int = 10
    long_alone_ratio: float = 0.9
    long_tokens_ratio: float = 0.4
    """When a queue is due to the length of requests: samples with a queue, the share in which one request runs and
    leaves no room for another, and the mean tokens of a request over those of the pool."""

    model_drift_ratio: float = DRIFT_LIMIT_RATIO
    """Most that the engine's own figures may differ from those predicted from its model's config; rounding, and a last
    block that is not full, stay far below."""

    exit_freed_ratio: float = 0.1
    """Share of a device that is freed when a server exits; a context and activations alone are less."""

    min_fraction_ratio: float = 0.1
    """Smallest memory fraction that is advised: a tenth of a device rarely holds weights, activations and a pool."""

    max_fraction_ratio: float = 0.97
    """Largest memory fraction that is recommended: above it, library memory outside any budget does not fit."""

    # capacity.*
    preempted_room_ratio: float = 0.25
    preempted_room_requests: float = 2.0
    """A pool with this share free, and room for so many mean requests, on both sides of a preemption did not fill and
    empty within a sample of a second."""

    step_output_tokens: int = 512
    """Most output of the concurrent step's requests, by the server's speed: a fix must hold for it in the next run."""

    burst_ratio: float = 0.02
    """Of the time in which requests lack room, and preemptions of the finished requests, in a history of
    `busy.floor_seconds` and in its last ones: below both, half an hour of a day, bursts cost next to nothing."""

    rare_ratio: float = 0.03
    """Of the time in which requests lack room, up to which so few preemptions are a suspect: 43 minutes of a day."""

    burst_gap_seconds: float = 300.0
    """Of the time between two samples no more is taken as observed: a scrape is a minute, seldom five."""

    burst_errors: float = 1.64
    """Standard errors below the observed share of the time up to which it is certain: one side of 90 %."""

    burst_over_seconds: float = 1800.0
    """Time since the last burst after which it is over."""

    pool_full_ratio: float = 0.95
    """Usage of a pool at which it counts as full where requests beyond it fail: a step adds a token for each."""

    pool_roomy_ratio: float = 0.5
    """Usage of such a pool up to which none of other clients' requests can have failed unnoticed between two samples:
    one that fails needs the rest of the pool, and a prompt of half the pool is processed for longer."""

    waiting_samples: int = 3
    """Samples in a row with requests waiting for room, from which it counts: admission takes some steps."""

    queue_seconds: float = 600.0
    """Least time with requests waiting for room, and without, for comparing throughput."""

    queue_collapse_ratio: float = 0.5
    """Throughput while requests wait for room, over that at other times: a full server has more, not half."""

    stuck_seconds: float = 120.0
    """Time without a token in which a request that has all of the pool is stuck: the longest prefill takes seconds."""

    # imbalance.rank
    imbalance_ratio: float = 0.02
    """Share of the device that one rank may use beyond the others, as for other processes."""

    imbalance_fault_ratio: float = 0.05
    """The same for a fault, if the other ranks agree: more than any two contexts and their libraries."""

    busy_rank_samples: int = 12
    """Samples of all ranks from which those of a server that is never idle are compared: a step more or less in one of
    them does not move a median of so many."""

    agreeing_ranks: int = 3
    agreeing_ratio: float = 0.1
    """Number of ranks that agree, for which a smaller excess of another rank counts: within a context of one another,
    or a tenth of that excess."""

    standing_out_bytes: int = GIB
    """That smaller excess: a context and its libraries, once."""

    uneven_pools_ratio: float = 0.1
    """Share of the largest pool that another engine's may lack: profiles of equal ranks differ by some hundred MiB."""

    uneven_pools_fault_ratio: float = 0.25
    """The same for a fault, on GPUs of one size: a quarter of an engine's requests have nowhere to go."""

    # isolation.prefix_cache
    isolation_rounds: int = 3
    """Requests of each kind without which the isolation probe does not decide: on another replica one misses anyway."""

    isolation_significance: float = 0.01
    """p-value of the difference between times to first token (Mann-Whitney): with six new prompts and six repeated ones
    it can reach 1 in 924."""

    # Post-mortem
    same_ratio: float = 0.01
    """How far figures of one failure may differ between sources: texts print two decimals, of the smallest GiB 1 %."""

    last_seconds: float = 600.0
    """The end of a trace that may show what led to a crash."""

    last_samples: int = 30
    """Samples at the end of a trace of which one with a running request shows that the server was serving."""

    host_limit_factor: float = 1.2
    """Host memory limit that is advised, over the one that was reached: the same would be reached again."""

    unexplained_ratio: float = 0.5
    """Share of a full pool below which the tokens of the requests that failed do not explain that it was full."""

    batch_tokens: int = 2048
    """Tokens on top that a batch may still bring: llama.cpp's --batch-size by default."""

    rounding_ratio: float = 0.05
    """Share of the blocks asked for that is missing by rounding: requests admitted by tokens take whole blocks."""

    outside_torch_ratio: float = 0.5
    """Share of the device that a failed process uses, from which it is the engine's own if torch has nothing of it."""

    torch_trace_ratio: float = 0.03
    """Share of a process's memory that torch reserves at most, where an engine allocates past it (public threads)."""

    # Alerts
    pressure: PressureThresholds = PRESSURE
    """Memory pressure above normal: displayed, and used by alerts; no verdict depends on it."""

    full_device_ratio: float = 0.98
    """Used share of a device from which it is full, even if a pool has free blocks: an engine leaves 8 % by default."""


DEFAULT_LIMITS = Limits()
