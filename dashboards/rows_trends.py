"""The middle rows: is memory leaking or fragmenting, is the pool too small."""

from dashboards.grafana import Row, Target
from dashboards.panels import NEEDS_AGENT, by_name, fixed, graph
from dashboards.queries import (
    CONCURRENCY,
    each,
    gpu,
    named,
    own,
    ratio,
    served,
    served_rate,
)
from dashboards.states import FULL, TIME_LEFT

_IDLE = f"{own('kv_used_bytes')} and ({own('requests_running')} + {own('requests_waiting')} == 0)"


_LIMIT = by_name("limit", color=fixed("red"), custom_fillOpacity=0, custom_lineStyle={"dash": [10, 10], "fill": "dash"})
_LIMIT_80 = by_name(
    "80 % of the limit", color=fixed("orange"), custom_fillOpacity=0, custom_lineStyle={"dash": [4, 8], "fill": "dash"}
)


def growth() -> Row:
    """Growth, memory that is not released, and memory that no allocation fits in."""
    gap = f"{gpu('torch_reserved_bytes')} - {gpu('torch_allocated_bytes')}"
    return Row(
        title="Is it leaking or fragmenting?",
        panels=(
            graph(
                "KV cache in use while idle",
                "Bytes of the pool in use although no request is running or waiting. 0 on a healthy "
                "server; a rising line is a leak of blocks. No samples while the server is busy.\n\n"
                "Metrics: `kvdiag_kv_used_bytes`, `kvdiag_requests_running`, `kvdiag_requests_waiting`",
                Target(expr=each("max", "engine", _IDLE), legend="{{replica}} engine {{engine}}"),
                unit="bytes",
                width=8,
                span_seconds=3600,
            ),
            graph(
                "Growth per hour",
                "Slope over the last hour of each device's used bytes, of torch's allocated bytes, and of the host "
                "memory of the largest process. A pool that is allocated at start does not grow: a line above 0 for "
                "hours is growth; above 0 for minutes is load.\n\n"
                "Metrics: `kvdiag_gpu_memory_used_bytes`, `kvdiag_torch_allocated_bytes`, "
                "`kvdiag_host_anonymous_bytes`",
                Target(
                    expr=each("max", "gpu", f"deriv({gpu('gpu_memory_used_bytes')}[1h]) * 3600"),
                    legend="{{replica}} GPU {{gpu}}",
                ),
                Target(
                    expr=each("max", "gpu", f"deriv({gpu('torch_allocated_bytes')}[1h]) * 3600"),
                    legend="{{replica}} GPU {{gpu}} torch",
                ),
                Target(
                    expr=each("max", "", f"deriv({own('host_anonymous_bytes')}[1h]) * 3600"),
                    legend="{{replica}} host",
                ),
                unit="bytes",
                width=8,
                least=None,
            ),
            graph(
                "Time to exhaustion",
                "Time until memory is exhausted at the observed growth, with its lower bound. No line: no "
                "verdict has found growth.\n\n"
                "Metrics: `kvdiag_time_to_exhaustion_seconds`, `kvdiag_time_to_exhaustion_low_seconds`",
                Target(expr=each("min", "id", own("time_to_exhaustion_seconds")), legend="{{replica}} {{id}}"),
                Target(
                    expr=each("min", "id", own("time_to_exhaustion_low_seconds")), legend="{{replica}} {{id}} at least"
                ),
                unit="s",
                no_value="No growth found",
                width=8,
                steps=TIME_LEFT,
            ),
            graph(
                "Growth by verdict",
                "Growth of the memory that a verdict is about, with its lower and upper bound.\n\n"
                "Metrics: `kvdiag_growth_bytes_per_second`, `kvdiag_growth_low_bytes_per_second`, "
                "`kvdiag_growth_high_bytes_per_second`",
                *(
                    Target(
                        expr=each("max", "id", f"{own(f'growth{bound}_bytes_per_second')} * 3600"),
                        legend=f"{{{{replica}}}} {{{{id}}}}{words}",
                    )
                    for bound, words in (("", ""), ("_low", " at least"), ("_high", " at most"))
                ),
                unit="bytes",
                no_value="No growth found",
                width=8,
            ),
            graph(
                "Reserved by torch and not allocated",
                "Reserved minus allocated bytes. Most of it is cache "
                "that torch reuses; only *stranded* is fragmentation. The alert fires above 1.86 GiB (2e9 bytes). "
                "Needs the agent.\n\n"
                "Metrics: `kvdiag_torch_reserved_bytes`, `kvdiag_torch_allocated_bytes`, `kvdiag_torch_stranded_bytes`",
                Target(expr=each("max", "gpu, rank", gap), legend="{{replica}} GPU {{gpu}} gap"),
                Target(
                    expr=each("max", "gpu, rank", gpu("torch_stranded_bytes")),
                    legend="{{replica}} GPU {{gpu}} stranded",
                ),
                unit="bytes",
                no_value=NEEDS_AGENT,
                width=8,
                steps={
                    "mode": "absolute",
                    "steps": [{"color": "transparent", "value": None}, {"color": "orange", "value": 2e9}],
                },
            ),
            graph(
                "Failed and retried allocations",
                "*retries*: torch had to flush its cache first. *out of memory*: that was not enough. "
                "Needs the agent.\n\n"
                "Metrics: `kvdiag_torch_alloc_retries_total`, `kvdiag_torch_ooms_total`",
                Target(
                    expr=each("sum", "", f"increase({gpu('torch_alloc_retries_total')}[$__rate_interval])"),
                    legend="{{replica}} retries",
                ),
                Target(
                    expr=each("sum", "", f"increase({gpu('torch_ooms_total')}[$__rate_interval])"),
                    legend="{{replica}} out of memory",
                ),
                unit="short",
                no_value=NEEDS_AGENT,
                width=8,
            ),
            graph(
                "Last failed allocation",
                "The requested size, and the device's free memory at that moment: more free than requested is "
                "fragmentation. Needs the agent.\n\nMetrics: `kvdiag_oom_asked_bytes`, `kvdiag_oom_free_bytes`",
                Target(
                    expr=each("max", "gpu, process", gpu("oom_asked_bytes")), legend="{{replica}} {{process}} asked"
                ),
                Target(expr=each("max", "gpu, process", gpu("oom_free_bytes")), legend="{{replica}} {{process}} free"),
                unit="bytes",
                no_value="No failed allocation, or no agent",
                width=12,
            ),
            graph(
                "Host memory",
                "Anonymous memory of the server's processes, in memory or swap. Most leaks "
                "are here.\n\n"
                "Metrics: `kvdiag_host_anonymous_bytes`, `kvdiag_host_resident_bytes`",
                Target(expr=each("max", "process", own("host_anonymous_bytes")), legend="{{replica}} {{process}}"),
                Target(expr=each("sum", "", own("host_resident_bytes")), legend="{{replica}} resident, all processes"),
                unit="bytes",
                width=12,
            ),
        ),
    )


