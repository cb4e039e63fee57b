"""`kvdiag serve`: the daemon beside a server: samples it, diagnoses it, and serves what it knows over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from urllib.parse import urlsplit

import click
import structlog

import kvdiag
from kvdiag.commands.connect import agent_reader
from kvdiag.commands.find import Finder
from kvdiag.commands.logs import configure
from kvdiag.commands.options import agent_option, server_options
from kvdiag.commands.thresholds import limit_options, limits_of
from kvdiag.diagnosis.limits import Limits
from kvdiag.errors import KvdiagError
from kvdiag.feeds.watch import Watch, pace_of
from kvdiag.server import Pages, WebServer

LISTEN = "127.0.0.1:9743"

_log = structlog.get_logger()


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
@click.option("--tick-seconds", type=click.FloatRange(0.05, 1.0), hidden=True, help="Pace of readings and diagnoses.")
@limit_options
@click.pass_context
def command(
    context: click.Context,
    listen: str,
    url: str | None,
    api_key: str | None,
    ca_file: Path | None,
    insecure: bool,
    agent_dir: Path | None,
    tick_seconds: float | None,
    reserved_gap_bytes: int,
) -> int:
    """Watch a server for as long as it takes: sample it every second, diagnose it, serve metrics and verdicts.

    \b
    /                     the state of things, for a person
    /metrics              for Prometheus
    /api/v1/diagnosis     the newest diagnosis, the document of `kvdiag run --output json`
    /api/v1/ledger        where every byte is, now
    /-/healthy, /-/ready

    May start before the server does, outlives it, and finds it again. It offers no load. Ends on SIGTERM.
    """  # noqa: D301 - \b is click's mark for a paragraph that keeps its lines
    # A daemon tells what happens unasked.
    configure(max(1, context.find_root().params.get("verbose") or 0))
    return asyncio.run(
        _serve(
            address(listen),
            url=url,
            api_key=api_key,
            ca_file=ca_file,
            insecure=insecure,
            agent_dir=agent_dir,
            limits=limits_of(reserved_gap_bytes),
            tick_seconds=tick_seconds,
        )
    )


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


def _reason(error: OSError) -> str:
    """Why a port cannot be had: asyncio puts the address, which the sentence has already, around the system's words."""
    return (os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)).lower()


async def _serve(
    listen: tuple[str, int],
    *,
    url: str | None,
    api_key: str | None,
    ca_file: Path | None,
    insecure: bool,
    agent_dir: Path | None,
    limits: Limits,
    tick_seconds: float | None,
) -> int:
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    agents = agent_reader(agent_dir)
    finder = Finder(url, own_port=listen[1], api_key=api_key, ca_file=ca_file, insecure=insecure)
    watch = Watch(
        find=finder.find,
        nvml=finder.nvml,
        agents=agents,
        limits=limits,
        pace=pace_of(tick_seconds or 1.0),
        diagnosis_seconds=tick_seconds,
    )
    web = WebServer(Pages(newest=watch.snapshot, history=watch.history))
    try:
        host, port = listen
        try:
            port = await web.start(host, port)
        except OSError as error:
            raise KvdiagError(f"cannot listen on {host}:{port}: {_reason(error)}; give another --listen") from error
        _log.info(
            "listening", address=f"http://{f'[{host}]' if ':' in host else host}:{port}", version=kvdiag.__version__
        )
        watching = asyncio.create_task(watch.run())
        ending = asyncio.create_task(over.wait())
        await asyncio.wait((watching, ending), return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        _log.info("ended")
    finally:
        await web.stop()
        await finder.close()
        if agents is not None:
            agents.close()
    return 0
