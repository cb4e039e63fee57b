"""Which metric in a Prometheus reports which field: names of DCGM, nvidia_gpu_exporter, cAdvisor, kube-state-metrics
and kvdiag itself, by the table in prometheus_names.json. Those of the engines stand in `kvdiag.engines`.

Names of DCGM: dcgm-exporter's default-counters.csv (framebuffer in MiB). Of nvidia_gpu_exporter: METRICS.md. Of
cAdvisor and kube-state-metrics: their lists of metrics (container_memory_rss is the cgroup's anonymous memory).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Literal

Part = Literal["engine", "config", "device", "process", "torch", "host", "container", "about", "up"]
"""What of a sample, or of the facts, a metric belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """The field that a metric reports. `scale` converts it to bytes, or makes 0 of it.

    `where` are labels that its series must have. Of several names for one field the one with the lowest `priority`
    counts. Series of one target that differ in the labels `adds` alone, which may be `__name__`, add up; of those that
    differ in `ranks` the largest counts.
    """

    part: Part
    field: str
    priority: int = 0
    scale: int = 1
    where: tuple[tuple[str, str], ...] = ()
    adds: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()


def escaped(name: str) -> str:
    """A metric's name as Prometheus 2 stores it where prometheus_client 0.22 to 0.26 serves it: `_` for `:`.

    It asks for OpenMetrics, in which samples, but not their types, are escaped so (client_python, issue 1177).
    """
    return name.replace(":", "_")


def _read(group: str) -> Mapping[str, Meaning]:
    return MappingProxyType(
        {
            name: Meaning(
                **{**fields, "where": tuple(fields.get("where", {}).items()), "adds": tuple(fields.get("adds", ()))}
            )
            for name, fields in _NAMES[group].items()
        }
    )


_NAMES = json.loads(resources.files("kvdiag.sources").joinpath("prometheus_names.json").read_bytes())

KVDIAG = _read("kvdiag")
GPU = _read("gpu")
"""Reported by an exporter of the node, which knows the server at most by its pod's name. DCGM's used bytes are
`taken_bytes`: they leave the driver's reservation out, where `used_bytes` is total - free.
"""

CONTAINER = _read("container")
"""Reported by the node and the cluster for a pod."""

PROCESS = _read("process")
"""Reported by any target: query only those that are a replica's."""
