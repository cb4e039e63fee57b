"""The options that name a Prometheus and the credentials for it, of `kvdiag diagnose` and `kvdiag serve` alike.

They are apart from what is done with them (`prometheus_options`), which a daemon next to a server need not import.
"""

# ruff: noqa: RUF009 - `given_by` makes fields, not values

from dataclasses import dataclass
from pathlib import Path

import click

from kvdiag.commands.options.common import Within, collected, given_by

ANSWER_SECONDS = 60.0
DEFAULT_WINDOW = "24h"


@dataclass(frozen=True, kw_only=True)
class PrometheusFields:
    """The API's address, the servers to diagnose, the length of the window, the processes, and the credentials."""

    prometheus: str | None = given_by("Prometheus API whose history to diagnose.", metavar="URL")
    match: str = given_by(
        "Only servers with these labels, such as '{namespace=\"x\"}'.", metavar="SELECTOR", default=""
    )
    window: str = given_by("Length of the history, such as 90m, 24h or 7d.", default=DEFAULT_WINDOW)
    workers: int | None = given_by("Processes that judge replicas; default: one a core.", type=click.IntRange(1, 1024))
    ray: str | None = given_by("Ray cluster that judges replicas: auto or HOST:PORT.", metavar="ADDRESS")
    user: str | None = given_by("User name for basic authentication.")
    password_file: Path | None = given_by("File with the password of --user.")
    password: str | None = given_by(None, hidden=True)
    token_file: Path | None = given_by("File with a bearer token.")
    token: str | None = given_by(None, hidden=True)
    headers: tuple[str, ...] = given_by(
        "HTTP header, such as X-Scope-OrgID:team; repeatable.",
        "--header",
        multiple=True,
        metavar="NAME:VALUE",
        default=(),
    )
    cert_file: Path | None = given_by("Client certificate, as a PEM file.")
    key_file: Path | None = given_by("Key of the client certificate, if in another file.")
    timeout: float = given_by(
        "Seconds to wait for each response.", type=Within(min=1.0, max=3600.0), default=ANSWER_SECONDS
    )


prometheus_fields = collected(PrometheusFields, "history")
