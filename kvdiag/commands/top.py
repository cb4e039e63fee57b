"""`kvdiag top`: a live view in the terminal, of a running daemon or of a server that it samples itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
import httpx2
from rich.console import Console

import kvdiag
from kvdiag.commands.connect import Finder, agent_reader
from kvdiag.commands.logging_setup import configure
from kvdiag.commands.options.common import ServerAccess, agent_option, either, server_access
from kvdiag.commands.options.daemon_url import DaemonUser, attach_option, open_daemon, user_options
from kvdiag.commands.options.serve_options import LISTEN
from kvdiag.commands.options.thresholds import limits_of, reserved_gap_option
from kvdiag.commands.printing import EXIT_CODES, PIPED_WIDTH, is_ascii_only, print_text
from kvdiag.commands.screen import Screen
from kvdiag.diagnosis.limits import Limits
from kvdiag.errors import KvdiagError
from kvdiag.feeds.daemon.latest import SHOWN_SECONDS
from kvdiag.feeds.daemon.watch import Watch, pace_of
from kvdiag.feeds.live.sampling import ticks
from kvdiag.ledger import ledger
from kvdiag.model import Facts, Sample, Snapshot
from kvdiag.outputs.terminal.sparkline_history import Point, longer, point, trends
from kvdiag.outputs.terminal.top_frame import View, frame, verdict
from kvdiag.outputs.terminal.top_memory import Room
from kvdiag.sources.daemon_client import DaemonReading, read_daemon
from kvdiag.sources.http import HttpReader, Unreadable

REFRESH_SECONDS = 1.0
DIAGNOSIS_SECONDS = 5.0
"""An interactive view diagnoses more often than a daemon; in the first hours one diagnosis takes about 20 ms."""

MOST_DIAGNOSIS_RATIO = 0.03
"""Share of one core for diagnoses while the view is open: with a day of eight GPUs, one every half minute."""

ONCE_SECONDS = 5.0
"""Longest wait of a single frame for a verdict: the first readings of a healthy server take two seconds."""

NO_SERVER_SECONDS = 0.5
"""Longest wait if no server answers: the GPUs can be shown all the same."""

NOTHING = Snapshot(state="starting", facts=Facts(), newest=Sample(at_seconds=0.0), sources=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """Where frames come from: `run` until cancelled keeps `newest` new, which has no trends yet."""

    run: Callable[[], Awaitable[None]]
    newest: Callable[[], View]


@dataclass(slots=True, kw_only=True)
class Viewer:
    """Makes views of a feed, which remember what the ones before showed."""

    feed: Feed
    _trail: tuple[Point, ...] = ()
    _newest_at_seconds: float = 0.0
    _advanced_seconds: float = field(default_factory=time.monotonic)

    def view(self) -> View:
        """What is to be shown now."""
        view, now_seconds = self.feed.newest(), time.monotonic()
        at_seconds = view.snapshot.newest.at_seconds
        # By our own clock: the daemon's may be another machine's.
        if at_seconds != self._newest_at_seconds:
            self._newest_at_seconds, self._advanced_seconds = at_seconds, now_seconds
        silent_seconds = now_seconds - self._advanced_seconds
        if silent_seconds > SHOWN_SECONDS:
            problem = view.problem or f"no new sample for {silent_seconds:.0f} s"
            return replace(view, snapshot=NOTHING, lines=(), problem=problem)
        self._trail = longer(self._trail, point(view.snapshot))
        return replace(view, trends=trends(self._trail))


@click.command()
@click.option("--url", help="Daemon, or server to sample; default: search this host.")
@attach_option
@user_options
@server_access
@agent_option
@click.option("--once", is_flag=True, help="Print one frame and exit with the verdict's code.")
@click.option("--tick-seconds", type=click.FloatRange(0.05, 1.0), hidden=True, help="Sampling interval.")
@reserved_gap_option
def command(
    url: str | None,
    attach: str | None,
    daemon_user: DaemonUser,
    access: ServerAccess,
    agent_dir: Path | None,
    once: bool,
    tick_seconds: float | None,
    reserved_gap_bytes: int,
) -> int:
    """Watch a server in the terminal: its memory, KV pool, trends and findings.

    \b
    kvdiag top                                  the daemon on this host, or a server found here
    kvdiag top --attach http://127.0.0.1:9743   a running `kvdiag serve`
    kvdiag top --url http://127.0.0.1:8000      a server sampled by this command, or a daemon

    q or Ctrl-C quits with exit code 0. Without a terminal, or with --once, it prints one frame and exits with the
    verdict's code. It sends no load.
    """  # noqa: D301 - \b is click's mark for a paragraph that keeps its lines
    url, attach = either(("url", url), ("attach", attach))
    if url is not None and attach is not None:
        raise click.UsageError("give either --url or --attach")
    console = Console(highlight=False)
    live = not once and sys.stdout.isatty() and not console.is_dumb_terminal
    if live and sys.stderr.isatty():
        configure(0)  # log lines would stand across the view

    async def show() -> int:
        address = attach or url or f"http://{LISTEN}"
        # Any process can listen on the daemon's usual port: a password goes only to an address that the user named.
        user = daemon_user if attach or url else DaemonUser()
        try:
            client = open_daemon(address, user, access)
        except KvdiagError:
            if url is None:
                raise
            client = None  # the address of a server: what is wrong with it is reported as of one
        if client is not None:
            async with client:
                daemon = _Daemon(client, tick_seconds or REFRESH_SECONDS)
                await daemon.read()
                # At an address other than the daemon's usual one, a proxy may be what requires a password.
                if attach is not None or (daemon.is_there if url is None else daemon.has_answered):
                    feed = Feed(run=daemon.run, newest=daemon.newest)
                    return await (_live(feed, console) if live else _once(feed, at_once=True))
        async with _sampling(
            url,
            access,
            agent_dir=agent_dir,
            limits=limits_of(reserved_gap_bytes),
            tick_seconds=tick_seconds,
            diagnosis_seconds=tick_seconds or (DIAGNOSIS_SECONDS if live else REFRESH_SECONDS),
            # A single frame is made of seconds, and a pace of its own is a test's: neither has to last.
            diagnosis_ratio=MOST_DIAGNOSIS_RATIO if live and tick_seconds is None else 1.0,
        ) as feed:
            return await (_live(feed, console) if live else _once(feed, at_once=False))

    return asyncio.run(show())


async def _live(feed: Feed, console: Console) -> int:
    """Show frames until the user leaves."""
    viewer = Viewer(feed=feed)
    running = asyncio.ensure_future(feed.run())
    try:
        with Screen(console) as screen:
            while not screen.over:
                if running.done():
                    await running
                columns, rows = screen.size
                screen.draw(frame(viewer.view(), Room(columns=columns, rows=rows, ascii_only=is_ascii_only())))
                await screen.wait(REFRESH_SECONDS)
    finally:
        await _stopped(running)
    return 0


async def _once(feed: Feed, *, at_once: bool) -> int:
    """Print one frame, once there is a verdict or there has been time for one."""
    viewer = Viewer(feed=feed)
    view = viewer.view()
    if not at_once:
        running = asyncio.ensure_future(feed.run())
        try:
            begun_seconds = time.monotonic()
            while verdict(view)[0] == "unknown" and not running.done():
                refused = any(gap.source == "engine" for gap in view.snapshot.newest.gaps)
                no_server = refused and view.snapshot.state == "starting"
                if time.monotonic() - begun_seconds > (NO_SERVER_SECONDS if no_server else ONCE_SECONDS):
                    break
                await asyncio.wait((running,), timeout=0.1)
                view = viewer.view()
        finally:
            await _stopped(running)
    columns = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else PIPED_WIDTH
    print_text(frame(view, Room(columns=columns or PIPED_WIDTH, ascii_only=is_ascii_only())))
    return EXIT_CODES[verdict(view)[0]]


async def _stopped(running: asyncio.Future[None]) -> None:
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


class _Daemon:
    """A daemon that is read every second; its last answer is kept while it counts as current."""

    def __init__(self, client: httpx2.AsyncClient, pace_seconds: float) -> None:
        self._address = str(client.base_url).rstrip("/")
        self._http = HttpReader(client)
        self._pace_seconds = pace_seconds
        self._reading: DaemonReading | None = None
        self._problem: str | None = None
        self.is_there = self.has_answered = False

    async def run(self) -> None:
        async for _ in ticks(self._pace_seconds):
            await self.read()

    async def read(self) -> None:
        try:
            self._reading, self._problem = await read_daemon(self._http), None
            self.is_there = self.has_answered = True
        except Unreadable as unreadable:
            self._problem = f"the daemon at {self._address}: {unreadable}"
            # A daemon that requires a password is there.
            self.is_there = self.is_there or unreadable.status in (401, 403)

    def newest(self) -> View:
        origin, reading = f"kvdiag serve at {self._address}", self._reading
        if reading is None:
            return View(snapshot=NOTHING, lines=(), origin=origin, problem=self._problem)
        versions = f"the daemon is kvdiag {reading.version}, this is {kvdiag.__version__}"
        note = None if reading.version == kvdiag.__version__ else f"{versions}: fields unknown to either are missing"
        return View(snapshot=reading.snapshot, lines=reading.lines, origin=origin, problem=self._problem, note=note)


@asynccontextmanager
async def _sampling(
    url: str | None,
    access: ServerAccess,
    *,
    agent_dir: Path | None,
    limits: Limits,
    tick_seconds: float | None,
    diagnosis_seconds: float,
    diagnosis_ratio: float,
) -> AsyncIterator[Feed]:
    """A feed that samples a server as `kvdiag serve` does."""
    agents = agent_reader(agent_dir)
    finder = Finder(url, access, own_port=0)
    watch = Watch(
        find=finder.find,
        nvml=finder.nvml,
        agents=agents,
        limits=limits,
        pace=pace_of(tick_seconds or 1.0),
        diagnosis_seconds=diagnosis_seconds,
        diagnosis_ratio=diagnosis_ratio,
    )

    def newest() -> View:
        snapshot = watch.snapshot()
        lines = ledger(snapshot.newest, snapshot.facts)
        return View(snapshot=snapshot, lines=lines, origin="sampled by this command")

    try:
        yield Feed(run=watch.run, newest=newest)
    finally:
        await finder.close()
        if agents is not None:
            agents.close()
