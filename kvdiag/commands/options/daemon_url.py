"""Options and client of the commands that read a running `kvdiag serve` instead of a server."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlunsplit

import click
import httpx2

from kvdiag.commands.connect import open_client
from kvdiag.commands.options.addresses import pasted
from kvdiag.commands.options.prometheus_options import read_secret
from kvdiag.errors import KvdiagError

F = TypeVar("F", bound=Callable[..., Any])

SUFFIXES = ("/metrics", "/api/v1/diagnosis", "/api/v1/ledger", "/api/v1/snapshot", "/-/healthy", "/-/ready")


def attach_options(function: F) -> F:
    """Add the options for a daemon's address and credentials."""
    for option in reversed(
        (
            click.option("--attach", metavar="URL", help="Read from the `kvdiag serve` at this address."),
            click.option("--user", help="User name for the daemon's basic authentication."),
            click.option(
                "--password-file",
                type=click.Path(path_type=Path),
                help="File with the password; or set KVDIAG_TOP_PASSWORD.",
            ),
            click.option("--password", hidden=True),
        )
    ):
        function = option(function)
    return function


def open_daemon(
    url: str,
    *,
    user: str | None,
    password: str | None,
    password_file: Path | None,
    ca_file: Path | None,
    insecure: bool,
) -> httpx2.AsyncClient:
    """Return the client for a daemon's base address, which may itself hold a user name and password.

    Raises:
        KvdiagError: the address, the password or the certificates cannot be used.

    """
    shown = url.rpartition("@")[2]
    refusal = f"{shown!r} is not a daemon address: give one such as http://127.0.0.1:9743"
    parts = pasted(url, SUFFIXES, refusal)
    name = user or unquote(parts.username or "")
    secret = read_secret(password, password_file) or unquote(parts.password or "")
    if secret and not name:
        raise KvdiagError("a password needs --user")
    address = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    client = open_client(address, api_key=None, ca_file=ca_file, insecure=insecure)
    if name:
        client.headers["Authorization"] = f"Basic {base64.b64encode(f'{name}:{secret}'.encode()).decode()}"
    return client
