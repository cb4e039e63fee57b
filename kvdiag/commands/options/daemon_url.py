"""Options and client of the commands that read a running `kvdiag serve` instead of a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlunsplit

import click
import httpx2

from kvdiag.commands.connect import open_client
from kvdiag.commands.options.addresses import basic_authorization, pasted, without_user
from kvdiag.commands.options.common import ServerAccess

T = TypeVar("T")

SUFFIXES = ("/metrics", "/api/v1/diagnosis", "/api/v1/ledger", "/api/v1/snapshot", "/-/healthy", "/-/ready")


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonUser:
    """The user that a daemon requires, and the password or the file that holds it."""

    user: str | None = None
    password: str | None = None
    password_file: Path | None = None


def attach_options(function: Callable[..., T]) -> Callable[..., T]:
    """Add the options for a daemon's address and user, which arrive as `attach` and `daemon_user`."""

    @click.option("--attach", metavar="URL", help="Read from the `kvdiag serve` at this address.")
    @click.option("--user", help="User name for the daemon's basic authentication.")
    @click.option(
        "--password-file",
        type=click.Path(path_type=Path),
        help="File with the password; or set KVDIAG_TOP_PASSWORD.",
    )
    @click.option("--password", hidden=True)
    @wraps(function)
    def collected(*, user: str | None, password: str | None, password_file: Path | None, **others: Any) -> T:
        found = DaemonUser(user=user, password=password, password_file=password_file)
        return function(daemon_user=found, **others)

    return collected


def open_daemon(url: str, user: DaemonUser, access: ServerAccess) -> httpx2.AsyncClient:
    """Return the client for a daemon's base address, which may itself hold a user name and password.

    Raises:
        KvdiagError: the address, the password or the certificates cannot be used.

    """
    refusal = f"{url.rpartition('@')[2]!r} is not a daemon address: give one such as http://127.0.0.1:9743"
    parts = pasted(url, SUFFIXES, refusal)
    authorization = basic_authorization(parts, user.user, user.password, user.password_file)
    # A server's key is not for the daemon beside it.
    client = open_client(urlunsplit(without_user(parts)), replace(access, api_key=None))
    if authorization:
        client.headers["Authorization"] = authorization
    return client
