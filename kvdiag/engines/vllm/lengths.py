"""How long vLLM's finished requests were, from the histograms of its page."""

from __future__ import annotations

import math
from collections import defaultdict

from kvdiag.model import MAX_COUNT, Lengths
from kvdiag.sources.prometheus_text import Page

BUCKETS = "vllm:request_generation_tokens_bucket"
PROMPTS = ("vllm:request_prompt_tokens_sum", "vllm:request_prompt_tokens_count")
LENGTH_NAMES = (BUCKETS, *PROMPTS)

MAX_BUCKETS = 4096
"""0.32 has fifteen for each engine and model name."""


def parse_lengths(page: Page) -> Lengths | None:
    """The lengths of all engines' finished requests together; `None` where the page does not tell them, or nonsense."""
    lines = page.get(BUCKETS, ())
    if not lines or len(lines) > MAX_BUCKETS:
        return None
    below: dict[float, float] = defaultdict(float)
    try:
        for line in lines:
            below[float(line.labels.get("le", ""))] += line.value
        uppers = tuple(sorted(below))
        so_far = [round(below[upper]) for upper in uppers]
        counts = tuple(here - before for before, here in zip([0, *so_far], so_far, strict=False))
        return Lengths(upper_tokens=uppers, counts=counts, mean_prompt_tokens=_mean_prompt_tokens(page))
    except (ValueError, OverflowError):
        # Bounds and counts that are none: what was never measured cannot be used.
        return None


def _mean_prompt_tokens(page: Page) -> float | None:
    total, count = (sum(line.value for line in page.get(name, ())) for name in PROMPTS)
    mean = total / count if count > 0 else math.nan
    return mean if 0.0 < mean <= MAX_COUNT else None
