"""vLLM, 0.6 to 0.32."""

import re
from types import MappingProxyType

from kvdiag.engines.engine import EngineAdapter, RequestDialect, later
from kvdiag.engines.metrics_reader import parse_version
from kvdiag.engines.openai_client import OpenAIClient, completion_body
from kvdiag.engines.vllm import metrics, settings
from kvdiag.model.capabilities import ALL

ENGINE = EngineAdapter(
    name="vllm",
    owned_by="vllm",
    capabilities=lambda _: ALL,
    client=OpenAIClient,
    metrics_path="/metrics/",  # without the last slash the server redirects
    metrics_flag="without --disable-log-stats",
    metrics=MappingProxyType(metrics.meanings()),
    metric_prefix="vllm:",
    polled_metrics=metrics.POLLED_NAMES,
    needed_metrics=MappingProxyType(metrics.NEEDED_NAMES),
    tested_versions=((0, 6), (0, 32)),
    parse_version=parse_version,
    config_metrics=(metrics.CONFIG,),
    parse_engines=metrics.parse_engines,
    parse_pools=metrics.parse_pools,
    parse_caches=metrics.parse_caches,
    length_metrics=metrics.LENGTH_NAMES,
    parse_lengths=metrics.parse_lengths,
    program="vllm",
    process_title=settings.PROCESS_TITLE,
    # A tag such as vllm/vllm-openai:v0.11.0; a digest has no version; vllm-runtime has Dynamo's.
    image=re.compile(r"vllm(?!-runtime)[^/]*:v?(\d{1,4}\.\d{1,4}(?:\.\d{1,4})?[\w.+-]{0,32})$"),
    parallel_ranks=settings.parallel_ranks,
    kv_connector=settings.kv_connector,
    parse_startup_log=later("vllm.startup_log", "parse_log"),
    parse_settings=settings.parse_settings,
    failed_pool_bytes=later("vllm.startup_log", "failed_pool_bytes"),
    request=RequestDialect(body=completion_body),
    first_engine_headers=MappingProxyType({"X-data-parallel-rank": "0"}),
)
