"""The comparison of predicted and reported figures, as text and as JSON (`schema_version` 1).

Names come from logs and servers, so they are escaped before they are printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvdiag.formatting import format_bytes, format_count, format_ratio
from kvdiag.kv.calibration.engine_report import EngineReport, PrintedSize, RankReport
from kvdiag.kv.calibration.predicted_vs_reported import DRIFT_LIMIT_RATIO, Calibration, Comparison, Figure, Interval
from kvdiag.kv.calibration.profiles import Profile
from kvdiag.outputs.terminal.cells import grid, heading, plain

SCHEMA_VERSION = 1
MOST_RANKS_SHOWN = 8

Json = dict[str, Any]

NAMES: Mapping[Figure, str] = {
    Figure.WEIGHTS: "weights",
    Figure.POOL: "KV pool",
    Figure.BLOCKS: "blocks",
    Figure.TOKENS: "tokens",
    Figure.CONCURRENCY: "concurrency",
}
_SIZES = (
    "weights",
    "pool",
    "activation",
    "peak_torch",
    "non_torch",
    "consumed",
    "graphs_actual",
    "graphs_estimate",
    "total",
)
_SETTINGS = (
    "version",
    "model",
    "architecture",
    "dtype",
    "kv_dtype",
    "tensor_parallel",
    "pipeline_parallel",
    "decode_context_parallel",
    "max_model_len_tokens",
    "max_num_batched_tokens",
    "block_size_tokens",
    "memory_fraction_ratio",
    "speculative_tokens",
)


def render_calibration(
    calibration: Calibration,
    report: EngineReport,
    *,
    model: str,
    origin: str,
    profile: Profile | None,
    note: str,
) -> RenderableType:
    """The whole answer."""
    drifting = [NAMES[one.figure] for one in calibration.comparisons if not one.within_limit]
    headline = Text()
    if drifting:
        headline.append("DRIFT", style="bold yellow")
        headline.append(f"  more than {format_ratio(DRIFT_LIMIT_RATIO)} off: {', '.join(dict.fromkeys(drifting))}")
    else:
        headline.append("NO DRIFT", style="bold green")
        headline.append(f"  predicted and reported figures agree within {format_ratio(DRIFT_LIMIT_RATIO)}")
    subject = grid()
    version = report.settings.version
    subject.add_row(Text("model", style="dim"), plain(model))
    subject.add_row(Text("engine", style="dim"), plain(origin + (f" (vllm {version})" if version else "")))
    parts: list[RenderableType] = [headline, subject, Padding(_comparisons(calibration.comparisons), (1, 0, 0, 0))]
    parts += [plain(f"  {', '.join(names)}: {reason}") for reason, names in _reasons(calibration.comparisons).items()]
    if len(report.ranks) > 1:
        parts += [heading("Reported by each rank"), _ranks(report.ranks)]
    if profile is not None:
        parts += [heading("Measured on one GPU"), _measured(profile)]
    notes = [
        *calibration.notes,
        *([f"not reported: {', '.join(calibration.missing)}"] if calibration.missing else []),
        note,
    ]
    parts.append(Padding(Group(*(plain(line, "dim") for line in notes)), (1, 0, 0, 0)))
    return Group(*parts)


def _reasons(comparisons: Sequence[Comparison]) -> dict[str, list[str]]:
    """Every reason once, with the figures it may explain."""
    found: dict[str, list[str]] = {}
    for one in comparisons:
        for reason in one.reasons:
            names = found.setdefault(reason.text, [])
            if NAMES[one.figure] not in names:
                names.append(NAMES[one.figure])
    return found


def _comparisons(comparisons: Sequence[Comparison]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("predicted", "reported", "drift"):
        table.add_column(name, justify="right")
    table.add_column("", overflow="fold")
    for one in comparisons:
        style = "" if one.within_limit else "yellow"
        table.add_row(
            NAMES[one.figure],
            _value(one.figure, one.predicted),
            _value(one.figure, one.reported),
            Text("exact" if one.drift_ratio == 0 else _signed(one.drift_ratio), style=style),
            plain(one.where, "dim"),
        )
    return table


def _value(figure: Figure, interval: Interval) -> str:
    if figure in (Figure.WEIGHTS, Figure.POOL):
        return format_bytes(interval.nominal)
    return f"{interval.nominal:,.2f}x" if figure is Figure.CONCURRENCY else format_count(interval.nominal)


def _signed(ratio: float) -> str:
    return f"{'+' if ratio > 0 else ''}{format_ratio(ratio)}"


def _ranks(ranks: Sequence[RankReport]) -> RenderableType:
    table = grid()
    for rank in ranks[:MOST_RANKS_SHOWN]:
        told = [f"{name.replace('_', ' ')} {format_bytes(size.nominal_bytes)}" for name, size in _sizes(rank).items()]
        table.add_row(plain(rank.name, "dim"), ", ".join(told))
    if len(ranks) > MOST_RANKS_SHOWN:
        table.add_row("", f"and {len(ranks) - MOST_RANKS_SHOWN} more")
    return table


def _measured(profile: Profile) -> RenderableType:
    table = grid()
    graphs = "graphs" if profile.graphs_in_fraction else "graphs, outside the memory fraction"
    for name, size in (
        ("context", profile.context_bytes),
        ("activation", profile.activation_bytes),
        ("overhead (context, activation, graphs)", profile.overhead_bytes),
        (graphs, profile.graph_bytes),
    ):
        if size is not None:
            table.add_row(Text(name, style="dim"), format_bytes(size))
    return table


def calibration_document(
    calibration: Calibration,
    report: EngineReport,
    *,
    model: str,
    origin: str,
    profile: Profile | None,
    profile_file: str | None,
    note: str,
) -> Json:
    """The same as plain values; what was not told is null."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model,
        "engine": {"origin": origin, **{name: getattr(report.settings, name) for name in _SETTINGS}},
        "within_limit": calibration.within_limit,
        "limit_ratio": DRIFT_LIMIT_RATIO,
        "comparisons": [
            {
                "figure": one.figure.value,
                "predicted": _number(one.figure, one.predicted.nominal),
                "predicted_low": _number(one.figure, one.predicted.low),
                "predicted_high": _number(one.figure, one.predicted.high),
                "reported": _number(one.figure, one.reported.nominal),
                "drift_ratio": one.drift_ratio,
                "where": one.where,
                "reasons": [reason.text for reason in one.reasons],
            }
            for one in calibration.comparisons
        ],
        "ranks": [
            {"name": rank.name, **{f"{name}_bytes": _bytes(getattr(rank, name)) for name in _SIZES}}
            for rank in report.ranks
        ],
        "measured": None
        if profile is None
        else {
            "gpu_total_bytes": profile.gpu_total_bytes,
            "gpu_name": profile.gpu_name,
            "context_bytes": profile.context_bytes,
            "activation_bytes": profile.activation_bytes,
            "graph_bytes": profile.graph_bytes,
            "overhead_bytes": profile.overhead_bytes,
            "graphs_in_fraction": profile.graphs_in_fraction,
        },
        "profile_file": profile_file,
        "missing": list(calibration.missing),
        "notes": [*calibration.notes, note],
    }


def _number(figure: Figure, value: float) -> float:
    return value if figure is Figure.CONCURRENCY else int(value)


def _sizes(rank: RankReport) -> dict[str, PrintedSize]:
    told = {name: getattr(rank, name) for name in _SIZES}
    return {name: size for name, size in told.items() if size is not None}


def _bytes(size: PrintedSize | None) -> int | None:
    return None if size is None else size.nominal_bytes
