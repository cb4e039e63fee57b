"""The metrics of vLLM 0.32 (vllm/v1/metrics/loggers.py) for one engine, kept and written by prometheus_client.

Gauges are as of the last step, counters and histograms since the start. What is constant on the metrics page stands in
tables: names, help texts and bucket bounds here, the labels of `cache_config_info` in cache_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from importlib import resources
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from kvdiag.sim.blocks import blocks_for
from kvdiag.sim.scenarios import MODEL_NAME, Scenario
from kvdiag.sim.scheduler import Batch, FinishReason, Request, Scheduler

GAUGES = {
    "num_requests_running": "Number of requests in model execution batches.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
}
COUNTERS = {
    "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "num_preemptions": "Cumulative number of preemption from the engine.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "prompt_tokens_cached": "Number of cached prompt tokens (local + external).",
    "generation_tokens": "Number of generation tokens processed.",
}
WAITING_HELP = (
    "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; 'deferred' = "
    "deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all reasons equals "
    "vllm:num_requests_waiting."
)
SLEEP_HELP = (
    "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; weights_offloaded = 1 "
    "means sleep level 1; discard_all = 1 means sleep level 2."
)

TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TTFT_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
ITL_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)

HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "request_prompt_tokens": ("Number of prefill tokens processed.", TOKENS),
    "request_generation_tokens": ("Number of generation tokens processed.", TOKENS),
    "iteration_tokens_total": ("Histogram of number of tokens per engine_step.", STEP_TOKENS),
    "request_max_num_generation_tokens": ("Histogram of maximum number of requested generation tokens.", TOKENS),
    "request_params_n": ("Histogram of the n request parameter.", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("Histogram of the max_tokens request parameter.", TOKENS),
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", TTFT_SECONDS),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", ITL_SECONDS),
    "request_time_per_output_token_seconds": ("Histogram of time_per_output_token_seconds per request.", ITL_SECONDS),
    "e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", LATENCY_SECONDS),
    "request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", LATENCY_SECONDS),
    "request_inference_time_seconds": ("Histogram of time spent in RUNNING phase for request.", LATENCY_SECONDS),
    "request_prefill_time_seconds": ("Histogram of time spent in PREFILL phase for request.", LATENCY_SECONDS),
    "request_decode_time_seconds": ("Histogram of time spent in DECODE phase for request.", LATENCY_SECONDS),
    "request_num_preemptions": ("Histogram of the number of times a request was preempted.", (1, 2, 3, 4, 5, 10, 20)),
    "request_prefill_kv_computed_tokens": (
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
        TOKENS,
    ),
}


class Statistics:
    """One engine's metrics."""

    def __init__(self, scenario: Scenario, total_blocks: int) -> None:
        """Count nothing yet."""
        own = {"engine": "0", "model_name": MODEL_NAME}
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        gauges = {name: Gauge(f"vllm:{name}", text, own, registry=registry) for name, text in GAUGES.items()}
        counters = {name: Counter(f"vllm:{name}", text, own, registry=registry) for name, text in COUNTERS.items()}
        self._gauges = {name: gauge.labels(**own) for name, gauge in gauges.items()}
        self._counters = {name: counter.labels(**own) for name, counter in counters.items()}
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, own, buckets=bounds, registry=registry).labels(**own)
            for name, (text, bounds) in HISTOGRAMS.items()
        }
        waiting = Gauge("vllm:num_requests_waiting_by_reason", WAITING_HELP, (*own, "reason"), registry=registry)
        self._waiting = waiting.labels(**own, reason="capacity")
        waiting.labels(**own, reason="deferred")
        sleep = Gauge("vllm:engine_sleep_state", SLEEP_HELP, (*own, "sleep_state"), registry=registry)
        for state in ("awake", "weights_offloaded", "discard_all"):
            sleep.labels(**own, sleep_state=state).set(state == "awake")
        sources = Counter(
            "vllm:prompt_tokens_by_source", "Number of prompt tokens by source.", (*own, "source"), registry=registry
        )
        self._sources = {
            source: sources.labels(**own, source=source)
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        }
        finished = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            (*own, "finished_reason"),
            registry=registry,
        )
        self._finished = {reason: finished.labels(**own, finished_reason=reason) for reason in get_args(FinishReason)}
        config = cache_config(scenario, total_blocks)
        info = Gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", config, registry=registry)
        info.labels(**config).set(1)
        self._scheduler_totals = (0, 0, 0)

    def page(self, names: Collection[str] = ()) -> bytes:
        """The metrics page; with `names` only the series of those exact names, as `name[]` selects them."""
        return generate_latest(self._registry.restricted_registry(names) if names else self._registry)

    def see(self, scheduler: Scheduler) -> None:
        """Take the gauges, and the counters that the scheduler itself keeps."""
        self._gauges["num_requests_running"].set(len(scheduler.running))
        self._gauges["num_requests_waiting"].set(len(scheduler.waiting))
        self._gauges["kv_cache_usage_perc"].set(scheduler.pool.usage_ratio)
        self._waiting.set(len(scheduler.waiting))
        totals = (scheduler.preemptions_total, scheduler.prefix_queries_total, scheduler.prefix_hits_total)
        names = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits")
        for name, total, before in zip(names, totals, self._scheduler_totals, strict=True):
            self._counters[name].inc(total - before)
        self._scheduler_totals = totals

    def scheduled(self, batch: Batch, now_seconds: float) -> None:
        """Note when requests first left the queue, and the step's size."""
        self._histograms["iteration_tokens_total"].observe(batch.total_tokens)
        for request in batch.tokens:
            if request.scheduled_seconds is None:
                request.scheduled_seconds = now_seconds

    def sampled(self, previous_seconds: dict[Request, float | None], now_seconds: float) -> None:
        """Count a step's new tokens; `previous_seconds` is when each had the one before, `None` at its first."""
        self._counters["generation_tokens"].inc(len(previous_seconds))
        for request, previous in previous_seconds.items():
            if previous is not None:
                self._histograms["inter_token_latency_seconds"].observe(now_seconds - previous)
            else:
                self._histograms["time_to_first_token_seconds"].observe(now_seconds - request.arrived_seconds)
                self._counters["prompt_tokens"].inc(len(request.prompt))
                self._counters["prompt_tokens_cached"].inc(request.cached_tokens)
                self._sources["local_compute"].inc(len(request.prompt) - request.cached_tokens)
                self._sources["local_cache_hit"].inc(request.cached_tokens)

    def finished(self, request: Request, now_seconds: float) -> None:
        """Count a request that is over, however it ended; times and sizes only of one that had a token."""
        if request.finish_reason is None:
            raise ValueError(f"request {request.id} is not finished")
        self._finished[request.finish_reason].inc()
        scheduled, first, last = request.scheduled_seconds, request.first_token_seconds, request.last_token_seconds
        if scheduled is None or first is None or last is None:
            return
        generated = len(request.output)
        observed = {
            "request_prompt_tokens": len(request.prompt),
            "request_generation_tokens": generated,
            "request_max_num_generation_tokens": generated,
            "request_params_n": 1,
            "request_params_max_tokens": request.max_tokens,
            "e2e_request_latency_seconds": now_seconds - request.arrived_seconds,
            "request_queue_time_seconds": scheduled - request.arrived_seconds,
            "request_inference_time_seconds": last - scheduled,
            "request_prefill_time_seconds": first - scheduled,
            "request_decode_time_seconds": last - first,
            "request_time_per_output_token_seconds": (last - first) / max(generated - 1, 1),
            "request_num_preemptions": request.preemptions,
            "request_prefill_kv_computed_tokens": len(request.prompt) - request.cached_tokens,
        }
        for name, value in observed.items():
            self._histograms[name].observe(value)


def cache_config(scenario: Scenario, total_blocks: int) -> dict[str, str]:
    """Labels of vllm:cache_config_info, all that 0.32 has. A value that is not set reads "None"."""
    # kv_cache_utils.py: get_kv_cache_capacity; the null block is not subtracted there.
    concurrency = total_blocks / blocks_for(scenario.max_model_len_tokens, scenario.block_tokens)
    values = {
        "block_size": scenario.block_tokens,
        "effective_attention_block_size": scenario.block_tokens,
        "enable_prefix_caching": scenario.prefix_caching,
        "gpu_memory_utilization": scenario.memory_fraction_ratio,
        "kv_cache_max_concurrency": concurrency,
        "kv_cache_memory_bytes": scenario.kv_cache_memory_bytes,
        "kv_cache_size_tokens": int(concurrency * scenario.max_model_len_tokens),
        "num_gpu_blocks": total_blocks,
    }
    constant: dict[str, str] = json.loads(resources.files("kvdiag.sim").joinpath("cache_config.json").read_bytes())
    return {**constant, **{name: str(value) for name, value in values.items()}}
