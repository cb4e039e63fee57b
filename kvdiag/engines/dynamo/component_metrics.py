"""Reads the metrics that Dynamo adds: the pool and the usage of a worker, the requests and the pool of a front end.

A front end's figures of the pool are those of one worker, as the worker registered itself ("model card"); it does not
know how much of it is in use. A worker's are its engine's (`LLMBackendMetrics` in dynamo/common/utils/prometheus.py,
1.6.1), one for each data-parallel rank, and 0 until the engine has reported.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvdiag.engines.engine import SOURCE, EngineAdapter, EngineReading
from kvdiag.engines.metrics_reader import MAX_GAPS, Figures, crowded, split_by_engine
from kvdiag.model import MAX_COUNT, Capabilities, Engine, Gap, KvPool
from kvdiag.sources.prometheus_names import Meaning
from kvdiag.sources.prometheus_text import Page

FRONT_END = "dynamo_frontend_"
WORKER = "dynamo_component_"
USAGE = "dynamo_component_gpu_cache_usage_percent"
TOTAL_BLOCKS = "dynamo_component_total_blocks"
WORKER_RUNNING = "dynamo_component_inflight_requests"
WORKER_WAITING = "dynamo_request_queue"
FRONT_END_RUNNING = "dynamo_frontend_inflight_requests"
CARD_BLOCKS = "dynamo_frontend_model_total_kv_blocks"
CARD_BLOCK_TOKENS = "dynamo_frontend_model_kv_cache_block_size"
CARD_CONTEXT = "dynamo_frontend_model_context_length"

GENERATE = {"dynamo_endpoint": "generate"}
"""The worker's endpoint that generates; others answer the router."""

ENGINE_METRICS = "with its engine's metrics on (SGLang: --enable-metrics; TensorRT-LLM: --publish-events-and-metrics)"
ASK_A_WORKER = "give a worker's metrics as --metrics-url http://WORKER:DYN_SYSTEM_PORT"

_BLOCK_TOKENS = re.compile(r"(?:^|\s)--(?:sglang-)?(?:block|page)[-_]size[=\s]+(\d{1,6})(?=\s|$)")

_LATER = 9
"""After the engine's own name for the same figure, where a worker has both."""


def meanings() -> dict[str, Meaning]:
    """The names in Prometheus of a worker's own figures, and of a front end's, which has a series for each model."""
    running = Meaning(part="engine", field="requests_running", priority=_LATER, where=tuple(GENERATE.items()))
    return {
        USAGE: Meaning(part="engine", field="kv_usage_ratio", priority=_LATER),
        WORKER_RUNNING: running,
        FRONT_END_RUNNING: replace(running, where=(), adds=("model",)),
        TOTAL_BLOCKS: Meaning(part="config", field="pool", priority=_LATER),
    }


def capabilities(page: Page) -> Capabilities:
    """A worker reports usage and blocks, a front end blocks alone."""
    return Capabilities(usage=USAGE in page, blocks=TOTAL_BLOCKS in page or CARD_BLOCKS in page, salt=True)


def parse_engines(page: Page) -> EngineReading:
    """A worker's engines, one for each rank, or the front end as one engine without usage."""
    gaps: list[Gap] = []
    front_end = any(name.startswith(FRONT_END) for name in page)
    if not front_end and any(name.startswith(WORKER) for name in page):
        absent = f"the Dynamo worker reports no figures of its engine; send it a request, or start it {ENGINE_METRICS}"
        pages = split_by_engine(page, (USAGE, TOTAL_BLOCKS), absent=absent)
        if isinstance(pages, Gap):
            return None, (pages,)
        alone = len(pages) == 1
        engines = tuple(_worker(page if alone else own, label, gaps, alone=alone) for label, own in pages.items())
        return engines, tuple(gaps[:MAX_GAPS])
    if not front_end:
        return None, (Gap(SOURCE, "absent", "the metrics have no dynamo_* series: is this a Dynamo server?"),)
    if (crowd := crowded(page, (FRONT_END_RUNNING,))) is not None:
        return None, (crowd,)
    running = _sum(page, FRONT_END_RUNNING, gaps)
    gaps.append(Gap(SOURCE, "absent", f"a Dynamo front end reports no KV usage; {ASK_A_WORKER}"))
    # Queued are also those whose prompt is being computed: only none of them is none that waits.
    return (Engine(engine="0", requests_running=running, requests_waiting=0 if running == 0 else None),), tuple(gaps)


