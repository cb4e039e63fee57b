"""Stored metrics of every engine, parsed."""

from pathlib import Path

from kvdiag.sources.prometheus_text import Page
from tests.builders.metrics_pages import parse_page

SCRAPES = Path(__file__).parents[1] / "fixtures" / "scrapes"


def scrape(name: str) -> Page:
    """The series of a stored scrape."""
    return parse_page((SCRAPES / f"{name}.prom").read_text(encoding="utf-8"))
