"""`--report FILE`: checked to be writable before anything begins, and written whole or not at all."""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click

import kvdiag
from kvdiag import files
from kvdiag.commands.printing import EXIT_CODES, print_diagnosis
from kvdiag.errors import KvdiagError
from kvdiag.model import Diagnosis, Timeline
from kvdiag.outputs.html.report_page import Making, render

REPEATED = frozenset(
    (
        *("url", "simulate", "check_fix", "agent_dir", "force", "record", "soak", "soak_cycle", "insecure", "ca_file"),
        *("trace", "prometheus", "match", "window", "start", "end", "timeout", "postmortem", "logs", "boxes", "traces"),
        *("reserved_gap_bytes", "output", "report"),
    )
)
"""Options whose values a report repeats. Of the others, such as keys, it shows only the option."""

ADDRESSES = frozenset(("url", "prometheus", "attach"))
"""Of those, options whose values may bring a password before an @, or a token after a question mark."""


report_option = click.option(
    "--report", type=click.Path(path_type=Path), metavar="FILE", help="Write an HTML report with plots to FILE."
)


class ReportFile:
    """Where a report goes; none where `path` is `None`."""

    def __init__(self, path: Path | None, *, read: Iterable[Path] = ()) -> None:
        """See that the file can be written, and is none of those that are read.

        Raises:
            KvdiagError: it cannot be, or is one.
        """
        self._path = path
        if path is None:
            return
        if str(path) == "-":
            raise KvdiagError("cannot write a report to -: stdout has the verdict; give a file")
        try:
            if path.exists() and any(one.exists() and one.samefile(path) for one in read):
                raise KvdiagError(f"cannot write a report to {path}: it is one of the inputs; give another file")
            if path.exists() and not path.is_file():
                raise KvdiagError(f"cannot write a report to {path}: it exists and is not a regular file")
            files.refuse(path)
        except (OSError, RuntimeError) as error:  # a RuntimeError is a loop of links
            reason = getattr(error, "strerror", None) or error
            raise KvdiagError(f"cannot write a report to {path}: {reason}") from error

    def write(self, page: Callable[[Making], str]) -> None:
        """Write what `page` gives, if a report is required: next to its place first, then moved there.

        Raises:
            KvdiagError: it cannot be written.
        """
        if self._path is None:
            return
        made = Making(version=kvdiag.__version__, command=_command(), made_seconds=time.time())
        content = page(made).encode()
        try:
            files.replace(self._path, content)
        except OSError as error:
            raise KvdiagError(f"cannot write a report to {self._path}: {error.strerror}") from error


def show_diagnosis(diagnosis: Diagnosis, timeline: Timeline, page: ReportFile, output: str) -> int:
    """Write the report, print the diagnosis, and return the exit code."""
    try:
        page.write(lambda making: render(diagnosis, timeline, making))
    finally:  # the verdict is printed even if the report cannot be written
        print_diagnosis(diagnosis, output)
    return EXIT_CODES[diagnosis.worst]


def _command() -> str:
    """The command line as it may be passed on."""
    context = click.get_current_context()
    return " ".join((context.command_path, *_given(context)))


def _given(context: click.Context) -> Iterator[str]:
    for parameter in context.command.params:
        name = parameter.name or ""
        value = context.params.get(name)
        if context.get_parameter_source(name) in (None, click.core.ParameterSource.DEFAULT) or value in (None, ()):
            continue
        option = parameter.opts[-1] if isinstance(parameter, click.Option) else None
        for one in value if isinstance(value, tuple) else (value,):
            if one is True:
                yield str(option)
            elif name in REPEATED:
                shown = _address(str(one)) if name in ADDRESSES else str(one)
                yield shown if option is None else f"{option} {shown}"
            else:
                yield f"{option} ..."


def _address(url: str) -> str:
    """An address without what may be secret in it."""
    scheme, _, rest = url.rpartition("://")
    host = re.split(r"[?#]", rest.rpartition("@")[2], maxsplit=1)[0]
    return f"{scheme}://{host}" if scheme else host
