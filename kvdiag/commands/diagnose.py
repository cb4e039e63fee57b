"""`kvdiag diagnose`: diagnose recorded traces, the history in a Prometheus, or the artifacts of a crash.

The history in a Prometheus is read and judged replica by replica, several at a time. In this order: one survey finds
all replicas; portions of them are read and diagnosed by several processes (--workers); each replica's
diagnosis and summary are kept and its samples are dropped, which bounds the memory; the summaries are then compared by
version. If no replica of a portion can be read, the rest is not read either, so that a Prometheus in trouble is not
queried for hundreds more: those replicas are unknown with that reason. It is an error only if no replica at all has
samples. A report reads the history of the replicas that it draws again.
"""

# ruff: noqa: RUF009 - `given_by` makes fields, not values

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from kvdiag.commands.options.common import collected, given_by, output_option, request_ids_option
from kvdiag.commands.options.prometheus_options import PrometheusAccess, PrometheusOptions, prometheus_options
from kvdiag.commands.options.report_file import ReportFile, report_option, show_diagnosis
from kvdiag.commands.options.thresholds import limits_of, reserved_gap_option
from kvdiag.commands.printing import EXIT_CODES, print_json, print_text, show_replicas
from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.fleet import ReplicaSummary, compare, summarise
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.postmortem import postmortem
from kvdiag.errors import KvdiagError
from kvdiag.feeds.fleet.workers import executor, results
from kvdiag.feeds.history.columns import JOIN_SECONDS
from kvdiag.feeds.history.prometheus_feed import REPLICAS_AT_ONCE, Survey, Window, read, survey
from kvdiag.feeds.history.series_join import Replica, image_of
from kvdiag.feeds.postmortem_inputs import gather, recognise
from kvdiag.feeds.recording.folder_timeline import read_recorded
from kvdiag.feeds.recording.trace import NotATraceError
from kvdiag.model import Facts, Gap, Timeline
from kvdiag.outputs.documents import fleet_document
from kvdiag.outputs.fleet_results import FleetDiagnosis, Judged, Source
from kvdiag.outputs.html import report_page
from kvdiag.outputs.terminal import fleet_text
from kvdiag.sources.http import Unreadable
from kvdiag.sources.prometheus_answers import SOURCE
from kvdiag.sources.prometheus_api import MAX_UNPROVEN

Results = tuple[list[Judged], list[ReplicaSummary], str | None]
"""Replicas that were diagnosed, their summaries for the comparison, and why some could not be read."""

MAX_EMPTY = MAX_UNPROVEN // REPLICAS_AT_ONCE
"""Portions without a sample, before any has had one, after which no further replica is queried for."""

_PATH = click.Path(path_type=Path)
_SEVERAL: dict[str, Any] = {"type": _PATH, "multiple": True}


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions:
    """The options of a diagnosis."""

    postmortem: bool = given_by("Explain an out-of-memory crash and suggest a fix.")
    logs: tuple[Path, ...] = given_by("Engine log, with --postmortem (- is stdin).", "--log", **_SEVERAL)
    boxes: tuple[Path, ...] = given_by("Agent black box or folder, with --postmortem.", "--black-box", **_SEVERAL)
    traces: tuple[Path, ...] = given_by("Recorded trace, with --postmortem.", "--trace", **_SEVERAL)
    show_request_ids: bool = given_by(request_ids_option, default=False)
    history: PrometheusOptions = given_by(prometheus_options)
    report: Path | None = given_by(report_option)
    reserved_gap_bytes: int = given_by(reserved_gap_option)
    output: str = given_by(output_option)


