"""vLLM's metrics endpoint, 0.6 to 0.32, by one table of names. Pure.

Four things are read: the state of each engine (`parse_engines`), its KV pool as it was configured (`parse_pools`), the
host caches that the configuration limits (`parse_caches`), and the lengths of finished requests (`parse_lengths`).
Names and counting rules changed over the versions: of a field's names the newest that is present counts, and `_dialect`
decides by the version, else by the names, whether there is a null block and whether the usage gauge counts it. Figures
outside their range become gaps.
"""

import json
import math
import pkgutil
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvdiag.engine_memory import host_cache_set_by
from kvdiag.engines import metrics_reader
from kvdiag.engines.engine import SOURCE, EngineReading
from kvdiag.engines.metrics_reader import CHECK, MAX_GAPS, Figures, lengths_of, parse_version, repeated
from kvdiag.model import MAX_COUNT, Engine, Gap, HostCache, KvPool, Lengths
from kvdiag.sources.prometheus_names import Meaning
from kvdiag.sources.prometheus_text import Page, Series

KV_USAGE, GPU_USAGE = "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"
USAGE_NAMES = (KV_USAGE, GPU_USAGE)
"""The gauge of KV usage, a fraction in spite of its name: `gpu_` until 0.9.1, both until 0.10, `kv_` from 0.11."""

COUNTS: Mapping[str, Sequence[str]] = json.loads(pkgutil.get_data(__package__, "counts.json") or b"")
"""Field of `Engine` to its names, newest first."""

WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
SLEEP_STATE = "vllm:engine_sleep_state"
CONFIG = "vllm:cache_config_info"

BUCKETS = "vllm:request_generation_tokens_bucket"
PROMPTS = ("vllm:request_prompt_tokens_sum", "vllm:request_prompt_tokens_count")
LENGTH_NAMES = (BUCKETS, *PROMPTS)

_MAX_NUM_SEQS = re.compile(r"--max[-_]num[-_]seqs[=\s](\d{1,6})(?!\S)")
"""The last one counts (argparse). No metric of 0.32 has it."""

_GIB = re.compile(r"\d{1,6}(?:\.\d{1,6})?")

POLLED_NAMES = (*USAGE_NAMES, *(name for names in COUNTS.values() for name in names), WAITING_BY_REASON, SLEEP_STATE)
"""Requested at each tick: about a thirtieth of all metrics (0.32: 1.3 ms and 2 KB instead of 7 ms and 59 KB)."""

NEEDED_NAMES: Mapping[str, Sequence[str]] = {
    "KV usage": USAGE_NAMES,
    "running requests": COUNTS["requests_running"],
    "waiting requests": COUNTS["requests_waiting"],
    "preemptions": COUNTS["preemptions_total"],
    "the pool's size": (CONFIG,),
}

MAX_WORD_CHARACTERS = 64
"""Of the name of a number format."""


def meanings() -> dict[str, Meaning]:
    """The metrics of this module, as named in Prometheus, to the field that each reports."""
    found = metrics_reader.meanings({"kv_usage_ratio": USAGE_NAMES, **COUNTS})
    capacity = (("reason", "capacity"),)
    found[WAITING_BY_REASON] = Meaning(part="engine", field="requests_waiting_for_capacity", where=capacity)
    found[SLEEP_STATE] = Meaning(part="engine", field="awake", where=(("sleep_state", "awake"),))
    found[CONFIG] = Meaning(part="config", field="pool")
    return found


def parse_engines(page: Page) -> EngineReading:
    """The engines in the order of their labels; `None` with a gap if there are none."""
    is_served = any(name.startswith(("http_", "process_")) for name in page)
    hint = "start the server without --disable-log-stats" if is_served else "is this a vLLM server?"
    pages = metrics_reader.split_by_engine(
        page, (*POLLED_NAMES, CONFIG), absent=f"the metrics have no vllm:* series: {hint}"
    )
    if isinstance(pages, Gap):
        return None, (pages,)
    gaps: list[Gap] = []
    engines = tuple(_engine(Figures(own, label, gaps), label) for label, own in pages.items())
    return engines, tuple(gaps[:MAX_GAPS])


def _engine(figures: Figures, label: str) -> Engine:
    counts = figures.counts(COUNTS)
    usage = figures.ratio("KV usage", USAGE_NAMES)
    awake = figures.count((SLEEP_STATE,), sleep_state="awake")
    return Engine(
        engine=label,
        kv_usage_ratio=usage,
        requests_waiting_for_capacity=figures.count((WAITING_BY_REASON,), reason="capacity"),
        asleep=None if awake is None else awake == 0,
        **counts,
    )


