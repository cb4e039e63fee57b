"""`kvdiag baseline`: save what one engine version or configuration measured, and compare another with it."""

import json
from pathlib import Path

import click

from kvdiag import baseline_comparison as comparison
from kvdiag import files
from kvdiag.baseline_comparison import TOLERANCE_RATIO, Baseline
from kvdiag.commands import CommandGroup
from kvdiag.commands.options.common import Within, output_option
from kvdiag.commands.printing import print_json, print_text
from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.trace import read_trace
from kvdiag.outputs.terminal import comparison_text
from kvdiag.sources.bounded_json import decode

MAX_FILE_BYTES = 4 * 2**20

SAME, WORSE, UNKNOWN = 0, 2, 3

_FILE = click.Path(path_type=Path)


@click.group(cls=CommandGroup)
def command() -> None:
    """Compare two engine versions or configurations: idle memory, KV pool, cost of each test step.

    \b
    kvdiag run --url URL --record before.jsonl.gz
    kvdiag baseline save before.jsonl.gz baseline.json
    kvdiag run --url URL --record after.jsonl.gz        after the change
    kvdiag baseline compare baseline.json after.jsonl.gz
    """  # noqa: D301 - \b is click's mark for a paragraph that keeps its lines


@command.command(short_help="Save the measurements of a trace as a baseline.")
@click.argument("trace", type=_FILE)
@click.argument("file", type=_FILE)
def save(trace: Path, file: Path) -> None:
    """Save the measurements of TRACE, a file written by `kvdiag run --record`, in FILE."""
    document = json.dumps(comparison.document(_of_trace(trace)), indent=2, allow_nan=False)
    if file.exists() and file.samefile(trace):
        raise KvdiagError(f"cannot write {file}: it is the trace itself; give another file")
    try:
        files.replace(file, f"{document}\n".encode())
    except OSError as error:
        raise KvdiagError(f"cannot write {file}: {error.strerror}") from error


@command.command(short_help="Compare a baseline or trace with another.")
@click.argument("before", type=_FILE)
@click.argument("after", type=_FILE)
@click.option(
    "--tolerance",
    type=Within(0.0, 1.0),
    default=TOLERANCE_RATIO,
    show_default=True,
    help="Relative difference to ignore.",
)
@output_option
def compare(before: Path, after: Path, tolerance: float, output: str) -> int:
    """Compare AFTER with BEFORE, each a saved baseline or a trace written by `kvdiag run --record`.

    Exit codes: 0 nothing is worse, 2 a measurement is worse, 3 a measurement of BEFORE is missing in AFTER.
    """
    old, new = _of(before), _of(after)
    changes = comparison.compare(old, new, tolerance)
    if output == "json":
        print_json(comparison_text.document(old, new, changes))
    else:
        print_text(comparison_text.render(old, new, changes))
    outcomes = {one.outcome for one in changes}
    return WORSE if "worse" in outcomes else UNKNOWN if "missing" in outcomes else SAME


def _of(path: Path) -> Baseline:
    try:
        with files.opened(path) as file:
            content = file.read(MAX_FILE_BYTES + 1)
        document = decode(content) if len(content) <= MAX_FILE_BYTES else None
    except OSError as error:
        raise KvdiagError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        document = None
    if not isinstance(document, dict) or "kvdiag_trace" in document:
        # Several lines of JSON, or a gzip file: a trace, whose reader reports what is wrong with it.
        return _of_trace(path)
    try:
        return comparison.parse(document)
    except ValueError as error:
        raise KvdiagError(f"{path} is not a baseline: {error}") from error


def _of_trace(path: Path) -> Baseline:
    timeline, facts = read_trace(path)
    try:
        return comparison.baseline_of(timeline, diagnose(timeline, facts, DEFAULT_LIMITS))
    except ValueError as error:
        raise KvdiagError(f"{path}: {error}") from error
