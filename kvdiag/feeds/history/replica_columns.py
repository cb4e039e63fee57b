"""A replica's series sorted into columns by their meaning: part of a sample, key within it, field. Pure.

A sample reported twice counts once; an impossible one (a usage of 3, negative bytes) is dropped. Both are counted.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from kvdiag.engines import ENGINE_METRICS
from kvdiag.feeds.history.columns import Column, combined, in_turn
from kvdiag.feeds.history.counter_courses import MIN_FALLS, falls_of, turns
from kvdiag.feeds.history.replica_addresses import Addresses, Candidate
from kvdiag.feeds.history.series_join import OF_NODES, Replica
from kvdiag.feeds.history.series_labels import METRICS, ONCE, LabelMap, container_name, size_of, target_of, uuid_of
from kvdiag.model import MAX_BYTES, MAX_COUNT, Gap, GapKind
from kvdiag.sources.prometheus_answers import SOURCE, Labels, Points
from kvdiag.sources.prometheus_names import Meaning, Part
from kvdiag.sources.prometheus_text import engine_label

Key = tuple[str, ...]
Fields = dict[str, Column]

IMPOSSIBLE_RATIO = 0.01
"""Of a figure's samples, beyond which impossible ones are no rounding; an exporter has them for what is unknown."""


@dataclass(slots=True)
class Columns:
    """Columns by part, key and field; series with other information; what was wrong with any of them."""

    parts: dict[Part, dict[Key, Fields]] = field(default_factory=dict)
    reported: list[tuple[LabelMap, Points]] = field(default_factory=list)
    """Series of which the labels, or the newest value, are of interest."""

    gaps: list[Gap] = field(default_factory=list)

    @property
    def started_seconds(self) -> float:
        """When the newest of the server's processes began, to separate one run from the next; 0 if not reported."""
        starts = (
            one.values[-1] for labels, one in self.reported if labels.get("__name__") == "process_start_time_seconds"
        )
        return max(starts, default=0.0)

    @property
    def are_refused(self) -> bool:
        """Whether they are of several servers, so that nothing can be judged by them."""
        return any(gap.kind == "refused" for gap in self.gaps)

    def of(self, part: Part) -> Mapping[Key, Fields]:
        """The columns of one part."""
        return self.parts.get(part, {})


def sort_out(replica: Replica, history: Mapping[Labels, Points]) -> Columns:
    """The columns of one replica from all that was read."""
    found: dict[tuple[Part, Key, str], list[Candidate]] = defaultdict(list)
    weight: Counter[tuple[str, ...]] = Counter()
    columns = Columns()
    infinite: dict[str, Gap] = {}
    for series_id in replica.series:
        points = history.get(series_id)
        if points is None:
            continue
        labels = dict(series_id)
        name = labels.get("__name__", "")
        meaning = METRICS[name]
        if points.infinite_seconds and meaning.part not in ONCE:
            infinite[name] = _impossible("infinite", name, is_proof=True)
        if not len(points) or any(labels.get(label) != value for label, value in meaning.where):
            continue
        weight[target_of(labels)] += len(points)
        if meaning.part in ONCE:
            columns.reported.append((labels, points))
        else:
            found[meaning.part, _key(meaning, labels), meaning.field].append((meaning.priority, name, labels, points))
    twice: Counter[str] = Counter()
    addresses = Addresses()
    for (part, key, name), candidates in found.items():
        candidates.sort(key=partial(_order, weight))
        merged = _merged(candidates)
        whole, repeated = in_turn([column for _, column in merged])
        if repeated and len({metric for metric, _ in merged}) < len(merged):
            twice[candidates[0][1]] += repeated
            if part == "engine":
                addresses.add(candidates)
        most = 1 if name.endswith("_ratio") or part == "up" else MAX_BYTES if name.endswith("_bytes") else MAX_COUNT
        kept, impossible = whole.between(0.0, most)
        if impossible:
            is_proof = impossible > IMPOSSIBLE_RATIO * len(whole.times)
            columns.gaps.append(_impossible(f"{impossible} impossible", candidates[0][1], is_proof=is_proof))
        if kept.times:
            columns.parts.setdefault(part, {}).setdefault(key, {})[name] = kept
    columns.gaps += infinite.values()
    if several := addresses.of_several_servers(columns.reported):
        names = ", ".join(several[:3])
        reason = f"several servers have this name at once ({names}): give their targets different labels"
        columns.gaps.append(Gap(SOURCE, "refused", reason))
    elif unclear := addresses.unclear:
        names = ", ".join(unclear[:3])
        reason = f"nothing shows whether these addresses ({names}) are of one server: give their targets other labels"
        columns.gaps.append(Gap(SOURCE, "failed", reason))
    elif addresses.names:
        names = ", ".join(addresses.names[:3])
        reason = f"this server is scraped at several addresses ({names}): the address with most samples is used"
        columns.gaps.append(Gap(SOURCE, "absent", reason))
    elif twice:
        names = ", ".join(sorted(twice)[:3])
        reason = (
            f"this replica's series exist twice ({names}): is it scraped by two jobs? The job with more samples is used"
        )
        columns.gaps.append(Gap(SOURCE, "absent", reason))
    # One says it: of several servers all counters fall, of a restart too.
    doubts = (*_falling(columns), *_changing(replica, history))
    columns.gaps += sorted(doubts, key=lambda gap: gap.kind != "refused")[:1]
    return columns


