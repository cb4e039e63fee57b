"""`kvdiag diagnose --postmortem`: what a server that ran out of memory died of, from what it left behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from kvdiag.commands.show import exit_code, print_diagnosis
from kvdiag.diagnosis.postmortem import postmortem
from kvdiag.feeds.remains import gather


def examine(
    files: Sequence[Path], *, logs: Sequence[Path], boxes: Sequence[Path], traces: Sequence[Path], output: str
) -> int:
    """Judge what is given, print it, and return the exit code.

    Raises:
        KvdiagError: a file cannot be read, or is nothing of the kind.

    """
    if not (files or logs or boxes or traces):
        raise click.UsageError("give what the server left: --black-box, --trace, --log, or files of any of them")
    diagnosis = postmortem(gather(files, logs=logs, boxes=boxes, traces=traces))
    print_diagnosis(diagnosis, output)
    return exit_code(diagnosis.worst)
