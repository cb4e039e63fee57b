"""LMDeploy's metrics, 0.10 to 0.18, by one table of names. Pure.

Of its pool it reports the share in use and nothing else (lmdeploy/metrics/loggers.py): neither blocks nor tokens.
Prefix-cached blocks count as used, so that an idle server with `enable_prefix_caching` is not at 0. The client adds one
series, `SLEEPING`, from `GET /is_sleeping`.
"""

import json
import pkgutil
from collections.abc import Mapping, Sequence

from kvdiag.engines import metrics_reader
from kvdiag.engines.engine import SOURCE, EngineReading
from kvdiag.engines.metrics_reader import MAX_GAPS, Figures
from kvdiag.model import Engine, Gap, KvPool
from kvdiag.sources.prometheus_names import Meaning
from kvdiag.sources.prometheus_text import Page

COUNTS: Mapping[str, Sequence[str]] = json.loads(pkgutil.get_data(__package__, "names.json") or b"")
"""Field of `Engine` to its names. Neither preemptions nor evictions are counted."""

USAGE = "lmdeploy:gpu_cache_usage_perc"
SLEEPING = "lmdeploy:is_sleeping"
ON_A_TIMER = "lmdeploy:iter_token_latency_count"
"""Since 0.10, whose gauges a timer renews. Those of 0.9 are of the last output, and stay so when it was the last."""

CONFIG = "lmdeploy:backend_config_info"
"""The engine's arguments as labels; its number of blocks is the one asked for, by default 0."""

READ_NAMES = (USAGE, SLEEPING, *(name for names in COUNTS.values() for name in names))

NEEDED_NAMES: Mapping[str, Sequence[str]] = {
    "KV usage": (USAGE,),
    "running requests": COUNTS["requests_running"],
    "waiting requests": COUNTS["requests_waiting"],
}

LENGTH_NAMES = (
    "lmdeploy:request_generation_tokens_bucket",
    "lmdeploy:request_prompt_tokens_sum",
    "lmdeploy:request_prompt_tokens_count",
)

NO_POOL = (
    "LMDeploy does not report the size of its KV pool; `kvdiag run` measures it, and the startup log prints it "
    "(blocks, or the object cache budget)"
)
CACHED = (
    "LMDeploy does not report the size of its KV pool, and with prefix caching cached blocks count as used; start it "
    "once without --enable-prefix-caching and run `kvdiag run`"
)


def meanings() -> dict[str, Meaning]:
    """The metrics of this module, as named in Prometheus, to the field that each reports."""
    found = metrics_reader.meanings({"kv_usage_ratio": (USAGE,), **COUNTS})
    found[CONFIG] = Meaning(part="config", field="pool")
    return found


def parse_engines(page: Page) -> EngineReading:
    """The engines in the order of their labels, the data-parallel ranks; `None` with a gap if there are none."""
    absent = "the metrics have no lmdeploy:* series: start the server without --disable-metrics"
    pages = metrics_reader.split_by_engine(page, READ_NAMES, absent=absent)
    if isinstance(pages, Gap):
        return None, (pages,)
    gaps: list[Gap] = []
    engines = tuple(_engine(Figures(own, label, gaps), label) for label, own in pages.items())
    return engines, tuple(gaps[:MAX_GAPS])


def _engine(figures: Figures, label: str) -> Engine:
    counts = figures.counts(COUNTS)
    sleeping = figures.count((SLEEPING,))
    return Engine(
        engine=label,
        kv_usage_ratio=figures.ratio("KV usage", (USAGE,)),
        asleep=None if sleeping is None else sleeping > 0,
        **metrics_reader.with_prompts_as_queries(counts),
    )


def parse_pools(
    page: Page,
    version: str | None,  # noqa: ARG001 - no version says
    commands: Sequence[str] = (),  # noqa: ARG001 - they have a share of what was free at start
) -> tuple[tuple[KvPool, ...], tuple[Gap, ...]]:
    """No pool, and the gap that says where its size is."""
    cached = any(line.labels.get("enable_prefix_caching") == "True" for line in page.get(CONFIG, ()))
    return (), (Gap(SOURCE, "absent", CACHED if cached else NO_POOL),)