def _order(weight: Mapping[tuple[str, ...], int], one: Candidate) -> tuple[object, ...]:
    """Of equal names the target with the most samples counts, and the same one for all fields of a replica.

    Series of one target follow one another where a label changes.
    """
    priority, _, labels, points = one
    target = target_of(labels)
    return priority, -weight[target], target, points.times[0], sorted(labels.items())


def _impossible(samples: str, name: str, *, is_proof: bool) -> Gap:
    """Samples that are left out; too many of what a server itself reports leave doubt about the others."""
    kind: GapKind = "failed" if is_proof and name not in OF_NODES else "absent"
    return Gap(SOURCE, kind, f"{samples} samples of {name} are left out")


def _falling(columns: Columns) -> Iterator[Gap]:
    """Counters that fall again and again, which no restarts explain."""
    every = [(name, column) for fields in columns.of("engine").values() for name, column in fields.items()]
    for name, column in every:
        falls = falls_of(column, columns.started_seconds) if name.endswith("_total") else None
        if falls is None:
            continue
        reason = f"{name} falls {falls.count:,} times in {falls.samples:,} samples"
        if falls.servers:
            yield _in_turn(f"{reason}, and they are {falls.servers} rising counters")
        else:
            yield _unexplained(reason)


def _changing(replica: Replica, history: Mapping[Labels, Points]) -> Iterator[Gap]:
    """Targets whose engine, or the size of whose pool, changes to and fro."""
    engines: dict[tuple[str, ...], dict[Hashable, list[float]]] = defaultdict(lambda: defaultdict(list))
    pools: dict[tuple[str, ...], dict[Hashable, list[float]]] = defaultdict(lambda: defaultdict(list))
    for series_id in replica.series:
        labels = dict(series_id)
        name = labels["__name__"]
        points = history.get(series_id)
        if points is None or name not in ENGINE_METRICS:
            continue
        if METRICS[name].field == "requests_running":
            engines[target_of(labels)][name.partition(":")[0]] += points.times
        elif any(size := size_of(labels)):
            pools[(*target_of(labels), engine_label(labels))][size] += points.times
    for holders in engines.values():
        if len(holders) > 1 and (count := turns(holders)) >= MIN_FALLS:
            yield _in_turn(f"the engine changes {count:,} times")
    for holders in pools.values():
        # A server that restarts may find room for another number of blocks each time.
        if len(holders) > 1 and (count := turns(holders)) >= MIN_FALLS:
            yield _unexplained(f"the size of its pool changes {count:,} times")


def _in_turn(reason: str) -> Gap:
    where = "several servers answer at one address in turn"
    return Gap(SOURCE, "refused", f"{where}: {reason}; scrape each server at its own address")


def _unexplained(reason: str) -> Gap:
    causes = "do several servers answer at one address, or does something change what Prometheus stores"
    return Gap(SOURCE, "failed", f"{reason}: does the server restart again and again, {causes}?")


def _merged(candidates: Iterable[Candidate]) -> list[tuple[str, Column]]:
    """The metric and the column of each candidate; of those that are parts of one figure, of all together."""
    groups: dict[Labels, dict[tuple[str, ...], list[tuple[str, Column]]]] = {}
    for _, metric, labels, points in candidates:
        meaning = METRICS[metric]
        parts = {*meaning.adds, *meaning.ranks}
        whole = tuple(sorted((name, value) for name, value in labels.items() if name not in parts))
        rank = tuple(labels.get(name, "") for name in meaning.ranks)
        column = _column(meaning, labels, points)
        groups.setdefault(whole, {}).setdefault(rank, []).append((metric, column))
    return [
        (
            next(iter(ranks.values()))[0][0],
            combined([combined([column for _, column in some], sum) for some in ranks.values()], max),
        )
        for ranks in groups.values()
    ]


def _key(meaning: Meaning, labels: LabelMap) -> Key:
    if meaning.part == "engine":
        return (engine_label(labels),)
    if meaning.part in ("device", "process", "torch"):
        uuid = uuid_of(labels)
        host = labels.get("Hostname", "") if uuid is None else ""
        who = labels.get("process") or labels.get("rank") or labels.get("pid") or ""
        return (uuid or f"gpu{labels.get('gpu', '')}", host if meaning.part == "device" else who)
    if meaning.part == "host":
        return (labels.get("process", ""),)
    if meaning.part == "container":
        return (container_name(labels),)
    return target_of(labels)


def _column(meaning: Meaning, labels: LabelMap, points: Points) -> Column:
    values = points.values
    if meaning.scale != 1:
        values = type(values)("d", [value * meaning.scale for value in values])
    return Column(targets=frozenset({target_of(labels)}), times=points.times, values=values)
