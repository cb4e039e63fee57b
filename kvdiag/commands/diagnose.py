"""`kvdiag diagnose`: diagnose recorded traces, the history in a Prometheus, or the artifacts of a crash."""

# ruff: noqa: RUF009 - `given_by` makes fields, not values

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvdiag.commands.fleet_history import examine_history, show
from kvdiag.commands.options.common import collected, given_by, output_option
from kvdiag.commands.options.prometheus_options import PrometheusOptions, prometheus_options
from kvdiag.commands.options.report_file import ReportFile, report_option, show_diagnosis
from kvdiag.commands.options.thresholds import limits_of, reserved_gap_option
from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.fleet import ReplicaSummary, compare, summarise
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.postmortem import postmortem
from kvdiag.errors import KvdiagError
from kvdiag.feeds.postmortem_inputs import gather, recognise
from kvdiag.feeds.recording.folder_timeline import read_recorded
from kvdiag.feeds.recording.trace import NotATraceError
from kvdiag.model import Facts, Timeline
from kvdiag.outputs.fleet_results import FleetDiagnosis, Judged

_PATH = click.Path(path_type=Path)
_SEVERAL: dict[str, Any] = {"type": _PATH, "multiple": True}


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions:
    """The options of a diagnosis."""

    postmortem: bool = given_by("Explain an out-of-memory crash and suggest a fix.")
    logs: tuple[Path, ...] = given_by("Engine log, with --postmortem (- is stdin).", "--log", **_SEVERAL)
    boxes: tuple[Path, ...] = given_by("Agent black box or folder, with --postmortem.", "--black-box", **_SEVERAL)
    traces: tuple[Path, ...] = given_by("Recorded trace, with --postmortem.", "--trace", **_SEVERAL)
    history: PrometheusOptions = given_by(prometheus_options)
    report: Path | None = given_by(report_option)
    reserved_gap_bytes: int = given_by(reserved_gap_option)
    output: str = given_by(output_option)


@click.command()
@click.argument("trace", type=_PATH, nargs=-1, metavar="[TRACE... | FILE...]")
@collected(DiagnoseOptions, "options")
def command(trace: tuple[Path, ...], options: DiagnoseOptions) -> int:
    """Diagnose TRACE, a file written by `kvdiag run --record` (JSON Lines, gzip allowed) or a recording directory.

    Several traces are treated as replicas of a fleet: each is diagnosed, replicas of one version are compared with each
    other, and each version with the one before.

    With --prometheus: diagnose the history in Prometheus or any server with its API (Thanos, Mimir, VictoriaMetrics),
    replica by replica. kvdiag need not have been running: it reads the metrics of vLLM, DCGM, nvidia_gpu_exporter,
    cAdvisor and kube-state-metrics, and kvdiag's own if present.

    With --postmortem: explain why a server ran out of memory. Each FILE is an agent's black box or a directory of them,
    a trace, an engine log, or a bare error message (- is stdin); the type is detected from the content. Several files
    complement each other, and contradictions between them are reported.

    With several replicas, --report lists all of them and shows the worst one in full.
    """
    page = ReportFile(options.report, read=(*trace, *options.logs, *options.boxes, *options.traces))
    limits, history, output = limits_of(options.reserved_gap_bytes), options.history, options.output
    crashed = {"logs": options.logs, "boxes": options.boxes, "traces": options.traces}
    if options.postmortem:
        if not any((trace, *crashed.values())):
            raise click.UsageError("--postmortem needs files to read: --log, --black-box, --trace, or FILE")
        case = gather(trace, **crashed)
        return show_diagnosis(postmortem(case), case.timeline or Timeline(samples=()), page, output)
    if any(crashed.values()):
        raise click.UsageError("--log, --black-box and --trace need --postmortem")
    if history.prometheus is not None:
        if trace:
            raise click.UsageError("give either a trace or --prometheus")
        span = history.span(time.time())
        return examine_history(history.access(), history.matchers(), span, limits, page, output)
    if not trace:
        raise click.UsageError("Missing argument 'TRACE'.")
    if len(trace) > 1:
        return _examine_fleet(trace, limits, page, output)
    timeline, facts = _recorded(trace[0])
    return show_diagnosis(diagnose(timeline, facts, limits), timeline, page, output)


def _examine_fleet(paths: Sequence[Path], limits: Limits, page: ReportFile, output: str) -> int:
    """Diagnose each trace, compare all, show the result, and return the exit code. One trace is held at a time."""
    known: dict[Path, Path] = {}
    for path in paths:
        if (same := known.setdefault(path.resolve(), path)) is not path:
            raise KvdiagError(f"{same} is given twice: each replica may count only once; remove the duplicate")
    judged: list[Judged] = []
    summaries: list[ReplicaSummary] = []
    for path in paths:
        timeline, facts = _recorded(path)
        name = str(path)
        judged.append(Judged(key=name, subject=(("trace", name),), diagnosis=diagnose(timeline, facts, limits)))
        summaries.append(summarise(timeline, facts, limits, replica=name))
    result = FleetDiagnosis(
        source=None, judged=tuple(sorted(judged, key=Judged.order)), fleet=compare(summaries, limits), gaps=()
    )
    return show(result, output, page, lambda worst: read_recorded(Path(worst.key))[0])


def _recorded(path: Path) -> tuple[Timeline, Facts]:
    """Return what was recorded at `path`; the error for crash artifacts points to --postmortem."""
    try:
        return read_recorded(path)
    except NotATraceError as error:
        raise KvdiagError(f"{error}{_instead(path)}") from error


def _instead(path: Path) -> str:
    """Return what to do with a file that is not a trace."""
    try:
        kind = recognise(path)
    except KvdiagError:
        return ""
    hints = {"log": "if it is an engine log", "black box": "to read an agent's black box"}
    return f"; {hints[kind]}, add --postmortem" if kind in hints else ""
