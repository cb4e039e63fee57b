"""`kvdiag diagnose`: judge a recorded trace by the rules of a live run, or, after its death, what a server left."""

from __future__ import annotations

from pathlib import Path

import click

from kvdiag.commands.options import output_option
from kvdiag.commands.postmortem import examine
from kvdiag.commands.show import exit_code, print_diagnosis
from kvdiag.commands.thresholds import limit_options, limits_of
from kvdiag.diagnosis import diagnose
from kvdiag.feeds.trace import read_trace

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("trace", type=_PATH, nargs=-1, metavar="[TRACE | FILE...]")
@click.option("--postmortem", is_flag=True, help="The server ran out of memory: say what of, and what to change.")
@click.option("--log", "logs", type=_PATH, multiple=True, help="With --postmortem: the engine's log (- is stdin).")
@click.option(
    "--black-box", "boxes", type=_PATH, multiple=True, help="With --postmortem: the agents' folder, or a file of it."
)
@click.option("--trace", "traces", type=_PATH, multiple=True, help="With --postmortem: what a recorder kept.")
@limit_options
@output_option
def command(
    trace: tuple[Path, ...],
    postmortem: bool,
    logs: tuple[Path, ...],
    boxes: tuple[Path, ...],
    traces: tuple[Path, ...],
    reserved_gap_bytes: int,
    output: str,
) -> int:
    """Judge TRACE, a file that `kvdiag run --record` has kept (JSON Lines, gzip allowed).

    With --postmortem: judge what a server left that ran out of memory. Each FILE is an agent's black box or the folder
    of them, a trace, an engine's log, or the bare message (- is stdin); its content says which. Several together fill
    in what one cannot tell, and where they contradict that is said.
    """
    if postmortem:
        return examine(trace, logs=logs, boxes=boxes, traces=traces, output=output)
    if logs or boxes or traces:
        raise click.UsageError("--log, --black-box and --trace are for --postmortem")
    if not trace:
        raise click.UsageError("Missing argument 'TRACE'.")
    if len(trace) > 1:
        extra = " ".join(str(path) for path in trace[1:])
        raise click.UsageError(f"Got unexpected extra argument ({extra})")
    diagnosis = diagnose(*read_trace(trace[0]), limits_of(reserved_gap_bytes))
    print_diagnosis(diagnosis, output)
    return exit_code(diagnosis.worst)
