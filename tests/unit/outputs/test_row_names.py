"""Rows of evidence are for people: under other names every figure that an output or a baseline reads is the same."""

import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from typing import Any

import pytest
from rich.console import Group

from kvdiag.baseline_comparison import baseline_of
from kvdiag.diagnosis.fleet import compare
from kvdiag.model import Evidence
from kvdiag.outputs.documents.fleet_document import compared
from kvdiag.outputs.html import report_page, status_page
from kvdiag.outputs.terminal.fleet_text import versions
from tests.builders.runs import run
from tests.builders.worlds import World
from tests.unit.diagnosis.fleet.replicas import fleet_of
from tests.unit.outputs import test_metrics, test_top_frames
from tests.unit.outputs.texts import piped

Change = Callable[[Any], Any]

SHOWN = test_metrics.snapshot()
TIMELINE = run(World(leaked_blocks_per_request=4))
FLEET = compare(chain(*(fleet_of(8, "torch_live", leak, version=f"{leak}") for leak in (0.0, 20.0))))
MAKING = report_page.Making(version="1", command="kvdiag", made_seconds=0.0)


def without_rows(page: str) -> str:
    """A page without its tables of evidence."""
    return re.sub(r'<table class="evidence">.*?</table>', "", page, flags=re.DOTALL)


READERS: dict[str, Callable[[Change], object]] = {
    "metrics": lambda change: test_metrics.page(change(SHOWN)),
    "top": lambda change: test_top_frames.screen(test_top_frames.of(change(SHOWN))),
    "status page": lambda change: without_rows(status_page.page(change(SHOWN), (), 1_001.0)),
    "report": lambda change: without_rows(report_page.render(change(SHOWN.diagnosis), TIMELINE, MAKING)),
    "baseline": lambda change: baseline_of(TIMELINE, change(SHOWN.diagnosis)),
    "fleet": lambda change: piped(Group(*versions(change(FLEET)))).partition("Comparison of replicas")[0],
    "fleet document": lambda change: {**compared(change(FLEET)), "findings": ()},
}


def renamed(value: Any) -> Any:
    """The same value, in which every row of evidence has another name."""
    if isinstance(value, Evidence):
        return replace(value, name=f"renamed_{value.name}")
    if isinstance(value, tuple):
        return tuple(map(renamed, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: renamed(getattr(value, one.name)) for one in fields(value)})
    return value


@pytest.mark.parametrize("reader", READERS)
def test_a_renamed_row_loses_no_figure(reader: str) -> None:
    """Metrics, `top`, pages, baselines and the comparison of versions are the same, but for the rows themselves."""
    assert READERS[reader](lambda value: value) == READERS[reader](renamed)
