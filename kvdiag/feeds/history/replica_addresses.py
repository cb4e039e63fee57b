"""Whether the addresses at which a replica is scraped at the same time are of one server or of several. Pure.

A server may have two addresses, and two jobs may find it under one each. Then its counters continue from one address to
the other: put in order of time, they fall no more often than at either alone. Those of two servers fall at every other
sample, unless neither has ever worked; their processes have started at different times. Each address is compared with
each that was scraped at the same time.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise

from kvdiag.feeds.history.series_labels import METRICS, LabelMap
from kvdiag.sources.prometheus_answers import Points

Candidate = tuple[int, str, LabelMap, Points]
"""A series for one figure: its priority, metric, labels and samples."""

SAME_START_SECONDS = 2.0
"""Between start times that a process reports at different scrapes: it computes them from the clock of the host."""

MAX_ADDRESSES = 8
"""At the same time, which one server may have; so many take a tenth of a second."""

_Same = tuple[str, ...]


class Addresses:
    """The hosts that reported one figure at the same time."""

    def __init__(self) -> None:
        """None yet."""
        self._pairs: dict[tuple[str, str], list[bool]] = {}
        self._until: dict[str, float] = {}

    @property
    def names(self) -> list[str]:
        """All hosts that reported at the same time as another."""
        return sorted({host for pair in self._pairs for host in pair})

    def add(self, candidates: Iterable[Candidate]) -> None:
        """Compare the series of one figure; none overlap where each address begins after the one before has ended."""
        hosts: dict[str, dict[_Same, Points]] = defaultdict(dict)
        for _, metric, labels, points in candidates:
            meaning = METRICS[metric]
            part = tuple(labels.get(name, "") for name in (*meaning.adds, *meaning.ranks))
            hosts[_host(labels)][metric, *part] = points
        spans = {
            host: (min(one.times[0] for one in some.values()), max(one.times[-1] for one in some.values()))
            for host, some in hosts.items()
        }
        for host, (_, until) in spans.items():
            self._until[host] = max(self._until.get(host, 0.0), until)
        together = [
            (one, other)
            for one, other in combinations(sorted(spans), 2)
            if spans[one][0] <= spans[other][1] and spans[other][0] <= spans[one][1]
        ]
        too_many = len({host for pair in together for host in pair}) > MAX_ADDRESSES
        for one, other in together:
            agreed = self._pairs.setdefault((one, other), [])
            for key in () if too_many else hosts[one].keys() & hosts[other].keys():
                agreed += _agree(hosts[one][key], hosts[other][key], is_counter=key[0].endswith("_total"))

    def of_several_servers(self, reported: Iterable[tuple[LabelMap, Points]]) -> list[str]:
        """The hosts that are of different servers; `reported` has the start times of their processes."""
        starts: dict[str, float] = {}
        for labels, points in reported:
            if labels.get("__name__") == "process_start_time_seconds":
                starts[_host(labels)] = max(starts.get(_host(labels), 0.0), points.values[-1])
        found: set[str] = set()
        for (one, other), agreed in self._pairs.items():
            apart = one in starts and other in starts and abs(starts[one] - starts[other]) > SAME_START_SECONDS
            # An address that is no longer scraped when the server restarts keeps the start of the process before.
            earlier, later = sorted((one, other), key=lambda host: starts.get(host, 0.0))
            apart = apart and starts[later] <= self._until[earlier]
            # Without a figure that both report at comparable times nothing shows that they are one.
            if apart or not agreed or not all(agreed):
                found |= {one, other}
        return sorted(found)


def _host(labels: LabelMap) -> str:
    instance = labels.get("instance", "")
    return instance.rpartition(":")[0] or instance


def _agree(one: Points, other: Points, *, is_counter: bool) -> Sequence[bool]:
    """Whether two series can be of one server; empty where their samples are not comparable."""
    at = dict(zip(other.times, other.values, strict=True))
    same = [at[moment] == value for moment, value in zip(one.times, one.values, strict=True) if moment in at]
    if same:
        return [all(same)]
    if not is_counter:
        return ()
    start, end = max(one.times[0], other.times[0]), min(one.times[-1], other.times[-1])
    within = [
        sorted((moment, value) for moment, value in zip(each.times, each.values, strict=True) if start <= moment <= end)
        for each in (one, other)
    ]
    falls = [sum(later < earlier for (_, earlier), (_, later) in pairwise(each)) for each in within]
    merged = sorted(within[0] + within[1])
    return [sum(later < earlier for (_, earlier), (_, later) in pairwise(merged)) <= max(falls)]
