"""The metrics of vLLM 0.32 (vllm/v1/metrics/loggers.py) for one engine, kept and written by prometheus_client.

Gauges are as of the last step, counters and histograms since the start. Constant parts stand in vllm_metrics.json:
names, help texts, bucket bounds, and the constant labels of `cache_config_info`.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from importlib import resources
from typing import Any, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from kvdiag.sim.blocks import blocks_for
from kvdiag.sim.model_folder import BFLOAT16_BYTES
from kvdiag.sim.scenarios import MODEL_NAME, Scenario
from kvdiag.sim.scheduler import Batch, FinishReason, Request, Scheduler

Metric = TypeVar("Metric", Gauge, Counter, Histogram)

_PAGE: Mapping[str, Any] = json.loads(resources.files("kvdiag.sim").joinpath("vllm_metrics.json").read_bytes())


class VllmStatistics:
    """One engine's metrics."""

    def __init__(self, scenario: Scenario, total_blocks: int) -> None:
        """Count nothing yet."""
        own = {"engine": "0", "model_name": MODEL_NAME}
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def made(kind: type[Metric], name: str, text: str, labels: Iterable[str] = own, **more: Any) -> Metric:
            return kind(f"vllm:{name}", text, tuple(labels), registry=registry, **more)

        def by_label(kind: type[Metric], name: str, label: str, values: Iterable[str]) -> dict[str, Metric]:
            metric = made(kind, name, _PAGE["by_label"][name], (*own, label))
            return {value: metric.labels(**own, **{label: value}) for value in values}

        self._gauges = {name: made(Gauge, name, text).labels(**own) for name, text in _PAGE["gauges"].items()}
        self._counters = {name: made(Counter, name, text).labels(**own) for name, text in _PAGE["counters"].items()}
        self._histograms = {
            name: made(Histogram, name, text, buckets=_PAGE["buckets"][buckets]).labels(**own)
            for name, (buckets, text) in _PAGE["histograms"].items()
        }
        self._waiting = by_label(Gauge, "num_requests_waiting_by_reason", "reason", ("capacity", "deferred"))
        states = ("awake", "weights_offloaded", "discard_all")
        by_label(Gauge, "engine_sleep_state", "sleep_state", states)["awake"].set(1)
        sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
        self._sources = by_label(Counter, "prompt_tokens_by_source", "source", sources)
        self._finished = by_label(Counter, "request_success", "finished_reason", get_args(FinishReason))
        config = cache_config(scenario, total_blocks)
        made(Gauge, "cache_config_info", _PAGE["by_label"]["cache_config_info"], config).labels(**config).set(1)
        self._scheduler_totals = (0, 0, 0)

    def page(self, names: Collection[str] = ()) -> bytes:
        """The metrics in text; with `names` only the series of those exact names, as `name[]` selects them."""
        return generate_latest(self._registry.restricted_registry(names) if names else self._registry)

    def see(self, scheduler: Scheduler) -> None:
        """Take the gauges, and the counters that the scheduler itself keeps."""
        self._gauges["num_requests_running"].set(len(scheduler.running))
        self._gauges["num_requests_waiting"].set(len(scheduler.waiting))
        self._gauges["kv_cache_usage_perc"].set(scheduler.pool.usage_ratio)
        self._waiting["capacity"].set(len(scheduler.waiting))
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
        "cache_dtype": "auto" if scenario.kv_element_bytes == BFLOAT16_BYTES else "fp8",
        "enable_prefix_caching": scenario.prefix_caching,
        "gpu_memory_utilization": scenario.memory_fraction_ratio,
        "kv_cache_max_concurrency": concurrency,
        "kv_cache_memory_bytes": scenario.kv_cache_memory_bytes,
        "kv_cache_size_tokens": int(concurrency * scenario.max_model_len_tokens),
        "num_gpu_blocks": total_blocks,
    }
    return {**_PAGE["cache_config"], **{name: str(value) for name, value in values.items()}}
