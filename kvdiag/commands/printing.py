"""Print results to stdout as text or JSON, progress to stderr; and the exit code of each status."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from kvdiag.commands import close_stdout
from kvdiag.errors import KvdiagError
from kvdiag.formatting import format_duration

if TYPE_CHECKING:
    from kvdiag.feeds.active.step_runner import Progress
    from kvdiag.model import Diagnosis, Status

EXIT_CODES: Mapping[Status, int] = {"ok": 0, "suspect": 1, "fault": 2, "unknown": 3}
"""As monitoring plugins define them."""

PIPED_WIDTH = 80

REPLICAS_SECONDS = 2.0
"""Between two progress lines where stderr is not a terminal; shorter work prints none."""


def print_diagnosis(diagnosis: Diagnosis, output: str) -> None:
    """Print a diagnosis to stdout as `text` or `json`."""
    if output == "json":
        print_json(import_module("kvdiag.outputs.documents.diagnosis_document").document(diagnosis))
    else:
        print_text(import_module("kvdiag.outputs.terminal.text").render(diagnosis))


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
    """Return whether stdout may be limited to ASCII, so that bars must be drawn with it."""
    return not sys.stdout.encoding.lower().startswith("utf")


def spinner_of(console: Console) -> str:
    """Return the name of a spinner that the console's encoding can show."""
    return "dots" if console.encoding.startswith("utf") else "line"


@contextmanager
def _spinner_or_lines(begin: str, pause_seconds: float = 0.0) -> Iterator[Callable[[str, str], None]]:
    """Yield a function that shows progress on stderr: text and detail at a terminal's spinner, else lines of text.

    A line is printed once, and at least `pause_seconds` after the one before.
    """
    console = Console(stderr=True, highlight=False)
    shown: set[str] = set()
    last_seconds = time.monotonic()

    def print_line(text: str, _: str) -> None:
        nonlocal last_seconds
        if text not in shown and time.monotonic() - last_seconds >= pause_seconds:
            last_seconds = time.monotonic()
            shown.add(text)
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    if not console.is_terminal:
        yield print_line
        return
    with console.status(begin, spinner=spinner_of(console)) as status:
        yield lambda text, detail: status.update(", ".join(filter(None, (text, detail))))


@contextmanager
def show_progress(total_seconds: float) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows the running step on stderr: a spinner on a terminal, else one line per step.

    `total_seconds` is about how long all steps take; a terminal also shows the time since the first.
    """
    began_seconds, about = time.monotonic(), f"about {format_duration(total_seconds)}"

    def tell(show: Callable[[str, str], None], step: Progress) -> None:
        total = f" ({about} in all)" if step.number == 1 else ""
        passed = f"{format_duration(time.monotonic() - began_seconds)} of {about}"
        show(f"step {step.number} of {step.steps}{total}  {step.title}", ", ".join(filter(None, (step.detail, passed))))

    with _spinner_or_lines("checking for other traffic") as show:
        yield lambda step: tell(show, step)


@contextmanager
def show_turns() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is being done now: at a spinner, or a line each off a terminal."""
    with _spinner_or_lines("reading") as show:
        yield lambda text: show(text, "")


@contextmanager
def show_replicas() -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows how many replicas are diagnosed: a spinner, or lines off a terminal."""
    with _spinner_or_lines("reading", REPLICAS_SECONDS) as show:
        yield lambda done, total: show(f"{done} of {total} replicas", "")


def _write(text: str) -> None:
    """Write to stdout and flush, so that a write error is raised here."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        close_stdout()
        raise KvdiagError(f"cannot write the result to stdout: {error.strerror}") from error
