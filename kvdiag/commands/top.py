"""`kvdiag top`: a live view in the terminal, of a running daemon or of a server that it samples itself.

A daemon is preferred, because it has the last hours: the given address, or else the usual one, is first read as a
daemon's. If none is there, this command samples a server with the `Watch` of `kvdiag serve`. Either is a `Feed`, and
the same view draws both. If no new sample has come for `SHOWN_SECONDS` by this command's own clock, no figures are
drawn, rather than old ones. A password goes only to an address that the user named. Without a terminal one frame is
printed and the verdict is the exit code; after a view, which showed it, the exit code is 0.
"""

# ruff: noqa: RUF009 - `given_by` makes fields, not values

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from pathlib import Path
from urllib.parse import urlunsplit

import click
import httpx2
from rich.console import Console

import kvdiag
from kvdiag.commands.connect import Finder, agent_reader, open_client
from kvdiag.commands.logging_setup import configure
from kvdiag.commands.options.addresses import basic_authorization, pasted, without_user
from kvdiag.commands.options.common import (
    ServerAccess,
    Within,
    agent_option,
    collected,
    either,
    given_by,
    server_access,
)
from kvdiag.commands.options.serve_options import LISTEN
from kvdiag.commands.options.thresholds import limits_of, reserved_gap_option
from kvdiag.commands.printing import EXIT_CODES, PIPED_WIDTH, is_ascii_only, print_text
from kvdiag.commands.screen import Screen
from kvdiag.errors import KvdiagError
from kvdiag.feeds.daemon.diagnosis_schedule import DiagnosisSchedule
from kvdiag.feeds.daemon.watch import Watch
from kvdiag.feeds.live.sampling import ticks
from kvdiag.formatting import format_duration
from kvdiag.ledger import ledger
from kvdiag.model import Facts, Sample, Snapshot
from kvdiag.outputs.current_verdict import SILENT_SECONDS
from kvdiag.outputs.terminal.sparkline_history import Point, longer, point, trends
from kvdiag.outputs.terminal.top_frame import View, frame, verdict
from kvdiag.outputs.terminal.top_memory import Room
from kvdiag.sources.daemon_client import DaemonReading, read_daemon, read_history
from kvdiag.sources.http import HttpReader, Unreadable

REFRESH_SECONDS = 1.0
DIAGNOSIS_SECONDS = 5.0
"""An interactive view diagnoses more often than a daemon; in the first hours one diagnosis takes about 20 ms."""

MAX_DIAGNOSIS_RATIO = 0.03
"""Share of one core for diagnoses while the view is open: with a day of eight GPUs, one every half minute."""

ONCE_SECONDS = 5.0
"""Longest wait of a single frame for a verdict: the first samples of a healthy server take two seconds."""

NO_SERVER_SECONDS = 0.5
"""Longest wait if no server answers: the GPUs can be shown all the same."""

SUFFIXES = (
    "/metrics",
    *(f"/api/v1/{name}" for name in ("diagnosis", "ledger", "snapshot", "history")),
    *("/-/healthy", "/-/ready"),
)

NOTHING = Snapshot(state="starting", facts=Facts(), newest=Sample(at_seconds=0.0), sources=())


