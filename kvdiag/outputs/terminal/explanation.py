"""The knowledge base of verdicts, for a person or as a document."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from kvdiag.diagnosis.knowledge import Entry
from kvdiag.outputs.presentation import ADVICE
from kvdiag.outputs.terminal.cells import columns

SCHEMA_VERSION = 1

PARTS = (("Symptom", "symptom"), *ADVICE)
"""The headings of an entry in reading order, and their fields."""


def one(verdict: str, entry: Entry) -> dict[str, Any]:
    """The document of one verdict."""
    return {"schema_version": SCHEMA_VERSION, "id": verdict, **asdict(entry)}


def document(known: Mapping[str, Entry]) -> dict[str, Any]:
    """The document of them all."""
    verdicts = [{"id": verdict, **asdict(entry)} for verdict, entry in known.items()]
    return {"schema_version": SCHEMA_VERSION, "verdicts": verdicts}


def render(verdict: str, entry: Entry) -> RenderableType:
    """One verdict with every part under its heading."""
    parts: list[RenderableType] = [Text(verdict, style="bold")]
    for title, field in PARTS:
        shown = f"`kvdiag explain --runbook {verdict}`" if field == "runbook" else getattr(entry, field)
        parts += [Text(f"\n{title}", style="bold"), Padding(Text(shown), (0, 0, 0, 2))]
    return Group(*parts)


def listing(known: Mapping[str, Entry]) -> RenderableType:
    """Every verdict on a line of its own, with its symptom."""
    table = columns("=", "", header=False)
    for verdict, entry in known.items():
        table.add_row(Text(verdict, style="bold"), Text(entry.symptom))
    return table
