"""Follows one server for a daemon: found, lost, found again, and whether it is still the same process.

The state is `starting` until the first answer, then `serving`, and `lost` from a failed read to the next answer. A
search repeats until the server is found. Later one starts only if a lost server answers again or stays lost, counters
fell, its processes are missing, or it identifies itself as another version or model, because a search also computes the
cost model. A server is another process if a counter fell, no pid is the same, or the engine or its version is another;
where pids are not known, its facts decide. A failed search is logged and repeated: the daemon outlives its server.
Nothing here judges memory.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

import structlog

from kvdiag.engines.engine import EngineClient, Identity
from kvdiag.errors import KvdiagError
from kvdiag.feeds.live.sampling import ticks
from kvdiag.feeds.recording.restore import same_server
from kvdiag.kv.calibration.running_server import all_pools_bytes
from kvdiag.model import Facts, Sample, ServerState
from kvdiag.sources import host
from kvdiag.sources.device_reader import DeviceReading
from kvdiag.sources.http import Unreadable
from kvdiag.sources.worker_thread import ThreadedReader

_log = structlog.get_logger()

MAX_ENGINES = 1024
"""Whose counters are remembered: a server may rename its engines with each answer."""

LOST_SEARCH_SECONDS = 10.0
"""Between searches for a server that is lost, or whose processes are no longer found."""

IDENTITY_CHECKS = 6
"""Of such intervals between two questions to a server that answers whether it still is the same version and model.

A server whose pool is not known is searched for as often: some report it once a first request has ended.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundServer:
    """A server that answers: who it is, its metrics, and the NVML that shows its GPUs."""

    facts: Facts
    engine: EngineClient
    nvml: ThreadedReader[DeviceReading]
    identity: Identity | None = None
    """As `engine` reported it; `None` is not checked again."""


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
        self._exited = False
        self._returned = asyncio.Event()
        self._found_server: FoundServer | None = None
        self._answered_seconds: float | None = None
        self._began_seconds: float | None = None
        self.state: ServerState = "starting"
        self.facts = Facts()

    def restore(self, facts: Facts, newest: Sample | None) -> None:
        """Continue from an earlier run, whose last sample of the engines is `newest`."""
        self.facts = facts
        if newest is not None:
            self._answered_seconds = newest.at_seconds
            self._counters_fell(newest)

    def add(self, sample: Sample) -> None:
        """Follow whether the engines answer, their counters restarted from 0, or the server's processes exited."""
        if sample.host or any(gap.source == host.SOURCE for gap in sample.gaps):
            self._exited = not sample.host
        if sample.answered:
            self._answered_seconds = sample.at_seconds
            fell = self._counters_fell(sample)
            if fell or self.state == "lost":
                self._began_seconds = sample.at_seconds
            if fell:
                self._restarted = True
            if self._restarted or self.state == "lost":
                self._returned.set()
            self._become("serving")
        elif self.has_answered and any(gap.source == "engine" for gap in sample.gaps):
            self._become("lost")

    @property
    def has_answered(self) -> bool:
        """Whether it answered before, in an earlier run too: one that does not answer now is down, not starting."""
        return self._answered_seconds is not None

    @property
    def down_since_seconds(self) -> float | None:
        """Its last answer, if it no longer answers."""
        return self._answered_seconds if self.state == "lost" else None

    def move(self, seconds: float) -> None:
        """Correct all times after the clock was set by so much."""
        self._answered_seconds, self._began_seconds = (
            None if at is None else at + seconds for at in (self._answered_seconds, self._began_seconds)
        )

    def leave(self, finder: Finder) -> None:
        """Look for another server from now on."""
        self._finder, self.state, self._restarted, self._had_pids = finder, "starting", True, False
        self._answered_seconds = None

    def take(self, facts: Facts, now_seconds: float) -> float | None:
        """Watch the server with these facts; return since when it is another process, `None` if it is the same."""
        before, pids = self.facts, {*(self.facts.server_pids or ())} & {*(facts.server_pids or ())}
        same = bool(pids) if before.server_pids and facts.server_pids else same_server(before, facts)
        # In a container the next process has the same id; a process keeps its pools.
        blocks = {(one.engine, one.total_blocks) for one in before.pools if facts.pool(one.engine)}
        same = same and blocks <= {(one.engine, one.total_blocks) for one in facts.pools}
        names = ((one.engine_name, one.engine_version) for one in (before, facts))
        same = same and not _differ(*names)
        other = self._restarted or not same
        if other:
            self._tokens.clear()
        began_seconds = now_seconds if self._began_seconds is None else self._began_seconds
        self.facts, self._restarted, self._began_seconds = facts, False, None
        self._had_pids = self._had_pids or facts.server_pids is not None
        return began_seconds if other else None

    async def first(self, absent: Callable[[str], None]) -> FoundServer:
        """The server, once there is one; `absent` is called with the reason of each attempt that fails."""
        async for _ in ticks(self._retry_seconds):
            try:
                return await self._found()
            except KvdiagError as error:
                absent(str(error))
        raise AssertionError("ticks never end")

    async def next(self) -> FoundServer:
        """The server again, once it was lost and has returned, has restarted, or has other facts."""
        intervals = 0
        while True:
            try:
                async with asyncio.timeout(LOST_SEARCH_SECONDS):
                    await self._returned.wait()
            except TimeoutError:
                intervals += 1
                # A server that restarts during a search is found without its processes, or with those that exited.
                without = self._had_pids and (self._exited or self.facts.server_pids is None)
                if self.state != "lost" and not without and (intervals % IDENTITY_CHECKS or await self._is_itself()):
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
        self._found_server = found
        return found

    async def _is_itself(self) -> bool:
        """Whether the server that was found has still the same version and model, and its pool is known."""
        found = self._found_server
        if found is None or found.identity is None:
            return True
        if not self.facts.pools:
            return False
        try:
            return not _differ(astuple(found.identity), astuple(await found.engine.identify()))
        except Unreadable:
            return True  # the sampler notices a server that does not answer

    def _counters_fell(self, sample: Sample) -> bool:
        """Whether an engine's counter has fallen: counters begin at 0 with their process."""
        fell = False
        if len(self._tokens) > MAX_ENGINES:
            self._tokens.clear()
        for engine in sample.engines or ():
            if (count := engine.prompt_tokens_total) is not None:
                fell = fell or count < self._tokens.get(engine.engine, 0)
                self._tokens[engine.engine] = count
        return fell

    def _become(self, state: ServerState) -> None:
        if state != self.state:
            self.state = state
            _log.info("server", state=state, url=self.facts.url)


def _differ(before: Sequence[object], now: Sequence[object]) -> bool:
    """Whether a value that is known both times is another one."""
    return any(None not in (one, other) and one != other for one, other in zip(before, now, strict=True))