@dataclass(slots=True, kw_only=True)
class Feed:
    """Where views come from, which remember what the ones before showed.

    `run` until cancelled keeps `newest` new, which has no trends yet. `before` are the samples from before the view
    began. `contradiction` is why a single frame's figures may be of several servers.
    """

    run: Callable[[], Awaitable[None]]
    newest: Callable[[], View]
    contradiction: Callable[[], Awaitable[str | None]] | None = None
    before: InitVar[tuple[Sample, ...]] = ()
    _points: tuple[Point, ...] = ()
    _newest_at_seconds: float = 0.0
    _advanced_seconds: float = field(default_factory=time.monotonic)

    def __post_init__(self, before: tuple[Sample, ...]) -> None:
        """Begin with the daemon's samples."""
        for sample in before:
            self._points = longer(self._points, point(sample))

    def view(self) -> View:
        """What is to be shown now."""
        view, now_seconds = self.newest(), time.monotonic()
        at_seconds = view.snapshot.newest.at_seconds
        # By our own clock: the daemon's may be another machine's.
        if at_seconds != self._newest_at_seconds:
            self._newest_at_seconds, self._advanced_seconds = at_seconds, now_seconds
        silent_seconds = now_seconds - self._advanced_seconds
        if silent_seconds > SILENT_SECONDS:
            problem = view.problem or f"no new sample for {format_duration(silent_seconds)}"
            return replace(view, snapshot=NOTHING, lines=(), problem=problem)
        diagnosis = view.snapshot.diagnosis
        began_seconds = diagnosis.lives[-1].start_seconds if diagnosis is not None and diagnosis.lives else 0.0
        # What another process had used is no trend of this one.
        points = [one for one in self._points if one.at_seconds >= began_seconds]
        self._points = longer(points, point(view.snapshot.newest))
        return replace(view, trends=trends(self._points))


@dataclass(frozen=True, kw_only=True)
class DaemonUser:
    """The user that a daemon requires, and the password or the file that holds it."""

    user: str | None = given_by("User name for the daemon's basic authentication.")
    password_file: Path | None = given_by("File with the password; or set KVDIAG_TOP_PASSWORD.")
    password: str | None = given_by(None, hidden=True)


@dataclass(frozen=True, kw_only=True)
class TopOptions:
    """The options of a live view."""

    url: str | None = given_by("Daemon, or server to sample; default: search this host.")
    attach: str | None = given_by("Read from the `kvdiag serve` at this address.", metavar="URL")
    daemon_user: DaemonUser = given_by(collected(DaemonUser, "daemon_user"))
    access: ServerAccess = given_by(server_access)
    agent_dir: Path | None = given_by(agent_option)
    once: bool = given_by("Print one frame and exit with the verdict's code.")
    tick_seconds: float | None = given_by("Sampling interval.", type=Within(0.05, 1.0), hidden=True)
    reserved_gap_bytes: int = given_by(reserved_gap_option)


@click.command()
@collected(TopOptions, "options")
def command(options: TopOptions) -> int:
    """Watch a server in the terminal: its memory, KV pool, trends and findings.

    \b
    kvdiag top                                  the daemon on this host, or a server found here
    kvdiag top --attach http://127.0.0.1:9743   a running `kvdiag serve`
    kvdiag top --url http://127.0.0.1:8000      a server (sampled by this command) or a daemon

    q or Ctrl-C quits with exit code 0. Without a terminal, or with --once, it prints one frame and exits with the
    verdict's code. It sends no load. Pressure is KV-pool usage (100 % while requests wait) or device usage without the
    pool's free bytes, whichever is larger.
    """  # noqa: D301 - \b is click's mark for a paragraph that keeps its lines
    url, attach = either(("url", options.url), ("attach", options.attach))
    tick_seconds = options.tick_seconds
    if url is not None and attach is not None:
        raise click.UsageError("give either --url or --attach")
    console = Console(highlight=False)
    live = not options.once and sys.stdout.isatty() and not console.is_dumb_terminal
    if live and sys.stderr.isatty():
        configure(0)  # log lines would stand across the view

    async def show() -> int:
        address = attach or url or f"http://{LISTEN}"
        # Any process can listen on the daemon's usual port: a password goes only to an address that the user named.
        user = options.daemon_user if attach or url else DaemonUser()
        try:
            client = open_daemon(address, user, options.access)
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
                    feed = Feed(run=daemon.run, newest=daemon.newest, before=await daemon.history())
                    return await (_live(feed, console) if live else _once(feed, at_once=True))
        schedule = partial(
            DiagnosisSchedule,
            every_seconds=tick_seconds or (DIAGNOSIS_SECONDS if live else REFRESH_SECONDS),
            # A single frame is made of seconds, and a pace of its own is a test's: neither has to last.
            cpu_ratio=MAX_DIAGNOSIS_RATIO if live and tick_seconds is None else 1.0,
        )
        async with _sampling(url, options, schedule) as feed:
            return await (_live(feed, console) if live else _once(feed, at_once=False))

    return asyncio.run(show())


