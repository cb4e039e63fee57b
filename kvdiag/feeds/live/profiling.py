"""Profiles several processes of a server at once, and counts the requests that it finishes before, during and after.

Three turns, so that the cost of tracing is measured: without, with and without it. The rates of the first and the last
turn are those of the server as it is; a profile without an address has no rates, and no growth per request.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from kvdiag.engines.engine import EngineClient
from kvdiag.errors import KvdiagError
from kvdiag.feeds.live.sampling import ticks
from kvdiag.formatting import plural
from kvdiag.model import MemoryProfile, ProfiledLoad, ProfileKind
from kvdiag.sources.agents.agent_profiles import ANSWER_SECONDS, Asked, ProfileFolder
from kvdiag.sources.agents.agent_publication import Publication

COUNT_SECONDS = 1.0
TURN_RATIO = 0.25
MIN_TURN_SECONDS = 2.0
MAX_PROFILED = 8
"""Processes at once: of a server of more workers they are chosen one at a time."""

Counts = list[tuple[float, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """The profile of one process, or why there is none."""

    process: str
    profile: MemoryProfile | None = None
    problem: str | None = None


def chosen_processes(folder: ProfileFolder, directory: Path, role: str | None) -> Sequence[Publication]:
    """The processes whose agents publish, or those with this role in their title, or this pid.

    Raises:
        KvdiagError: there is none, or there are too many to profile at once.
    """
    processes = list(folder.processes())
    names = ", ".join(f"{one.title} {one.pid}" for one in processes)
    if not processes:
        raise KvdiagError(f"no agent publishes in {directory}: was the server started with it on its PYTHONPATH?")
    if role is not None:
        processes = [one for one in processes if role == str(one.pid) or role.lower() in one.title.lower()]
        if not processes:
            raise KvdiagError(f"no process {role!r} publishes in {directory}; those that do: {names}")
    if len(processes) > MAX_PROFILED:
        raise KvdiagError(f"{plural(len(processes), 'process', 'processes')} publish; choose by `process`: {names}")
    return processes


async def profile_processes(
    folder: ProfileFolder,
    processes: Sequence[Publication],
    kind: ProfileKind,
    seconds: float,
    *,
    client: EngineClient | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Profiled, ...]:
    """Profile these processes at the same time; with a `client` also the requests that the server finishes.

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
            raise KvdiagError(
                next((one.problem for one in found if one.problem), "no agent publishes in the directory")
            )
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
    return tuple(_with_load(one, counts) for one in found)


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
        waited = (
            "no answer in time: kvdiag's user may not ask in the directory, its disk is full, or the agent is older"
        )
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


def _with_load(one: Profiled, counts: Counts) -> Profiled:
    if one.profile is None:
        return one
    return replace(one, profile=replace(one.profile, load=counted_load(one.profile, counts)))


def counted_load(profile: MemoryProfile, counts: Sequence[tuple[float, int]]) -> ProfiledLoad:
    """The requests meanwhile and their rates; `counts` are moments (monotonic) and the requests finished by then."""
    began, ended = profile.began_monotonic_seconds, profile.ended_monotonic_seconds
    last = profile.last.at_monotonic_seconds
    first = _finished(counts, last - profile.seconds)
    both = _finished(counts, last)
    return ProfiledLoad(
        requests=None if first is None or both is None else both - first,
        before_per_second=_rate([one for one in counts if one[0] <= began]),
        during_per_second=_rate([one for one in counts if began <= one[0] <= ended]),
        after_per_second=_rate([one for one in counts if one[0] >= ended]),
    )


def _finished(counts: Sequence[tuple[float, int]], at_seconds: float) -> float | None:
    """Requests finished at a moment, between the counts around it; `None` outside of them, or after a restart."""
    for (before, low), (after, high) in pairwise(counts):
        if before <= at_seconds <= after and low <= high:
            return low + (high - low) * ((at_seconds - before) / (after - before) if after > before else 0.0)
    return None


def _rate(counts: Sequence[tuple[float, int]]) -> float | None:
    if len(counts) < 2 or counts[-1][0] <= counts[0][0] or counts[-1][1] < counts[0][1]:  # noqa: PLR2004 - two ends
        return None
    return (counts[-1][1] - counts[0][1]) / (counts[-1][0] - counts[0][0])
