"""`kvdiag serve`: the daemon beside a server: samples it, diagnoses it, and serves what it knows over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from kvdiag.commands import settings
from kvdiag.commands.daemon_process import Daemon, Options
from kvdiag.commands.logging_setup import configure
from kvdiag.commands.options.common import agent_option, server_options
from kvdiag.commands.options.sizes import Size
from kvdiag.commands.options.thresholds import limit_options, limits_of, pressure_options
from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.segment_store import LEAST_MAX_BYTES, MAX_BYTES

LISTEN = "127.0.0.1:9743"


def _configured(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:  # noqa: ARG001 - click's signature
    """Take the defaults of the other options from a file, before they are looked at."""
    if path is not None:
        context.default_map = settings(context, path).get("serve", {})
    return path


@click.command()
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=LISTEN,
    show_default=True,
    help="Where to serve; port 0 takes any free one. Others than loopback let anybody there read it.",
)
@click.option("--url", help="The server; left out, it is looked for on this host's usual ports.")
@server_options
@agent_option
@click.option(
    "--record-dir",
    type=click.Path(path_type=Path),
    help="Where to keep what is seen: for `kvdiag diagnose DIR`, and for this daemon's next start to go on from.",
)
@click.option(
    "--record-max-size",
    type=Size(LEAST_MAX_BYTES),
    default=f"{MAX_BYTES >> 20}MiB",
    show_default=True,
    help="What it may take; the oldest is removed. 256MiB are three days of eight GPUs, a month of one.",
)
@click.option(
    "--web-config",
    type=click.Path(path_type=Path),
    help="TLS and passwords, in the form that Prometheus' exporters share. Needs kvdiag[web].",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    callback=_configured,
    help="A TOML file with these options in a table [serve]; flags and environment come first. SIGHUP reads it again.",
)
@click.option("--tick-seconds", type=click.FloatRange(0.05, 1.0), hidden=True, help="Pace of readings and diagnoses.")
@limit_options
@pressure_options
@click.pass_context
def command(context: click.Context, /, **_: Any) -> int:
    """Watch a server for as long as it takes: sample it every second, diagnose it, serve metrics and verdicts.

    \b
    /                     the state of things, for a person
    /metrics              for Prometheus
    /api/v1/diagnosis     the newest diagnosis, the document of `kvdiag run --output json`
    /api/v1/ledger        where every byte is, now
    /api/v1/admission     ?prompt_tokens=N&max_tokens=N: admit one more request, wait, or shed
    /-/healthy, /-/ready

    May start before the server does, outlives it, and finds it again. It offers no load. Ends on SIGTERM.
    """  # noqa: D301 - \b is click's mark for a paragraph that keeps its lines
    # A daemon tells what happens unasked.
    configure(max(1, context.find_root().params.get("verbose") or 0))
    daemon = Daemon(_options(context.params), reread=lambda: _options(_reread(context)))
    return asyncio.run(daemon.run())


def _options(values: dict[str, Any]) -> Options:
    """What the options say together.

    Raises:
        KvdiagError: an address or a threshold is none.

    """
    names = ("url", "api_key", "ca_file", "insecure", "agent_dir", "record_dir", "web_config")
    return Options(
        listen=address(values["listen"]),
        limits=limits_of(
            values["reserved_gap_bytes"], pressure=(values["pressure_warning"], values["pressure_critical"])
        ),
        record_max_bytes=values["record_max_size"],
        tick_seconds=values["tick_seconds"],
        **{name: values[name] for name in names},
    )


def _reread(context: click.Context) -> dict[str, Any]:
    """The options' values as of now: those given by flag stay, for the others the file, where there is one, is read.

    Raises:
        KvdiagError: the file cannot be used.

    """
    given = context.params["config"] or context.find_root().params.get("config")
    defaults = {} if given is None else settings(context, given).get("serve", {})
    try:
        fresh = context.command.make_context(context.info_name, [], parent=context.parent, default_map=defaults)
    except click.UsageError as error:
        raise KvdiagError(error.format_message()) from error
    by_flag = {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    return {**fresh.params, **by_flag}


def address(listen: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [HOST]:PORT.

    Raises:
        KvdiagError: it is none.

    """
    refusal = KvdiagError(f"{listen!r} is no address to listen on: give one such as {LISTEN}")
    try:
        parts = urlsplit(f"//{listen}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise refusal from error
    if not host or port is None or parts.netloc != listen or "@" in listen:
        raise refusal
    return host, port
