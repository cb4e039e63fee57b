"""What the daemons of `kvdiag serve` have in common: the port, passwords and certificates, signals, and the end.

In this order: the web configuration is read, so that a wrong one ends the start at once; the port is opened; the work
begins and continues until SIGTERM. SIGHUP reads the options again: all that may fail comes first, so that an invalid
configuration changes nothing. Nothing of a reload may lower protection.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import structlog

import kvdiag
from kvdiag.commands.options.serve_options import ServeOptions
from kvdiag.errors import KvdiagError
from kvdiag.server.connections import AnswersRequests, WebServer
from kvdiag.server.passwords import Passwords
from kvdiag.server.web_config import WebConfig, access, lowered, read_web_config
from kvdiag.sources.worker_thread import DaemonThreadPool

_log = structlog.get_logger()

RELEASE_SECONDS = 10.0
RELEASES_PER_COLLECTION = 6
"""A collection looks at a whole day of samples: 30 ms with 8 GPUs."""


def allocator(call: str, *arguments: int) -> None:
    """Call the C library's allocator, where that is glibc's."""
    with contextlib.suppress(AttributeError, OSError):
        getattr(ctypes.CDLL(None), call)(*arguments)


def _release_memory(loop: asyncio.AbstractEventLoop, count: int = 1) -> None:
    """Return free pages to the kernel, again and again: a diagnosis needs 2 MiB for a moment only."""
    if count % RELEASES_PER_COLLECTION == 0:
        gc.collect()
    allocator("malloc_trim", 0)
    loop.call_later(RELEASE_SECONDS, _release_memory, loop, count + 1)


class WebDaemon(ABC):
    """A port with pages, and the work behind it (`_work`), until SIGTERM."""

    def __init__(self, options: ServeOptions, reread: Callable[[], ServeOptions]) -> None:
        """Read the web configuration. `reread` returns the options as of now.

        Raises:
            KvdiagError: a file or certificate cannot be used.
        """
        self._options = options
        self._reread = reread
        self._web_config = WebConfig() if options.web_config is None else read_web_config(options.web_config)
        self._tls: ssl.SSLContext | None = self._web_config.tls()
        self._web: WebServer
        self._passwords: Passwords
        self._push: Any = None

    def _serve(self, pages: AnswersRequests) -> None:
        """Serve these pages, once the port is open."""
        self._web = WebServer(pages)
        self._web.access, self._passwords = access(self._web_config)
        if (otlp := self._options.otlp) is not None:
            pushing = import_module("kvdiag.server.otlp_push")
            url, authorization = otlp
            headers = () if authorization is None else (("Authorization", authorization),)
            endpoint = pushing.OtlpEndpoint(url=url, headers=headers)
            self._push = pushing.OtlpPush(pages, endpoint, self._options.address[1])

    @abstractmethod
    async def _work(self) -> None:
        """Do what the daemon is for; never returns by itself."""

    @abstractmethod
    async def _release(self) -> None:
        """Close what the work has opened."""

    @abstractmethod
    def _change(self) -> None:
        """Take over the options as of now (SIGHUP)."""

    async def run(self) -> int:
        """Work and serve until SIGTERM; return the exit code.

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
            working = asyncio.create_task(self._work())
            pushing = None if self._push is None else asyncio.create_task(self._push.run(over))
            ending = asyncio.create_task(over.wait())
            await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
            over.set()
            working.cancel()
            if pushing is not None:
                await self._push.finish(pushing)
            with contextlib.suppress(asyncio.CancelledError):
                await working
            _log.info("ended")
        finally:
            await self._web.stop()
            await self._release()
            self._passwords.close()
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
