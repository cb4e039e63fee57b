"""Options that several commands have. Imports nothing that talks to a server: `kvdiag fit` answers without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
U = TypeVar("U")


def either(first: tuple[str, T | None], second: tuple[str, U | None]) -> tuple[T | None, U | None]:
    """Two options that exclude each other, by name and value.

    Where one stands on the command line, the other counts only if it does too, and not from the environment or a file.
    """
    context = click.get_current_context()
    one, other = (context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name, _ in (first, second))
    return first[1] if one or not other else None, second[1] if other or not one else None


def server_options(function: F) -> F:
    """The options of every command that reads a server."""
    for option in reversed(
        (
            click.option(
                "--api-key",
                envvar="KVDIAG_API_KEY",
                help="Key of a server started with --api-key (better given as KVDIAG_API_KEY).",
            ),
            click.option(
                "--ca-file",
                type=click.Path(path_type=Path),
                help="Certificates to trust instead of the system's, for https with an authority of your own.",
            ),
            click.option("--insecure", is_flag=True, help="Do not check the server's certificate."),
        )
    ):
        function = option(function)
    return function


def agent_option(function: F) -> F:
    """`--agent-dir`."""
    option = click.option(
        "--agent-dir",
        envvar="KVDIAG_AGENT_DIR",
        type=click.Path(path_type=Path, readable=False),  # what cannot be read is a gap, which doctor explains
        help="Where the agents in the server's processes publish what torch holds (see `kvdiag agent install --help`).",
    )
    return option(function)


def output_option(function: F) -> F:
    """`--output text|json`."""
    option = click.option(
        "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Form of the result."
    )
    return option(function)
