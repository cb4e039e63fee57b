"""`kvdiag serve`: the daemon next to a server: it samples, diagnoses, records, and serves the results over HTTP.

`Daemon` puts watch, recorder and HTTP server (`WebDaemon`) together. In this order: files, certificates and the
recording are opened, so that a wrong option ends the start at once; the port is opened; then the watch runs until
SIGTERM, whether or not the server is there. SIGHUP reads the options again; what needs a restart is logged. With
--prometheus it is the daemon of a fleet instead (`daemons/fleet_daemon.py`).
"""

import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module

import click
import structlog

from kvdiag.commands.connect import Finder, agent_reader, base_url, without_credentials
from kvdiag.commands.daemons.web_daemon import WebDaemon, allocator
from kvdiag.commands.logging_setup import configure, import_without
from kvdiag.commands.options.serve_options import ServeOptions, reread, serve_options
from kvdiag.errors import KvdiagError
from kvdiag.feeds.daemon.diagnosis_schedule import DiagnosisSchedule
from kvdiag.feeds.daemon.watch import Watch
from kvdiag.feeds.recording.disk_recorder import DiskRecorder
from kvdiag.feeds.recording.restore import reload
from kvdiag.feeds.recording.segment_store import SegmentStore
from kvdiag.server.endpoints import Pages
from kvdiag.server.profile_desk import ProfileDesk

_log = structlog.get_logger()


@click.command()
@serve_options
@click.pass_context
def command(context: click.Context, options: ServeOptions) -> int:
    """Watch a server: sample it every second, diagnose it, serve metrics and verdicts over HTTP.

    \b
    /                     status page
    /metrics              Prometheus metrics
    /api/v1/diagnosis     newest diagnosis, as printed by `kvdiag run --output json`
    /api/v1/ledger        current memory ledger
    /api/v1/history       last ten minutes
    /api/v1/snapshot      the data that `kvdiag top` shows
    /runbooks             what to do about each verdict and alert: /runbooks/ID
    /api/v1/admission     ?prompt_tokens=N&max_tokens=N: admit, wait, or shed one more request
    /api/v1/profile       with --allow-profile: POST ?seconds=60&kind=host|device&process=ROLE, then GET the answer
    /-/healthy, /-/ready

    With --prometheus: watch a fleet. Every --every, read what is new in a Prometheus, diagnose each replica and version
    by the rules of `kvdiag diagnose`, and serve / (the worst first), /replica/NAMESPACE/POD, /metrics and
    /api/v1/fleet. --record-dir keeps the state; without it, a restart reads the whole window again.

    It can start before the server, survives server restarts and reconnects. It sends no load. SIGTERM ends it.
    Pressure is KV-pool usage (100 % while requests wait) or device usage without the pool's free bytes, whichever is
    larger.
    """  # noqa: D301 - \b is click's mark for a paragraph that keeps its lines
    # A daemon logs events by default.
    configure(max(1, context.find_root().params.get("verbose") or 0))
    # mallopt(3), M_ARENA_MAX: a second arena for the other threads is 1 MiB that stays half empty.
    allocator("mallopt", -8, 1)
    _import_early()
    kind: type[WebDaemon] = Daemon
    if options.history.prometheus is not None:  # a daemon next to a server imports nothing of a fleet's
        kind = import_module("kvdiag.commands.daemons.fleet_daemon").FleetDaemon
    return asyncio.run(kind(options, lambda: reread(context)).run())


def _import_early() -> None:
    """Import what the first sample needs before the history is loaded, which reuses the memory that imports free.

    Where h2 is installed, httpcore2 imports 1 MiB of HTTP/2, which no engine needs.
    """
    import_without("h2", "httpcore2")
    for name in ("anyio._backends._asyncio", "pynvml"):
        import_module(name)
    gc.collect()


