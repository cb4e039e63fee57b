"""Recorded answers of llama.cpp's server, and pages made of them."""

import json
from pathlib import Path
from typing import Any

from kvdiag.engines.llamacpp.command_line import Options, parse_options
from kvdiag.engines.llamacpp.slots import server_page, slots_of, slots_page
from kvdiag.sources.prometheus_text import Page
from tests.builders.metrics_pages import parse_page

SCRAPES = Path(__file__).parents[3] / "fixtures" / "scrapes"
DEFAULT = "llama-server -m tiny.gguf -c 32768 --metrics"
SPLIT = f"{DEFAULT} -np 4"


def answer(name: str) -> Any:
    """A decoded JSON answer."""
    return json.loads((SCRAPES / f"llamacpp-{name}.json").read_text())


def options(command: str) -> Options:
    """The options of one command line."""
    found = parse_options([command])
    assert found is not None
    return found


def page(kind: str, stage: str, command: str = DEFAULT) -> Page:
    """What kvdiag makes of a server's answers; without its metrics."""
    props, models = (answer(f"b11549-{kind}-{name}") for name in ("props", "models"))
    slots = answer(f"b11549-{kind}-{stage}-slots")
    return {**server_page(props, models, options(command)), **slots_page(slots_of(slots))}


def metrics(name: str) -> Page:
    """A metrics endpoint's page."""
    return parse_page((SCRAPES / f"llamacpp-{name}.prom").read_text())
