"""Which metric in a Prometheus reports which field: names of DCGM, nvidia_gpu_exporter, cAdvisor, kube-state-metrics
and kvdiag itself. Those of the engines stand in `kvdiag.engines`. Pure.

Names of DCGM: dcgm-exporter's default-counters.csv (framebuffer in MiB). Of nvidia_gpu_exporter: METRICS.md. Of
cAdvisor and kube-state-metrics: their lists of metrics (container_memory_rss is the cgroup's anonymous memory).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Part = Literal["engine", "config", "device", "process", "torch", "host", "container", "about", "up"]
"""What of a sample, or of the facts, a metric belongs to."""

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """The field that a metric reports. `scale` converts it to bytes; `where` are labels that its series must have.

    Of several names for one field the one with the lowest `priority` counts.
    """

    part: Part
    field: str
    priority: int = 0
    scale: int = 1
    where: tuple[tuple[str, str], ...] = ()


_KVDIAG = {
    "kvdiag_kv_usage_ratio": Meaning(part="engine", field="kv_usage_ratio", priority=9),
    "kvdiag_requests_running": Meaning(part="engine", field="requests_running", priority=9),
    "kvdiag_requests_waiting": Meaning(part="engine", field="requests_waiting", priority=9),
    "kvdiag_kv_pool_bytes": Meaning(part="config", field="pool_bytes"),
    "kvdiag_kv_capacity_tokens": Meaning(part="config", field="capacity_tokens"),
    "kvdiag_requests_max_concurrency": Meaning(part="config", field="max_concurrency"),
    "kvdiag_memory_component_bytes": Meaning(part="about", field="weights_bytes", where=(("component", "weights"),)),
    "kvdiag_gpu_memory_total_bytes": Meaning(part="device", field="total_bytes"),
    "kvdiag_gpu_memory_used_bytes": Meaning(part="device", field="used_bytes"),
    "kvdiag_gpu_memory_free_bytes": Meaning(part="device", field="free_bytes"),
    "kvdiag_gpu_memory_driver_reserved_bytes": Meaning(part="device", field="driver_reserved_bytes"),
    "kvdiag_gpu_process_memory_bytes": Meaning(part="process", field="used_bytes"),
    **{
        f"kvdiag_torch_{name}": Meaning(part="torch", field=name)
        for name in (
            "allocated_bytes",
            "reserved_bytes",
            "requested_bytes",
            "inactive_split_bytes",
            "releasable_bytes",
            "stranded_bytes",
            "alloc_retries_total",
            "ooms_total",
        )
    },
    "kvdiag_host_resident_bytes": Meaning(part="host", field="resident_bytes"),
    "kvdiag_host_anonymous_bytes": Meaning(part="host", field="anonymous_bytes"),
}

_GPU = {
    "DCGM_FI_DEV_FB_TOTAL": Meaning(part="device", field="total_bytes", priority=1, scale=MIB),
    # Not `used_bytes`, which everywhere here is total - free: DCGM leaves the driver's reservation out of it.
    "DCGM_FI_DEV_FB_USED": Meaning(part="device", field="taken_bytes", priority=1, scale=MIB),
    "DCGM_FI_DEV_FB_FREE": Meaning(part="device", field="free_bytes", priority=1, scale=MIB),
    "DCGM_FI_DEV_FB_RESERVED": Meaning(part="device", field="driver_reserved_bytes", priority=1, scale=MIB),
    "nvidia_smi_memory_total_bytes": Meaning(part="device", field="total_bytes", priority=2),
    "nvidia_smi_memory_used_bytes": Meaning(part="device", field="taken_bytes", priority=2),
    "nvidia_smi_memory_free_bytes": Meaning(part="device", field="free_bytes", priority=2),
    "nvidia_smi_memory_reserved_bytes": Meaning(part="device", field="driver_reserved_bytes", priority=2),
}

_CONTAINER = {
    "container_memory_rss": Meaning(part="container", field="anonymous_bytes"),
    "container_memory_working_set_bytes": Meaning(part="container", field="resident_bytes"),
    "container_spec_memory_limit_bytes": Meaning(part="about", field="host_limit_bytes", priority=1),
    "kube_pod_container_resource_limits": Meaning(
        part="about", field="host_limit_bytes", where=(("resource", "memory"), ("unit", "byte"))
    ),
    "kube_pod_container_info": Meaning(part="about", field="image"),
    "kube_pod_info": Meaning(part="about", field="node"),
}

_PROCESS = {
    "process_resident_memory_bytes": Meaning(part="host", field="resident_bytes", priority=9),
    "process_start_time_seconds": Meaning(part="about", field="start_seconds"),
    "up": Meaning(part="up", field="up"),
}

KVDIAG: Mapping[str, Meaning] = MappingProxyType(_KVDIAG)
GPU: Mapping[str, Meaning] = MappingProxyType(_GPU)
"""Told by an exporter of the node, which knows the server at most by its pod's name."""

CONTAINER: Mapping[str, Meaning] = MappingProxyType(_CONTAINER)
"""Told by the node and the cluster of a pod."""

PROCESS: Mapping[str, Meaning] = MappingProxyType(_PROCESS)
"""Told by any target: to be asked only of those that are a replica's."""