async def _live(feed: Feed, console: Console) -> int:
    running = asyncio.ensure_future(feed.run())
    try:
        with Screen(console) as screen:
            while not screen.over:
                if running.done():
                    await running
                columns, rows = screen.size
                screen.draw(frame(feed.view(), Room(columns=columns, rows=rows, ascii_only=is_ascii_only())))
                await screen.wait(REFRESH_SECONDS)
    finally:
        await _stopped(running)
    return 0


async def _once(feed: Feed, *, at_once: bool) -> int:
    """Print one frame, once there is a verdict or there has been time for one."""
    view = feed.view()
    if not at_once:
        running = asyncio.ensure_future(feed.run())
        try:
            begun_seconds = time.monotonic()
            while verdict(view).status == "unknown" and not running.done():
                refused = any(gap.source == "engine" for gap in view.snapshot.newest.gaps)
                no_server = refused and view.snapshot.state == "starting"
                if time.monotonic() - begun_seconds > (NO_SERVER_SECONDS if no_server else ONCE_SECONDS):
                    break
                await asyncio.wait((running,), timeout=0.1)
                view = feed.view()
            if feed.contradiction is not None and (problem := await feed.contradiction()) is not None:
                view = replace(view, problem=problem)
        finally:
            await _stopped(running)
    columns = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else PIPED_WIDTH
    print_text(frame(view, Room(columns=columns or PIPED_WIDTH, ascii_only=is_ascii_only())))
    now, diagnosis = verdict(view), view.snapshot.diagnosis
    # No alarm for what a restart has ended.
    over = diagnosis is not None and diagnosis.worst_past_life is not None and now.holds and not now.down
    return EXIT_CODES[diagnosis.present_worst if diagnosis is not None and over else now.status]


async def _stopped(running: asyncio.Future[None]) -> None:
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def open_daemon(url: str, user: DaemonUser, access: ServerAccess) -> httpx2.AsyncClient:
    """Return the client for a daemon's base address, which may itself hold a user name and password."""
    refusal = f"{url.rpartition('@')[2]!r} is not a daemon address: give one such as http://127.0.0.1:9743"
    parts = pasted(url, SUFFIXES, refusal)
    authorization = basic_authorization(parts, user.user, user.password, user.password_file)
    # A server's key is not for its daemon.
    client = open_client(urlunsplit(without_user(parts)), replace(access, api_key=None))
    if authorization:
        client.headers["Authorization"] = authorization
    return client


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

    async def history(self) -> tuple[Sample, ...]:
        return await read_history(self._http) if self.has_answered else ()

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
    url: str | None, options: TopOptions, schedule: Callable[..., DiagnosisSchedule]
) -> AsyncIterator[Feed]:
    """A feed that samples a server as `kvdiag serve` does."""
    agents = agent_reader(options.agent_dir)
    finder = Finder(url, options.access, own_port=0)
    watch = Watch(
        finder,
        agents=agents,
        limits=limits_of(options.reserved_gap_bytes),
        tick_seconds=options.tick_seconds or 1.0,
        schedule=schedule,
    )

    def newest() -> View:
        snapshot = watch.snapshot()
        lines = ledger(snapshot.newest, snapshot.facts)
        return View(snapshot=snapshot, lines=lines, origin="sampled by this command")

    try:
        yield Feed(run=watch.run, newest=newest, contradiction=watch.contradiction)
    finally:
        await finder.close()
        if agents is not None:
            agents.close()
