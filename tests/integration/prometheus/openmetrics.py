"""A timeline as the series of its exporters, in lines of OpenMetrics for promtool."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from kvdiag.model import Facts, KvPool, Timeline

MIB = 2**20

Labels = Mapping[str, str]

NEW_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "kv_usage_ratio": "vllm:kv_cache_usage_perc",
        "requests_running": "vllm:num_requests_running",
        "requests_waiting": "vllm:num_requests_waiting",
        "preemptions_total": "vllm:num_preemptions_total",
        "prompt_tokens_total": "vllm:prompt_tokens_total",
        "generation_tokens_total": "vllm:generation_tokens_total",
        "prefix_queries_total": "vllm:prefix_cache_queries_total",
        "prefix_hits_total": "vllm:prefix_cache_hits_total",
        "media_queries_total": "vllm:mm_cache_queries_total",
    }
)
"""vLLM 0.11 and newer."""

OLD_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **NEW_NAMES,
        "kv_usage_ratio": "vllm:gpu_cache_usage_perc",
        "prefix_queries_total": "vllm:gpu_prefix_cache_queries_total",
        "prefix_hits_total": "vllm:gpu_prefix_cache_hits_total",
    }
)
"""vLLM 0.9.0, whose V1 engine counted the null block as used."""


def line(name: str, labels: Labels, value: float | str, at_seconds: float) -> str:
    """One sample."""
    inside = ",".join(f'{label}="{text}"' for label, text in labels.items())
    return f"{name}{{{inside}}} {value} {at_seconds:.3f}"


def vllm(timeline: Timeline, facts: Facts, labels: Labels, names: Mapping[str, str] = NEW_NAMES) -> Iterator[str]:
    """The engines, as vLLM's own metrics report them."""
    for sample in timeline.samples:
        for engine in sample.engines or ():
            told = {**labels, "engine": engine.engine, "model_name": facts.model or "tiny"}
            for field, name in names.items():
                value = getattr(engine, field)
                if value is not None:
                    yield line(name, told, value, sample.at_seconds)
        if sample.engines:
            for pool in facts.pools:
                total = str(pool.total_blocks * len(facts.pools))
                yield line("vllm:cache_config_info", {**labels, **_config(pool, total)}, 1, sample.at_seconds)


def _config(pool: KvPool, total_blocks: str) -> dict[str, str]:
    told = {
        "engine": pool.engine,
        "block_size": str(pool.block_tokens),
        "num_gpu_blocks": total_blocks,
        "cache_dtype": pool.cache_dtype,
        "gpu_memory_utilization": pool.memory_fraction_ratio,
        "enable_prefix_caching": pool.prefix_caching,
        "kv_cache_memory_bytes": pool.pool_bytes,
        "kv_cache_size_tokens": pool.capacity_tokens,
        "kv_cache_max_concurrency": pool.max_concurrency,
    }
    return {label: str(value) for label, value in told.items()}


def dcgm(timeline: Timeline, labels: Labels) -> Iterator[str]:
    """The devices, as DCGM's exporter reports them: whole MiB, with the driver's reservation as its own series."""
    for sample in timeline.samples:
        for device in sample.devices or ():
            memory = device.memory
            if memory is None:
                continue
            reserved = memory.driver_reserved_bytes or 0
            told = {**labels, "gpu": str(device.index), "UUID": device.uuid, "modelName": device.name}
            for name, size in (
                ("USED", memory.used_bytes - reserved),
                ("FREE", memory.free_bytes),
                ("RESERVED", reserved),
            ):
                yield line(f"DCGM_FI_DEV_FB_{name}", told, size // MIB, sample.at_seconds)


def kvdiag(timeline: Timeline, labels: Labels) -> Iterator[str]:
    """Devices, processes, allocators and host memory, as kvdiag's own metrics report them."""
    for sample in timeline.samples:
        at_seconds = sample.at_seconds
        for device in sample.devices or ():
            told = {**labels, "gpu": str(device.index), "uuid": device.uuid}
            if device.memory is not None:
                sizes = {
                    "total": device.memory.total_bytes,
                    "used": device.memory.used_bytes,
                    "free": device.memory.free_bytes,
                    "driver_reserved": device.memory.driver_reserved_bytes,
                }
                for name, size in sizes.items():
                    if size is not None:
                        yield line(f"kvdiag_gpu_memory_{name}_bytes", told, size, at_seconds)
            for process in device.processes or ():
                if process.used_bytes is not None:
                    who = {**told, "process": f"{process.name} {process.pid}"}
                    yield line("kvdiag_gpu_process_memory_bytes", who, process.used_bytes, at_seconds)
        for each in sample.allocators or ():
            told = {**labels, "uuid": f"GPU-{each.device_uuid}", "process": f"{each.title} {each.pid}"}
            for field in ("allocated_bytes", "reserved_bytes", "alloc_retries_total", "ooms_total"):
                if (value := getattr(each, field)) is not None:
                    yield line(f"kvdiag_torch_{field}", told, value, at_seconds)
            for field in ("releasable_bytes", "stranded_bytes") if each.split is not None else ():
                yield line(f"kvdiag_torch_{field}", told, getattr(each.split, field), at_seconds)
        for host in sample.host or ():
            told = {**labels, "process": f"{host.name} {host.pid}"}
            yield line("kvdiag_host_resident_bytes", told, host.resident_bytes, at_seconds)
            if host.anonymous_bytes is not None:
                yield line("kvdiag_host_anonymous_bytes", told, host.anonymous_bytes, at_seconds)
