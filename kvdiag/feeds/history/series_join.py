"""Which series in a Prometheus are of one server: its own, its pod's, its GPUs'. Pure: label sets in, replicas out.

A server is identified by the `pod` label of an engine's own metrics (kvdiag's where there are none), or by `instance`
without a pod. Where no such metrics are scraped, it is a pod to which an exporter assigns a GPU and whose memory its
node reports. GPU exporters run on the node and have an instance of their own: their series are joined by the pod that
they name (as `exported_pod`, or as `pod` where labels are honoured), by GPU UUID where the server's side names it, or
by host where only one server runs there. A series that could belong to two servers is joined to neither.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kvdiag.engines import ENGINE_METRICS
from kvdiag.feeds.history.series_labels import (
    METRICS,
    TARGET_LABELS,
    LabelMap,
    containers,
    hosts_of,
    only,
    pod_of,
    uuid_of,
    workload_of,
)
from kvdiag.model import Gap
from kvdiag.sources.prometheus_answers import Labels
from kvdiag.sources.prometheus_names import CONTAINER, GPU, KVDIAG

OF_ONE_TARGET = frozenset(
    {
        *TARGET_LABELS,
        *("__name__", "exported_namespace", "exported_pod", "exported_container"),
        *("node", "kubernetes_node", "nodename", "Hostname", "hostname", "UUID", "uuid", "gpu", "device", "GPU_I_ID"),
        *("tp_rank", "pp_rank", "dp_rank", "moe_ep_rank"),
        *(
            "pci_bus_id",
            "modelName",
            "name",
            "engine",
            "model_name",
            "model",
            "process",
            "rank",
            "le",
            "version",
            "image",
        ),
    }
)
"""Labels of one target, of one series, or of one of two Prometheus that hold the same."""

MAX_NAMED = 3
"""Of servers that a GPU may belong to, in one sentence."""

OF_NODES = frozenset({*GPU, *CONTAINER})
"""Metrics that the exporters of a node or a cluster have about a server, and not its own targets."""

Subject = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One subject of a diagnosis: a server with all series about it, or a GPU without a known server."""

    key: str
    subject: Subject
    series: tuple[Labels, ...]
    gaps: tuple[Gap, ...] = ()
    unlisted: str | None = None
    """Why some of its series are not listed."""

    @property
    def own(self) -> tuple[Labels, ...]:
        """The series of its own targets, or all where it has none: the GPUs of its host outlive a server."""
        return tuple(one for one in self.series if metric_of(one) not in OF_NODES) or self.series

    @property
    def labels(self) -> list[dict[str, str]]:
        """The labels of each series."""
        return [dict(series_id) for series_id in self.series]


def metric_of(series_id: Labels) -> str:
    """The name of a series' metric."""
    return dict(series_id).get("__name__", "")


@dataclass(slots=True)
class _Group:
    key: str
    own: list[LabelMap] = field(default_factory=list)
    series: list[Labels] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    uuids: set[str] = field(default_factory=set)
    gaps: list[Gap] = field(default_factory=list)
    gpus: bool = False


def container_of(replica: Replica) -> str | None:
    """The server's container in its pod, if all series agree: those of its own metrics, else of its GPUs' exporter."""
    own = [labels for labels in replica.labels if labels.get("__name__") in ENGINE_METRICS]
    gpus = [labels for labels in replica.labels if labels.get("__name__") in GPU and workload_of(labels) is not None]
    given = {
        name
        for labels in gpus
        if (name := labels.get("exported_container") or ("" if labels.get("exported_pod") else labels.get("container")))
    }
    return only({labels["container"] for labels in own if labels.get("container")} or given)


def image_of(replica: Replica) -> str | None:
    """The image of a server's own container, without its registry, if kube-state-metrics reports just one."""
    inside = containers(replica.labels, container_of(replica))
    return only(labels["image"].rpartition("/")[2] for labels in inside if labels.get("image"))


def gpus_assigned(replica: Replica) -> bool:
    """Whether all GPUs of a server are known to be its own: by an exporter that names its pod, or by its kvdiag daemon.

    GPUs that were joined by their host may include idle ones of other servers.
    """
    reported = [labels for labels in replica.labels if labels.get("__name__") in {*GPU, *KVDIAG}]
    gpus = [labels for labels in reported if METRICS[labels["__name__"]].part == "device"]
    return bool(gpus) and all(
        labels["__name__"] in KVDIAG or ((pod := pod_of(labels)) is not None and _pod_key(pod) == replica.key)
        for labels in gpus
    )


def pods_of_gpus(series: Iterable[Labels]) -> dict[str, set[str]]:
    """The pods that exporters name for each GPU, by UUID: several where it is shared, or has changed hands."""
    found: dict[str, set[str]] = defaultdict(set)
    for series_id in series:
        labels = dict(series_id)
        if labels.get("__name__") not in GPU or (uuid := uuid_of(labels)) is None:
            continue
        if (pod := workload_of(labels)) is not None:
            found[uuid].add("/".join(pod).lstrip("/"))
    return found


