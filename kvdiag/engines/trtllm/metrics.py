"""TensorRT-LLM's metrics, of trtllm-serve and of Triton, by one table of names. Pure.

trtllm-serve's `GET /prometheus/metrics` has gauges of the pool (tensorrt_llm/metrics/collector.py, 2026) that move only
when a request ends, and are absent before the first end. Triton's `:8002/metrics` has the same figures as labels of
three metrics (README of tensorrtllm_backend): `as_served` gives them trtllm-serve's names, and the rest reads those.
trtllm-serve's `GET /metrics` is never read: it is a list that a read empties.
"""

import json
import pkgutil
from collections.abc import Mapping, Sequence

from kvdiag.engines import metrics_reader
from kvdiag.engines.engine import SOURCE, EngineReading
from kvdiag.engines.metrics_reader import CHECK, MAX_GAPS, Figures
from kvdiag.model import MAX_COUNT, Engine, Gap, KvPool
from kvdiag.sources.prometheus_names import Meaning
from kvdiag.sources.prometheus_text import Page, Series

_NAMES = json.loads(pkgutil.get_data(__package__, "names.json") or b"")

COUNTS: Mapping[str, Sequence[str]] = _NAMES["counts"]
"""Field of `Engine` to its names. No version counts preemptions: requests paused for lack of blocks are a gauge."""

TRITON: Sequence[tuple[str, str, str, str]] = tuple(map(tuple, _NAMES["triton"]))
"""Triton's metric, its label, the label's value, and trtllm-serve's name for the same figure."""

PREFIX, TRITON_PREFIX = "trtllm_", "nv_trt_llm_"
TRITON_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"

USED = "trtllm_kv_cache_used_blocks"
UTILIZATION = "trtllm_kv_cache_utilization"
STILL = "trtllm_iterations_still"
"""Whether no figure moved for a while: added by the client, which alone sees one read after the other."""

POOL = MAX_BLOCKS, BLOCK_TOKENS = "trtllm_kv_cache_max_blocks", "trtllm_kv_cache_tokens_per_block"

READ_NAMES = (*POOL, USED, UTILIZATION, STILL, *(name for names in COUNTS.values() for name in names))

NEEDED_NAMES: Mapping[str, Sequence[str]] = {
    "KV usage": (USED, UTILIZATION),
    "running requests": COUNTS["requests_running"],
    "waiting requests": COUNTS["requests_waiting"],
    "the pool's size": (MAX_BLOCKS,),
}

TURN_ON = (
    "start the server with return_perf_metrics: true and enable_iter_perf_stats: true in its --extra_llm_api_options"
)
FIRST_REQUEST = "the gauges appear when the first request has ended: send one request"


MAX_DIGITS = 18
MODEL, LONGEST = "trtllm_model_config_info", "max_model_len"


def longest_tokens(page: Page) -> int | None:
    """The tokens of the longest request, a label of the model's settings; `None` where they were not given."""
    found = [line.labels.get(LONGEST, "") for line in page.get(MODEL, ())]
    known = {int(text) for text in found if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS}
    longest = max(known, default=0)
    return longest if 0 < longest <= MAX_COUNT else None


def meanings() -> dict[str, Meaning]:
    """The metrics of trtllm-serve, as named in Prometheus, to the field that each reports."""
    found = metrics_reader.meanings({"kv_usage_ratio": (UTILIZATION,), **COUNTS})
    return found | {name: Meaning(part="config", field="pool") for name in POOL}


def as_served(page: Page) -> Page:
    """The page with Triton's figures under trtllm-serve's names; one of trtllm-serve as it is."""
    if not any(name.startswith(TRITON_PREFIX) for name in page):
        return page
    found: dict[str, tuple[Series, ...]] = {}
    if STILL in page:
        found[STILL] = page[STILL]
    for metric, label, value, name in TRITON:
        lines = tuple(Series({}, line.value) for line in page.get(metric, ()) if line.labels.get(label) == value)
        if lines:
            found[name] = lines
    return found


def parse_engines(page: Page) -> EngineReading:
    """The one engine of the page; `None` with a gap if it shows none."""
    page = as_served(page)
    pages = metrics_reader.split_by_engine(page, READ_NAMES, absent=f"the metrics have no trtllm_* series: {TURN_ON}")
    if isinstance(pages, Gap):
        return None, (pages,)
    gaps: list[Gap] = []
    engines = tuple(_engine(Figures(own, label, gaps), label) for label, own in pages.items())
    return engines, tuple(gaps[:MAX_GAPS])


def _engine(figures: Figures, label: str) -> Engine:
    counts = figures.counts(COUNTS)
    still = figures.count((STILL,))
    for field in ("requests_running", "requests_waiting", "requests_waiting_for_capacity"):
        # Without the series, a count above 0 may be of requests that have ended.
        counts[field] = counts[field] if still == 0 or not counts[field] else None if still is None else 0
    used, total = figures.count((USED,)), figures.count((MAX_BLOCKS,))
    usage = None
    if used is not None and total is not None and used > total:
        figures.refuse(USED, used)
    elif used is not None and total:
        usage = used / total
    elif used is None:
        usage = figures.ratio("KV usage", (UTILIZATION,))
    return Engine(engine=label, kv_usage_ratio=usage, **metrics_reader.with_prompts_as_queries(counts))


def parse_pools(
    page: Page,
    version: str | None,  # noqa: ARG001 - all versions count alike
    commands: Sequence[str] = (),  # noqa: ARG001 - the metrics have it all
) -> tuple[tuple[KvPool, ...], tuple[Gap, ...]]:
    """The KV pool, of whose blocks all can be used."""
    page = as_served(page)
    pages = metrics_reader.split_by_engine(page, POOL, absent=f"the engine does not report its KV pool; {_hint(page)}")
    if isinstance(pages, Gap):
        return (), (pages,)
    gaps: list[Gap] = []
    pools = [_pool(Figures(own, label, gaps), label, gaps) for label, own in pages.items()]
    return tuple(pool for pool in pools if pool is not None), tuple(gaps[:MAX_GAPS])


def _hint(page: Page) -> str:
    iterations = any(name in page for name in (USED, UTILIZATION, *COUNTS["requests_running"]))
    return TURN_ON if not iterations and not any(name.startswith(PREFIX) for name in page) else FIRST_REQUEST


def _pool(figures: Figures, label: str, gaps: list[Gap]) -> KvPool | None:
    total, block_tokens = figures.count((MAX_BLOCKS,)), figures.count((BLOCK_TOKENS,))
    if total is None or block_tokens is None:
        missing = MAX_BLOCKS if total is None else BLOCK_TOKENS
        gaps.append(Gap(SOURCE, "failed", f"the KV pool of engine {label} cannot be used: no {missing}; {CHECK}"))
        return None
    try:
        return KvPool(
            engine=label, block_tokens=block_tokens, total_blocks=total, usable_blocks=total, usage_blocks=total
        )
    except ValueError as error:
        gaps.append(Gap(SOURCE, "failed", f"the KV pool of engine {label} cannot be used: {error}; {CHECK}"))
        return None
