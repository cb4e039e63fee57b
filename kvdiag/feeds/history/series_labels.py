"""What the labels of one series in a Prometheus say: its metric's meaning, its pod, GPU, host and target. Pure."""

from __future__ import annotations

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

Said = Mapping[str, str]

HOST_LABELS = ("node", "kubernetes_node", "nodename", "Hostname", "hostname")
UUID_LABELS = ("UUID", "uuid")
POD_LABELS = (("exported_namespace", "exported_pod"), ("namespace", "pod"))

_EXPORTER = re.compile(
    r"dcgm|exporter|gpu-operator|monitoring|observability|kube-system|otel|opentelemetry|collector|alloy|telegraf",
    re.IGNORECASE,
)
"""In names of pods, containers and namespaces that read GPUs and do not use them: the target's own, no workload's."""

_NVML_UUID = re.compile(r"(?:GPU|MIG)-")


def pod_of(said: Said) -> tuple[str, str, str] | None:
    """The pod that a series is about: the one that an exporter names, else its own target's."""
    for namespace, pod in POD_LABELS:
        if said.get(pod):
            return said.get("cluster", ""), said.get(namespace, ""), said[pod]
    return None


def uuid_of(said: Said) -> str | None:
    """The GPU that a series is about, as CUDA names it; a MIG slice has its instance beside it."""
    for label in (*UUID_LABELS, "gpu"):
        # An index under `gpu`, or the UUID itself.
        if said.get(label) and (label != "gpu" or _NVML_UUID.match(said[label])):
            slice_id = said.get("GPU_I_ID")
            return cuda_uuid(said[label]) + (f"/{slice_id}" if slice_id else "")
    return None


def hosts_of(said: Said) -> set[str]:
    """Names by which a series' host may be known, its instance's without the port among them."""
    found = {said[label] for label in HOST_LABELS if said.get(label)}
    host = said.get("instance", "").rpartition(":")[0] or said.get("instance", "")
    return found | ({host} if host else set())


def container_name(said: Said) -> str:
    """The container that a series is about: the one that an exporter names, else its own target's; "" if none is."""
    return said.get("exported_container") or said.get("container", "")


def containers(series: Iterable[Said], name: str | None) -> Iterator[Said]:
    """What kube-state-metrics reports of the containers of this name, of all where it is `None`."""
    for said in series:
        if said.get("__name__") == "kube_pod_container_info" and name in (None, container_name(said)):
            yield said


def only(values: Iterable[T]) -> T | None:
    """The one value that all have, else `None`."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def target_of(said: Said) -> tuple[str, ...]:
    """What was scraped: one page, whose series have their times in common."""
    return tuple(said.get(label, "") for label in ("cluster", "job", "instance", "namespace", "pod"))


def workload_of(said: Said) -> tuple[str, str, str] | None:
    """The pod that an exporter gives a GPU to, as far as its labels tell: not the exporter's own."""
    if said.get("exported_pod"):
        return pod_of(said)
    own = any(_EXPORTER.search(said.get(label, "")) for label in ("pod", "container", "namespace"))
    return None if own else pod_of(said)
