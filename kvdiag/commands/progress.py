"""The running step, on stderr: a spinner on a terminal, one line a step where it is piped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from kvdiag.commands.printing import spinner_of
from kvdiag.feeds.active.step_runner import Progress


@contextmanager
def show_progress() -> Iterator[Callable[[Progress], None]]:
    """Yield the function that is told of every change."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        told: set[int] = set()

        def tell_line(progress: Progress) -> None:
            if progress.number not in told:
                told.add(progress.number)
                console.print(f"step {progress.number} of {progress.steps}  {progress.title}", soft_wrap=True)

        yield tell_line
        return
    with console.status("looking for other traffic", spinner=spinner_of(console)) as status:

        def tell(progress: Progress) -> None:
            detail = f", {progress.detail}" if progress.detail else ""
            status.update(f"step {progress.number} of {progress.steps}  {progress.title}{detail}")

        yield tell
