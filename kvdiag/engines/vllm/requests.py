"""vLLM's dialect of a completion request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

COMPLETIONS_PATH = "/v1/completions"
FIRST_ENGINE_HEADERS = {"X-data-parallel-rank": "0"}


def request_body(
    *, model: str, token_ids: Sequence[int], max_tokens: int, cache_salt: str | None, user: str | None
) -> dict[str, Any]:
    """The JSON body of one request.

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
