"""`kvdiag diagnose --postmortem`: what a server that ran out of memory died of, from what it left behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from kvdiag.commands.options.report_file import ReportFile
from kvdiag.commands.printing import exit_code, print_diagnosis
from kvdiag.diagnosis.postmortem import postmortem
from kvdiag.feeds.postmortem_inputs import gather
from kvdiag.model import Timeline
from kvdiag.outputs.html.report_page import render


def examine(
    files: Sequence[Path],
    *,
    logs: Sequence[Path],
    boxes: Sequence[Path],
    traces: Sequence[Path],
    page: ReportFile,
    output: str,
) -> int:
    """Judge what is given, report and print it, and return the exit code.

    Raises:
        KvdiagError: a file cannot be read, or is nothing of the kind.

    """
    if not (files or logs or boxes or traces):
        raise click.UsageError("give what the server left: --black-box, --trace, --log, or files of any of them")
    case = gather(files, logs=logs, boxes=boxes, traces=traces)
    diagnosis = postmortem(case)
    timeline = case.timeline or Timeline(samples=())
    try:
        page.write(lambda making: render(diagnosis, timeline, making))
    finally:  # the verdict is told even where there is no room for a report
        print_diagnosis(diagnosis, output)
    return exit_code(diagnosis.worst)
