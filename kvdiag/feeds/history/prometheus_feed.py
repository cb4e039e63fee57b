"""Makes timelines from a Prometheus' history: `survey` finds the replicas, `read` reads the samples of a few at a time.

The survey asks for series without samples, from what identifies a server to what may belong to it: metrics of engines
and kvdiag, GPU exporters, the containers of their pods, and, if --match selects some servers, the GPUs of their pods,
hosts and UUIDs, which lack the selected labels. `series_join` decides which of them belong together.

Reading is limited by size: a query names metrics and label values of several replicas, and covers as much time as
`POINTS_AT_ONCE` allows at the scrape interval measured so far. Where a value does not change, the newest is enough.
A replica's samples are dropped once its timeline is made, so that memory does not grow with the fleet.
"""

import re
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvdiag.engines import ENGINE_METRICS
from kvdiag.feeds.history.replica_timeline import timeline_of
from kvdiag.feeds.history.series_join import Replica, join, pods_of_gpus
from kvdiag.feeds.history.series_labels import (
    HOST_LABELS,
    METRICS,
    ONCE,
    UUID_LABELS,
    hosts_of,
    pod_of,
    target_of,
    uuid_of,
    workload_of,
)
from kvdiag.feeds.history.series_list import NAMES_AT_ONCE, Listing, SeriesList, Unlisted
from kvdiag.model import Facts, Gap, Timeline
from kvdiag.sources.http import TooMuchError
from kvdiag.sources.prometheus_answers import SOURCE, History, Labels, LostHistory
from kvdiag.sources.prometheus_api import POINTS_AT_ONCE, Lost, PrometheusSource, Whole
from kvdiag.sources.prometheus_names import CONTAINER, GPU, KVDIAG, PROCESS
from kvdiag.sources.promql import any_of, named, selector

NEVER = ("kube_pod_info", "kube_pod_container_info")
"""Metrics with information in their labels alone."""

PODS = ("pod", "exported_pod")

_OWN_NAME = re.compile(r"\b(?=(?:namespace|pod|container)\s*(?:=|!=|=~|!~)\s*\")(\w+)")

SCRAPE_SECONDS = 15.0
"""Assumed scrape interval, until it has been measured."""

TOGETHER_SECONDS = 90.0
"""Before the window's end, in which a GPU that two pods have is shared; a minute's scrape and a late one."""

MAX_REPLICAS = 4096
"""Each is diagnosed, and all diagnoses are kept."""

REPLICAS_AT_ONCE = 16
"""Read with one query, so that the others' samples need not be kept meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A time range, in Unix seconds."""

    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The replicas with samples in a window, and the series that belong to none of them."""

    # Python 3.11's `asyncio.run` writes a text of what it returns, twice.
    replicas: tuple[Replica, ...] = field(repr=False)
    gaps: tuple[Gap, ...]


async def survey(source: PrometheusSource, match: str, window: Window) -> Survey:
    """Find every replica that `match` (matchers without braces) selects, and all that belongs to it.

    Raises:
        Unreadable: the server does not answer, or has no such API.
    """
    series = SeriesList(source, window.start_seconds, window.end_seconds)
    found = await series.of([Listing(names=(*ENGINE_METRICS, *KVDIAG), matcher=match)])
    labels = [dict(series_id) for series_id in found]
    # An exporter names the GPU's pod by another label, because `pod` is its own.
    chosen = dict.fromkeys((match, _OWN_NAME.sub(r"exported_\1", match)))
    alone = await series.of(Listing(names=tuple(GPU), matcher=one) for one in chosen)
    pods = sorted({pod[2] for one in labels if (pod := pod_of(one)) is not None})
    given = {pod[2] for one in alone if (pod := workload_of(dict(one))) is not None}
    around = await series.of(_by(CONTAINER, PODS, sorted({*pods, *given})))
    if match:
        hosts = {host for one in labels for host in hosts_of(one)}
        hosts |= {reported["node"] for series_id in around if (reported := dict(series_id)).get("node")}
        around |= await series.of(_gpus(pods, sorted(hosts), labels))
    shared = await _shared(source, found | around | alone, window)
    replicas, gaps = join(found | around, alone, shared)
    if len(replicas) > MAX_REPLICAS:
        raise TooMuchError("failed", f"{len(replicas):,} replicas, more than {MAX_REPLICAS:,}: narrow --match")
    warned = tuple(Gap(SOURCE, "failed", f"the server warns: {warning}") for warning in source.warnings)
    if series.unlisted and not replicas:
        raise TooMuchError("failed", series.unlisted[0].reason)
    replicas, unlisted = _incomplete(replicas, series.unlisted)
    # Of any of them series may be missing from a list that is not complete.
    replicas = tuple(replace(one, gaps=(*one.gaps, *warned)) for one in replicas) if warned else replicas
    return Survey(replicas=replicas, gaps=(*warned, *unlisted, *gaps))


def _incomplete(
    replicas: Sequence[Replica], unlisted: Sequence[Unlisted]
) -> tuple[tuple[Replica, ...], tuple[Gap, ...]]:
    """The replicas, each with why some of its series are not listed, and those reasons that concern none of them."""
    if not unlisted:
        return tuple(replicas), ()
    instances = [{labels.get("instance", "") for labels in replica.labels} for replica in replicas]
    reasons = [next((each.reason for each in unlisted if each.instance in some), None) for some in instances]
    marked = (replace(one, unlisted=reason) for one, reason in zip(replicas, reasons, strict=True))
    rest = [each.reason for each in unlisted if not any(each.instance in some for some in instances)]
    return tuple(marked), tuple(Gap(SOURCE, "failed", reason) for reason in rest)


async def _shared(source: PrometheusSource, reported: Collection[Labels], window: Window) -> dict[str, set[str]]:
    """The GPUs that several pods had at once when the window ended; one that has only changed hands is not shared."""
    claimed = {pod for pods in pods_of_gpus(reported).values() if len(pods) > 1 for pod in pods}
    history = History()
    lost: list[Lost[Whole]] = []
    for wanted in _by(GPU, PODS, sorted({pod.rpartition("/")[2] for pod in claimed})):
        start = window.end_seconds - TOGETHER_SECONDS
        lost += await source.newest(Whole(wanted.selector), start, window.end_seconds, history)
    # Without an answer any GPU that several pods have had may be shared.
    known = pods_of_gpus(reported if lost else history.series)
    return {uuid: pods for uuid, pods in known.items() if len(pods) > 1}


def _gpus(pods: Sequence[str], hosts: Sequence[str], labels: Iterable[dict[str, str]]) -> Iterator[Listing]:
    """The GPUs that name the servers' pods, stand in their hosts, or have their UUIDs."""
    yield from _by(GPU, PODS, pods)
    yield from _by(GPU, HOST_LABELS, hosts)
    yield from _by(GPU, ("instance",), hosts, ending="(:[0-9]+)?")
    uuids = {one[label] for one in labels for label in UUID_LABELS if uuid_of(one) and one.get(label)}
    # nvidia_gpu_exporter leaves NVML's prefix out.
    yield from _by(GPU, UUID_LABELS, sorted(uuids | {uuid.removeprefix("GPU-") for uuid in uuids}))


