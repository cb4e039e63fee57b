"""The middle rows: does it leak or fragment, is the pool too small."""

from __future__ import annotations

from dashboards.grafana import Row, Target
from dashboards.panels import by_name, fixed, graph
from dashboards.queries import (
    CONCURRENCY,
    each,
    gpu,
    own,
    rate,
    ratio,
    vllm,
)
from dashboards.states import FULL, TIME_LEFT

_GIB = 2**30
_IDLE = f"{own('kv_used_bytes')} and ({own('requests_running')} + {own('requests_waiting')} == 0)"


_LIMIT = by_name("limit", color=fixed("red"), custom_fillOpacity=0, custom_lineStyle={"dash": [10, 10], "fill": "dash"})
_LIMIT_80 = by_name(
    "80 % of the limit", color=fixed("orange"), custom_fillOpacity=0, custom_lineStyle={"dash": [4, 8], "fill": "dash"}
)


def growth() -> Row:
    """What grows, what does not return, and what no allocation fits in."""
    gap = f"{gpu('torch_reserved_bytes')} - {gpu('torch_allocated_bytes')}"
    return Row(
        title="Is it leaking or fragmenting?",
        panels=(
            graph(
                "KV cache held while nothing runs",
                "Bytes of the pool that are in use although no request runs or waits. Returns to 0 on a healthy "
                "server; a floor that rises is a leak of blocks. Holes are times under load.\n\n"
                "Metrics: `kvdiag_kv_used_bytes`, `kvdiag_requests_running`, `kvdiag_requests_waiting`",
                Target(expr=each("max", "engine", _IDLE), legend="{{replica}} engine {{engine}}"),
                unit="bytes",
                width=8,
            ),
            graph(
                "Growth per hour",
                "Slope of the last hour of each device's used bytes, of what torch has allocated, and of the host "
                "memory of the largest process. A pool that was taken at start does not grow: what stays above 0 for "
                "hours does. Growth of a minute is load.\n\n"
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
                "How long the room lasts at the growth that was found, and the least that it can last. No line: no "
                "verdict has found growth.\n\n"
                "Metrics: `kvdiag_time_to_exhaustion_seconds`, `kvdiag_time_to_exhaustion_low_seconds`",
                Target(expr=each("min", "id", own("time_to_exhaustion_seconds")), legend="{{replica}} {{id}}"),
                Target(
                    expr=each("min", "id", own("time_to_exhaustion_low_seconds")), legend="{{replica}} {{id}} at least"
                ),
                unit="s",
                width=8,
                steps=TIME_LEFT,
            ),
            graph(
                "Growth that was found",
                "How fast what a verdict calls grows, with the least and the most that it can be.\n\n"
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
                width=8,
            ),
            graph(
                "Reserved by torch and not allocated",
                "The gap between what torch's allocator took from the driver and what lives in it. Most of it is cache "
                "that is used again; only *stranded* is fragmentation. The line is at 2 GiB. Needs the agent.\n\n"
                "Metrics: `kvdiag_torch_reserved_bytes`, `kvdiag_torch_allocated_bytes`, `kvdiag_torch_stranded_bytes`",
                Target(expr=each("max", "gpu, rank", gap), legend="{{replica}} GPU {{gpu}} gap"),
                Target(
                    expr=each("max", "gpu, rank", gpu("torch_stranded_bytes")),
                    legend="{{replica}} GPU {{gpu}} stranded",
                ),
                unit="bytes",
                width=8,
                steps={
                    "mode": "absolute",
                    "steps": [{"color": "transparent", "value": None}, {"color": "orange", "value": 2 * _GIB}],
                },
            ),
            graph(
                "Allocations that failed, or failed at first",
                "*retries*: torch had to give its cache back to the driver first. *out of memory*: it was not enough. "
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
                width=8,
            ),
            graph(
                "The last allocation that failed",
                "What it asked for, and what was free on the device then: more free than asked for is fragmentation. "
                "Needs the agent.\n\nMetrics: `kvdiag_oom_asked_bytes`, `kvdiag_oom_free_bytes`",
                Target(
                    expr=each("max", "gpu, process", gpu("oom_asked_bytes")), legend="{{replica}} {{process}} asked"
                ),
                Target(expr=each("max", "gpu, process", gpu("oom_free_bytes")), legend="{{replica}} {{process}} free"),
                unit="bytes",
                width=12,
            ),
            graph(
                "Host memory",
                "The server's own memory on the host, without file-backed pages: the most common real leak.\n\n"
                "Metrics: `kvdiag_host_anonymous_bytes`, `kvdiag_host_resident_bytes`",
                Target(expr=each("max", "process", own("host_anonymous_bytes")), legend="{{replica}} {{process}}"),
                Target(expr=each("sum", "", own("host_resident_bytes")), legend="{{replica}} resident, all processes"),
                unit="bytes",
                width=12,
            ),
        ),
    )


