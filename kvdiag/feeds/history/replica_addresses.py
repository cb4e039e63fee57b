"""Whether the addresses at which a replica is scraped at the same time are of one server or of several. Pure.

A server may have several addresses, and as many jobs may find it under one each. Then its counters continue from one
address to the next: put in order of time, they fall only where they do at one of them alone, after a restart. Those of
several servers fall at every other sample, unless none has ever worked; their processes have started at different
times. All addresses are put in one order, which takes as long as sorting their samples, however many there are.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from kvdiag.feeds.history.series_labels import METRICS, LabelMap
from kvdiag.sources.prometheus_answers import Points

Candidate = tuple[int, str, LabelMap, Points]
"""A series for one figure: its priority, metric, labels and samples."""

SAME_START_SECONDS = 2.0
"""Between start times that a process reports at different scrapes: it computes them from the clock of the host."""

_Same = tuple[str, ...]
_Span = tuple[float, float]


class Addresses:
    """The hosts that reported one figure at the same time."""

    def __init__(self) -> None:
        """None yet."""
        self._agreed: dict[str, list[bool]] = {}
        """Of each host, whether it agreed with the others, for each figure that shows it."""
        self._until: dict[str, float] = {}
        self._ports: dict[tuple[str, str], list[bool]] = defaultdict(list)
        """The same of two addresses of one host, which differ by their ports; or by their jobs alone."""

    @property
    def names(self) -> list[str]:
        """All hosts that reported at the same time as another."""
        return sorted(self._agreed)

    @property
    def unclear(self) -> list[str]:
        """The addresses of which nothing shows that they are one server's: no figure at comparable times."""
        ports = {port for pair, agreed in self._ports.items() if not agreed and len({*pair}) > 1 for port in pair}
        return sorted(ports | {host for host, agreed in self._agreed.items() if not agreed})

    def add(self, candidates: Iterable[Candidate]) -> None:
        """Compare the series of one figure; none overlap where each address begins after the one before has ended."""
        hosts: dict[str, dict[_Same, Points]] = defaultdict(dict)
        instances: dict[tuple[str, _Same], str] = {}
        for _, metric, labels, points in candidates:
            meaning = METRICS[metric]
            part = tuple(labels.get(name, "") for name in (*meaning.adds, *meaning.ranks))
            host, key, instance = _host(labels), (metric, *part), labels.get("instance", "")
            if (before := hosts[host].get(key)) is not None and _overlap(before, points):
                agreed = _agree([before, points], is_counter=metric.endswith("_total"))
                self._ports[instances[host, key], instance] += agreed
            hosts[host][key], instances[host, key] = points, instance
        spans = {
            host: (min(one.times[0] for one in some.values()), max(one.times[-1] for one in some.values()))
            for host, some in hosts.items()
        }
        for host, (_, until) in spans.items():
            self._until[host] = max(self._until.get(host, 0.0), until)
        by_key: dict[_Same, dict[str, Points]] = defaultdict(dict)
        for host in _together(spans):
            self._agreed.setdefault(host, [])
            for key, points in hosts[host].items():
                by_key[key][host] = points
        for key, some in by_key.items():
            if len(some) > 1:
                agreed = _agree(list(some.values()), is_counter=key[0].endswith("_total"))
                for host in some:
                    self._agreed[host] += agreed

    def of_several_servers(self, reported: Iterable[tuple[LabelMap, Points]]) -> list[str]:
        """The hosts and ports that are of different servers; `reported` has the start times of their processes."""
        starts: dict[str, float] = {}
        for labels, points in reported:
            host = _host(labels)
            if labels.get("__name__") == "process_start_time_seconds" and host in self._agreed:
                starts[host] = max(starts.get(host, 0.0), points.values[-1])
        found = {port for pair, agreed in self._ports.items() if not all(agreed) for port in pair}
        found |= {host for host, agreed in self._agreed.items() if not all(agreed)}
        for earlier, later in pairwise(sorted(starts, key=lambda host: starts[host])):
            # An address that is no longer scraped when the server restarts keeps the start of the process before.
            if starts[later] - starts[earlier] > SAME_START_SECONDS and starts[later] <= self._until[earlier]:
                found |= {earlier, later}
        return sorted(found)


def _host(labels: LabelMap) -> str:
    instance = labels.get("instance", "")
    return instance.rpartition(":")[0] or instance


def _together(spans: Mapping[str, _Span]) -> list[str]:
    """The hosts that were scraped at the same time as another, by their names."""
    found: set[str] = set()
    before: str | None = None
    for host in sorted(spans, key=lambda host: spans[host]):
        if before is not None and spans[host][0] <= spans[before][1]:
            found |= {before, host}
        if before is None or spans[host][1] > spans[before][1]:
            before = host
    return sorted(found)


def _overlap(one: Points, other: Points) -> bool:
    return one.times[0] <= other.times[-1] and other.times[0] <= one.times[-1]


def _agree(some: Sequence[Points], *, is_counter: bool) -> Sequence[bool]:
    """Whether series can be of one server; empty where their samples are not comparable."""
    at: dict[float, float] = {}
    for points in some:
        for moment, value in zip(points.times, points.values, strict=True):
            if at.setdefault(moment, value) != value:
                return [False]
    if not is_counter:
        return [True] if len(at) < sum(map(len, some)) else ()
    restarts = _joined(fall for points in some for fall in _falls(points.times, points.values))
    watched = _joined((points.times[0], points.times[-1]) for points in some)
    moments = sorted(at)
    return [
        all(
            _overlaps(restarts, fall) or not _overlaps(watched, fall)
            for fall in _falls(moments, [at[moment] for moment in moments])
        )
    ]


def _falls(times: Sequence[float], values: Sequence[float]) -> Iterator[_Span]:
    """From the last sample before each fall to the first one after it."""
    for (before, more), (after, less) in pairwise(zip(times, values, strict=True)):
        if less < more:
            yield before, after


def _joined(spans: Iterable[_Span]) -> list[_Span]:
    """The same spans, without those that overlap."""
    found: list[_Span] = []
    for start, end in sorted(spans):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _overlaps(spans: Sequence[_Span], one: _Span) -> bool:
    """Whether any of these spans, which are joined, has more than an end in common with another one."""
    place = bisect_left(spans, (one[1], 0.0))
    return place > 0 and spans[place - 1][1] > one[0]
