"""Profiles several processes of a server at once, and counts the requests that it finishes before, during and after.

Three turns, so that the cost of tracing is measured: without, with and without it. The rates of the first and the last
turn are those of the server as it is; a profile without an address has no rates, and no growth per request.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvdiag.engines.engine import EngineClient
from kvdiag.errors import KvdiagError
from kvdiag.feeds.live.sampling import ticks
from kvdiag.formatting import plural
from kvdiag.model import MemoryProfile, ProfileKind
from kvdiag.sources.agent_profiles import Asked, ProfileFolder
from kvdiag.sources.agent_publication import Publication

COUNT_SECONDS = 1.0
TURN_RATIO = 0.25
MIN_TURN_SECONDS = 2.0
ANSWER_SECONDS = 60.0
"""After the end of the tracing: sums are made in slices while the server works, and a full disk may be emptied."""

Counts = list[tuple[float, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """The profile of one process, or why there is none."""

    process: str
    profile: MemoryProfile | None = None
    problem: str | None = None


async def profile_processes(
    folder: ProfileFolder,
    processes: Sequence[Publication],
    kind: ProfileKind,
    seconds: float,
    *,
    client: EngineClient | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[tuple[Profiled, ...], Counts]:
    """Profile these processes at the same time; with a `client` also the requests finished at each moment.

    Raises:
        KvdiagError: none of them can be asked.
    """
    counts: Counts = []
    counting = None if client is None else asyncio.create_task(_count(client, counts))
    turn_seconds = 0.0 if client is None else max(seconds * TURN_RATIO, MIN_TURN_SECONDS)
    try:
        await _turn_without(turn_seconds, progress)
        asked, found = _ask(folder, processes, kind, seconds)
        if not asked:
            raise KvdiagError(found[0].problem or "")
        try:
            progress(f"tracing {plural(len(asked), 'process', 'processes')}")
            found += await asyncio.gather(*(_answer(folder, one, seconds) for one in asked))
        finally:
            for one in asked:
                folder.withdraw(one)
        await _turn_without(turn_seconds, progress)
    finally:
        if counting is not None:
            counting.cancel()
            await asyncio.gather(counting, return_exceptions=True)
    return tuple(found), counts


async def _turn_without(seconds: float, progress: Callable[[str], None]) -> None:
    if seconds:
        progress("counting requests without tracing")
        await asyncio.sleep(seconds)


def _ask(
    folder: ProfileFolder, processes: Sequence[Publication], kind: ProfileKind, seconds: float
) -> tuple[list[Asked], list[Profiled]]:
    asked, refused = [], []
    for process in processes:
        try:
            asked.append(folder.ask(process, kind, seconds))
        except KvdiagError as error:
            refused.append(Profiled(process=f"{process.title} {process.pid}", problem=str(error)))
    return asked, refused


async def _answer(folder: ProfileFolder, asked: Asked, seconds: float) -> Profiled:
    try:
        async with asyncio.timeout(seconds + ANSWER_SECONDS):
            async for _ in ticks(COUNT_SECONDS):
                if (profile := folder.answer(asked)) is not None:
                    return Profiled(process=asked.name, profile=profile)
    except TimeoutError:
        waited = "no answer in time: its agent is older than this kvdiag, or the folder's disk is full"
        return Profiled(process=asked.name, problem=f"{asked.name}: {waited}")
    except KvdiagError as error:
        return Profiled(process=asked.name, problem=str(error))
    raise AssertionError("ticks never end")


async def _count(client: EngineClient, counts: Counts) -> None:
    """Add how many requests have finished, once a second; nothing in a second without an answer."""
    async for _ in ticks(COUNT_SECONDS):
        engines, _gaps = await client.read()
        finished = [one.requests_finished_total for one in engines or ()]
        if finished and all(one is not None for one in finished):
            counts.append((time.monotonic(), sum(one or 0 for one in finished)))