def _worker(page: Page, label: str, gaps: list[Gap], *, alone: bool) -> Engine:
    figures = Figures(page, label, gaps)
    return Engine(
        engine=label,
        kv_usage_ratio=figures.ratio("KV usage", (USAGE,)),
        # The requests of all ranks are counted together.
        requests_running=figures.count((WORKER_RUNNING,), **GENERATE) if alone else None,
        requests_waiting=figures.count((WORKER_WAITING,)) if alone else None,
    )


def _sum(page: Page, name: str, gaps: list[Gap]) -> int | None:
    """The sum over all models; `None` without any, or with an impossible one."""
    values = [line.value for line in page.get(name, ())]
    if impossible := [value for value in values if not 0 <= value <= MAX_COUNT]:
        Figures(page, "0", gaps).refuse(name, impossible[0])
        return None
    return min(round(sum(values)), MAX_COUNT) if values else None


def parse_pools(
    page: Page,
    version: str | None,  # noqa: ARG001 - the form of a parser of pools
    commands: Sequence[str] = (),
    labels: Iterable[str] = ("0",),
) -> tuple[tuple[KvPool, ...], tuple[Gap, ...]]:
    """The pools that a worker reports, or the front end for its workers; `labels` are those of the engines.

    A worker reports its blocks' number alone: their size is the front end's, or on the worker's command line.
    """
    gaps: list[Gap] = []
    if (crowd := crowded(page, (TOTAL_BLOCKS, CARD_BLOCKS, CARD_BLOCK_TOKENS))) is not None:
        return (), (crowd,)
    sizes = {_whole(line.value) for line in page.get(CARD_BLOCK_TOKENS, ())}
    sizes = sizes or {int(found[1]) for command in commands if (found := _BLOCK_TOKENS.search(command))}
    counts = {line.engine: _whole(line.value) for line in page.get(TOTAL_BLOCKS, ())}
    if len(counts) != len(page.get(TOTAL_BLOCKS, ())):
        gaps.append(Gap(SOURCE, "failed", f"{TOTAL_BLOCKS} appears several times for one rank: which one is its own?"))
        return (), tuple(gaps)
    labels = tuple(labels)
    if not any(counts.values()) and len(card := {_whole(line.value) for line in page.get(CARD_BLOCKS, ())}) == 1:
        counts = dict.fromkeys(labels, card.pop()) if len(labels) == 1 else {}
    size = sizes.pop() if len(sizes) == 1 else None
    if not any(counts.values()) or size is None:
        what = "its KV blocks" if size is not None else "its KV blocks' size"
        how = "give the front end as --url and the worker's metrics as --metrics-url"
        return (), (Gap(SOURCE, "absent", f"the worker does not report {what}; {how}"),)
    pools = []
    for label, count in sorted(counts.items()):
        try:
            pools.append(
                KvPool(
                    engine=label,
                    block_tokens=size,
                    total_blocks=count or 0,
                    usable_blocks=count or 0,
                    usage_blocks=count or 0,
                    capacity_tokens=(count or 0) * size,
                )
            )
        except ValueError as error:
            gaps.append(Gap(SOURCE, "failed", f"the pool of rank {label[:64]} cannot be used: {error}"))
    return tuple(pools), tuple(gaps[:MAX_GAPS])


def _whole(value: float) -> int | None:
    return round(value) if 0 < value <= MAX_COUNT else None


def worker_pools(
    engine: EngineAdapter, page: Page, version: str | None, commands: Sequence[str]
) -> tuple[tuple[KvPool, ...], tuple[Gap, ...]]:
    """The pools that a worker's engine reports; where it reports none, those that Dynamo does.

    All of their blocks count as usable, as those of a simulated engine do: of vLLM's own, which reports its pool, the
    null block is not.
    """
    pools, gaps = engine.parse_pools(page, version, commands)
    if pools:
        return pools, gaps
    engines, _ = engine.parse_engines(page)
    pools, others = parse_pools(page, version, commands, [one.engine for one in engines or ()])
    return pools, (*(gap for gap in gaps if gap.kind != "absent"), *others)
