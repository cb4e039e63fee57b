"""The metrics page as vLLM 0.32 writes it (vllm/v1/metrics/loggers.py): `render(families(...))`. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvdiag.sim.statistics import Histogram, Statistics

Labels = Mapping[str, str]
Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of the page."""

    name: str
    labels: Labels
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """The lines under one HELP and TYPE."""

    name: str
    kind: Kind
    help: str
    series: tuple[Series, ...]


def families(
    statistics: Statistics, *, model: str, cache_config: Labels, process: Mapping[str, float], started_seconds: float
) -> Iterator[Family]:
    """All families of the page, in vLLM's order."""
    page = _Page({"engine": "0", "model_name": model}, started_seconds)
    for name, value in process.items():
        kind: Kind = "counter" if name.endswith("_total") else "gauge"
        yield Family(name, kind, PROCESS_HELP[name], (Series(name, {}, value),))
    yield from page.gauge("num_requests_running", "Number of requests in model execution batches.", statistics.running)
    yield from page.gauge("num_requests_waiting", "Number of requests waiting to be processed.", statistics.waiting)
    yield from page.gauges(
        "num_requests_waiting_by_reason",
        "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; 'deferred' "
        "= deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all reasons equals "
        "vllm:num_requests_waiting.",
        "reason",
        {"capacity": statistics.waiting, "deferred": 0},
    )
    yield from page.gauges(
        "engine_sleep_state",
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; weights_offloaded = "
        "1 means sleep level 1; discard_all = 1 means sleep level 2.",
        "sleep_state",
        {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
    )
    yield from page.gauge(
        "kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", statistics.kv_usage_ratio
    )
    yield from page.counter(
        "prefix_cache_queries",
        "Prefix cache queries, in terms of number of queried tokens.",
        statistics.prefix_queries_total,
    )
    yield from page.counter(
        "prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", statistics.prefix_hits_total
    )
    yield from page.counter(
        "num_preemptions", "Cumulative number of preemption from the engine.", statistics.preemptions_total
    )
    yield from page.counter("prompt_tokens", "Number of prefill tokens processed.", statistics.prompt_tokens_total)
    yield from page.counters(
        "prompt_tokens_by_source",
        "Number of prompt tokens by source.",
        "source",
        {
            "local_compute": statistics.prompt_tokens_total - statistics.cached_prompt_tokens_total,
            "local_cache_hit": statistics.cached_prompt_tokens_total,
            "external_kv_transfer": 0,
        },
    )
    yield from page.counter(
        "prompt_tokens_cached",
        "Number of cached prompt tokens (local + external).",
        statistics.cached_prompt_tokens_total,
    )
    yield from page.counter(
        "generation_tokens", "Number of generation tokens processed.", statistics.generation_tokens_total
    )
    yield from page.counters(
        "request_success", "Count of successfully processed requests.", "finished_reason", statistics.finished_total
    )
    for name, text, histogram in _histograms(statistics):
        yield from page.histogram(name, text, histogram)
    yield Family(
        "vllm:cache_config_info",
        "gauge",
        "Information of the LLMEngine CacheConfig",
        (Series("vllm:cache_config_info", cache_config, 1),),
    )


def _histograms(statistics: Statistics) -> Iterator[tuple[str, str, Histogram]]:
    yield "request_prompt_tokens", "Number of prefill tokens processed.", statistics.prompt_tokens
    yield "request_generation_tokens", "Number of generation tokens processed.", statistics.generation_tokens
    yield "iteration_tokens_total", "Histogram of number of tokens per engine_step.", statistics.step_tokens
    yield (
        "request_max_num_generation_tokens",
        "Histogram of maximum number of requested generation tokens.",
        statistics.generation_tokens,
    )
    yield "request_params_n", "Histogram of the n request parameter.", statistics.params_n
    yield (
        "request_params_max_tokens",
        "Histogram of the max_tokens request parameter.",
        statistics.params_max_tokens,
    )
    yield "time_to_first_token_seconds", "Histogram of time to first token in seconds.", statistics.ttft_seconds
    yield "inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", statistics.itl_seconds
    yield (
        "request_time_per_output_token_seconds",
        "Histogram of time_per_output_token_seconds per request.",
        statistics.tpot_seconds,
    )
    yield "e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", statistics.e2e_seconds
    yield (
        "request_queue_time_seconds",
        "Histogram of time spent in WAITING phase for request.",
        statistics.queue_seconds,
    )
    yield (
        "request_inference_time_seconds",
        "Histogram of time spent in RUNNING phase for request.",
        statistics.inference_seconds,
    )
    yield (
        "request_prefill_time_seconds",
        "Histogram of time spent in PREFILL phase for request.",
        statistics.prefill_seconds,
    )
    yield (
        "request_decode_time_seconds",
        "Histogram of time spent in DECODE phase for request.",
        statistics.decode_seconds,
    )
    yield (
        "request_num_preemptions",
        "Histogram of the number of times a request was preempted.",
        statistics.preemptions,
    )
    yield (
        "request_prefill_kv_computed_tokens",
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
        statistics.prefill_computed_tokens,
    )


PROCESS_HELP = {
    "process_virtual_memory_bytes": "Virtual memory size in bytes.",
    "process_resident_memory_bytes": "Resident memory size in bytes.",
    "process_start_time_seconds": "Start time of the process since unix epoch in seconds.",
    "process_cpu_seconds_total": "Total user and system CPU time spent in seconds.",
}


class _Page:
    """Builds vLLM's families: its prefix, its labels, and the `_created` twins that prometheus_client adds."""

    def __init__(self, labels: Labels, started_seconds: float) -> None:
        self._labels = labels
        self._started_seconds = started_seconds

    def gauge(self, name: str, text: str, value: float) -> Iterator[Family]:
        yield Family(f"vllm:{name}", "gauge", text, (Series(f"vllm:{name}", self._labels, value),))

    def gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Iterator[Family]:
        yield Family(f"vllm:{name}", "gauge", text, self._by(f"vllm:{name}", label, values))

    def counter(self, name: str, text: str, value: float) -> Iterator[Family]:
        total = f"vllm:{name}_total"
        yield Family(total, "counter", text, (Series(total, self._labels, value),))
        yield self._created(name, text, [self._labels])

    def counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Iterator[Family]:
        total = f"vllm:{name}_total"
        series = self._by(total, label, values)
        yield Family(total, "counter", text, series)
        yield self._created(name, text, [one.labels for one in series])

    def histogram(self, name: str, text: str, histogram: Histogram) -> Iterator[Family]:
        full = f"vllm:{name}"
        cumulative = histogram.cumulative
        bounds = [*map(repr, histogram.bounds), "+Inf"]
        buckets = (
            Series(f"{full}_bucket", {**self._labels, "le": bound}, hits)
            for bound, hits in zip(bounds, cumulative, strict=True)
        )
        count = Series(f"{full}_count", self._labels, cumulative[-1])
        yield Family(full, "histogram", text, (*buckets, count, Series(f"{full}_sum", self._labels, histogram.sum)))
        yield self._created(name, text, [self._labels])

    def _by(self, name: str, label: str, values: Mapping[str, float]) -> tuple[Series, ...]:
        return tuple(Series(name, {**self._labels, label: key}, value) for key, value in values.items())

    def _created(self, name: str, text: str, labels: Sequence[Labels]) -> Family:
        created = f"vllm:{name}_created"
        return Family(created, "gauge", text, tuple(Series(created, one, self._started_seconds) for one in labels))


def only(page: Iterable[Family], names: Collection[str]) -> Iterator[Family]:
    """What `name[]` leaves: the series of those exact names (prometheus_client's restricted registry)."""
    for family in page:
        kept = tuple(series for series in family.series if series.name in names)
        if kept:
            yield Family(family.name, family.kind, family.help, kept)


def render(page: Iterable[Family]) -> str:
    """The page in Prometheus's text format."""
    lines: list[str] = []
    for family in page:
        lines.append(f"# HELP {family.name} {family.help}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        lines += (f"{series.name}{_labels_text(series.labels)} {float(series.value)!r}" for series in family.series)
    return "".join(f"{line}\n" for line in lines)


def _labels_text(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items())) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