@click.command()
@click.argument("trace", type=_PATH, nargs=-1, metavar="[TRACE... | FILE...]")
@collected(DiagnoseOptions, "options")
def command(trace: tuple[Path, ...], options: DiagnoseOptions) -> int:
    """Diagnose TRACE, a file written by `kvdiag run --record` (JSON Lines, gzip allowed) or a recording directory.

    Several traces are treated as replicas of a fleet: each is diagnosed, replicas of one version are compared with each
    other, and each version with the one before.

    With --prometheus: diagnose the history in Prometheus or any server with its API (Thanos, Mimir, VictoriaMetrics),
    replica by replica. kvdiag need not have been running: it reads the metrics of the engine, DCGM,
    nvidia_gpu_exporter, cAdvisor and kube-state-metrics, and kvdiag's own if present.

    With --postmortem: explain why a server ran out of memory. Each FILE is an agent's black box or a directory of them,
    a trace, an engine log, or a bare error message (- is stdin); the type is detected from the content. Several files
    complement each other, and contradictions between them are reported.

    With several replicas, --report lists all of them and shows the worst one in full.
    """
    page = ReportFile(options.report, read=(*trace, *options.logs, *options.boxes, *options.traces))
    limits, history, output = limits_of(options.reserved_gap_bytes), options.history, options.output
    crashed = {"logs": options.logs, "boxes": options.boxes, "traces": options.traces}
    if options.postmortem:
        if not any((trace, *crashed.values())):
            raise click.UsageError("--postmortem needs files to read: --log, --black-box, --trace, or FILE")
        case = gather(trace, **crashed, show_request_ids=options.show_request_ids)
        return show_diagnosis(postmortem(case), case.timeline or Timeline(samples=()), page, output)
    if any(crashed.values()):
        raise click.UsageError("--log, --black-box and --trace need --postmortem")
    if history.prometheus is not None:
        if trace:
            raise click.UsageError("give either a trace or --prometheus")
        span = history.span(time.time())
        return examine_history(history.access(), history.matchers(), span, limits, page, output)
    if not trace:
        raise click.UsageError("Missing argument 'TRACE'.")
    if len(trace) > 1:
        return _examine_fleet(trace, limits, page, output)
    timeline, facts = _recorded(trace[0])
    return show_diagnosis(diagnose(timeline, facts, limits), timeline, page, output)


def _examine_fleet(paths: Sequence[Path], limits: Limits, page: ReportFile, output: str) -> int:
    """Diagnose each trace, compare all, show the result, and return the exit code. One trace is held at a time."""
    known: dict[Path, Path] = {}
    for path in paths:
        if (same := known.setdefault(path.resolve(), path)) is not path:
            raise KvdiagError(f"{same} is given twice: each replica may count only once; remove the duplicate")
    judged: list[Judged] = []
    summaries: list[ReplicaSummary] = []
    for path in paths:
        timeline, facts = _recorded(path)
        name = str(path)
        judged.append(Judged(key=name, subject=(("trace", name),), diagnosis=diagnose(timeline, facts, limits)))
        summaries.append(summarise(timeline, facts, limits, replica=name))
    result = FleetDiagnosis(
        source=None, judged=tuple(sorted(judged, key=Judged.order)), fleet=compare(summaries, limits), gaps=()
    )
    return show(result, output, page, lambda worst: read_recorded(Path(worst.key))[0])


def _recorded(path: Path) -> tuple[Timeline, Facts]:
    """Return what was recorded at `path`; the error for crash artifacts points to --postmortem."""
    try:
        return read_recorded(path)
    except NotATraceError as error:
        raise KvdiagError(f"{error}{_instead(path)}") from error


def _instead(path: Path) -> str:
    """Return what to do with a file that is not a trace."""
    try:
        kind = recognise(path)
    except KvdiagError:
        return ""
    hints = {"log": "if it is an engine log", "black box": "to read an agent's black box"}
    return f"; {hints[kind]}, add --postmortem" if kind in hints else ""


def no_replica(url: str, match: str) -> KvdiagError:
    """Return the error of a Prometheus that has no series of any replica."""
    whom = f" that match {{{match}}}" if match else ""
    return KvdiagError(
        f"{url.rstrip('/')} has no metrics of an engine, DCGM, nvidia_gpu_exporter or kvdiag{whom} in this time: check "
        "--match, --window and what is scraped"
    )


