"""trtllm-serve's HTTP routes over one simulated engine: a paged pool whose gauges come late.

Each iteration leaves its figures in a queue, as they were before its requests ended. Two readers empty that queue (as
in tensorrt_llm/serve/openai_server.py of 2026): `GET /metrics`, which answers with all of it as JSON, and a collector
that sets the gauges of `/prometheus/metrics`. The collector wakes when a client has read a response to its end, and
continues until no iteration came for half a second; so the gauges do not move during a lone request, and stay as they
were before its end. Before the first request ended, no gauge is there.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from kvdiag.sim.api import Routes
from kvdiag.sim.http_server import Response
from kvdiag.sim.openai_api import OpenAIApi
from kvdiag.sim.scenarios import Scenario
from kvdiag.sim.scheduler import Batch, Request
from kvdiag.sim.step_counts import StepCounts, text_page

TRTLLM_VERSION = "1.3.0rc1"
MAX_ITERATIONS = 1000
"""Kept at most, the newest (iter_stats_max_iterations of the server's arguments)."""
COLLECTOR_SECONDS = 0.5
LABELS = {"model_name": "undefined", "engine_type": "undefined"}
"""What the server sets them to."""
PAGE_TYPE = "text/plain; version=1.0.0; charset=utf-8"


class _Iterations(StepCounts):
    """The figures of iterations that no reader took yet."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        super().__init__()
        self.queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._count = 0
        self._completed = 0
        self._before_seconds = 0.0

    def scheduled(self, batch: Batch, now_seconds: float) -> None:
        super().scheduled(batch, now_seconds)
        self._count += 1
        if self.queue.qsize() >= MAX_ITERATIONS:
            self.queue.get_nowait()
        self.queue.put_nowait(
            {
                "iter": self._count,
                "iterLatencyMS": 1000 * (now_seconds - self._before_seconds),
                "numActiveRequests": len(self.running),
                "numQueuedRequests": self.waiting,
                "numCompletedRequests": self._completed,
                "kvCacheStats": {
                    "maxNumBlocks": self._blocks,
                    "freeNumBlocks": self._blocks - self.used_blocks,
                    "usedNumBlocks": self.used_blocks,
                    "tokensPerBlock": self._block_tokens,
                },
                "inflightBatchingStats": {"numPausedRequests": 0, "numScheduledRequests": len(batch.tokens)},
            }
        )
        self._completed = 0
        self._before_seconds = now_seconds

    def finished(self, request: Request, now_seconds: float) -> None:
        super().finished(request, now_seconds)
        self._completed += 1

    def drain(self) -> list[dict[str, Any]]:
        return [self.queue.get_nowait() for _ in range(self.queue.qsize())]


class TrtllmApi(OpenAIApi):
    """A TensorRT-LLM server with return_perf_metrics and enable_iter_perf_stats."""

    owned_by = "tensorrt_llm"

    def __init__(self, scenario: Scenario, root: Path) -> None:
        """As `Api`."""
        super().__init__(scenario, root)
        self._iterations = self.engine.report_to(_Iterations(self.engine.total_blocks, scenario.block_tokens))
        self._gauges: dict[str, float] = {}
        self._streamed = {"requests": 0, "prompt_tokens": 0, "generation_tokens": 0}
        self._collector: asyncio.Task[None] | None = None

    def routes(self) -> Routes:
        """The version and both readers of the iterations, with OpenAI's."""
        return {
            **super().routes(),
            "/version": ("GET", lambda _: Response.json({"version": TRTLLM_VERSION})),
            "/metrics": ("GET", lambda _: Response.json(self._iterations.drain())),
            "/prometheus/metrics": ("GET", lambda _: Response(self._page(), content_type=PAGE_TYPE)),
        }

    def streamed(self, prompt_tokens: int, generated_tokens: int) -> None:
        """Count the request and wake the collector."""
        self._streamed["requests"] += 1
        self._streamed["prompt_tokens"] += prompt_tokens
        self._streamed["generation_tokens"] += generated_tokens
        if self._collector is None or self._collector.done():
            self._collector = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(COLLECTOR_SECONDS):
                    self._set(await self._iterations.queue.get())

    def _set(self, iteration: dict[str, Any]) -> None:
        pool = iteration["kvCacheStats"]
        self._gauges = {
            "iteration_latency_seconds": iteration["iterLatencyMS"] / 1000,
            "num_requests_running": iteration["numActiveRequests"],
            "num_requests_waiting": iteration["numQueuedRequests"],
            "kv_cache_max_blocks": pool["maxNumBlocks"],
            "kv_cache_free_blocks": pool["freeNumBlocks"],
            "kv_cache_used_blocks": pool["usedNumBlocks"],
            "kv_cache_tokens_per_block": pool["tokensPerBlock"],
            "kv_cache_utilization": pool["usedNumBlocks"] / pool["maxNumBlocks"],
            "num_paused_requests": iteration["inflightBatchingStats"]["numPausedRequests"],
        }

    def _page(self) -> bytes:
        done = self._streamed
        counters = {
            "prompt_tokens_total": done["prompt_tokens"],
            "generation_tokens_total": done["generation_tokens"],
            "prompt_cached_tokens_total": self._iterations.cached_tokens,
        }
        return text_page(
            [
                *((f"trtllm_{name}", "gauge", value) for name, value in self._gauges.items()),
                *((f"trtllm_{name}", "counter", value) for name, value in counters.items()),
                ("trtllm_e2e_request_latency_seconds_count", "untyped", done["requests"]),
            ],
            LABELS,
        )
