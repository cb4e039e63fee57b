"""Options and client of the commands that read a running `kvdiag serve` instead of a server."""

# ruff: noqa: RUF009 - `given_by` makes fields, not values

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlunsplit

import httpx2

from kvdiag.commands.connect import open_client
from kvdiag.commands.options.addresses import basic_authorization, pasted, without_user
from kvdiag.commands.options.common import ServerAccess, collected, given_by

SUFFIXES = ("/metrics", "/api/v1/diagnosis", "/api/v1/ledger", "/api/v1/snapshot", "/-/healthy", "/-/ready")


@dataclass(frozen=True, kw_only=True)
class DaemonUser:
    """The user that a daemon requires, and the password or the file that holds it."""

    user: str | None = given_by("User name for the daemon's basic authentication.")
    password_file: Path | None = given_by("File with the password; or set KVDIAG_TOP_PASSWORD.")
    password: str | None = given_by(None, hidden=True)


user_options = collected(DaemonUser, "daemon_user")


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
