"""The lower rows: which rank or process, what it costs, and the health of kvdiag itself."""

from dashboards.grafana import Row, Target
from dashboards.panels import NEEDS_AGENT, graph, timeline
from dashboards.queries import (
    each,
    gpu,
    named,
    own,
    rate,
    ratio,
    replica,
    served_rate,
)
from dashboards.states import UP_MAPPINGS, UP_STEPS


def holders() -> Row:
    """Memory by GPU, rank and process."""
    used = replica(gpu("gpu_memory_used_bytes"))
    spread = f"(max by (replica) ({used}) - min by (replica) ({used}))"
    return Row(
        title="Which rank or process?",
        panels=(
            graph(
                "Used, by GPU",
                "Used bytes of each device. The ranks of one model use the same; the fullest limits them all.\n\n"
                "Metric: `kvdiag_gpu_memory_used_bytes`",
                Target(expr=each("max", "gpu", gpu("gpu_memory_used_bytes")), legend="{{replica}} GPU {{gpu}}"),
                unit="bytes",
                width=8,
            ),
            graph(
                "KV cache lost to uneven GPUs, in tokens",
                "Used bytes of the fullest minus the emptiest device, in tokens of KV cache that every rank loses. 0 "
                "with one GPU.\n\n"
                "Metrics: `kvdiag_gpu_memory_used_bytes`, `kvdiag_kv_bytes_per_token`",
                Target(expr=ratio(spread, each("max", "", own("kv_bytes_per_token"))), legend="{{replica}}"),
                unit="short",
                width=8,
            ),
            graph(
                "GPU memory by process",
                "Device memory of each process. Memory of other processes than the server's is foreign memory.\n\n"
                "Metric: `kvdiag_gpu_process_memory_bytes`",
                Target(
                    expr=each("sum", "gpu, process", gpu("gpu_process_memory_bytes")),
                    legend="{{replica}} GPU {{gpu}} {{process}}",
                ),
                unit="bytes",
                width=8,
            ),
            graph(
                "Allocated by torch, by rank",
                "Live tensors in each rank's process. Needs the agent.\n\nMetric: `kvdiag_torch_allocated_bytes`",
                Target(
                    expr=each("max", "gpu, rank, process", gpu("torch_allocated_bytes")),
                    legend="{{replica}} rank {{rank}} {{process}}",
                ),
                no_value=NEEDS_AGENT,
                unit="bytes",
            ),
            graph(
                "Reserved by torch, by rank",
                "Bytes that torch has reserved from the driver in each rank's process. Needs the agent.\n\n"
                "Metric: `kvdiag_torch_reserved_bytes`",
                Target(
                    expr=each("max", "gpu, rank, process", gpu("torch_reserved_bytes")),
                    legend="{{replica}} rank {{rank}} {{process}}",
                ),
                no_value=NEEDS_AGENT,
                unit="bytes",
            ),
        ),
    )


def speed() -> Row:
    """The cost of a pool that is too small; kept short, because vLLM has boards for it."""
    latency = each("sum", "le", served_rate("inter_token_latency", "_bucket"))
    return Row(
        title="What does it cost: speed and caching (the engine's own series)",
        collapsed=True,
        panels=(
            graph(
                "Tokens per second",
                "Prompt and generated tokens. llama.cpp's prompts are without the tokens that it had cached.\n\n"
                + named("prompt_tokens", "generation_tokens"),
                Target(expr=each("sum", "", served_rate("prompt_tokens")), legend="{{replica}} prompt"),
                Target(expr=each("sum", "", served_rate("generation_tokens")), legend="{{replica}} generated"),
                unit="cps",
                width=8,
            ),
            graph(
                "Inter-token latency",
                "Median and 95th percentile. If it rises with long prompts, use smaller prefill chunks. Only vLLM and "
                "SGLang report it.\n\n" + named("inter_token_latency"),
                Target(expr=f"histogram_quantile(0.5, {latency})", legend="{{replica}} p50"),
                Target(expr=f"histogram_quantile(0.95, {latency})", legend="{{replica}} p95"),
                unit="s",
                width=8,
            ),
            graph(
                "Prefix cache hit rate",
                "Ratio of prompt tokens that were cached. It falls when the pool is too small to keep "
                "prefixes.\n\n" + named("prefix_hits", "prefix_queries"),
                Target(
                    expr=ratio(
                        each("sum", "", served_rate("prefix_hits")), each("sum", "", served_rate("prefix_queries"))
                    ),
                    legend="{{replica}}",
                ),
                unit="percentunit",
                width=8,
                most=1,
            ),
        ),
    )


def itself() -> Row:
    """Whether kvdiag itself is working."""
    return Row(
        title="kvdiag itself",
        collapsed=True,
        panels=(
            timeline(
                "Sources",
                "Whether the last read of each source succeeded.\n\nMetric: `kvdiag_source_up`",
                Target(expr=each("min", "source", own("source_up")), legend="{{replica}} {{source}}"),
                mappings=UP_MAPPINGS,
                steps=UP_STEPS,
                width=12,
                height=8,
            ),
            graph(
                "Failed reads per second",
                "Failed reads of each source.\n\nMetric: `kvdiag_source_errors_total`",
                Target(expr=each("sum", "source", rate(own("source_errors_total"))), legend="{{replica}} {{source}}"),
                unit="ops",
            ),
            graph(
                "Read duration",
                "How long the last read of each source took.\n\nMetric: `kvdiag_sample_duration_seconds`",
                Target(expr=each("max", "source", own("sample_duration_seconds")), legend="{{replica}} {{source}}"),
                unit="s",
            ),
            graph(
                "Age of the data",
                "Time since the newest sample and the newest diagnosis.\n\n"
                "Metrics: `kvdiag_sample_timestamp_seconds`, `kvdiag_diagnosis_timestamp_seconds`",
                Target(
                    expr=each("max", "", f"time() - {own('sample_timestamp_seconds')}"), legend="{{replica}} sample"
                ),
                Target(
                    expr=each("max", "", f"time() - {own('diagnosis_timestamp_seconds')}"),
                    legend="{{replica}} diagnosis",
                ),
                unit="s",
            ),
        ),
    )
