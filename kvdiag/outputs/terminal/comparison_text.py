"""Two baselines side by side, for a person and as a document."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from kvdiag.baseline_comparison import Baseline, Change, Outcome, changed_settings
from kvdiag.formatting import format_bytes, format_number, format_ratio, signed
from kvdiag.outputs.documents import Json, fields_of
from kvdiag.outputs.presentation import spaced
from kvdiag.outputs.terminal.cells import columns, plain

SCHEMA_VERSION = 1
STYLES: Mapping[Outcome, str] = {
    "same": "dim",
    "better": "green",
    "worse": "red",
    "missing": "magenta",
    "new": "yellow",
}


def document(before: Baseline, after: Baseline, changes: Sequence[Change]) -> Json:
    """The comparison as a document."""
    who = ("engine", "engine_version", "model", "worst")
    return {
        "schema_version": SCHEMA_VERSION,
        "before": fields_of(before, *who),
        "after": fields_of(after, *who),
        "settings": [{"name": name, "before": was, "after": now} for name, was, now in changed_settings(before, after)],
        "changes": [
            fields_of(one, "name", "unit", "outcome", "before", "after")
            | {"ratio": None if one.ratio is None else round(one.ratio, 6)}
            for one in changes
        ],
    }


def render(before: Baseline, after: Baseline, changes: Sequence[Change]) -> RenderableType:
    """The settings that differ, then one line for each figure, with its change if it differs."""
    settings = columns("=", ">before", ">after")
    for name, was, now in changed_settings(before, after):
        settings.add_row(plain(spaced(name)), plain(was or "not set"), plain(now or "not set"), style="yellow")
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
        *((plain("Changed settings", "bold"), settings, Text()) if settings.row_count else ()),
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
    return format_number(value)
