"""`kvdiag diagnose`: judge a trace, the history that a Prometheus holds, or what a server left that died."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from kvdiag.commands.histories.crash_history import examine
from kvdiag.commands.histories.fleet_history import examine_history
from kvdiag.commands.histories.trace_histories import examine_traces, recorded
from kvdiag.commands.options.common import output_option
from kvdiag.commands.options.prometheus_options import access, matchers, prometheus_options, window_of
from kvdiag.commands.options.report_file import ReportFile, report_option
from kvdiag.commands.options.thresholds import limit_options, limits_of
from kvdiag.commands.printing import exit_code, print_diagnosis
from kvdiag.diagnosis import diagnose
from kvdiag.outputs.html.report_page import render

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("trace", type=_PATH, nargs=-1, metavar="[TRACE... | FILE...]")
@click.option("--postmortem", is_flag=True, help="The server ran out of memory: say what of, and what to change.")
@click.option("--log", "logs", type=_PATH, multiple=True, help="With --postmortem: the engine's log (- is stdin).")
@click.option(
    "--black-box", "boxes", type=_PATH, multiple=True, help="With --postmortem: the agents' folder, or a file of it."
)
@click.option("--trace", "traces", type=_PATH, multiple=True, help="With --postmortem: what a recorder kept.")
@prometheus_options
@report_option
@limit_options
@output_option
def command(
    trace: tuple[Path, ...],
    postmortem: bool,
    logs: tuple[Path, ...],
    boxes: tuple[Path, ...],
    traces: tuple[Path, ...],
    prometheus: str | None,
    match: str,
    window: str,
    start: str | None,
    end: str | None,
    report: Path | None,
    reserved_gap_bytes: int,
    output: str,
    **reached: Any,
) -> int:
    """Judge TRACE, a file that `kvdiag run --record` has kept (JSON Lines, gzip allowed), or a recorder's folder.

    Several traces are the replicas of a fleet: each is judged, those of one version are compared with one another, and
    each version with the one before.

    With --prometheus: judge the history that a Prometheus holds, or anything that speaks its API (Thanos, Mimir,
    VictoriaMetrics), one replica after the other. Nothing of kvdiag need have been there: what is read are vLLM's own
    metrics, DCGM's, nvidia_gpu_exporter's, cAdvisor's and kube-state-metrics', and kvdiag's where there are any.

    With --postmortem: judge what a server left that ran out of memory. Each FILE is an agent's black box or the folder
    of them, a trace, an engine's log, or the bare message (- is stdin); its content says which. Several together fill
    in what one cannot tell, and where they contradict that is said.

    A --report of several replicas has a table of all, and the worst one in full.
    """
    page = ReportFile(report, read=(*trace, *logs, *boxes, *traces))
    if postmortem:
        return examine(trace, logs=logs, boxes=boxes, traces=traces, page=page, output=output)
    if logs or boxes or traces:
        raise click.UsageError("--log, --black-box and --trace are for --postmortem")
    if prometheus is not None:
        if trace:
            raise click.UsageError("give either a trace or --prometheus")
        span = window_of(window, start, end, time.time())
        return examine_history(
            access(prometheus, **reached), matchers(match), span, limits_of(reserved_gap_bytes), page, output
        )
    if not trace:
        raise click.UsageError("Missing argument 'TRACE'.")
    if len(trace) > 1:
        return examine_traces(trace, limits_of(reserved_gap_bytes), page, output)
    timeline, facts = recorded(trace[0])
    diagnosis = diagnose(timeline, facts, limits_of(reserved_gap_bytes))
    try:
        page.write(lambda making: render(diagnosis, timeline, making))
    finally:  # the verdict is told even where there is no room for a report
        print_diagnosis(diagnosis, output)
    return exit_code(diagnosis.worst)
