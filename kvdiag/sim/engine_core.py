"""The engine: a scheduler whose steps take time, and whose model, pool and activations take GPU memory.

It takes its memory as vLLM does: context, weights, a profiled step, then a pool from what the fraction leaves. A step
is scheduled, counted in the statistics, allocated, slept and completed; the statistics come before the results, as with
async scheduling. An allocation that fails ends the step's requests with torch's message. Single-threaded: it runs in
the event loop that also serves HTTP. A scenario's faults are real: the engine or the scheduler keeps blocks or memory;
counters only count.
"""

import asyncio
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvdiag.sim.blocks import BlockPool
from kvdiag.sim.gpu import Block, CachingAllocator, DeviceFullError, Gpu, OutOfMemoryError, round_up
from kvdiag.sim.model_folder import BFLOAT16_BYTES
from kvdiag.sim.scenarios import Comb, Scenario
from kvdiag.sim.scheduler import Batch, FinishReason, PoolFullError, Request, Scheduler

STEP_SECONDS = 0.004
DECODE_SECONDS_PER_REQUEST = 0.0002
PREFILL_SECONDS_PER_TOKEN = 12e-6
"""A decode step of ten requests takes 6 ms, a prefill of 2048 tokens about 29 ms: a small model on a 24-GiB card."""

EOS_TOKEN = 2
CONTEXT_STEP_TOKENS = 4096

CONTEXT_EXCEEDED = "Context size has been exceeded."
"""llama.cpp's message to every request that runs when no cell is free (tools/server/server-context.cpp)."""

CUDA_OUT_OF_MEMORY = "CUDA error: out of memory"
"""Message of a library's own cudaMalloc, outside torch (cudaGetErrorString of cudaErrorMemoryAllocation)."""


@dataclass(frozen=True, slots=True)
class Output:
    """A step's result for one request: a token, its end, or both; `error` is why it failed."""

    request: Request
    token: int | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None


Outputs = asyncio.Queue[Output | None]
"""The engine puts in its outputs; `None` means that the client has disconnected."""


class Statistics(Protocol):
    """Receives every step, for the metrics of the engine's API."""

    def see(self, scheduler: Scheduler) -> None:
        """Take the scheduler's state: between steps, and when a step is scheduled."""

    def scheduled(self, batch: Batch, now_seconds: float) -> None:
        """Take a step that is about to run; the times of requests that leave the queue are set later."""

    def sampled(self, previous_seconds: dict[Request, float | None], now_seconds: float) -> None:
        """Take a step's new tokens; `previous_seconds` is when each had the one before, `None` at its first."""

    def finished(self, request: Request, now_seconds: float) -> None:
        """Take a request that is over, however it ended."""


AnyStatistics = TypeVar("AnyStatistics", bound=Statistics)