class Daemon(WebDaemon):
    """One watch, its recorder and its HTTP server."""

    def __init__(self, options: ServeOptions, reread: Callable[[], ServeOptions]) -> None:
        """Open directories and files, without asking a server yet. `reread` returns the options as of now.

        Raises:
            KvdiagError: a directory, file or certificate cannot be used.
        """
        super().__init__(options, reread)
        self._recorder = _recorder(options)
        self._finder = Finder(options.url, options.access, own_port=options.address[1])
        self._agents = agent_reader(options.agent_dir, show_request_ids=options.show_request_ids)
        schedule: Callable[..., DiagnosisSchedule] = DiagnosisSchedule
        if options.tick_seconds is not None:  # a test's, which wants a diagnosis that often at any cost
            schedule = partial(DiagnosisSchedule, every_seconds=options.tick_seconds, cpu_ratio=1.0)
        self._watch = Watch(
            self._finder,
            agents=self._agents,
            limits=options.limits,
            tick_seconds=options.tick_seconds or 1.0,
            recorder=self._recorder,
            schedule=schedule,
        )
        self._profiles = _profiles(options)
        self._serve(Pages(newest=self._watch.snapshot, history=self._watch.history, profiles=self._profiles))
        self._retired: list[Finder] = []
        self._closing: set[asyncio.Task[None]] = set()

    async def _work(self) -> None:
        await self._watch.run()

    async def _release(self) -> None:
        if self._profiles is not None:
            await self._profiles.close()
        await asyncio.gather(*self._closing, return_exceptions=True)
        for finder in (self._finder, *self._retired):
            await finder.close()
        if self._agents is not None:
            self._agents.close()
        if self._recorder is not None:
            self._recorder.close()

    def _change(self) -> None:
        try:
            options = self._reread()
            if options.access.insecure and not self._options.access.insecure:
                raise KvdiagError("--insecure needs a restart: it would stop certificate checks")  # noqa: TRY301
            elsewhere = (options.url, options.access) != (self._options.url, self._options.access)
            finder = Finder(options.url, options.access, own_port=self._options.address[1]) if elsewhere else None
            # Last of what may fail, so that a failure changes nothing.
            self._take_web_config()
        except KvdiagError as error:
            _log.error("configuration", reason=f"{error}; the previous configuration stays in effect")
            return
        self._take(options, finder)
        _log.info("configuration", state="reloaded")

    def _take(self, options: ServeOptions, finder: Finder | None) -> None:
        old = self._options
        wrong = [f"--{name.replace('_', '-')}" for name, value in options.fixed.items() if value != old.fixed[name]]
        if wrong:
            _log.warning("configuration", reason=f"{', '.join(wrong)} needs a restart")
        if finder is not None:
            # The newest one may still be in use.
            for left in self._retired:
                closing = asyncio.get_running_loop().create_task(left.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            self._retired = [self._finder]
            self._finder = finder
            self._watch.look_elsewhere(finder)
        if options.agent_dir != old.agent_dir:
            self._agents = agent_reader(options.agent_dir, show_request_ids=old.show_request_ids)
            self._watch.read_agents(self._agents)
        if self._recorder is not None and options.record_max_size != old.record_max_size:
            self._recorder.order(SegmentStore.resize, options.record_max_size)
        self._watch.limits = options.limits
        self._options = replace(options, **old.fixed)


def _profiles(options: ServeOptions) -> ProfileDesk | None:
    if not options.allow_profile or options.agent_dir is None:
        return None
    return ProfileDesk(partial(import_module("kvdiag.commands.daemons.profile_taking").take, options.agent_dir))


def _recorder(options: ServeOptions) -> DiskRecorder | None:
    if options.record_dir is None:
        return None
    url = None if options.url is None else without_credentials(base_url(options.url))
    segments = SegmentStore(options.record_dir, max_bytes=options.record_max_size)
    before = reload(options.record_dir, now_seconds=time.time(), url=url)
    return DiskRecorder(segments, before)
