"""The comparison of predicted and reported figures, as text and as JSON (`schema_version` 1).

The headline names the figures that drift; then come the figures, each reason once with the figures it may explain, the
ranks if there are several, the measured profile, and what was not reported. Text rounds; JSON has each figure with the
interval that a printed size leaves, and null for what is not reported. Names come from logs and servers, so they are
escaped before they are printed. Nothing is judged here.
"""

from collections.abc import Sequence
from dataclasses import fields

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from kvdiag.formatting import format_bytes, format_number, format_ratio, signed
from kvdiag.kv.calibration.engine_report import DRIFT_LIMIT_RATIO, EngineReport, PrintedSize, RankReport
from kvdiag.kv.calibration.predicted_vs_reported import (
    SIZES,
    Calibration,
    Comparison,
    Figure,
    Interval,
)
from kvdiag.kv.calibration.profiles import Profile
from kvdiag.outputs.documents import Json, fields_of
from kvdiag.outputs.presentation import spaced
from kvdiag.outputs.terminal.cells import columns, grid, heading, plain

SCHEMA_VERSION = 1
MAX_RANKS_SHOWN = 8

_SIZES = tuple(field.name for field in fields(RankReport) if field.name not in ("name", "stage"))
_SIZE_NAMES = {name: spaced(name) for name in _SIZES} | {"consumed": "weights + non-torch"}
_MEASURED = (
    *("gpu_total_bytes", "gpu_name", "context_bytes", "activation_bytes", "graph_bytes", "overhead_bytes"),
    "graphs_in_fraction",
)
_SETTINGS = (
    *("version", "model", "architecture", "dtype", "kv_dtype"),
    *("tensor_parallel", "pipeline_parallel", "decode_context_parallel", "max_model_len_tokens"),
    *("max_num_batched_tokens", "block_size_tokens", "memory_fraction_ratio", "speculative_tokens"),
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
    drifting = [one.figure.label for one in calibration.comparisons if not one.within_limit]
    headline = Text()
    if drifting:
        headline.append("DRIFT", style="bold yellow")
        headline.append(f"  more than {format_ratio(DRIFT_LIMIT_RATIO)} off: {', '.join(dict.fromkeys(drifting))}")
    else:
        headline.append("NO DRIFT", style="bold green")
        headline.append(f"  predicted and reported figures agree within {format_ratio(DRIFT_LIMIT_RATIO)}")
    version = report.settings.version
    named = f" ({report.engine_name or 'version'} {version})" if version else ""
    subject = grid((("model", model), ("engine", f"{origin}{named}")))
    parts: list[RenderableType] = [headline, subject, Padding(_comparisons(calibration, report), (1, 0, 0, 0))]
    parts += [plain(f"  {', '.join(names)}: {reason}") for reason, names in _reasons(calibration.comparisons).items()]
    if len(report.ranks) > 1:
        parts += [heading("Reported by each rank"), _ranks(report.ranks)]
    if profile is not None:
        parts += [heading("Overheads of one GPU, from the report"), _measured(profile)]
    missing = [f"not reported: {', '.join(calibration.missing)}"] if calibration.missing else []
    notes = [*calibration.notes, *missing, note]
    parts.append(Padding(Group(*(plain(line, "dim") for line in notes)), (1, 0, 0, 0)))
    return Group(*parts)


def _reasons(comparisons: Sequence[Comparison]) -> dict[str, dict[str, None]]:
    found: dict[str, dict[str, None]] = {}
    for one in comparisons:
        for reason in one.reasons:
            found.setdefault(reason.text, {})[one.figure.label] = None
    return found


def _comparisons(calibration: Calibration, report: EngineReport) -> RenderableType:
    by_blocks = report.deciding_rank is None or report.settings.blocks_override is not None
    origin = f"predicted from the reported {'blocks' if by_blocks else 'pool'}"
    table = columns("", ">predicted", ">reported", ">drift", "")
    for one in calibration.comparisons:
        style = "" if one.within_limit else "yellow"
        table.add_row(
            one.figure.label,
            _value(one.figure, one.predicted),
            _value(one.figure, one.reported),
            Text("none" if one.drift_ratio == 0 else signed(format_ratio(one.drift_ratio)), style=style),
            plain(one.where if one.figure in SIZES else origin, "dim"),
        )
    return table


def _value(figure: Figure, interval: Interval) -> str:
    if figure in SIZES:
        return format_bytes(interval.nominal)
    return format_number(interval.nominal) + ("x" if figure is Figure.CONCURRENCY else "")


def _ranks(ranks: Sequence[RankReport]) -> RenderableType:
    rows = [
        (rank.name, ", ".join(f"{_SIZE_NAMES[name]} {format_bytes(size.nominal_bytes)}" for name, size in _sizes(rank)))
        for rank in ranks[:MAX_RANKS_SHOWN]
    ]
    if len(ranks) > MAX_RANKS_SHOWN:
        rows.append(("", f"and {len(ranks) - MAX_RANKS_SHOWN} more"))
    return grid(rows)


def _measured(profile: Profile) -> RenderableType:
    graphs = "graphs" if profile.graphs_in_fraction else "graphs, outside the memory fraction"
    sizes = {
        "context": profile.context_bytes,
        "activation": profile.activation_bytes,
        f"overhead (context, activation{', graphs' if profile.graph_bytes is None else ''})": profile.overhead_bytes,
        graphs: profile.graph_bytes,
    }
    return grid((name, format_bytes(size)) for name, size in sizes.items() if size is not None)


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
    """The same as plain values; what was not reported is null."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model,
        "engine": {"origin": origin, **fields_of(report.settings, *_SETTINGS)},
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
            {"name": rank.name, **{f"{name}_bytes": None for name in _SIZES}}
            | {f"{name}_bytes": size.nominal_bytes for name, size in _sizes(rank)}
            for rank in report.ranks
        ],
        "measured": None if profile is None else fields_of(profile, *_MEASURED),
        "profile_file": profile_file,
        "missing": list(calibration.missing),
        "notes": [*calibration.notes, note],
    }


def _number(figure: Figure, value: float) -> float:
    return value if figure is Figure.CONCURRENCY else int(value)


def _sizes(rank: RankReport) -> list[tuple[str, PrintedSize]]:
    return [(name, size) for name in _SIZES if (size := getattr(rank, name)) is not None]
