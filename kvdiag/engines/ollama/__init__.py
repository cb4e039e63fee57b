"""Ollama, by its API of 2025-07 on and its models' llama-server children."""

import re
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kvdiag.engines import llamacpp
from kvdiag.engines.engine import RequestDialect, later
from kvdiag.engines.llamacpp import slots
from kvdiag.engines.metrics_reader import parse_version
from kvdiag.engines.ollama import runners
from kvdiag.model import Capabilities
from kvdiag.sources.prometheus_text import Page


def completion_body(
    *,
    model: str,
    token_ids: Sequence[int],
    max_tokens: int,
    cache_salt: str | None,  # noqa: ARG001 - the server has no salts
    user: str | None,  # noqa: ARG001 - nor users
) -> dict[str, Any]:
    """The JSON body of one request: text of about as many tokens, whose exact number Ollama alone knows."""
    text = " ".join(f"w{token}" for token in token_ids)
    return {"model": model, "prompt": text, "max_tokens": max_tokens, "temperature": 0, "stream": True}


def capabilities(page: Page) -> Capabilities:
    """What the models' servers show where they are visible; Ollama itself shows which are loaded."""
    has_slots = slots.TOKENS in page
    return Capabilities(
        unit="cell",
        usage=has_slots,
        blocks=has_slots,
        returns=False,
        waits=False,
        salt=False,
        forces_length=False,
    )


ENGINE = replace(
    llamacpp.ENGINE,
    name="ollama",
    owned_by="library",
    capabilities=capabilities,
    client=later("ollama.ollama_client", "OllamaClient"),
    metrics_path="/api/ps",
    metrics_flag="on this host: kvdiag finds its models' servers by their processes",
    metrics=MappingProxyType({}),
    metric_prefix="ollama:",
    needed_metrics=MappingProxyType({"loaded models": (runners.LOADED,), "tokens of each slot": (slots.TOKENS,)}),
    tested_versions=((0, 9), (0, 32)),
    parse_version=parse_version,
    parse_engines=runners.parse_engines,
    parse_pools=runners.parse_pools,
    program="ollama",
    process_title=re.compile(r"ollama", re.IGNORECASE),
    image=re.compile(r"ollama[^/]*:v?(\d{1,4}\.\d{1,4}(?:\.\d{1,4})?[\w.+-]{0,32})$"),
    request=RequestDialect(body=completion_body),
)