def _by(names: Iterable[str], labels: Iterable[str], values: Sequence[str], ending: str = "") -> Iterator[Listing]:
    """Lists of metrics of which one of these labels has one of these values, some values at a time."""
    for label in labels:
        for start in range(0, len(values), NAMES_AT_ONCE):
            some = any_of(label, values[start : start + NAMES_AT_ONCE], ending=ending)
            yield Listing(names=tuple(names), matcher=some)


async def read(
    source: PrometheusSource, replicas: Sequence[Replica], window: Window
) -> AsyncIterator[tuple[Replica, Timeline, Facts]]:
    """Each replica's timeline and facts, one after the other. Few are held at once."""
    async for one, whole, history in read_samples(source, replicas, window):
        yield one, *timeline_of(whole, history, window.end_seconds)


async def read_samples(
    source: PrometheusSource, replicas: Sequence[Replica], window: Window, *, at_once: int = REPLICAS_AT_ONCE
) -> AsyncIterator[tuple[Replica, Replica, History]]:
    """Each replica, the same with its targets' process metrics, and a history that has its samples until the next one.

    A query is for `at_once` replicas at most, fewer where their samples are too many.
    """
    pace = _Pace(SCRAPE_SECONDS)
    left = list(replicas)
    while left:
        some = pace.some(left, window, at_once)
        left = left[len(some) :]
        history, lost = await _history(source, some, window, pace)
        processes = processes_of(history.series)
        for one in some:
            whole = with_processes(one, processes)
            own = [each for query, each in lost if query.covers(one)]
            if one.unlisted is not None:
                start, end = window.start_seconds, window.end_seconds
                own.append(LostHistory(start_seconds=start, end_seconds=end, reason=one.unlisted))
            yield one, whole, replace(history, lost=own)
            for series_id in whole.series:
                history.series.pop(series_id, None)


@dataclass(slots=True)
class _Pace:
    """How many points a query brings, learned from those before."""

    scrape_seconds: float

    def some(self, replicas: Sequence[Replica], window: Window, at_once: int) -> Sequence[Replica]:
        """The first replicas, as many as one query of the whole window can bring; at least one."""
        points = 0.0
        for place, one in enumerate(replicas[:at_once]):
            points += len(one.series) * (window.end_seconds - window.start_seconds) / self.scrape_seconds
            if points > POINTS_AT_ONCE and place:
                return replicas[:place]
        return replicas[:at_once]

    def chunk_seconds(self, series: int) -> float:
        """The interval of which so many series bring no more points than one query may."""
        return max(POINTS_AT_ONCE * self.scrape_seconds / max(series, 1), 60.0)

    def learn(self, points: int, series: int, seconds: float) -> None:
        """Take note of what a query brought."""
        if points:
            self.scrape_seconds = min(max(series * seconds / points, 0.1), 4.0 * SCRAPE_SECONDS)


