"""vLLM, 0.6 to 0.32."""

import json
import re
from collections.abc import Sequence
from importlib import resources
from types import MappingProxyType
from typing import Any

from kvdiag.engines.engine import EngineAdapter, RequestDialect
from kvdiag.engines.metrics_reader import parse_version
from kvdiag.engines.openai_client import OpenAIClient
from kvdiag.engines.vllm import metrics, settings, startup_log
from kvdiag.model.capabilities import ALL


def completion_body(
    *, model: str, token_ids: Sequence[int], max_tokens: int, cache_salt: str | None, user: str | None
) -> dict[str, Any]:
    """The JSON body of one request, in vLLM's dialect.

    `ignore_eos` and `min_tokens` make the length exact; `continuous_usage_stats` puts an exact count into every chunk,
    even where several tokens come in one.
    """
    return {
        "model": model,
        "prompt": token_ids,
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **({} if cache_salt is None else {"cache_salt": cache_salt}),
        **({} if user is None else {"user": user}),
    }


ENGINE = EngineAdapter(
    name="vllm",
    title="vLLM",
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
    # A tag such as vllm/vllm-openai:v0.11.0; a digest has no version.
    image=re.compile(r"vllm[^/]*:v?(\d{1,4}\.\d{1,4}(?:\.\d{1,4})?[\w.+-]{0,32})$"),
    parallel_ranks=settings.parallel_ranks,
    kv_connector=settings.kv_connector,
    parse_startup_log=startup_log.parse_log,
    parse_settings=settings.parse_settings,
    failed_pool_bytes=startup_log.failed_pool_bytes,
    request=RequestDialect(body=completion_body),
    first_engine_headers=MappingProxyType({"X-data-parallel-rank": "0"}),
    flags=MappingProxyType(json.loads(resources.files(__name__).joinpath("flags.json").read_bytes())),
)