def examine_history(
    access: PrometheusAccess, match: str, window: Window, limits: Limits, page: ReportFile, output: str
) -> int:
    """Diagnose every replica in a Prometheus' history, write and print the result, and return the exit code.

    Raises:
        KvdiagError: there is no answer, no such API, or no replica.
    """
    try:
        found = asyncio.run(_survey(access, match, window))
    except Unreadable as error:
        raise KvdiagError(f"{access.url.rstrip('/')}: {error}") from error
    if not found.replicas:
        raise no_replica(access.url, match)
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
    """Write and print the diagnosis of many replicas, and return the exit code.

    `timeline_of` reads a replica's history again: all of them together would be too much to keep.
    """
    try:
        page.write(lambda making: report_page.render_fleet(result, timeline_of, making))
    finally:  # the verdict is printed even if the report cannot be written
        if output == "json":
            print_json(fleet_document.document(result))
        else:
            print_text(fleet_text.render(result))
    return EXIT_CODES[result.worst]


async def _timeline(access: PrometheusAccess, replica: Replica, window: Window) -> Timeline:
    async with access.source() as source:
        async for _, timeline, _ in read(source, (replica,), window):
            return timeline
    return Timeline(samples=())


async def _survey(access: PrometheusAccess, match: str, window: Window) -> Survey:
    async with access.source() as source:
        return await survey(source, match, window)


def _all(access: PrometheusAccess, replicas: Sequence[Replica], window: Window, limits: Limits) -> Results:

    def answers_for(key: str) -> bool:
        return judge(access, window, limits, [one for one in replicas if one.key == key])[2] is None

    portions = [replicas[at : at + REPLICAS_AT_ONCE] for at in range(0, len(replicas), REPLICAS_AT_ONCE)]
    judged: list[Judged] = []
    summaries: list[ReplicaSummary] = []
    problem: str | None = None
    empty, proven = 0, None
    options = access.options
    with executor(options.workers, len(portions), options.ray) as pool, show_replicas() as show_progress:
        for diagnosed, summarised, problem in results(pool, partial(judge, access, window, limits), portions):
            judged += diagnosed
            summaries += summarised
            show_progress(len(judged), len(replicas))
            proven = proven or next((one.key for one in diagnosed if one.diagnosis.samples), None)
            empty += problem is not None
            # A Prometheus that no longer answers is not queried for hundreds of further replicas. One that fails for
            # some still answers for others.
            if problem is not None and (empty >= MAX_EMPTY if proven is None else not answers_for(proven)):
                break
    known = {one.key for one in judged}
    judged += [_unread(one, problem or "", limits) for one in replicas if one.key not in known]
    return judged, summaries, problem


def judge(access: PrometheusAccess, window: Window, limits: Limits, replicas: Sequence[Replica]) -> Results:
    """Read and judge some replicas."""
    # Half a million samples are as many small lists and values without a cycle among them: looking for cycles again and
    # again takes a third of the time.
    gc.disable()
    try:
        return asyncio.run(_judge(access, window, limits, replicas))
    finally:
        gc.enable()


async def _judge(access: PrometheusAccess, window: Window, limits: Limits, replicas: Sequence[Replica]) -> Results:
    judged, summaries = [], []
    problems: list[str] = []
    async with access.source() as source:
        async for replica, timeline, facts in read(source, tuple(replicas), window):
            diagnosis = diagnose(timeline, facts, limits)
            judged.append(Judged(key=replica.key, subject=replica.subject, diagnosis=diagnosis))
            if facts.engine_name is not None:
                # A GPU that no server is known of is no replica of any version.
                version = facts.engine_version or image_of(replica)
                summaries.append(summarise(timeline, facts, limits, replica=replica.key, version=version))
            problems += [gap.reason for gap in facts.gaps if gap.source == SOURCE and gap.kind == "failed"]
    nothing = not any(one.diagnosis.samples for one in judged)
    return judged, summaries, problems[0] if nothing and problems else None


def _unread(replica: Replica, problem: str, limits: Limits) -> Judged:
    gap = Gap(source=SOURCE, kind="failed", reason=f"not read: Prometheus had stopped answering ({problem}); try again")
    facts = Facts(gaps=(*replica.gaps, gap))
    return Judged(key=replica.key, subject=replica.subject, diagnosis=diagnose(Timeline(samples=()), facts, limits))