class Engine:
    """One vLLM-like engine on one simulated GPU; `run` is its step loop."""

    statistics: Statistics

    def __init__(self, scenario: Scenario, gpu: Gpu, *, pid: int, seed: int = 0) -> None:
        """Take all the memory that a server takes before it serves; `seed` determines the sampled tokens."""
        self.scenario = scenario
        self.gpu = gpu
        self.process = gpu.join(pid, "VLLM::EngineCore")
        self.allocator = CachingAllocator(gpu, self.process, expandable_segments=scenario.expandable_segments)
        self._random = random.Random(seed)
        self._resident: list[Block] = []
        self._requests_seen = 0
        self._kept_bytes = 0
        self._kept_pages_bytes = 0
        self._outputs: dict[Request, Outputs] = {}
        self._aborts: list[Request] = []
        self._work = asyncio.Event()
        self.total_blocks = self._load()
        self.scheduler = Scheduler(
            BlockPool(self.total_blocks + (not scenario.null_block), prefix_caching=scenario.prefix_caching),
            scenario,
            blocks_kept_at_finish=scenario.blocks_kept_per_request,
        )

    def report_to(self, statistics: AnyStatistics) -> AnyStatistics:
        """Report every step to `statistics` from now on; must precede `run`."""
        statistics.see(self.scheduler)
        self.statistics = statistics
        return statistics

    def submit(self, request: Request, outputs: Outputs) -> None:
        """Queue a request for the next step; its results arrive in `outputs`."""
        self._outputs[request] = outputs
        self.scheduler.add(request)
        self._work.set()

    def abort(self, request: Request) -> None:
        """Drop a request at the end of the current step, as when its client disconnects."""
        if request in self._outputs:
            self._aborts.append(request)
            self._work.set()

    async def run(self) -> None:
        """Step while there is work, wait while there is none, until cancelled."""
        while True:
            self._apply_aborts()
            if self.scheduler.idle:
                self._work.clear()
                await self._work.wait()
                continue
            try:
                batch = self.scheduler.schedule()
            except PoolFullError:
                self._fail(Batch(dict.fromkeys(self.scheduler.running, 0)), CONTEXT_EXCEEDED)
                self.statistics.see(self.scheduler)
                continue
            # Updated before the results, as with async scheduling: the blocks of the current step count.
            self.statistics.see(self.scheduler)
            if batch.tokens:
                await self._step(batch)
            else:
                # Nothing fits: vLLM's core busy-loops here, until an abort frees blocks.
                await asyncio.sleep(STEP_SECONDS)
            self.statistics.see(self.scheduler)

    async def _step(self, batch: Batch) -> None:
        fresh = sum(request.scheduled_seconds is None for request in batch.tokens)
        self.statistics.scheduled(batch, time.monotonic())
        held: list[Block] = []
        try:
            for _ in range(fresh):
                self._first_touch()
            for size_bytes in self._activations(batch.total_tokens, batch.longest_prefill_tokens):
                held.append(self.allocator.allocate(size_bytes))  # noqa: PERF401 - what is held must be freed on failure
            prefill = batch.total_tokens - len(batch.tokens)
            await asyncio.sleep(
                STEP_SECONDS + len(batch.tokens) * DECODE_SECONDS_PER_REQUEST + prefill * PREFILL_SECONDS_PER_TOKEN
            )
        except (OutOfMemoryError, DeviceFullError) as error:
            text = str(error) if isinstance(error, OutOfMemoryError) else CUDA_OUT_OF_MEMORY
            self._fail(batch, text)
            return
        finally:
            for block in held:
                self.allocator.free(block)
        self._apply_aborts()
        self._take_results(batch)

    def _fail(self, batch: Batch, error: str) -> None:
        for request in self.scheduler.fail(batch):
            self.statistics.finished(request, time.monotonic())
            self._outputs.pop(request).put_nowait(Output(request, finish_reason="error", error=error))

    def _take_results(self, batch: Batch) -> None:
        now = time.monotonic()
        sampled = {request: self._random.randrange(self.scenario.model.vocab) for request in batch.sampling()}
        before = {request: request.last_token_seconds for request in sampled}
        finished = self.scheduler.complete(batch, sampled, eos_token=EOS_TOKEN, now_seconds=now)
        self.statistics.sampled(before, now)
        for request, token in sampled.items():
            if request in self._outputs:
                self._outputs[request].put_nowait(Output(request, token, request.finish_reason))
        for request in finished:
            self.statistics.finished(request, now)
            del self._outputs[request]

    def _apply_aborts(self) -> None:
        for request in self._aborts:
            # vLLM forgets an aborted request without counting it (output_processor.py: abort_requests).
            if self._outputs.pop(request, None) is not None:
                self.scheduler.abort(request)
        if self._aborts:
            self._aborts = []
            self.statistics.see(self.scheduler)

    def _load(self) -> int:
        """Take the memory that a server takes before it serves; returns the pool's number of blocks."""
        scenario = self.scenario
        self.gpu.take(self.process, scenario.context_bytes)
        # vLLM takes its first memory snapshot after creating the context (gpu_worker.py: init_device).
        free_at_start = self.gpu.free_bytes
        for _ in range(scenario.weight_copies):
            for _name, shape in scenario.model.tensors():
                self._keep(math.prod(shape) * BFLOAT16_BYTES)
        if scenario.comb is not None:
            self._comb(scenario.comb)
        # A dummy step of the largest batch, whose activations are freed (mem_utils.py: memory_profiling).
        for block in list(map(self.allocator.allocate, self._activations(scenario.max_batched_tokens))):
            self.allocator.free(block)
        self.allocator.empty_cache()
        if scenario.kv_cache_memory_bytes is not None:
            available = scenario.kv_cache_memory_bytes
        else:
            requested = math.ceil(self.gpu.usable_bytes * scenario.memory_fraction_ratio)
            consumed = free_at_start - self.gpu.free_bytes
            available = requested - consumed - sum(self._activations(scenario.max_batched_tokens))
        block_bytes = scenario.block_tokens * scenario.kv_bytes_per_token_per_layer
        blocks = available // (block_bytes * scenario.model.layers)
        for _ in range(scenario.model.layers):
            self._keep(blocks * block_bytes)
        return blocks

    def _keep(self, size_bytes: int) -> None:
        self._resident.append(self.allocator.allocate(size_bytes))

    def _comb(self, comb: Comb) -> None:
        """Leave small tensors in one large buffer, as a loader that converts weights piece by piece does."""
        buffer = self.allocator.allocate(comb.teeth * (comb.hole_bytes + comb.tooth_bytes))
        self.allocator.free(buffer)
        pieces: list[Block] = []
        for _ in range(comb.teeth):
            pieces.append(self.allocator.allocate(comb.hole_bytes))
            self._keep(comb.tooth_bytes)
        for piece in pieces:
            self.allocator.free(piece)

    def _activations(self, batch_tokens: int, longest_prefill_tokens: int = 0) -> Iterator[int]:
        scenario = self.scenario
        yield scenario.workspace_bytes
        if scenario.activation_bytes_per_batched_token:
            yield batch_tokens * scenario.activation_bytes_per_batched_token
        if scenario.activation_bytes_per_context_token and longest_prefill_tokens:
            context = round_up(longest_prefill_tokens, CONTEXT_STEP_TOKENS)
            yield context * scenario.activation_bytes_per_context_token

    def _first_touch(self) -> None:
        """Take the memory that a request costs outside torch: kernels once, and a leak each time."""
        if self._requests_seen < len(self.scenario.lazy_bytes):
            self.gpu.take(self.process, self.scenario.lazy_bytes[self._requests_seen])
        self._requests_seen += 1
        self._kept_bytes += self.scenario.device_bytes_kept_per_request
        if self._kept_bytes > self._kept_pages_bytes:
            # cudaMalloc serves small requests from a page that it has, and takes another when that is full.
            self._kept_pages_bytes += self.gpu.take(self.process, self._kept_bytes - self._kept_pages_bytes)
