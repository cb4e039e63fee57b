"""What `kvdiag serve` runs: watch, recorder and HTTP put together, changed on SIGHUP, ended on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

import kvdiag
from kvdiag.commands.connect import agent_reader, base_url, without_credentials
from kvdiag.commands.discovery import Finder
from kvdiag.diagnosis.limits import Limits
from kvdiag.errors import KvdiagError
from kvdiag.feeds.daemon.watch import DIAGNOSIS_SECONDS, MOST_DIAGNOSIS_RATIO, Watch, pace_of
from kvdiag.feeds.live.sampling import AllocatorReading
from kvdiag.feeds.recording.disk_recorder import DiskRecorder
from kvdiag.feeds.recording.restore import Before, reload
from kvdiag.feeds.recording.segment_store import SegmentStore
from kvdiag.server.connections import WebServer
from kvdiag.server.endpoints import Pages
from kvdiag.server.web_config import Passwords, WebConfig, access, lowered, read_web_config
from kvdiag.sources.worker_thread import DaemonThreadPool, ThreadedReader

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the daemon was asked to do. `tick_seconds` is the pace of everything, `None` for the usual one."""

    listen: tuple[str, int]
    url: str | None
    api_key: str | None
    ca_file: Path | None
    insecure: bool
    agent_dir: Path | None
    record_dir: Path | None
    record_max_bytes: int
    web_config: Path | None
    limits: Limits
    tick_seconds: float | None

    @property
    def server(self) -> tuple[object, ...]:
        """Whom to watch, and how to reach it."""
        return self.url, self.api_key, self.ca_file, self.insecure

    @property
    def fixed(self) -> dict[str, object]:
        """What can be changed by a restart alone."""
        return {name: getattr(self, name) for name in ("listen", "record_dir", "web_config", "tick_seconds")}


class Daemon:
    """One watch, its recorder and its server of HTTP."""

    def __init__(self, options: Options, reread: Callable[[], Options]) -> None:
        """Take hold of folders and files; no server is asked yet. `reread` gives the options as they are now.

        Raises:
            KvdiagError: something that was asked for cannot be had.

        """
        self._options = options
        self._reread = reread
        self._web_config = WebConfig() if options.web_config is None else read_web_config(options.web_config)
        self._tls: ssl.SSLContext | None = self._web_config.tls()
        self._recorder, before = _recorder(options)
        self._finder = _finder(options, options.listen[1])
        self._agents = agent_reader(options.agent_dir)
        self._watch = Watch(
            find=self._finder.find,
            nvml=self._finder.nvml,
            agents=self._agents,
            limits=options.limits,
            pace=pace_of(options.tick_seconds or 1.0),
            diagnosis_seconds=options.tick_seconds or DIAGNOSIS_SECONDS,
            # At a pace of our own, a test's, a verdict comes as often as asked for, whatever it costs.
            diagnosis_ratio=MOST_DIAGNOSIS_RATIO if options.tick_seconds is None else 1.0,
            recorder=self._recorder,
            before=before,
        )
        self._web = WebServer(Pages(newest=self._watch.snapshot, history=self._watch.history))
        self._passwords: Passwords
        self._web.access, self._passwords = access(self._web_config)
        self._retired: list[Finder] = []
        self._closing: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Watch and serve until SIGTERM; the exit code.

        Raises:
            KvdiagError: the port cannot be had.

        """
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(DaemonThreadPool())
        loop.set_exception_handler(_mistake)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, over.set)
        loop.add_signal_handler(signal.SIGHUP, self._change)
        try:
            await self._listen()
            # What was imported stays for ever: no collection needs to look at it again.
            gc.collect()
            gc.freeze()
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
        host, wanted = self._options.listen
        try:
            port = await self._web.start(host, wanted, self._tls)
        except OSError as error:
            raise KvdiagError(f"cannot listen on {host}:{wanted}: {_reason(error)}; give another --listen") from error
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
        """Do as the configuration says now; one that is wrong changes nothing."""
        try:
            options = self._reread()
            _still_checks(self._options, options)
            elsewhere = options.server != self._options.server
            finder = _finder(options, self._options.listen[1]) if elsewhere else None
            # Last of what may fail: whatever did leaves everything as it was.
            self._take_web_config()
        except KvdiagError as error:
            _log.error("configuration", reason=f"{error}; everything stays as it was")
            return
        self._take(options, finder)
        _log.info("configuration", state="read again")

    def _take(self, options: Options, finder: Finder | None) -> None:
        old = self._options
        wrong = [f"--{name.replace('_', '-')}" for name, value in options.fixed.items() if value != old.fixed[name]]
        if wrong:
            _log.warning("configuration", reason=f"{', '.join(wrong)} takes a restart")
        if finder is not None:
            # The newest may still be asked at this moment.
            for left in self._retired:
                closing = asyncio.get_running_loop().create_task(left.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            self._retired = [self._finder]
            self._finder = finder
            self._watch.look_elsewhere(finder.find, finder.nvml)
        if options.agent_dir != old.agent_dir:
            agents: ThreadedReader[AllocatorReading] | None = agent_reader(options.agent_dir)
            if self._agents is not None:
                self._agents.close()
            self._agents = agents
            self._watch.ask_agents(agents)
        if self._recorder is not None and options.record_max_bytes != old.record_max_bytes:
            self._recorder.resize(options.record_max_bytes)
        self._watch.limits = options.limits
        self._options = replace(options, **old.fixed)  # type: ignore[arg-type]  # names and values are the class's own

    def _take_web_config(self) -> None:
        """Other users and headers, and a certificate that was renewed; another kind of TLS takes a restart."""
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
            _log.warning("configuration", reason="tls_server_config takes a restart, but for renewed files")
        self._web_config = replace(self._web_config, users=config.users, headers=config.headers)


def _still_checks(before: Options, now: Options) -> None:
    """Refuse a reload that stops certificate checks.

    Raises:
        KvdiagError: the new options set --insecure.

    """
    if now.insecure and not before.insecure:
        raise KvdiagError("--insecure needs a restart: it would stop certificate checks")


def _mistake(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what the event loop has to complain of: by itself it writes to stderr, and waits where nobody reads that."""
    _log.error("mistake", reason=context.get("message"), exc_info=context.get("exception"))


def _finder(options: Options, own_port: int) -> Finder:
    return Finder(
        options.url,
        own_port=own_port,
        api_key=options.api_key,
        ca_file=options.ca_file,
        insecure=options.insecure,
    )


def _recorder(options: Options) -> tuple[DiskRecorder | None, Before | None]:
    """The recorder, and what its folder holds of earlier runs.

    Raises:
        KvdiagError: the folder cannot be used.

    """
    if options.record_dir is None:
        return None, None
    url = None if options.url is None else without_credentials(base_url(options.url))
    segments = SegmentStore(options.record_dir, max_bytes=options.record_max_bytes)
    before = reload(options.record_dir, now_seconds=time.time(), url=url)
    return DiskRecorder(segments), before


def _reason(error: OSError) -> str:
    """Why a port cannot be had: asyncio puts the address, which the sentence has already, around the system's words."""
    return (os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)).lower()
