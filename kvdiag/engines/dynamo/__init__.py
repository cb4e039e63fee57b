"""NVIDIA Dynamo, 1.6: its front end, and its workers, each of which is another engine's server.

A worker has no API for completions. Its system port (DYN_SYSTEM_PORT) passes the metrics of its engine through, next to
Dynamo's own, so that it is read as that engine: `worker` makes the engine's adapter that of a worker. Requests go to
the front end, which passes token ids, `min_tokens`, `ignore_eos` and a cache salt on, and sends a request to the worker
that a header names. `ENGINE` reads a front end, which knows no KV usage, and a worker whose engine has its metrics off.
"""

import re
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from kvdiag.engines.dynamo import component_metrics as metrics
from kvdiag.engines.engine import EngineAdapter, RequestDialect, later
from kvdiag.engines.metrics_reader import parse_version
from kvdiag.engines.openai_client import completion_body
from kvdiag.errors import KvdiagError
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings

SYSTEM_PORT = "with DYN_SYSTEM_PORT set"
FRONT_END = "or give its front end as --url and this address as --metrics-url"

_WORKER_ID = re.compile(r'^dynamo_component_\w+\{[^}\n]*\bworker_id="([0-9a-f]{1,16})"', re.MULTILINE)


def _no_log(text: str) -> EngineReport:  # noqa: ARG001 - the form of a log's parser
    raise KvdiagError("")


ENGINE = EngineAdapter(
    name="dynamo",
    owned_by="nvidia",
    capabilities=metrics.capabilities,
    client=later("dynamo.front_end", "DynamoClient"),
    metrics_flag=SYSTEM_PORT,
    usage_at=metrics.ASK_A_WORKER,
    metrics=MappingProxyType(metrics.meanings()),
    metric_prefix="dynamo_",
    needed_metrics=MappingProxyType({"running requests": (metrics.FRONT_END_RUNNING, metrics.WORKER_RUNNING)}),
    tested_versions=((1, 6), (1, 6)),
    parse_version=parse_version,
    config_metrics=(metrics.TOTAL_BLOCKS,),
    parse_engines=metrics.parse_engines,
    parse_pools=metrics.parse_pools,
    program="dynamo.",
    process_title=re.compile(r"^dynamo\."),
    image=re.compile(r"dynamo[^/]*:v?(\d{1,4}\.\d{1,4}(?:\.\d{1,4})?[\w.+-]{0,32})$"),
    parallel_ranks=lambda _: None,
    parse_startup_log=_no_log,
    parse_settings=lambda _: EngineSettings(),
    request=RequestDialect(body=completion_body),
    first_engine_headers=MappingProxyType({"x-dynamo-dp-rank": "0"}),
)


def is_worker(text: str) -> bool:
    """Whether a metrics endpoint's answer is a worker's; a front end has a component's metrics, too."""
    return f"\n{metrics.WORKER}" in text and f"\n{metrics.FRONT_END}" not in text


def _worker_client(own: Any) -> Any:
    """The class that reads a worker, with the engine's own way to read its metrics where a worker has all of that."""
    from kvdiag.engines.dynamo.front_end import DynamoClient  # noqa: PLC0415 - as `later` does

    return type("WorkerClient", (DynamoClient, own), {}) if getattr(own, "reads_metrics_alone", False) else DynamoClient


def worker(engine: EngineAdapter, text: str) -> EngineAdapter:
    """The adapter of a worker of this engine, whose metrics are `text`."""
    known = _WORKER_ID.search(text)
    # Its pool may be the front end's to report; its engine's own figures appear with the first request.
    pool = (metrics.TOTAL_BLOCKS, metrics.CARD_BLOCKS)
    needed = {
        what: names if set(names).isdisjoint(engine.config_metrics) else (*names, *pool)
        for what, names in engine.needed_metrics.items()
    }
    headers = {} if known is None else {"x-dynamo-worker-instance-id": str(int(known[1], 16))}
    return replace(
        engine,
        client=_worker_client(engine.client),
        metrics_path=ENGINE.metrics_path,
        reports_version=False,
        metrics_flag=metrics.ENGINE_METRICS if engine is ENGINE else f"{engine.metrics_flag}, {FRONT_END}",
        polled_metrics=(),
        front_metrics=(metrics.CARD_BLOCKS, metrics.CARD_BLOCK_TOKENS),
        needed_metrics=MappingProxyType(needed if engine is not ENGINE else {**needed, "KV usage": (metrics.USAGE,)}),
        parse_pools=engine.parse_pools if engine is ENGINE else partial(metrics.worker_pools, engine),
        program=ENGINE.program,
        request=replace(ENGINE.request, headers=MappingProxyType(headers)),
        first_engine_headers=ENGINE.first_engine_headers,
    )
