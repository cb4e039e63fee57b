"""What the engine has counted: gauges as of the last step, counters and histograms since the start; no wire names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import get_args

from kvdiag.sim.scheduler import Batch, FinishReason, Request, Scheduler

# Bucket bounds of vLLM 0.32 (vllm/v1/metrics/loggers.py).
TOKEN_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COUNT_BOUNDS = (1, 2, 5, 10, 20)
PREEMPTION_BOUNDS = (1, 2, 3, 4, 5, 10, 20)
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
ITL_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY_BOUNDS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)


class Histogram:
    """Cumulative buckets, as Prometheus has them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Count nothing yet; `bounds` ascend and leave infinity out."""
        self.bounds = tuple(float(bound) for bound in bounds)
        self._hits = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    @property
    def cumulative(self) -> list[int]:
        """Observations at or below each bound, and all of them last."""
        totals: list[int] = []
        for hits in self._hits:
            totals.append(hits + (totals[-1] if totals else 0))
        return totals

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._hits[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Statistics:
    """Everything that the metrics page tells of the engine's work."""

    def __init__(self) -> None:
        """Count nothing yet."""
        self.kv_usage_ratio = 0.0
        self.running = 0
        self.waiting = 0
        self.preemptions_total = 0
        self.prefix_queries_total = 0
        self.prefix_hits_total = 0
        self.prompt_tokens_total = 0
        self.cached_prompt_tokens_total = 0
        self.generation_tokens_total = 0
        self.finished_total: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        self.prompt_tokens = Histogram(TOKEN_BOUNDS)
        self.generation_tokens = Histogram(TOKEN_BOUNDS)
        self.step_tokens = Histogram(STEP_TOKEN_BOUNDS)
        self.params_n = Histogram(COUNT_BOUNDS)
        self.params_max_tokens = Histogram(TOKEN_BOUNDS)
        self.ttft_seconds = Histogram(TTFT_BOUNDS)
        self.itl_seconds = Histogram(ITL_BOUNDS)
        self.tpot_seconds = Histogram(ITL_BOUNDS)
        self.e2e_seconds = Histogram(LATENCY_BOUNDS)
        self.queue_seconds = Histogram(LATENCY_BOUNDS)
        self.inference_seconds = Histogram(LATENCY_BOUNDS)
        self.prefill_seconds = Histogram(LATENCY_BOUNDS)
        self.decode_seconds = Histogram(LATENCY_BOUNDS)
        self.preemptions = Histogram(PREEMPTION_BOUNDS)
        self.prefill_computed_tokens = Histogram(TOKEN_BOUNDS)

    def see(self, scheduler: Scheduler) -> None:
        """Take the gauges, and the counters that the scheduler itself keeps."""
        self.kv_usage_ratio = scheduler.pool.usage_ratio
        self.running = len(scheduler.running)
        self.waiting = len(scheduler.waiting)
        self.preemptions_total = scheduler.preemptions_total
        self.prefix_queries_total = scheduler.prefix_queries_total
        self.prefix_hits_total = scheduler.prefix_hits_total

    def scheduled(self, batch: Batch, now_seconds: float) -> None:
        """Note when requests first left the queue, and the step's size."""
        self.step_tokens.observe(batch.total_tokens)
        for request in batch.tokens:
            if request.scheduled_seconds is None:
                request.scheduled_seconds = now_seconds

    def sampled(self, previous_seconds: dict[Request, float | None], now_seconds: float) -> None:
        """Count a step's new tokens; `previous_seconds` is when each had the one before, `None` at its first."""
        self.generation_tokens_total += len(previous_seconds)
        for request, previous in previous_seconds.items():
            if previous is not None:
                self.itl_seconds.observe(now_seconds - previous)
            else:
                self.ttft_seconds.observe(now_seconds - request.arrived_seconds)
                self.prompt_tokens_total += len(request.prompt)
                self.cached_prompt_tokens_total += request.cached_tokens

    def finished(self, request: Request, now_seconds: float) -> None:
        """Count a request that is over, however it ended; times and sizes only of one that had a token."""
        if request.finish_reason is None:
            raise ValueError(f"request {request.id} is not finished")
        self.finished_total[request.finish_reason] += 1
        scheduled, first, last = request.scheduled_seconds, request.first_token_seconds, request.last_token_seconds
        if scheduled is None or first is None or last is None:
            return
        generated = len(request.output)
        self.prompt_tokens.observe(len(request.prompt))
        self.generation_tokens.observe(generated)
        self.params_n.observe(1)
        self.params_max_tokens.observe(request.max_tokens)
        self.e2e_seconds.observe(now_seconds - request.arrived_seconds)
        self.queue_seconds.observe(scheduled - request.arrived_seconds)
        self.inference_seconds.observe(last - scheduled)
        self.prefill_seconds.observe(first - scheduled)
        self.decode_seconds.observe(last - first)
        self.tpot_seconds.observe((last - first) / (generated - 1) if generated > 1 else 0.0)
        self.preemptions.observe(request.preemptions)
        self.prefill_computed_tokens.observe(len(request.prompt) - request.cached_tokens)
