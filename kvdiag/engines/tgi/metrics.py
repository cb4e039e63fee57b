"""Text Generation Inference's metrics, 2 and 3, by one table of names. Pure.

The pool is counted in tokens, and what is counted is reserved: a request takes all that it may come to when its batch
takes it in (backends/v3/src/backend.rs). The gauges of the batch are set by a batch alone: before the first one they
are absent, and at the end of each they are set to 0. None has labels. The parser of Prometheus's client appends
`_total` to the names of counters.
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
"""Field of `Engine` to its names. Nothing is ever preempted: a request waits in the queue until all of it fits."""

RESERVED, CAPACITY = "tgi_batch_current_max_tokens", "tgi_batch_max_total_tokens"

READ_NAMES = (CAPACITY, RESERVED, *(name for names in COUNTS.values() for name in names))

NEEDED_NAMES: Mapping[str, Sequence[str]] = {
    "KV usage": (RESERVED, CAPACITY),
    "running requests": (*COUNTS["requests_running"], CAPACITY),
    "waiting requests": (*COUNTS["requests_waiting"], CAPACITY),
    "the pool's size": (CAPACITY,),
}
"""The capacity stands for gauges that no batch has set yet."""

LENGTH_NAMES = (
    "tgi_request_generated_tokens_bucket",
    "tgi_request_input_length_sum",
    "tgi_request_input_length_count",
)


def meanings() -> dict[str, Meaning]:
    """The metrics of this module, as named in Prometheus, to the field that each reports."""
    found = metrics_reader.meanings({"kv_used_tokens": (RESERVED,), **COUNTS})
    found[CAPACITY] = Meaning(part="config", field="pool")
    return found


def parse_engines(page: Page) -> EngineReading:
    """The one engine of the page; `None` with a gap if it shows none."""
    absent = "the metrics have no tgi_* series: is this a TGI server, and has its model warmed up?"
    pages = metrics_reader.split_by_engine(page, READ_NAMES, absent=absent)
    if isinstance(pages, Gap):
        return None, (pages,)
    gaps: list[Gap] = []
    engines = tuple(_engine(Figures(own, label, gaps), own, label) for label, own in pages.items())
    return engines, tuple(gaps[:MAX_GAPS])


def _engine(figures: Figures, page: Page, label: str) -> Engine:
    counts = figures.counts(COUNTS)
    capacity, reserved = figures.count((CAPACITY,)), figures.count((RESERVED,))
    if capacity is not None and RESERVED not in page:
        reserved = 0
        for name in ("requests_running", "requests_waiting"):
            counts[name] = 0 if page.keys().isdisjoint(COUNTS[name]) else counts[name]
    if capacity and reserved is not None and reserved > capacity:
        figures.refuse(RESERVED, reserved)
        reserved = None
    usage = reserved / capacity if capacity and reserved is not None else None
    counts = metrics_reader.with_prompts_as_queries(counts)
    return Engine(engine=label, kv_usage_ratio=usage, preemptions_total=0, **counts)


def parse_pools(
    page: Page,
    version: str | None,  # noqa: ARG001 - 2 and 3 count alike
    commands: Sequence[str] = (),  # noqa: ARG001 - the metrics have it all
) -> tuple[tuple[KvPool, ...], tuple[Gap, ...]]:
    """The pool in tokens: what the server found at its warm-up that all requests together may reserve."""
    absent = f"the engine does not report its KV pool; wait until {CAPACITY} appears, after its warm-up"
    pages = metrics_reader.split_by_engine(page, (CAPACITY,), absent=absent)
    if isinstance(pages, Gap):
        return (), (pages,)
    gaps: list[Gap] = []
    pools = []
    for label, own in pages.items():
        capacity = Figures(own, label, gaps).count((CAPACITY,))
        if capacity is not None and capacity > 1:
            pools.append(
                KvPool(
                    engine=label,
                    block_tokens=1,
                    total_blocks=capacity,
                    usable_blocks=capacity,
                    usage_blocks=capacity,
                    capacity_tokens=capacity,
                )
            )
        elif capacity is not None:
            gaps.append(Gap(SOURCE, "failed", f"{CAPACITY} is {capacity}: no pool has so few tokens"))
    return tuple(pools), tuple(gaps[:MAX_GAPS])
