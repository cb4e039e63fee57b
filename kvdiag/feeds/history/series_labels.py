"""The labels of one series in a Prometheus: its metric's meaning, its pod, GPU, host and target. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

from kvdiag.engines import ENGINE_METRICS
from kvdiag.model import cuda_uuid
from kvdiag.sources.prometheus_names import CONTAINER, GPU, KVDIAG, PROCESS, Meaning

T = TypeVar("T")

METRICS: Mapping[str, Meaning] = MappingProxyType({**ENGINE_METRICS, **KVDIAG, **GPU, **CONTAINER, **PROCESS})
"""Every metric that a history is read from."""

ONCE = ("config", "about")
"""Parts that do not change while a server runs, so that the newest sample is enough."""

LabelMap = Mapping[str, str]

HOST_LABELS = ("node", "kubernetes_node", "nodename", "Hostname", "hostname")
UUID_LABELS = ("UUID", "uuid")
TARGET_LABELS = (
    *("job", "instance", "endpoint", "service", "container", "prometheus", "prometheus_replica"),
    *("namespace", "pod", "replica", "receive"),
)
"""What a Prometheus adds to all series of a target: which one it is, and who scrapes it."""
POD_LABELS = (("exported_namespace", "exported_pod"), ("namespace", "pod"))

_EXPORTER = re.compile(
    r"dcgm|exporter|gpu-operator|monitoring|observability|kube-system|otel|opentelemetry|collector|alloy|telegraf",
    re.IGNORECASE,
)
"""In names of pods, containers and namespaces that read GPUs and do not use them: the target's own, no workload's."""

_NVML_UUID = re.compile(r"(?:GPU|MIG)-")


def pod_of(labels: LabelMap) -> tuple[str, str, str] | None:
    """The pod that a series is about: the one that an exporter names, else its own target's."""
    for namespace, pod in POD_LABELS:
        if labels.get(pod):
            return labels.get("cluster", ""), labels.get(namespace, ""), labels[pod]
    return None


def uuid_of(labels: LabelMap) -> str | None:
    """The GPU that a series is about, as CUDA names it; a MIG slice with its instance."""
    for label in (*UUID_LABELS, "gpu"):
        # An index under `gpu`, or the UUID itself.
        if labels.get(label) and (label != "gpu" or _NVML_UUID.match(labels[label])):
            slice_id = labels.get("GPU_I_ID")
            return cuda_uuid(labels[label]) + (f"/{slice_id}" if slice_id else "")
    return None


def hosts_of(labels: LabelMap) -> set[str]:
    """Names by which a series' host may be known, its instance's without the port among them."""
    found = {labels[label] for label in HOST_LABELS if labels.get(label)}
    host = labels.get("instance", "").rpartition(":")[0] or labels.get("instance", "")
    return found | ({host} if host else set())


def container_name(labels: LabelMap) -> str:
    """The container that a series is about: the one that an exporter names, else its own target's; "" if none is."""
    return labels.get("exported_container") or labels.get("container", "")


def containers(series: Iterable[LabelMap], name: str | None) -> Iterator[LabelMap]:
    """What kube-state-metrics reports of the containers of this name, of all where it is `None`."""
    for labels in series:
        if labels.get("__name__") == "kube_pod_container_info" and name in (None, container_name(labels)):
            yield labels


def only(values: Iterable[T]) -> T | None:
    """The one value that all have, else `None`."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def target_of(labels: LabelMap) -> tuple[str, ...]:
    """The scrape target: all series of one scrape have the same time."""
    return tuple(labels.get(label, "") for label in ("cluster", "job", "instance", "namespace", "pod"))


def workload_of(labels: LabelMap) -> tuple[str, str, str] | None:
    """The pod that an exporter assigns a GPU to, by its labels; never the exporter's own pod."""
    if labels.get("exported_pod"):
        return pod_of(labels)
    own = any(_EXPORTER.search(labels.get(label, "")) for label in ("pod", "container", "namespace"))
    return None if own else pod_of(labels)


def size_of(labels: LabelMap) -> tuple[str, ...]:
    """The size of a pool where labels describe it: what differs where the pool has another size."""
    return tuple(labels.get(name, "") for name in ("num_gpu_blocks", "block_size", "effective_attention_block_size"))
