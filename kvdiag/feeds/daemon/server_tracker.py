"""Which server a daemon watches: found, lost, found again, and distinguished from the one before it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from kvdiag.engines.engine import EngineClient
from kvdiag.errors import KvdiagError
from kvdiag.feeds.live.sampling import DeviceReading, ticks
from kvdiag.feeds.recording.restore import same_server
from kvdiag.kv.calibration.running_server import all_pools_bytes
from kvdiag.model import Facts, Sample, ServerState
from kvdiag.sources.worker_thread import ThreadedReader

_log = structlog.get_logger()

LOST_SEARCH_SECONDS = 10.0
"""Between searches for a server that is lost, or whose processes are no longer found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundServer:
    """A server that answers: who it is, its metrics, and the NVML that shows its GPUs."""

    facts: Facts
    engine: EngineClient
    nvml: ThreadedReader[DeviceReading]


class Finder(Protocol):
    """Looks for the server; `nvml` shows this machine's GPUs while there is none."""

    nvml: ThreadedReader[DeviceReading]

    def find(self) -> Awaitable[FoundServer]:
        """The server; KvdiagError with the reason while there is none."""


class ServerTracker:
    """The facts of the server that is watched, and whether it answers. `add` keeps them up to date."""

    def __init__(self, finder: Finder, *, retry_seconds: float) -> None:
        """Look for the server with `finder`, every `retry_seconds` until it first answers."""
        self._finder = finder
        self._retry_seconds = retry_seconds
        self._tokens: dict[str, int] = {}
        self._restarted = False
        self._had_pids = False
        self._returned = asyncio.Event()
        self.state: ServerState = "starting"
        self.facts = Facts()

    def restore(self, facts: Facts, newest: Sample | None) -> None:
        """Continue from an earlier run, whose last sample of the engines is `newest`."""
        self.facts = facts
        if newest is not None:
            self._counters_fell(newest)

    def add(self, sample: Sample) -> None:
        """Follow whether the engines answer, and whether their counters have restarted from 0."""
        if sample.engines is not None:
            if self._counters_fell(sample):
                self._restarted = True
            if self._restarted or self.state == "lost":
                self._returned.set()
            self._become("serving")
        elif self.state == "serving" and any(gap.source == "engine" for gap in sample.gaps):
            self._become("lost")

    def leave(self, finder: Finder) -> None:
        """Look for another server from now on."""
        self._finder, self.state, self._restarted, self._had_pids = finder, "starting", True, False

    def take(self, facts: Facts) -> bool:
        """Watch the server with these facts; return whether it is another one, or the same one restarted."""
        before, pids = self.facts, {*(self.facts.server_pids or ())} & {*(facts.server_pids or ())}
        same = bool(pids) if before.server_pids and facts.server_pids else same_server(before, facts)
        other = self._restarted or not same
        if other:
            self._tokens.clear()
        self.facts, self._restarted = facts, False
        self._had_pids = self._had_pids or facts.server_pids is not None
        return other

    async def first(self, absent: Callable[[str], None]) -> FoundServer:
        """The server, once there is one; `absent` is called with the reason of each attempt that fails."""
        async for _ in ticks(self._retry_seconds):
            try:
                return await self._found()
            except KvdiagError as error:
                absent(f"starting: {error}")
        raise AssertionError("ticks never end")

    async def next(self) -> FoundServer:
        """The server again, once it was lost and has returned, has restarted, or has other facts."""
        while True:
            try:
                async with asyncio.timeout(LOST_SEARCH_SECONDS):
                    await self._returned.wait()
            except TimeoutError:
                # A server that restarts during a search is found without its processes; without them no host is read.
                if self.state != "lost" and not (self._had_pids and self.facts.server_pids is None):
                    continue
            self._returned.clear()
            try:
                found = await self._found()
            except KvdiagError as error:
                _log.debug("search", reason=str(error))
                if self.state == "serving":
                    await asyncio.sleep(self._retry_seconds)
                    self._returned.set()
                continue
            if self._restarted or found.facts != self.facts:
                return found

    async def _found(self) -> FoundServer:
        try:
            found = await self._finder.find()
        except KvdiagError:
            raise
        except Exception as error:  # an unforeseen error must not end the daemon
            _log.debug("mistake", exc_info=True)
            kind = type(error).__name__
            raise KvdiagError(f"internal error while searching ({kind}); please report it with a log of -vv") from error
        # The cost model of a new server takes some 0.1 s; afterwards its answers are remembered.
        await asyncio.to_thread(all_pools_bytes, found.facts)
        return found

    def _counters_fell(self, sample: Sample) -> bool:
        """Whether an engine's counter has fallen: counters begin at 0 with their process."""
        fell = False
        for engine in sample.engines or ():
            if (count := engine.prompt_tokens_total) is not None:
                fell = fell or count < self._tokens.get(engine.engine, 0)
                self._tokens[engine.engine] = count
        return fell

    def _become(self, state: ServerState) -> None:
        if state != self.state:
            self.state = state
            _log.info("server", state=state, url=self.facts.url)
