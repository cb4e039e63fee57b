"""SGLang's stored pages and loads, and pages made of a few lines."""

import json
from pathlib import Path
from typing import Any

from kvdiag.engines.sglang.client import Rank, parse_loads
from kvdiag.sources.prometheus_text import Page
from tests.builders.metrics_pages import parse_page

SCRAPES = Path(__file__).parents[3] / "fixtures" / "scrapes"


def page_of(name: str) -> Page:
    """A stored page."""
    return parse_page((SCRAPES / f"sglang-{name}.prom").read_text())


def loads_of(name: str) -> tuple[Rank, ...]:
    """A stored answer of /v1/loads."""
    ranks = parse_loads(json.loads((SCRAPES / f"sglang-{name}-loads.json").read_text()))
    assert ranks is not None
    return ranks


def load(**fields: Any) -> Rank:
    """One scheduler's snapshot, idle and empty but for `fields`."""
    counts: dict[str, Any] = {"rank": 0, "running": 0, "waiting": 0, "used_tokens": 0, "uncached_tokens": 0}
    return Rank(**{**counts, "at_seconds": 1.0, "total_tokens": 8192, "work": (100.0, 8.0), **fields})