def parse_pools(
    page: Page,
    version: str | None,
    commands: Sequence[str] = (),
) -> tuple[tuple[KvPool, ...], tuple[Gap, ...]]:
    """The KV pools that `vllm:cache_config_info` reports, one per engine; how many requests run by the command alone.

    `num_gpu_blocks` is the sum over data-parallel engines, repeated on each engine's line, from 0.9.0 on, when the
    line got its `engine` label (vllm/v1/engine/core_client.py; 0.32 with two engines reports 8192 for both).
    """
    lines = page.get(CONFIG, ())
    if not lines:
        reason = f"the engine does not report its KV pool; check why /metrics lacks {CONFIG} (`kvdiag doctor`)"
        return (), (Gap(source=SOURCE, kind="absent", reason=reason),)
    if (crowd := metrics_reader.crowded(page, (CONFIG,))) is not None:
        return (), (crowd,)
    gaps: list[Gap] = []
    pools: list[KvPool] = []
    counts = Counter(line.engine for line in lines)
    given = [int(found[1]) for command in commands for found in _MAX_NUM_SEQS.finditer(command)]
    most_requests = given[-1] or None if given else None
    gaps += [repeated(CONFIG, count, engine) for engine, count in counts.items() if count > 1]
    for line in lines:
        if counts[line.engine] > 1:
            continue
        try:
            pool = _pool(line, engines=len(counts), dialect=_dialect(page, version))
            pools.append(replace(pool, max_requests=most_requests))
        except ValueError as error:
            label = line.engine[: metrics_reader.MAX_LABEL_CHARACTERS]
            gaps.append(Gap(SOURCE, "failed", f"{CONFIG} of engine {label} cannot be used: {error}; {CHECK}"))
    return tuple(pools), tuple(gaps[:MAX_GAPS])


def parse_caches(page: Page) -> tuple[HostCache, ...]:
    """The caches in host memory limited by `vllm:cache_config_info`, all ranks together (since 0.11.1, in GiB).

    (vllm/config/cache.py::CacheConfig.kv_offloading_size.) Its swap space is left out: it is taken whole, at start.
    """
    reported = {line.labels.get("kv_offloading_size", "") for line in page.get(CONFIG, ())}
    sizes = {float(size) for size in reported if _GIB.fullmatch(size)}
    if len(reported) != 1 or not sizes:
        return ()
    name = host_cache_set_by("--kv_offloading_size").name
    return (HostCache(name=name, flag="kv_offloading_size", limit_bytes=round(sizes.pop() * 2**30)),)


def _dialect(page: Page, version: str | None) -> tuple[int, int]:
    """How many null blocks a version's pool has, and how many of them its usage gauge counts."""
    known = parse_version(version)
    # V0 was removed after 0.11.0; before, metrics without any of V1's names are V0's, which has a hit rate instead.
    if not (known and known > (0, 11, 0)) and page.keys().isdisjoint((KV_USAGE, *COUNTS["prefix_queries_total"])):
        return 0, 0
    # kv_cache_usage_perc without its older twin means 0.11 or later, even if /version is not available.
    newer = known >= (0, 10, 2) if known else GPU_USAGE not in page
    return 1, 0 if newer else 1


def _pool(line: Series, *, engines: int, dialect: tuple[int, int]) -> KvPool:
    labels = line.labels
    total = _label_int(labels, "num_gpu_blocks")
    block_tokens = _label_int(labels, "effective_attention_block_size") or _label_int(labels, "block_size")
    if total is None or block_tokens is None:
        raise ValueError(
            f"num_gpu_blocks is {labels.get('num_gpu_blocks')!r:.40}, block_size is {labels.get('block_size')!r:.40}"
        )
    total //= engines
    null_blocks, counted_null_blocks = dialect
    usable = total - null_blocks
    fraction = _label_float(labels, "gpu_memory_utilization")
    concurrency = _label_float(labels, "kv_cache_max_concurrency")
    overridden = _label_int(labels, "num_gpu_blocks_override") is not None
    return KvPool(
        engine=line.engine,
        block_tokens=block_tokens,
        total_blocks=total,
        usable_blocks=usable,
        usage_blocks=usable + counted_null_blocks,
        capacity_tokens=_label_int(labels, "kv_cache_size_tokens"),
        max_concurrency=concurrency if concurrency is not None and 1 / MAX_COUNT < concurrency < MAX_COUNT else None,
        # The label keeps the requested size when num_gpu_blocks is overridden (observed: 1 GiB for 40 MiB).
        pool_bytes=None if overridden else _label_int(labels, "kv_cache_memory_bytes"),
        overridden=overridden or None,
        cache_dtype=_label_word(labels, "cache_dtype"),
        sliding_window_tokens=_label_int(labels, "sliding_window") or None,
        state_cache_mode=_label_word(labels, "mamba_cache_mode"),
        state_dtype=_label_word(labels, "mamba_ssm_cache_dtype"),
        memory_fraction_ratio=fraction if fraction is not None and 0 < fraction <= 1 else None,
        prefix_caching={"True": True, "False": False}.get(labels.get("enable_prefix_caching", "")),
    )


def _label_int(labels: Mapping[str, str], name: str) -> int | None:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() and len(text) < len(str(MAX_COUNT)) else None


def _label_word(labels: Mapping[str, str], name: str) -> str | None:
    """The name of a format or a mode; Python's own word for nothing is none."""
    text = labels.get(name)
    return text if text and text != "None" and len(text) <= MAX_WORD_CHARACTERS else None


def _label_float(labels: Mapping[str, str], name: str) -> float | None:
    try:
        value = float(labels.get(name, ""))
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def parse_lengths(page: Page) -> Lengths | None:
    """The lengths of all engines' finished requests together; `None` if none or impossible ones are reported."""
    return lengths_of(page, BUCKETS, PROMPTS)
