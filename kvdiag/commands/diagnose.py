"""`kvdiag diagnose`: judge a recorded trace, by the same rules as a live run."""

from __future__ import annotations

from pathlib import Path

import click

from kvdiag.commands.options import output_option
from kvdiag.commands.show import exit_code, print_diagnosis
from kvdiag.diagnosis import diagnose
from kvdiag.feeds.trace import read_trace


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@output_option
def command(trace: Path, output: str) -> int:
    """Judge TRACE, a file that `kvdiag run --record` has kept (JSON Lines, gzip allowed)."""
    diagnosis = diagnose(*read_trace(trace))
    print_diagnosis(diagnosis, output)
    return exit_code(diagnosis.worst)
