"""The values that everything else makes, judges or shows: frozen, keyword-only, refusing the impossible.

Rules of this file: a missing reading is `None`, never 0 or nan; a name carries its unit (`_bytes`, `_ratio`, `_seconds`,
`_tokens`, `_blocks`, `_total` for a counter); a value that cannot be (free > total, time running backwards) cannot be
built, so that a source which reads one has to say so with a `Gap`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Literal

GapKind = Literal["absent", "failed"]
Status = Literal["ok", "suspect", "fault", "unknown"]
Phase = Literal["begin", "offer", "release", "end"]
Provenance = Literal["measured", "reported", "computed"]

MAX_BYTES = 2**50
"""No memory of one host is larger (1 PiB); a larger figure is a wrong reading."""

MAX_COUNT = 2**53
"""Largest integer that a float on a metrics page can carry exactly."""


def _refuse(value: object, problem: str | None) -> None:
    if problem is not None:
        raise ValueError(f"{type(value).__name__}: {problem}")


def _count_problem(name: str, count: int | None, limit: int = MAX_COUNT) -> str | None:
    if count is None or 0 <= count <= limit:
        return None
    return f"{name} is {count}, not within 0..{limit}"


def _time_problem(name: str, seconds: float | None) -> str | None:
    if seconds is None or (math.isfinite(seconds) and seconds >= 0):
        return None
    return f"{name} is {seconds}, not a time"


def _first(*problems: str | None) -> str | None:
    return next((problem for problem in problems if problem is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Something that was looked for and not seen.

    `absent`: it does not exist here (no GPU, no such metric). `failed`: it should be there and did not answer.
    """

    source: str
    kind: GapKind
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One device's memory as NVML tells it.

    `used_bytes` is `total - free`, one denominator for everything: NVIDIA's documents disagree on whether NVML's own
    `used` holds the driver's reservation (release notes of R525 against the struct comment of R590), `free` is the same
    in every version.
    """

    total_bytes: int
    free_bytes: int
    driver_reserved_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse a device with no memory, or more free or reserved than there is."""
        _refuse(
            self,
            _first(
                None if 0 < self.total_bytes < MAX_BYTES else f"total_bytes is {self.total_bytes}",
                _count_problem("free_bytes", self.free_bytes, self.total_bytes),
                _count_problem("driver_reserved_bytes", self.driver_reserved_bytes, self.total_bytes),
            ),
        )

    @property
    def used_bytes(self) -> int:
        """Bytes nobody else can have, the driver's reservation among them."""
        return self.total_bytes - self.free_bytes

    @property
    def occupied_ratio(self) -> float:
        """Share of the device that is taken, 0..1."""
        return self.used_bytes / self.total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that NVML lists on a device. `used_bytes` is `None` where the driver does not tell."""

    pid: int
    used_bytes: int | None
    name: str | None = None

    def __post_init__(self) -> None:
        """Refuse impossible process ids and sizes."""
        _refuse(
            self,
            _first(_count_problem("pid", self.pid, 2**32), _count_problem("used_bytes", self.used_bytes, MAX_BYTES)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU or a MIG slice. `memory` and `processes` are `None` where that reading is not to be had."""

    uuid: str
    index: int
    name: str
    memory: Memory | None
    processes: tuple[Process, ...] | None = None
    mig_parent_uuid: str | None = None

    def __post_init__(self) -> None:
        """Refuse a device without an identity."""
        _refuse(self, _first(None if self.uuid else "no uuid", _count_problem("index", self.index, 1024)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine (data-parallel rank) as its metrics page shows it; `engine` is the page's label, "0" where it has none."""

    engine: str
    kv_usage_ratio: float | None = None
    requests_running: int | None = None
    requests_waiting: int | None = None
    requests_waiting_for_capacity: int | None = None
    preemptions_total: int | None = None
    prompt_tokens_total: int | None = None
    generation_tokens_total: int | None = None
    prefix_queries_total: int | None = None
    prefix_hits_total: int | None = None
    asleep: bool | None = None

    def __post_init__(self) -> None:
        """Refuse a usage outside 0..1 and negative counts."""
        usage = self.kv_usage_ratio
        _refuse(
            self,
            _first(
                None if usage is None or 0.0 <= usage <= 1.0 else f"kv_usage_ratio is {usage}, not within 0..1",
                *(
                    _count_problem(name, getattr(self, name))
                    for name in (
                        "requests_running",
                        "requests_waiting",
                        "requests_waiting_for_capacity",
                        "preemptions_total",
                        "prompt_tokens_total",
                        "generation_tokens_total",
                        "prefix_queries_total",
                        "prefix_hits_total",
                    )
                ),
            ),
        )

    @property
    def idle(self) -> bool | None:
        """Whether the engine says that nothing runs and nothing waits; `None` where it does not say."""
        if self.requests_running is None or self.requests_waiting is None:
            return None
        return self.requests_running == 0 and self.requests_waiting == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProcess:
    """Host memory of one of the server's processes; `anonymous_bytes` leaves file-backed pages out."""

    pid: int
    name: str
    resident_bytes: int
    anonymous_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse impossible sizes."""
        _refuse(
            self,
            _first(
                _count_problem("pid", self.pid, 2**32),
                _count_problem("resident_bytes", self.resident_bytes, MAX_BYTES),
                _count_problem("anonymous_bytes", self.anonymous_bytes, MAX_BYTES),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What kvdiag's own requests held when a sample was taken.

    `requests` are open, waiting ones included; `resident_tokens` has, for each that has produced its first token,
    the tokens whose keys and values the engine must hold: prompt + output - 1, since the token just sampled has not
    been through the model yet.
    """

    requests: int
    resident_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse more resident requests than open ones."""
        _refuse(
            self,
            _first(
                _count_problem("requests", self.requests),
                None
                if len(self.resident_tokens) <= self.requests
                else f"{len(self.resident_tokens)} resident requests of {self.requests} open",
                *(_count_problem("resident_tokens", tokens) for tokens in self.resident_tokens),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Everything seen at one moment. A part that was not due on this tick is `None`; one that was due and not seen is a `Gap`."""

    at_seconds: float
    engines: tuple[Engine, ...] | None = None
    devices: tuple[Device, ...] | None = None
    host: tuple[HostProcess, ...] | None = None
    load: Load | None = None
    gaps: tuple[Gap, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a sample without a time."""
        _refuse(self, _time_problem("at_seconds", self.at_seconds))

    @property
    def engines_idle(self) -> bool | None:
        """Whether every engine says that it is idle; `None` where one does not say or was not seen."""
        if not self.engines:
            return None
        states = [engine.idle for engine in self.engines]
        if False in states:
            return False
        return None if None in states else True


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that a test step offers at once: unique random prompts, all generating `max_tokens`.

    `hold_seconds` is how long all of them should be resident together, so that several samples see them.
    """

    requests: int
    prompt_tokens: int
    max_tokens: int
    hold_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Refuse negative amounts."""
        _refuse(
            self,
            _first(
                _count_problem("requests", self.requests),
                _count_problem("prompt_tokens", self.prompt_tokens),
                _count_problem("max_tokens", self.max_tokens),
                _time_problem("hold_seconds", self.hold_seconds),
            ),
        )

    @property
    def tokens_per_request(self) -> int:
        """Tokens a finished request has in the KV cache at its peak (the last sampled one is never stored)."""
        return max(self.prompt_tokens + self.max_tokens - 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a step's requests. `errors` are the distinct messages of those that failed, bounded in length."""

    completed: int
    failed: int
    prompt_tokens: int
    generated_tokens: int
    errors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse negative counts."""
        _refuse(
            self,
            _first(
                *(
                    _count_problem(name, getattr(self, name))
                    for name in ("completed", "failed", "prompt_tokens", "generated_tokens")
                )
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment of a test step: its quiet lead-in begins, its load is offered, the last request is over, it has settled."""

    at_seconds: float
    step: str
    cycle: int
    phase: Phase
    workload: Workload | None = None
    outcome: Outcome | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a mark without a time."""
        _refuse(self, _first(_time_problem("at_seconds", self.at_seconds), _count_problem("cycle", self.cycle)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One cycle of one test step, put together from its marks; what never happened is `None`."""

    step: str
    cycle: int
    begin_seconds: float
    offer_seconds: float | None = None
    release_seconds: float | None = None
    end_seconds: float | None = None
    workload: Workload | None = None
    outcome: Outcome | None = None
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether the span ran to its end."""
        return self.end_seconds is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Samples and marks in ascending time: all that is judged, whatever feed made it."""

    samples: tuple[Sample, ...]
    marks: tuple[Mark, ...] = ()
    _times: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse time that runs backwards."""
        times = tuple(sample.at_seconds for sample in self.samples)
        for name, series in (("samples", times), ("marks", tuple(mark.at_seconds for mark in self.marks))):
            if any(later < earlier for earlier, later in zip(series, series[1:], strict=False)):
                raise ValueError(f"Timeline: {name} are not in ascending time")
        object.__setattr__(self, "_times", times)

    def between(self, start_seconds: float, end_seconds: float) -> tuple[Sample, ...]:
        """Samples with start <= time <= end."""
        return self.samples[bisect_left(self._times, start_seconds) : bisect_right(self._times, end_seconds)]

    def spans(self, step: str | None = None) -> tuple[Span, ...]:
        """The test steps' spans in order of their beginnings, those of `step` alone where it is named."""
        spans: dict[tuple[str, int], Span] = {}
        for mark in self.marks:
            if step is not None and mark.step != step:
                continue
            key = (mark.step, mark.cycle)
            known = spans.get(key)
            if known is None:
                known = Span(step=mark.step, cycle=mark.cycle, begin_seconds=mark.at_seconds)
            spans[key] = Span(
                step=known.step,
                cycle=known.cycle,
                begin_seconds=known.begin_seconds,
                offer_seconds=mark.at_seconds if mark.phase == "offer" else known.offer_seconds,
                release_seconds=mark.at_seconds if mark.phase == "release" else known.release_seconds,
                end_seconds=mark.at_seconds if mark.phase == "end" else known.end_seconds,
                workload=mark.workload or known.workload,
                outcome=mark.outcome or known.outcome,
                notes=known.notes + mark.notes,
            )
        return tuple(spans.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPool:
    """One engine's KV-cache pool as the engine itself reports it.

    `block_tokens` is what one block holds, context parallelism included. `usable_blocks` is what requests can hold: vLLM
    V1 never hands out its null block (id 0). `usage_blocks` is the denominator of the engine's own usage gauge; where
    it is larger than `usable_blocks` (V1 before 0.10.2) an idle pool shows the null block as used. `pool_bytes` and
    every count of blocks are per rank.
    """

    engine: str
    block_tokens: int
    total_blocks: int
    usable_blocks: int
    usage_blocks: int
    capacity_tokens: int | None = None
    max_concurrency: float | None = None
    pool_bytes: int | None = None
    cache_dtype: str | None = None
    sliding_window_tokens: int | None = None
    memory_fraction_ratio: float | None = None
    prefix_caching: bool | None = None

    def __post_init__(self) -> None:
        """Refuse an empty pool, a denominator outside it, and impossible figures."""
        _refuse(
            self,
            _first(
                None if 0 < self.block_tokens <= MAX_COUNT else f"block_tokens is {self.block_tokens}",
                None if 1 < self.total_blocks <= MAX_COUNT else f"total_blocks is {self.total_blocks}",
                None
                if 0 < self.usable_blocks <= self.usage_blocks <= self.total_blocks
                else f"{self.usable_blocks} usable, {self.usage_blocks} in the gauge, {self.total_blocks} in all",
                _count_problem("capacity_tokens", self.capacity_tokens),
                _count_problem("pool_bytes", self.pool_bytes, MAX_BYTES),
                None
                if self.memory_fraction_ratio is None or 0 < self.memory_fraction_ratio <= 1
                else f"memory_fraction_ratio is {self.memory_fraction_ratio}",
            ),
        )

    @property
    def block_bytes(self) -> int | None:
        """Bytes of one block on one rank, where the engine reports its pool's size."""
        return None if self.pool_bytes is None else self.pool_bytes // self.total_blocks

    def used_blocks(self, usage_ratio: float) -> int:
        """Blocks held by requests, from the usage gauge (vllm/v1/core/block_pool.py::BlockPool.get_usage)."""
        return max(round(usage_ratio * self.usage_blocks) - (self.usage_blocks - self.usable_blocks), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What does not change while a timeline is made: the server, its pools, and which processes are its own.

    `server_pids` is `None` where the server's processes could not be found; `weights_bytes` is the checkpoint's size
    on disk, all ranks together; `forced` says that other traffic was to be expected.
    """

    url: str | None = None
    engine_name: str | None = None
    engine_version: str | None = None
    model: str | None = None
    max_model_len_tokens: int | None = None
    pools: tuple[KvPool, ...] = ()
    server_pids: tuple[int, ...] | None = None
    weights_bytes: int | None = None
    forced: bool = False
    gaps: tuple[Gap, ...] = ()

    def pool(self, engine: str) -> KvPool | None:
        """The pool of one engine, `None` where it did not report one."""
        return next((pool for pool in self.pools if pool.engine == engine), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A named number with its unit; `value` is `None` where it is not known."""

    name: str
    value: float | str | None
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A number that a finding stands on, and where it was seen."""

    name: str
    value: float | str | None
    unit: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A test step's verdict: what had to be seen against what was."""

    id: str
    status: Status
    summary: str
    expected: tuple[Quantity, ...] = ()
    measured: tuple[Quantity, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule's verdict with the numbers that decided. The last four come from the knowledge base unless a rule knows better."""

    id: str
    status: Status
    summary: str
    evidence: tuple[Evidence, ...] = ()
    likely_cause: str | None = None
    confirm: str | None = None
    remedy: str | None = None
    runbook: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """One part of a device's used bytes. The lines of a device add up to its used bytes exactly.

    Only a residual (`unaccounted`, `server_other`) may be negative: then a reported or computed line claims more than
    was measured, and hiding that would hide an error. `gpu` is `None` where no device was seen.
    """

    gpu: int | None
    component: str
    bytes: int
    source: Provenance
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The judgement of one timeline: all that the outputs show."""

    worst: Status
    facts: Facts
    start_seconds: float
    end_seconds: float
    samples: int
    steps: tuple[StepResult, ...]
    findings: tuple[Finding, ...]
    ledger: tuple[LedgerLine, ...]
    gaps: tuple[Gap, ...]
