"""Printing results: to stdout, as text or JSON; and the exit code that goes with a status."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console, RenderableType

from kvdiag.commands import close_stdout
from kvdiag.errors import KvdiagError
from kvdiag.model import Diagnosis, Status
from kvdiag.outputs.documents import diagnosis_document
from kvdiag.outputs.terminal import text

EXIT_CODES: Mapping[Status, int] = {"ok": 0, "suspect": 1, "fault": 2, "unknown": 3}
PIPED_WIDTH = 80


def exit_code(status: Status) -> int:
    """The monitoring-plugins' exit code of a status."""
    return EXIT_CODES[status]


def print_diagnosis(diagnosis: Diagnosis, output: str) -> None:
    """Print a diagnosis to stdout as `text` or `json`."""
    if output == "json":
        print_json(diagnosis_document.document(diagnosis))
    else:
        print_text(text.render(diagnosis))


def print_json(document: dict[str, Any]) -> None:
    """Print a document to stdout."""
    _write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_text(result: RenderableType) -> None:
    """Print to stdout: coloured on a terminal; plain, 80 columns wide and without padding where piped."""
    if sys.stdout.isatty():
        Console(highlight=False).print(result)
        return
    console = Console(width=PIPED_WIDTH, highlight=False, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(result)
    _write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def is_ascii_only() -> bool:
    """Whether stdout may have no more characters than ASCII, so that bars are better made of those."""
    return not sys.stdout.encoding.lower().startswith("utf")


def spinner_of(console: Console) -> str:
    """The name of the spinner that a console's encoding can show."""
    return "dots" if console.encoding.startswith("utf") else "line"


def _write(text: str) -> None:
    """Write to stdout to the end, so that what cannot be written is noticed here.

    Raises:
        KvdiagError: the disk is full or gone.

    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        close_stdout()
        raise KvdiagError(f"cannot print the result: {error.strerror}") from error
