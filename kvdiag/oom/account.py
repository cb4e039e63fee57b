"""What one source reports about a failure: the engine's log, an agent's black box, a trace, a bare message."""

from dataclasses import dataclass
from typing import Literal

from kvdiag.model import Allocator, BlockOwners, ReservedSplit
from kvdiag.oom.last_requests import LastRequest
from kvdiag.oom.message import Shortage

ServingPhase = Literal["prefill", "decode", "request", "sampler", "logprobs", "encoder", "kv_growth", "scratch"]
"""`request`: serving, prefill or decode unknown. `kv_growth`: a cache that grows in torch. `scratch`: a pool next to
the buffers that were taken at start (ggml-cuda.cu::ggml_cuda_pool_vmm::alloc).
"""

StartPhase = Literal["load", "profile", "compute", "kv_pool", "graph_capture", "warmup", "startup", "wake"]
Phase = Literal[StartPhase, ServingPhase]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the engine had scheduled in the step that failed, as vLLM V1 dumps it (logging_utils/dump_input.py)."""

    scheduled_tokens: int | None
    requests: int | None
    largest_request: str | None = None
    largest_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One source's report of a failure. `exact` figures are bytes as counted; others were rounded for print.
    Anybody may have written an `unverified` one.

    `at_seconds` is a wall clock; `allocator` and `split` are what torch held when it failed, `owners` who held the
    KV pool. In a log, `line` is where the failure stands and `process` its name there; `last_requests` are those since
    the engine was last idle, where it counted its pool, or those whose blocks `connector` held; `later` counts the
    failures after it.
    """

    origin: str
    shortage: Shortage
    exact: bool = False
    unverified: bool = False
    at_seconds: float | None = None
    process: str = ""
    rank: int | None = None
    phase: Phase | None = None
    phase_source: str | None = None
    work: Work | None = None
    running: int | None = None
    waiting: int | None = None
    kv_usage_ratio: float | None = None
    max_num_seqs: int | None = None
    graphs_captured: tuple[int, int] | None = None
    """How many CUDA graphs of how many had been captured."""
    later: int = 0
    line: int = 0
    allocator: Allocator | None = None
    split: ReservedSplit | None = None
    owners: BlockOwners | None = None
    last_requests: tuple[LastRequest, ...] = ()
    connector: str | None = None
