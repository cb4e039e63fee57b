"""`kvdiag diagnose --prometheus`: every replica read and judged, some side by side, and shown with the worst first."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass

from kvdiag.commands.options.prometheus_options import PrometheusAccess
from kvdiag.commands.options.report_file import ReportFile
from kvdiag.commands.printing import EXIT_CODES, print_json, print_text, show_replicas
from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.fleet import ReplicaSummary, compare, summarise
from kvdiag.diagnosis.limits import Limits
from kvdiag.errors import KvdiagError
from kvdiag.feeds.history.prometheus_feed import REPLICAS_AT_ONCE, Survey, Window, read, survey
from kvdiag.feeds.history.replica_timeline import JOIN_SECONDS
from kvdiag.feeds.history.series_join import Replica, image_of
from kvdiag.model import Facts, Gap, Timeline
from kvdiag.outputs.documents import fleet_document
from kvdiag.outputs.fleet_results import FleetDiagnosis, Judged, Source
from kvdiag.outputs.html import report_fleet
from kvdiag.outputs.terminal import fleet_text
from kvdiag.sources.http import Unreadable
from kvdiag.sources.prometheus_answers import SOURCE
from kvdiag.sources.prometheus_api import PrometheusSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Some replicas for one process to read and judge."""

    access: PrometheusAccess
    replicas: tuple[Replica, ...]
    window: Window
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What became of it; `problem` is why nothing of it could be read."""

    judged: tuple[Judged, ...]
    summaries: tuple[ReplicaSummary, ...]
    problem: str | None


def examine_history(
    access: PrometheusAccess, match: str, window: Window, limits: Limits, page: ReportFile, output: str
) -> int:
    """Judge every replica of a Prometheus' history, report and print the result, and give its exit code.

    Raises:
        KvdiagError: nothing can be said: no answer, no such API, or nobody there.

    """
    try:
        found = asyncio.run(_survey(access, match, window))
    except Unreadable as error:
        raise KvdiagError(f"{access.url.rstrip('/')}: {error}") from error
    if not found.replicas:
        whom = f" that match {{{match}}}" if match else ""
        raise KvdiagError(
            f"{access.url.rstrip('/')} has no metrics of vLLM, DCGM, nvidia_gpu_exporter or kvdiag{whom} in this time: "
            "check --match, --window and what is scraped"
        )
    judged, summaries, problem = _all(access, found.replicas, window, limits)
    if problem is not None and not any(one.diagnosis.samples for one in judged):
        raise KvdiagError(f"{access.url.rstrip('/')}: no samples could be read: {problem}")
    result = FleetDiagnosis(
        source=Source(
            url=access.url.rstrip("/"),
            match=match,
            start_seconds=window.start_seconds,
            end_seconds=window.end_seconds,
            join_seconds=JOIN_SECONDS,
        ),
        judged=tuple(sorted(judged, key=Judged.order)),
        fleet=compare(summaries, limits),
        gaps=found.gaps,
    )
    replicas = {one.key: one for one in found.replicas}
    return show(result, output, page, lambda worst: asyncio.run(_timeline(access, replicas[worst.key], window)))


def show(result: FleetDiagnosis, output: str, page: ReportFile, timeline_of: Callable[[Judged], Timeline]) -> int:
    """Report and print what was judged of many replicas, and give its exit code.

    `timeline_of` reads a replica's history again: all of them together would be too much to keep.
    """
    try:
        page.write(lambda making: report_fleet.render(result, timeline_of, making))
    finally:  # the verdict is told even where there is no room for a report
        if output == "json":
            print_json(fleet_document.document(result))
        else:
            print_text(fleet_text.render(result))
    return EXIT_CODES[result.worst]


async def _timeline(access: PrometheusAccess, replica: Replica, window: Window) -> Timeline:
    async with access.client() as client:
        async for _, timeline, _ in read(PrometheusSource(client, access.seconds), (replica,), window):
            return timeline
    return Timeline(samples=())


async def _survey(access: PrometheusAccess, match: str, window: Window) -> Survey:
    async with access.client() as client:
        return await survey(PrometheusSource(client, access.seconds), match, window)


def _all(
    access: PrometheusAccess, replicas: Sequence[Replica], window: Window, limits: Limits
) -> tuple[list[Judged], list[ReplicaSummary], str | None]:
    """Every replica judged, what is kept of each to compare it, and why some could not be read where that is so."""
    works = [
        Work(access=access, replicas=tuple(replicas[at : at + REPLICAS_AT_ONCE]), window=window, limits=limits)
        for at in range(0, len(replicas), REPLICAS_AT_ONCE)
    ]
    judged: list[Judged] = []
    summaries: list[ReplicaSummary] = []
    problem: str | None = None
    with _several(works) as results, show_replicas() as tell:
        for done in results:
            judged += done.judged
            summaries += done.summaries
            tell(len(judged), len(replicas))
            if done.problem is not None:
                # A server that does not answer any more is not asked for hundreds of others.
                problem = done.problem
                break
    seen = {one.key for one in judged}
    judged += [_unread(one, problem or "", limits) for one in replicas if one.key not in seen]
    return judged, summaries, problem


@contextmanager
def _several(works: Sequence[Work]) -> Iterator[Iterator[Done]]:
    """The results in any order, made by as many processes as there are processors."""
    processors = len(os.sched_getaffinity(0))
    if len(works) == 1 or processors == 1:
        yield map(judge, works)
        return
    # Forked before anything here has a thread: nothing is imported again, and what was surveyed is shared.
    pool = ProcessPoolExecutor(
        min(processors, len(works)), mp_context=multiprocessing.get_context("fork"), initializer=_deaf
    )
    try:
        yield _results([pool.submit(judge, work) for work in works])
    except BrokenProcessPool as error:
        raise KvdiagError("a process that read the history was killed: is there too little memory?") from error
    finally:
        for child in multiprocessing.active_children():
            child.terminate()
        pool.shutdown(cancel_futures=True)


def _results(waiting: Sequence[Future[Done]]) -> Iterator[Done]:
    left = set(waiting)
    while left:
        ready, left = wait(left, return_when=FIRST_COMPLETED)
        for one in ready:
            yield one.result()


def _deaf() -> None:
    """A Ctrl-C is for the process that waits for all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def judge(work: Work) -> Done:
    """Read and judge some replicas."""
    # Half a million samples are as many small lists and values without a cycle among them: looking for cycles again and
    # again takes a third of the time.
    gc.disable()
    try:
        return asyncio.run(_judge(work))
    finally:
        gc.enable()


