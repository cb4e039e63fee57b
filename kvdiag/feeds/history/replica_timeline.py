"""A replica's series → its Timeline and Facts. Pure: points in, values out.

In this order: the series are sorted into columns by what they report; the pools follow, by which usage is read; then
the names of processes, the samples, and the facts. Each part of a sample keeps the time at which it was scraped:
engines, devices and host processes come from different targets, and which of their samples belong together is decided
by the diagnosis. An interval that could not be read, a failed scrape and series that ended early are gaps, so that
silence is not taken for health.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvdiag.engines import ENGINE_METRICS, engine_with_metrics
from kvdiag.feeds.history import replica_facts
from kvdiag.feeds.history.columns import JOIN_SECONDS, Rows, Values, in_turn, readings, rows_of
from kvdiag.feeds.history.replica_columns import Columns, Fields, Key, sort_out
from kvdiag.feeds.history.replica_gpus import Names, allocators_of, cards_of, devices_of, names_of
from kvdiag.feeds.history.series_join import Replica, container_of, gpus_assigned
from kvdiag.feeds.history.series_labels import METRICS, LabelMap, only
from kvdiag.formatting import format_duration, format_time
from kvdiag.model import ENGINE_COUNTS, Engine, Facts, Gap, HostProcess, Sample, Timeline
from kvdiag.sources.prometheus_answers import SOURCE, History, LostHistory

SILENT_SECONDS = 300.0
"""Before the window's end, from which a replica's series count as ended (Prometheus' own look-back)."""

MAX_LOST = 8
"""Intervals that could not be read and are listed one by one."""

_JUDGED = frozenset({"kv_usage_ratio", "requests_running"})

API_SERVER = "API server"
FIRST_LIFE = 1

SCRAPE_FAILED = Gap("engine", "failed", "the scrape of the server failed (up is 0); see Prometheus's /targets")


def timeline_of(replica: Replica, history: History, end_seconds: float) -> tuple[Timeline, Facts]:
    """One replica's timeline and facts from all that was read of its series until `end_seconds`."""
    columns = sort_out(replica, history.series)
    labels = replica.labels
    container = container_of(replica)
    version = replica_facts.version_of(labels, container)
    engine = engine_with_metrics(one["__name__"] for one in labels)
    model = only(one["model_name"] for one in labels if one["__name__"] in ENGINE_METRICS and one.get("model_name"))
    identity = Facts(
        url=_where(replica),
        engine_name=replica_facts.engine_of(labels, container) if engine is None else engine.name,
        engine_version=version,
        model=model,
    )
    if columns.are_refused:
        # No figure of them is one server's: none is shown, judged or compared with other replicas'.
        return Timeline(samples=()), replace(identity, gaps=(*replica.gaps, *columns.gaps, *_missing(history)))
    present = _present(replica, history)
    pools = replica_facts.pools_of(columns, present, version, engine)
    _count_usage(columns, pools)
    names = names_of(columns)
    samples, gaps = _samples(columns, labels, names, container)
    uuids = {device.uuid for sample in samples for device in sample.devices or ()}
    facts = replace(
        identity,
        max_model_len_tokens=replica_facts.longest_request_tokens(pools.pools),
        pools=pools.pools,
        server_pids=names.server_pids,
        weights_bytes=replica_facts.weights_bytes(columns),
        host_limit_bytes=replica_facts.host_limit_bytes(columns, container),
        host_caches=pools.caches or None,
        started_seconds=float(round(columns.started_seconds)) or None,
        device_uuids=tuple(sorted(uuids)) if gpus_assigned(replica) else None,
        capabilities=pools.capabilities,
        gaps=(
            *replica.gaps,
            *pools.gaps,
            *columns.gaps,
            *gaps,
            *_missing(history),
            *_ended(samples, end_seconds, _nan_seconds(replica, history)),
            *_partly_ended(columns, samples, end_seconds),
        ),
    )
    earlier = tuple((until, replace(facts, pools=before)) for until, before in pools.earlier)
    return Timeline(samples=samples, earlier_facts=earlier), facts


def _where(replica: Replica) -> str:
    reported = dict(replica.subject)
    if reported.get("pod"):
        return "/".join(reported[name] for name in ("cluster", "namespace", "pod") if reported.get(name))
    return reported.get("instance") or replica.key.partition(" ")[2].partition(" [")[0].lstrip("/")


def _present(replica: Replica, history: History) -> list[str]:
    """The metrics that are there to the end: those of the version before an upgrade are left out."""
    last: dict[str, float] = defaultdict(float)
    for series_id in replica.series:
        points = history.series.get(series_id)
        name = dict(series_id)["__name__"]
        if points is not None and points.times and METRICS[name].part == "engine":
            last[name] = max(last[name], points.times[-1])
    newest = max(last.values(), default=0.0)
    return [name for name, seconds in last.items() if newest - seconds <= JOIN_SECONDS]


def _samples(
    columns: Columns, labels: Sequence[LabelMap], names: Names, container: str | None
) -> tuple[tuple[Sample, ...], list[Gap]]:
    cards = cards_of(labels, [key[0] for part in ("device", "process", "torch") for key in columns.of(part)])
    # Of tokens in use without a pool nothing is left.
    shown = [(key, fields) for key, fields in columns.of("engine").items() if fields]
    parts = sorted(shown, key=lambda part: (len(part[0][0]), part[0]))
    engines = readings(*rows_of(dict(parts)), _engines)
    devices, device_gaps = devices_of(columns, cards, names)
    torch, torch_gaps = allocators_of(columns, cards, names, round(columns.started_seconds))
    host = _host(columns, names, container)
    failed = {
        moment
        for fields in columns.of("up").values()
        for moment, up in zip(fields["up"].times, fields["up"].values, strict=True)
        if not up and moment not in engines
    }
    moments = sorted(failed.union(engines, devices, torch, host))
    samples = Sample.of_columns(
        len(moments),
        at_seconds=moments,
        engines=list(map(engines.get, moments)),
        devices=list(map(devices.get, moments)),
        allocators=list(map(torch.get, moments)),
        host=list(map(host.get, moments)),
        gaps=[(SCRAPE_FAILED,) if moment in failed else () for moment in moments],
    )
    return tuple(samples), device_gaps + torch_gaps


def _count_usage(columns: Columns, pools: replica_facts.Pools) -> None:
    """Make a pool's usage of its used tokens, where both are reported; a share counts where they are not."""
    sizes: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for until, known in (*pools.earlier, (math.inf, pools.pools)):
        for pool in known:
            sizes[pool.engine].append((until, pool.usage_blocks * pool.block_tokens))
    for (engine,), fields in columns.of("engine").items():
        used = fields.pop("kv_used_tokens", None)
        if used is None or engine not in sizes:
            continue
        tokens = [
            next((size for until, size in sizes[engine] if moment < until), sizes[engine][-1][1])
            for moment in used.times
        ]
        shares = array("d", [value / size for value, size in zip(used.values, tokens, strict=True)])
        counted, _ = replace(used, values=shares).between(0.0, 1.0)
        if counted.times:
            others = [fields["kv_usage_ratio"]] if "kv_usage_ratio" in fields else []
            fields["kv_usage_ratio"], _ = in_turn([counted, *others])


def _engines(key: Key, count: int, columns: Rows) -> Sequence[Engine | None]:
    awake = columns.get("awake")
    known = {name: values for name, values in columns.items() if name != "awake"}
    made = Engine.of_columns(
        count,
        engine=[key[0]] * count,
        kv_usage_ratio=columns.get("kv_usage_ratio", [None] * count),
        asleep=[None] * count if awake is None else [None if one is None else one == 0 for one in awake],
        **{name: _rounded(columns[name]) for name in ENGINE_COUNTS if name in columns},
    )
    if not any(None not in values for values in known.values()):
        # In some rows nothing may be known but that it sleeps.
        reported = (
            [False] * count if not known else [row.count(None) < len(row) for row in zip(*known.values(), strict=True)]
        )
        return [one if reports else None for one, reports in zip(made, reported, strict=True)]
    return made


def _rounded(values: Values) -> Sequence[int | None]:
    try:
        # As `round`, in half of its time.
        return list(map(float.__round__, values))  # type: ignore[arg-type]  # a missing value is a TypeError
    except TypeError:
        return [None if value is None else round(value) for value in values]


def _host(columns: Columns, names: Names, container: str | None) -> dict[float, tuple[HostProcess, ...]]:
    """The processes at each time that one of them was read, or their container where none is known by itself.

    cAdvisor's container_memory_rss is the anonymous memory of the whole container (the cgroup's `rss`, `anon` in
    version 2); what of it is in swap is container_memory_swap.
    """
    processes = {key[0]: fields for key, fields in columns.of("host").items()}
    named = {who: fields for who, fields in processes.items() if who}
    reported: dict[tuple[int, str], Fields] = {
        (names.pids[who], who.removesuffix(f" {names.pids[who]}")): fields for who, fields in named.items()
    }
    if not any("anonymous_bytes" in fields for fields in named.values()):
        reported |= {
            (FIRST_LIFE, f"container {who}".rstrip()): one for who, one in _container(columns, container).items()
        }
        if "" in processes and not named:
            reported[FIRST_LIFE, API_SERVER] = processes[""]
    return readings(*rows_of(reported), _processes)


def _processes(who: tuple[int, str], count: int, columns: Rows) -> Sequence[HostProcess | None]:
    anonymous = _rounded(columns.get("anonymous_bytes", [None] * count))
    resident = _rounded(columns.get("resident_bytes", [None] * count))
    made = HostProcess.of_columns(
        count,
        pid=[who[0]] * count,
        name=[who[1]] * count,
        resident_bytes=[other or 0 if one is None else one for one, other in zip(resident, anonymous, strict=True)],
        anonymous_bytes=anonymous,
    )
    if any(None not in values for values in columns.values()):
        return made
    known = zip(*columns.values(), strict=True)
    return [one if row.count(None) < len(row) else None for one, row in zip(made, known, strict=True)]


def _container(columns: Columns, container: str | None) -> Mapping[str, Fields]:
    """The server's container: the one that its own series name, else the only one, else the pod as a whole."""
    seen = {key[0]: fields for key, fields in columns.of("container").items() if key[0] != "POD"}
    if container is not None and container in seen:
        return {container: seen[container]}
    inside = [name for name in seen if name]
    if len(inside) == 1:
        return {inside[0]: seen[inside[0]]}
    return {"": seen[""]} if "" in seen else {}


def _missing(history: History) -> list[Gap]:
    gaps = [Gap(SOURCE, "failed", f"the server warns: {warning}") for warning in history.warnings]
    lost = _joined(history.lost)
    gaps += [
        Gap(
            SOURCE,
            "failed",
            f"{format_time(one.start_seconds)} to {format_time(one.end_seconds)} could not be read: {one.reason}",
        )
        for one in lost[:MAX_LOST]
    ]
    if len(lost) > MAX_LOST:
        gaps.append(Gap(SOURCE, "failed", f"{len(lost) - MAX_LOST} more intervals could not be read"))
    return gaps


def _joined(lost: Sequence[LostHistory]) -> list[LostHistory]:
    found: list[LostHistory] = []
    for one in sorted(set(lost), key=lambda one: (one.start_seconds, one.end_seconds, one.reason)):
        if found and found[-1].reason == one.reason and one.start_seconds <= found[-1].end_seconds:
            end = max(one.end_seconds, found[-1].end_seconds)
            found[-1] = replace(found[-1], end_seconds=end)
        else:
            found.append(one)
    return found


def _nan_seconds(replica: Replica, history: History) -> float:
    """The time of the newest NaN among a server's own samples, 0 without any."""
    own = (history.series.get(series_id) for series_id in replica.own)
    return max((points.nan_seconds for points in own if points is not None), default=0.0)


def _partly_ended(columns: Columns, samples: Sequence[Sample], end_seconds: float) -> list[Gap]:
    """Figures that end while the server's others continue: it was not replaced, and they are no longer known."""
    newest: dict[str, float] = {}
    for fields in columns.of("engine").values():
        for name in _JUDGED.intersection(fields):
            newest[name] = max(newest.get(name, 0.0), fields[name].times[-1])
    for part, name in (("devices", "GPU memory"), ("host", "host memory")):
        found = next((one.at_seconds for one in reversed(samples) if getattr(one, part) is not None), None)
        newest |= {} if found is None else {name: found}
    scrapes = [(one["up"].times[-1], one["up"].values[-1]) for one in columns.of("up").values()]
    scraped_seconds, is_up = max(scrapes, default=(0.0, 1.0))
    alive_seconds = max(scraped_seconds, *(one.at_seconds for one in samples[-1:]), 0.0)
    ended = [(name, seconds) for name, seconds in newest.items() if end_seconds - seconds > SILENT_SECONDS]
    # A scrape that fails is a gap of its own.
    if not ended or not is_up or end_seconds - alive_seconds > SILENT_SECONDS:
        return []
    named = ", ".join(f"{name} ends at {format_time(seconds)}" for name, seconds in ended)
    reason = "while other series of this server continue: check what is served, and what the scrape drops"
    return [Gap(SOURCE, "failed", f"{named} {reason}")]


def _ended(samples: Sequence[Sample], end_seconds: float, nan_seconds: float) -> list[Gap]:
    if not samples:
        return [Gap(SOURCE, "absent", "no series has a sample in this window; widen --window")]
    silent = end_seconds - samples[-1].at_seconds
    if silent <= SILENT_SECONDS:
        return []
    if nan_seconds - samples[-1].at_seconds > SILENT_SECONDS:
        reason = f"after {format_time(samples[-1].at_seconds)} all samples are NaN: check what serves or stores them"
        return [Gap(SOURCE, "failed", reason)]
    reason = (
        f"its series end at {format_time(samples[-1].at_seconds)}, {format_duration(silent)} before the window does: "
        "was the server replaced, or is it no longer scraped?"
    )
    return [Gap(SOURCE, "absent", reason)]
