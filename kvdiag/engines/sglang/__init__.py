"""SGLang, 0.3.6 to 0.5.23."""

import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from kvdiag.engines.engine import EngineAdapter, RequestDialect, later
from kvdiag.engines.metrics_reader import parse_version
from kvdiag.engines.openai_client import completion_body
from kvdiag.engines.sglang import metrics, settings

SAFE_IDS = range(300, 900)
"""Ids of plain text in every vocabulary: one beyond a model's ends the server (0.5.23: an IndexError in its scheduler),
and no endpoint reports the vocabulary's size.
"""


def safe_body(
    *, model: str, token_ids: Sequence[int], max_tokens: int, cache_salt: str | None, user: str | None
) -> dict[str, Any]:
    """The JSON body of one request, in SGLang's dialect; versions before 0.5.4 ignore the salt.

    `ignore_eos` makes the scheduler reserve prompt and output of each request, so that none is retracted.
    """
    safe = [SAFE_IDS[token % len(SAFE_IDS)] for token in token_ids]
    return completion_body(model=model, token_ids=safe, max_tokens=max_tokens, cache_salt=cache_salt, user=user)


ENGINE = EngineAdapter(
    name="sglang",
    owned_by="sglang",
    capabilities=metrics.capabilities,
    client=later("sglang.client", "SglangClient"),
    metrics_flag="with --enable-metrics",
    metrics=MappingProxyType(metrics.meanings()),
    metric_prefix=metrics.PREFIX,
    needed_metrics=MappingProxyType(metrics.NEEDED_NAMES),
    tested_versions=((0, 3), (0, 5)),
    parse_version=parse_version,
    config_metrics=metrics.CONFIG_NAMES,
    parse_engines=metrics.parse_engines,
    parse_pools=metrics.parse_pools,
    parse_caches=metrics.parse_caches,
    length_metrics=(metrics.LENGTHS, *metrics.PROMPTS),
    parse_lengths=metrics.parse_lengths,
    program="sglang",
    process_title=settings.PROCESS_TITLE,
    # A tag such as lmsysorg/sglang:v0.5.6-cu129; `latest` has no version.
    image=re.compile(r"sglang(?!-runtime)[^/]*:v?(\d{1,4}\.\d{1,4}(?:\.\d{1,4})?[\w.+-]{0,32})$"),
    parallel_ranks=settings.parallel_ranks,
    kv_connector=settings.kv_connector,
    parse_startup_log=later("sglang.startup_log", "parse_log"),
    parse_settings=settings.parse_settings,
    failed_pool_bytes=later("sglang.startup_log", "failed_pool_bytes"),
    request=RequestDialect(body=safe_body),
    first_engine_headers=MappingProxyType({"X-data-parallel-rank": "0"}),
)