async def _judge(work: Work) -> Done:
    judged, summaries = [], []
    problems: list[str] = []
    async with work.access.client() as client:
        source = PrometheusSource(client, work.access.seconds)
        async for replica, timeline, facts in read(source, work.replicas, work.window):
            diagnosis = diagnose(timeline, facts, work.limits)
            judged.append(Judged(key=replica.key, subject=replica.subject, diagnosis=diagnosis))
            if facts.engine_name is not None:
                # A GPU that no server is known of is no replica of any version.
                version = facts.engine_version or image_of(replica)
                summaries.append(summarise(timeline, facts, work.limits, replica=replica.key, version=version))
            problems += [gap.reason for gap in facts.gaps if gap.source == SOURCE and gap.kind == "failed"]
    nothing = not any(one.diagnosis.samples for one in judged)
    found = problems[0] if nothing and problems else None
    return Done(judged=tuple(judged), summaries=tuple(summaries), problem=found)


def _unread(replica: Replica, problem: str, limits: Limits) -> Judged:
    gap = Gap(source=SOURCE, kind="failed", reason=f"not asked for, since the server had stopped answering: {problem}")
    facts = Facts(gaps=(*replica.gaps, gap))
    return Judged(key=replica.key, subject=replica.subject, diagnosis=diagnose(Timeline(samples=()), facts, limits))