def join(
    series: Iterable[Labels], gpus: Iterable[Labels] = (), shared: Mapping[str, Iterable[str]] = MappingProxyType({})
) -> tuple[tuple[Replica, ...], tuple[Gap, ...]]:
    """All replicas in the order of their keys, and what could be joined to none.

    Of `gpus` each is a subject of its own where it is of no server; others among `series` count for servers only.
    `shared` are GPUs, by UUID, that their exporter gives to these pods at once: to none of them alone.
    """
    chosen = frozenset(gpus)
    reported = [(series_id, dict(series_id)) for series_id in sorted(chosen.union(series))]
    # Labels that every series of every exporter has, such as a region: what differs in them is elsewhere.
    realms = sorted(set.intersection(*(set(labels) for _, labels in reported)) - OF_ONE_TARGET) if reported else ()
    found: list[Replica] = []
    gaps: list[Gap] = []
    apart: dict[str, list[tuple[Labels, LabelMap]]] = defaultdict(list)
    for series_id, labels in reported:
        apart[",".join(f"{name}={labels[name]}" for name in realms)].append((series_id, labels))
    for realm, some in apart.items():
        replicas, missing = _join(some, chosen, shared)
        found += [replace(one, key=f"{one.key} [{realm}]") for one in replicas] if len(apart) > 1 else replicas
        gaps += missing
    return tuple(sorted(found, key=lambda replica: replica.key)), tuple(dict.fromkeys(gaps))


def _join(
    reported: Sequence[tuple[Labels, LabelMap]], chosen: frozenset[Labels], shared: Mapping[str, Iterable[str]]
) -> tuple[list[Replica], tuple[Gap, ...]]:
    groups = _servers(reported)
    _add_pods(groups, reported, chosen)
    for series_id, labels in reported:
        if labels.get("__name__") in CONTAINER and (group := _of_its_pod(groups, labels)) is not None:
            group.series.append(series_id)
            if labels["__name__"] == "kube_pod_info" and labels.get("node"):
                group.hosts.add(labels["node"])
    gpus = [(series_id, labels) for series_id, labels in reported if labels.get("__name__") in GPU]
    alone, gaps = _join_gpus(groups, gpus, chosen, shared)
    return [_replica(group) for group in groups.values()] + alone, gaps


def _servers(reported: Sequence[tuple[Labels, LabelMap]]) -> dict[str, _Group]:
    engines: dict[str, _Group] = {}
    exported: dict[str, _Group] = {}
    for series_id, labels in reported:
        name = labels.get("__name__", "")
        if name not in ENGINE_METRICS and name not in KVDIAG:
            continue
        key = _key(labels)
        group = (engines if name in ENGINE_METRICS else exported).setdefault(key, _Group(key=key))
        group.series.append(series_id)
        group.own.append(labels)
        group.hosts |= hosts_of(labels)
        if (uuid := uuid_of(labels)) is not None:
            group.uuids.add(uuid)
            group.gpus = group.gpus or METRICS[name].part == "device"
    for key, group in sorted(exported.items()):
        home = engines.get(key) or _only_home(group, engines, exported)
        if home is None:
            engines[key] = group
            continue
        home.series += group.series
        home.uuids |= group.uuids
        home.hosts |= group.hosts
        home.gpus = home.gpus or group.gpus
    return engines


def _add_pods(
    groups: dict[str, _Group], reported: Sequence[tuple[Labels, LabelMap]], chosen: frozenset[Labels]
) -> None:
    """A server whose metrics are not scraped: a pod with a GPU, by its exporter, and memory, by its node."""
    kept = {
        pod
        for _, labels in reported
        if labels.get("__name__") in CONTAINER and METRICS[labels["__name__"]].part == "container"
        if (pod := pod_of(labels)) is not None
    }
    for series_id, labels in reported:
        pod = workload_of(labels) if labels.get("__name__") in GPU and series_id in chosen else None
        if pod is None or pod not in kept or _pod_key(pod) in groups:
            continue
        names = dict(zip(("cluster", "namespace", "pod"), pod, strict=True))
        gap = Gap("engine", "absent", "its engine's metrics are not scraped; add its /metrics to Prometheus")
        own = {name: value for name, value in names.items() if value}
        groups[_pod_key(pod)] = _Group(key=_pod_key(pod), own=[own], gaps=[gap])


def _key(labels: LabelMap) -> str:
    if (pod := pod_of(labels)) is not None:
        return _pod_key(pod)
    return f"instance {labels.get('cluster', '')}/{labels.get('instance', '')}"


def _pod_key(pod: tuple[str, str, str]) -> str:
    return f"pod {'/'.join(pod)}"


def _of_its_pod(groups: Mapping[str, _Group], labels: LabelMap) -> _Group | None:
    return groups.get(_pod_key(pod)) if (pod := pod_of(labels)) is not None else None


def _only_home(group: _Group, engines: Mapping[str, _Group], exported: Mapping[str, _Group]) -> _Group | None:
    """The one server that kvdiag's own metrics can be of, where they name no pod of it."""
    if group.key.startswith("pod "):
        return None
    near = [one for one in engines.values() if one.hosts & group.hosts and one.key not in exported]
    rivals = [one for one in exported.values() if one.hosts & group.hosts and one.key not in engines]
    if len(near) == 1 and len(rivals) == 1:
        return near[0]
    return next(iter(engines.values())) if len(engines) == len(exported) == 1 and not near else None


