"""`kvdiag serve`: the daemon next to a server: it samples, diagnoses, records, and serves the results over HTTP.

`Daemon` puts watch, recorder and HTTP server together. In this order: files, certificates and the recording are opened,
so that a wrong option ends the start at once; the port is opened; then the watch runs until SIGTERM, whether or not the
server is there. SIGHUP reads the options again: all that may fail comes first, so that an invalid configuration changes
nothing; what needs a restart is logged. Nothing of a reload may lower protection.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import click
import structlog

import kvdiag
from kvdiag.commands.connect import Finder, agent_reader, base_url, without_credentials
from kvdiag.commands.logging_setup import configure, import_without
from kvdiag.commands.options.serve_options import ServeOptions, reread, serve_options
from kvdiag.errors import KvdiagError
from kvdiag.feeds.daemon.diagnosis_schedule import DiagnosisSchedule
from kvdiag.feeds.daemon.watch import Watch
from kvdiag.feeds.recording.disk_recorder import DiskRecorder
from kvdiag.feeds.recording.restore import reload
from kvdiag.feeds.recording.segment_store import SegmentStore
from kvdiag.server.connections import WebServer
from kvdiag.server.endpoints import Pages
from kvdiag.server.passwords import Passwords
from kvdiag.server.web_config import WebConfig, access, lowered, read_web_config
from kvdiag.sources.worker_thread import DaemonThreadPool

_log = structlog.get_logger()

RELEASE_SECONDS = 60.0


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
    /-/healthy, /-/ready

    It can start before the server, survives server restarts and reconnects. It sends no load. SIGTERM ends it.
    Pressure is KV-pool usage (100 % while requests wait) or device usage without the pool's free bytes, whichever is
    larger.
    """  # noqa: D301 - \b is click's mark for a paragraph that keeps its lines
    # A daemon logs events by default.
    configure(max(1, context.find_root().params.get("verbose") or 0))
    # mallopt(3), M_ARENA_MAX: a second arena for the other threads is 1 MiB that stays half empty.
    _allocator("mallopt", -8, 1)
    _import_early()
    daemon = Daemon(options, reread=lambda: reread(context))
    return asyncio.run(daemon.run())


def _allocator(call: str, *arguments: int) -> None:
    """Call the C library's allocator, where that is glibc's."""
    with contextlib.suppress(AttributeError, OSError):
        getattr(ctypes.CDLL(None), call)(*arguments)


def _release_memory(loop: asyncio.AbstractEventLoop) -> None:
    """Return free pages to the kernel each minute: 1.2 MiB that a diagnosis needs for a moment only."""
    gc.collect()
    _allocator("malloc_trim", 0)
    loop.call_later(RELEASE_SECONDS, _release_memory, loop)


def _import_early() -> None:
    """Import what the first sample needs before the history is loaded, which reuses the memory that imports free.

    Where h2 is installed, httpcore2 imports 1 MiB of HTTP/2, which no engine needs.
    """
    import_without("h2", "httpcore2")
    for name in ("anyio._backends._asyncio", "pynvml"):
        import_module(name)
    gc.collect()


class Daemon:
    """One watch, its recorder and its HTTP server."""

    def __init__(self, options: ServeOptions, reread: Callable[[], ServeOptions]) -> None:
        """Open directories and files, without asking a server yet. `reread` returns the options as of now.

        Raises:
            KvdiagError: a directory, file or certificate cannot be used.
        """
        self._options = options
        self._reread = reread
        self._web_config = WebConfig() if options.web_config is None else read_web_config(options.web_config)
        self._tls: ssl.SSLContext | None = self._web_config.tls()
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
        self._web = WebServer(Pages(newest=self._watch.snapshot, history=self._watch.history))
        self._passwords: Passwords
        self._web.access, self._passwords = access(self._web_config)
        self._retired: list[Finder] = []
        self._closing: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Watch and serve until SIGTERM; return the exit code.

        Raises:
            KvdiagError: the address cannot be listened on.
        """
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(DaemonThreadPool())
        loop.set_exception_handler(_log_loop_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, over.set)
        loop.add_signal_handler(signal.SIGHUP, self._change)
        try:
            await self._listen()
            # Imported modules stay for good: no collection needs to look at them again.
            gc.collect()
            gc.freeze()
            loop.call_later(RELEASE_SECONDS, _release_memory, loop)
            watching = asyncio.create_task(self._watch.run())
            ending = asyncio.create_task(over.wait())
            await asyncio.wait((watching, ending), return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            _log.info("ended")
        finally:
            await self._close()
        return 0

    async def _listen(self) -> None:
        host, wanted = self._options.address
        try:
            port = await self._web.start(host, wanted, self._tls)
        except OSError as error:
            # asyncio's own text repeats the address
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
            raise KvdiagError(f"cannot listen on {host}:{wanted}: {reason.lower()}; give another --listen") from error
        scheme = "http" if self._tls is None else "https"
        where = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        _log.info("listening", address=where, version=kvdiag.__version__)

    async def _close(self) -> None:
        await self._web.stop()
        await asyncio.gather(*self._closing, return_exceptions=True)
        for finder in (self._finder, *self._retired):
            await finder.close()
        if self._agents is not None:
            self._agents.close()
        self._passwords.close()
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

    def _take_web_config(self) -> None:
        """Apply new users, headers and renewed certificates; other changes to TLS need a restart."""
        if self._options.web_config is None:
            return
        config = read_web_config(self._options.web_config)
        if (less := lowered(self._web_config, config)) is not None:
            raise KvdiagError(f"{self._options.web_config} would lower protection: {less}; restart kvdiag to apply it")
        config.tls()
        allowed, passwords = access(config)
        if self._tls is not None:
            config.load(self._tls)
        self._passwords.close()
        self._web.access, self._passwords = allowed, passwords
        if config.transport != self._web_config.transport:
            _log.warning("configuration", reason="tls_server_config needs a restart; only certificates are renewed")
        self._web_config = replace(self._web_config, users=config.users, headers=config.headers)


def _log_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an event loop error: by default it goes to stderr, and blocks if stderr is not read."""
    _log.error("internal error", reason=context.get("message"), exc_info=context.get("exception"))


def _recorder(options: ServeOptions) -> DiskRecorder | None:
    if options.record_dir is None:
        return None
    url = None if options.url is None else without_credentials(base_url(options.url))
    segments = SegmentStore(options.record_dir, max_bytes=options.record_max_size)
    before = reload(options.record_dir, now_seconds=time.time(), url=url)
    return DiskRecorder(segments, before)
