"""Two baselines side by side, for a person and as a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from kvdiag.baseline_comparison import Baseline, Change, Outcome
from kvdiag.formatting import format_bytes, format_count, format_ratio
from kvdiag.outputs.documents.plain_values import Json, fields_of
from kvdiag.outputs.presentation import signed
from kvdiag.outputs.terminal.cells import columns, plain

SCHEMA_VERSION = 1
STYLES: Mapping[Outcome, str] = {
    "same": "dim",
    "better": "green",
    "worse": "red",
    "not seen": "magenta",
    "new": "yellow",
}


def document(before: Baseline, after: Baseline, changes: Sequence[Change]) -> Json:
    """The comparison as a document."""
    who = ("engine", "engine_version", "model", "worst")
    return {
        "schema_version": SCHEMA_VERSION,
        "before": fields_of(before, *who),
        "after": fields_of(after, *who),
        "changes": [
            fields_of(one, "name", "unit", "outcome", "before", "after")
            | {"ratio": None if one.ratio is None else round(one.ratio, 6)}
            for one in changes
        ],
    }


def render(before: Baseline, after: Baseline, changes: Sequence[Change]) -> RenderableType:
    """One line for each figure, with its change if it differs."""
    table = columns("=", "=", ">before", ">after", ">change")
    for one in changes:
        change = "" if one.ratio is None or one.outcome == "same" else signed(format_ratio(one.ratio))
        table.add_row(
            Text(one.outcome, style=STYLES[one.outcome]),
            plain(one.name),
            plain(_value(one.before, one.unit)),
            plain(_value(one.after, one.unit)),
            change,
        )
    counts = [(outcome, sum(one.outcome == outcome for one in changes)) for outcome in STYLES]
    return Group(
        plain(f"before  {_title(before)}"),
        plain(f"after   {_title(after)}"),
        Text(),
        table,
        Text(),
        plain(", ".join(f"{count} {outcome}" for outcome, count in counts if count), "bold"),
    )


def _title(baseline: Baseline) -> str:
    engine = " ".join(part for part in (baseline.engine, baseline.engine_version) if part) or "unknown engine"
    return f"{engine}, {baseline.model or 'unknown model'}: {baseline.worst}"


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "not measured"
    if unit == "called":
        return "found" if value else "not found"
    if unit.startswith("bytes"):
        return format_bytes(value)
    return f"{value:,.4g}" if value % 1 else format_count(value)