def _join_gpus(
    groups: Mapping[str, _Group],
    reported: Sequence[tuple[Labels, LabelMap]],
    chosen: frozenset[Labels],
    shared: Mapping[str, Iterable[str]],
) -> tuple[list[Replica], tuple[Gap, ...]]:
    """Give each GPU to its server; the others are subjects of their own."""
    by_uuid: dict[str, list[_Group]] = defaultdict(list)
    by_host: dict[str, list[_Group]] = defaultdict(list)
    for group in groups.values():
        for uuid in group.uuids:
            by_uuid[uuid].append(group)
        for host in group.hosts:
            by_host[host].append(group)
    # Exporters that report which pod has a GPU: a GPU for which they name no pod belongs to none.
    mapping = {
        _exporter_of(labels) for _, labels in reported if labels.get("exported_pod") or _of_its_pod(groups, labels)
    }
    gpu_hosts = {labels.get("Hostname") or labels.get("instance", "") for _, labels in reported}
    unowned: dict[str, list[Labels]] = defaultdict(list)
    gaps: list[Gap] = []
    for series_id, labels in reported:
        uuid = uuid_of(labels) or f"{labels.get('Hostname') or labels.get('instance', '')}/gpu{labels.get('gpu', '')}"
        owner = _of_its_pod(groups, labels)
        if owner is not None and uuid in shared:
            problem = "is shared by {}: its bytes cannot be attributed"
            gaps.append(_unassigned(uuid, labels, problem, sorted(shared[uuid]), [owner]))
            owner = None
        elif owner is None and not labels.get("exported_pod"):
            owners = by_uuid.get(uuid, [])
            if not owners and _exporter_of(labels) not in mapping:
                owners = list({one.key: one for host in hosts_of(labels) for one in by_host.get(host, [])}.values())
                if not owners and len(groups) == 1 and len(gpu_hosts) == 1:
                    owners = list(groups.values())
            if len(owners) > 1:
                names = [one.key.partition(" ")[2].lstrip("/") for one in owners]
                gaps.append(
                    _unassigned(uuid, labels, "may belong to {}: its exporter does not name the pod", names, owners)
                )
            owner = owners[0] if len(owners) == 1 else None
        if owner is None:
            if series_id in chosen:
                unowned[uuid].append(series_id)
        else:
            owner.series.append(series_id)
            owner.gpus = True
    return [_lone_gpu(uuid, series_id) for uuid, series_id in unowned.items()], tuple(dict.fromkeys(gaps))


def _exporter_of(labels: LabelMap) -> tuple[str, ...]:
    """The exporter of a GPU's series, without its pod label: with honor_labels that is the workload's."""
    return tuple(labels.get(label, "") for label in ("cluster", "job", "instance", "Hostname"))


def _unassigned(uuid: str, labels: LabelMap, problem: str, names: Sequence[str], owners: Sequence[_Group]) -> Gap:
    """The gap of a GPU that could belong to several servers, noted with each of them."""
    host = labels.get("Hostname") or labels.get("instance", "")
    more = "" if len(names) <= MAX_NAMED else f" and {len(names) - MAX_NAMED} more"
    named = f"{', '.join(names[:MAX_NAMED])}{more}"
    gap = Gap("nvml", "absent", f"GPU {uuid} of {host} {problem.format(named)}, so it is assigned to none")
    for owner in owners:
        owner.gaps += [gap] if gap not in owner.gaps else []
    return gap


def _lone_gpu(uuid: str, series: Sequence[Labels]) -> Replica:
    reason = "no server is known to use this GPU"
    return Replica(
        key=f"gpu {uuid}",
        subject=_common([dict(series_id) for series_id in series]),
        series=tuple(series),
        gaps=(Gap("engine", "absent", reason), Gap("host", "absent", reason)),
    )


def _replica(group: _Group) -> Replica:
    gaps = list(group.gaps)
    if not group.gpus and not any(gap.source == "nvml" for gap in gaps):
        reason = "no series of DCGM, nvidia_gpu_exporter or kvdiag covers this server's GPUs"
        gaps.append(Gap("nvml", "absent", reason))
    names = {dict(series_id).get("__name__", "") for series_id in group.series}
    if not any(METRICS[name].part in ("host", "container") for name in names):
        reason = "no series of kvdiag or cAdvisor covers this server's host memory"
        gaps.append(Gap("host", "absent", reason))
    return Replica(key=group.key, subject=_common(group.own), series=tuple(group.series), gaps=tuple(gaps))


_OF_THE_METRIC = frozenset({"__name__", "engine", "reason", "sleep_state", "process", "component", "status", "id"})


def _common(reported: Sequence[LabelMap]) -> Subject:
    """The labels that all of a subject's own series have in common: its identity."""
    shared = set(reported[0].items()).intersection(*(labels.items() for labels in reported[1:])) if reported else set()
    return tuple(sorted(item for item in shared if item[0] not in _OF_THE_METRIC))
