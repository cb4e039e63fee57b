"""llama.cpp's server (llama-server), builds of 2025-10 to b11549."""

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvdiag.engines.engine import MAX_TOKENS, EngineAdapter, RequestDialect, later, openai_generated
from kvdiag.engines.llamacpp import slots
from kvdiag.engines.llamacpp.command_line import ENVIRONMENT
from kvdiag.engines.metrics_reader import meanings
from kvdiag.model import Capabilities
from kvdiag.sources.prometheus_names import Meaning
from kvdiag.sources.prometheus_text import Page

PROCESS_TITLE = re.compile(r"llama[-_]server|\bllama serve\b", re.IGNORECASE)
"""`llama serve` is the same server in the program that has all of llama.cpp's tools (LLAMA_APP_CMD, b11549)."""


def completion_body(
    *,
    model: str,
    token_ids: Sequence[int],
    max_tokens: int,
    cache_salt: str | None,  # noqa: ARG001 - the server has no salts
    user: str | None,
) -> dict[str, Any]:
    """The JSON body of one request: `timings_per_token` puts an exact count into every chunk.

    Chunks alone do not: several tokens are sent together until their bytes are whole UTF-8.
    """
    return {
        "model": model,
        "prompt": token_ids,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "cache_prompt": False,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "timings_per_token": True,
        **({} if user is None else {"user": user}),
    }


def generated(event: Mapping[str, Any], before: int) -> int:
    """Tokens generated so far, by the event's timings."""
    timings = event.get("timings")
    count = timings.get("predicted_n") if isinstance(timings, dict) else None
    if type(count) is int and 0 <= count < MAX_TOKENS:
        return max(count, before)
    return openai_generated(event, before)


def parse_version(version: str | None) -> tuple[int, int, int] | None:
    """The build's number as a version, such as 11434.0.0 of "b11434-0123abc"; `None` where it has none."""
    build = slots.build_number(version)
    return None if build is None else (build, 0, 0)


def capabilities(page: Page) -> Capabilities:
    """What its slots show; through Prometheus alone, which has only its metrics, neither usage nor pool."""
    has_slots = slots.TOKENS in page
    return Capabilities(
        unit="cell",
        usage=has_slots,
        blocks=has_slots,
        returns=False,
        waits=False,
        salt=False,
    )


def metric_meanings() -> dict[str, Meaning]:
    """Name in Prometheus to the field that it reports."""
    gauges = {"requests_running": (slots.RUNNING,), "requests_waiting": (slots.DEFERRED,)}
    return meanings({**gauges, **slots.COUNTERS})


def no_ranks(commands: Iterable[str]) -> tuple[int, int] | None:  # noqa: ARG001 - every server is one process
    """One process holds all layers on all devices: there are no ranks to compare."""
    return None


ENGINE = EngineAdapter(
    name="llamacpp",
    owned_by="llamacpp",
    capabilities=capabilities,
    client=later("llamacpp.client", "LlamaClient"),
    metrics_flag="with --metrics, and without --no-slots",
    metrics=MappingProxyType(metric_meanings()),
    metric_prefix="llamacpp:",
    needed_metrics=MappingProxyType(slots.NEEDED_NAMES),
    metrics_at_start=True,
    tested_versions=((6700, 0), (11549, 0)),
    parse_version=parse_version,
    parse_engines=slots.parse_engines,
    parse_pools=slots.parse_pools,
    parse_caches=slots.parse_caches,
    # One process; its parent (llama-swap, the router) may have started others with other settings.
    program="",
    environment=ENVIRONMENT,
    process_title=PROCESS_TITLE,
    # ghcr.io/ggml-org/llama.cpp:server-cuda-b11434
    image=re.compile(r"llama\.?cpp[^/]*:[\w.-]{0,60}?\b(b\d{3,6})$"),
    parallel_ranks=no_ranks,
    parse_startup_log=later("llamacpp.load_log", "parse_log"),
    parse_settings=later("llamacpp.load_log", "parse_settings"),
    failed_pool_bytes=later("llamacpp.load_log", "failed_pool_bytes"),
    request=RequestDialect(body=completion_body, generated=generated),
    first_engine_headers=MappingProxyType({}),
)
