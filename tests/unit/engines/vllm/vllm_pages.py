"""vLLM's stored pages, pages made of a few lines, and the gap of a page without a pool."""

from pathlib import Path

from kvdiag.engines.engine import SOURCE
from kvdiag.model import Gap
from kvdiag.sources.prometheus_text import Page
from tests.builders.answers import containing
from tests.builders.metrics_pages import parse_page

SCRAPES = Path(__file__).parents[3] / "fixtures" / "scrapes"

NO_POOL = Gap(source=SOURCE, kind="absent", reason=containing("lacks vllm:cache_config_info"))


def page_of(name: str) -> Page:
    """A stored page."""
    return parse_page((SCRAPES / f"{name}.prom").read_text())


def engine_page(*lines: str, config: str = "") -> str:
    """A page of one engine with these gauges, and a pool where `config` gives its labels."""
    pool = [f'vllm:cache_config_info{{engine="0",{config}}} 1.0'] if config else []
    return "".join(f"{line}\n" for line in (*lines, *pool))