def pool() -> Row:
    """Occupancy, waiting, preemptions, and concurrency against its limit."""
    tokens = vllm("request_prompt_tokens_bucket")
    return Row(
        title="Is the pool too small?",
        panels=(
            graph(
                "Pool in use",
                "Share of each engine's KV pool that requests hold, and memory pressure, which is 1 as soon as "
                "requests wait for capacity.\n\nMetrics: `kvdiag_kv_usage_ratio`, `kvdiag_memory_pressure_ratio`",
                Target(expr=each("max", "engine", own("kv_usage_ratio")), legend="{{replica}} engine {{engine}}"),
                Target(expr=each("max", "", gpu("memory_pressure_ratio")), legend="{{replica}} pressure"),
                unit="percentunit",
                width=8,
                most=1,
                steps=FULL,
            ),
            graph(
                "Requests against the limit",
                "Requests that run and wait, over all chosen replicas, and how many the pools hold at once: of their "
                "present length where kvdiag knows it, else of the longest that are admitted.\n\n"
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
                "*capacity*: for room in the pool or the batch. *deferred*: for something else that passes.\n\n"
                "Metric: `vllm:num_requests_waiting_by_reason`",
                Target(
                    expr=each("sum", "reason", vllm("num_requests_waiting_by_reason")),
                    legend="{{replica}} {{reason}}",
                ),
                unit="short",
                width=8,
            ),
            graph(
                "Preemptions per second",
                "Requests that were put out of the pool to make room, and are computed again.\n\n"
                "Metric: `vllm:num_preemptions_total`",
                Target(
                    expr=each("sum", "engine", rate(vllm("num_preemptions_total"))),
                    legend="{{replica}} engine {{engine}}",
                ),
                unit="ops",
                width=8,
            ),
            graph(
                "Prompt length",
                "Mean, and the bucket that 99 % of the finished requests stay within. A long tail fills a pool that "
                "the mean fits in.\n\nMetric: `vllm:request_prompt_tokens`",
                Target(
                    expr=ratio(
                        each("sum", "", rate(vllm("request_prompt_tokens_sum"))),
                        each("sum", "", rate(vllm("request_prompt_tokens_count"))),
                    ),
                    legend="{{replica}} mean",
                ),
                Target(expr=f"histogram_quantile(0.99, {each('sum', 'le', rate(tokens))})", legend="{{replica}} 99 %"),
                unit="short",
                width=8,
            ),
            graph(
                "Context of what runs",
                "Tokens in the pool for each request that runs, those generated so far among them, and the most within "
                "5 minutes: a document of ten pages is a step here.\n\nMetric: `kvdiag_context_mean_tokens`",
                Target(expr=each("max", "engine", own("context_mean_tokens")), legend="{{replica}} engine {{engine}}"),
                Target(
                    expr=each("max", "engine", f"max_over_time({own('context_mean_tokens')}[5m])"),
                    legend="{{replica}} engine {{engine}} within 5 min",
                ),
                unit="short",
                width=8,
            ),
            graph(
                "Waste in the blocks held",
                "Share of the blocks that requests hold which no token fills. A few per cent at most with paging.\n\n"
                "Metric: `kvdiag_kv_waste_ratio`",
                Target(expr=each("max", "engine", own("kv_waste_ratio")), legend="{{replica}} engine {{engine}}"),
                unit="percentunit",
                width=8,
            ),
            graph(
                "Further requests that fit",
                "Requests as long as those that run now that the free blocks still hold.\n\n"
                "Metric: `kvdiag_kv_headroom_requests`",
                Target(expr=each("sum", "engine", own("kv_headroom_requests")), legend="{{replica}} engine {{engine}}"),
                unit="short",
                width=8,
            ),
            graph(
                "Room in the pool",
                "Tokens that still fit into each engine's KV pool.\n\n"
                "Metrics: `kvdiag_kv_capacity_tokens`, `kvdiag_kv_usage_ratio`",
                Target(
                    expr=each("sum", "engine", f"{own('kv_capacity_tokens')} * (1 - {own('kv_usage_ratio')})"),
                    legend="{{replica}} engine {{engine}}",
                ),
                unit="short",
                width=8,
            ),
        ),
    )
