"""The checks of `kvdiag doctor`, for a person and as a document (`doctor.schema.json`)."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from kvdiag.checks.check import Check, Outcome, worst
from kvdiag.outputs.documents import Json, fields_of
from kvdiag.outputs.terminal.cells import grid, heading, plain

SCHEMA_VERSION = 1
STYLES: dict[Outcome, str] = {"pass": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


def document(checks: Sequence[Check]) -> Json:
    """The checks as a document."""
    rows = [fields_of(one, "id", "outcome", "found", "fix") for one in checks]
    return {"schema_version": SCHEMA_VERSION, "worst": worst(checks), "checks": rows}


def render(checks: Sequence[Check], *, ascii_only: bool) -> RenderableType:
    """One line for each check, its fix below it, and the number of each outcome."""
    rows = []
    for one in checks:
        line = Text.assemble((f"{one.id}: ", "bold"), plain(one.found, "dim" if one.outcome == "skip" else ""))
        if one.fix is not None:
            line.append("\n").append(plain(f"{'->' if ascii_only else '→'} {one.fix}"))
        rows.append((Text(one.outcome.upper(), style=STYLES[one.outcome]), line))
    counts = [(outcome, sum(one.outcome == outcome for one in checks)) for outcome in STYLES]
    return Group(grid(rows), heading(", ".join(f"{count} {outcome}" for outcome, count in counts if count)))