def pool() -> Row:
    """Usage, waiting requests, preemptions, and concurrency with its limit."""
    lengths = each("sum", "le", served_rate("prompt_length", "_bucket"))
    return Row(
        title="Is the pool too small?",
        panels=(
            graph(
                "Pool in use",
                "Usage of each engine's KV pool, and memory pressure, which is 1 as soon as "
                "requests wait.\n\nMetrics: `kvdiag_kv_usage_ratio`, `kvdiag_memory_pressure_ratio`",
                Target(expr=each("max", "engine", own("kv_usage_ratio")), legend="{{replica}} engine {{engine}}"),
                Target(expr=each("max", "", gpu("memory_pressure_ratio")), legend="{{replica}} pressure"),
                unit="percentunit",
                width=8,
                most=1,
                steps=FULL,
            ),
            graph(
                "Requests and their limit",
                "Running and waiting requests of all chosen replicas, and how many fit into the pools: at their "
                "current length if kvdiag knows it, else at full context length.\n\n"
                "Metrics: `kvdiag_requests_running`, `kvdiag_requests_waiting`, `kvdiag_requests_concurrency_limit`, "
                "`kvdiag_requests_max_concurrency`",
                Target(expr=f"sum({own('requests_running')})", legend="running"),
                Target(expr=f"sum({own('requests_waiting')})", legend="waiting"),
                Target(expr=f"sum({CONCURRENCY})", legend="limit"),
                Target(expr=f"0.8 * sum({CONCURRENCY})", legend="80 % of the limit"),
                unit="short",
                width=8,
                overrides=(
                    by_name("running", color=fixed("blue")),
                    by_name("waiting", color=fixed("purple")),
                    _LIMIT,
                    _LIMIT_80,
                ),
            ),
            graph(
                "Waiting, by reason",
                "*capacity*: waiting for room in the pool or the batch. *deferred*: waiting for another, "
                "temporary reason. Only vLLM reports it.\n\n" + named("waiting_by_reason"),
                Target(expr=each("sum", "reason", served("waiting_by_reason")), legend="{{replica}} {{reason}}"),
                unit="short",
                width=8,
            ),
            graph(
                "Preemptions per second",
                "Requests evicted from the pool to make room; they are computed again. Only vLLM and SGLang, "
                "which calls them retracted, report them.\n\n" + named("preemptions"),
                Target(
                    expr=each("sum", "engine", served_rate("preemptions")),
                    legend="{{replica}} engine {{engine}}",
                ),
                unit="ops",
                width=8,
            ),
            graph(
                "Prompt length",
                "Mean and 99th percentile of the finished requests. A long tail can exhaust a pool "
                "that is large enough for the mean. TensorRT-LLM and llama.cpp do not "
                "report it.\n\n" + named("prompt_length"),
                Target(
                    expr=ratio(
                        each("sum", "", served_rate("prompt_length", "_sum")),
                        each("sum", "", served_rate("prompt_length", "_count")),
                    ),
                    legend="{{replica}} mean",
                ),
                Target(expr=f"histogram_quantile(0.99, {lengths})", legend="{{replica}} 99 %"),
                unit="short",
                width=8,
            ),
            graph(
                "Context of running requests",
                "Mean tokens in the pool per running request, including generated ones, and their maximum within "
                "5 minutes: a long document shows as a step.\n\nMetric: `kvdiag_context_mean_tokens`",
                Target(expr=each("max", "engine", own("context_mean_tokens")), legend="{{replica}} engine {{engine}}"),
                Target(
                    expr=each("max", "engine", f"max_over_time({own('context_mean_tokens')}[5m])"),
                    legend="{{replica}} engine {{engine}} within 5 min",
                ),
                unit="short",
                width=8,
            ),
            graph(
                "Pool by owner",
                "Blocks of the pools by who has them, counted inside the engine. *orphaned*: in use by no request, and "
                "leaked; *cached_free*: free, with a prefix that can still be hit. Needs the agent.\n\n"
                "Metric: `kvdiag_kv_blocks`",
                Target(expr=each("sum", "owner", own("kv_blocks")), legend="{{replica}} {{owner}}"),
                unit="short",
                no_value=NEEDS_AGENT,
                width=24,
                stacked=True,
            ),
            graph(
                "Wasted block space",
                "Share of the used block space that holds no tokens. A few percent at most with paging.\n\n"
                "Metric: `kvdiag_kv_waste_ratio`",
                Target(expr=each("max", "engine", own("kv_waste_ratio")), legend="{{replica}} engine {{engine}}"),
                unit="percentunit",
                width=8,
            ),
            graph(
                "Further requests that fit",
                "Requests of the current mean length that fit into the free blocks.\n\n"
                "Metric: `kvdiag_kv_headroom_requests`",
                Target(expr=each("sum", "engine", own("kv_headroom_requests")), legend="{{replica}} engine {{engine}}"),
                unit="short",
                width=8,
            ),
            graph(
                "Room in the pool",
                "Tokens that still fit into each engine's KV pool.\n\nMetric: `kvdiag_kv_headroom_tokens`",
                Target(expr=each("sum", "engine", own("kv_headroom_tokens")), legend="{{replica}} engine {{engine}}"),
                unit="short",
                width=8,
            ),
        ),
    )