async def _history(
    source: PrometheusSource, replicas: Sequence[Replica], window: Window, pace: _Pace
) -> tuple[History, list[tuple["_Query", LostHistory]]]:
    """The samples of some replicas, and the intervals that could not be read with the query of each."""
    history = History()
    lost: list[tuple[_Query, LostHistory]] = []
    for query in _queries(replicas):
        start = window.start_seconds
        while start < window.end_seconds:
            end = window.end_seconds
            if not query.wanted.once:
                end = min(start + pace.chunk_seconds(query.series), end)
            before = history.points
            read = source.newest if query.wanted.once else source.raw
            lost += await read(query, start, end, history)
            pace.learn(history.points - before, query.series, end - start)
            start = end
    return history, lost


class _Wanted(NamedTuple):
    """Series that one query selects: by one label, within one namespace."""

    once: bool
    family: str
    label: str
    space: str
    inside: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Query:
    """A query for some metrics of some values of one label, and about how many series each value has.

    The server finds them by its index, and one query does for many replicas.
    """

    wanted: _Wanted
    names: frozenset[str]
    counts: Mapping[str, int]

    @property
    def series(self) -> int:
        """About how many it selects."""
        return sum(self.counts.values())

    @property
    def selector(self) -> str:
        """The selector in PromQL."""
        within = any_of(self.wanted.space, [self.wanted.inside]) if self.wanted.space else ""
        return selector(named(self.names), any_of(self.wanted.label, sorted(self.counts)), within)

    def halves(self) -> Sequence["_Query"]:
        """Two queries that together select the same; none where it is for one value."""
        values = sorted(self.counts)
        middle = len(values) // 2
        parts = (values[:middle], values[middle:]) if middle else ()
        return [replace(self, counts={value: self.counts[value] for value in some}) for some in parts]

    def covers(self, replica: Replica) -> bool:
        """Whether it selects any series of a replica."""
        return any(map(self.selects, replica.series))

    def selects(self, series: Labels) -> bool:
        """Whether it selects a series."""
        labels = dict(series)
        return (
            labels.get("__name__") in self.names
            and labels.get(self.wanted.label, "") in self.counts
            and (not self.wanted.space or labels.get(self.wanted.space, "") == self.wanted.inside)
        )


def _queries(replicas: Sequence[Replica]) -> Iterator[_Query]:
    """Queries that together bring all series of some replicas."""
    names: dict[_Wanted, set[str]] = defaultdict(set)
    counts: dict[_Wanted, dict[str, int]] = defaultdict(dict)
    changed = any(other_pools(one) for one in replicas)
    for series_id in {series_id for one in replicas for series_id in one.series}:
        labels = dict(series_id)
        name = labels["__name__"]
        if name in NEVER:
            continue
        family = "gpu" if name in GPU else "container" if name in CONTAINER else "own"
        order = ("exported_pod", *(UUID_LABELS if family == "gpu" else ()), "pod", "instance")
        label = next((label for label in order if labels.get(label)), "instance")
        # Many namespaces have a pod of the same name.
        space = {"pod": "namespace", "exported_pod": "exported_namespace"}.get(label, "")
        once = METRICS[name].part in ONCE and not (changed and METRICS[name].field == "pool")
        value = labels.get(label, "")
        # A target's process metrics come in both ways, even where all of its own series come in one.
        for process in PROCESS if family == "own" else ():
            beside = _Wanted(METRICS[process].part in ONCE, family, label, space, labels.get(space, ""))
            if process not in names[beside] or value not in counts[beside]:
                names[beside].add(process)
                counts[beside][value] = counts[beside].get(value, 0) + 1
        key = _Wanted(once, family, label, space, labels.get(space, ""))
        names[key].add(name)
        counts[key][value] = counts[key].get(value, 0) + 1
    for key, some in sorted(counts.items(), key=lambda one: one[0]):
        yield _Query(wanted=key, names=frozenset(names[key]), counts=some)


def other_pools(replica: Replica) -> bool:
    """Whether an engine has had pools of several kinds, so that it matters when."""
    of_pools = [labels for labels in replica.labels if METRICS[labels["__name__"]].field == "pool"]
    return len({labels.get("engine", "0") for labels in of_pools}) < len(of_pools)


def processes_of(series: Iterable[Labels]) -> dict[tuple[str, ...], list[Labels]]:
    """The process metrics among some series, by target."""
    found: dict[tuple[str, ...], list[Labels]] = defaultdict(list)
    for series_id in series:
        labels = dict(series_id)
        if labels.get("__name__") in PROCESS:
            found[target_of(labels)].append(series_id)
    return found


def with_processes(replica: Replica, processes: Mapping[tuple[str, ...], Sequence[Labels]]) -> Replica:
    """The same with those process metrics that the targets of the server's own metrics serve."""
    own = {target_of(labels) for labels in replica.labels if labels.get("__name__") in ENGINE_METRICS}
    more = [series_id for target in sorted(own) for series_id in processes.get(target, ())]
    return replace(replica, series=(*replica.series, *more))
