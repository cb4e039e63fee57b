"""Cases of layers whose pool vLLM's own classes and kvdiag compute from the same config."""

from typing import Any

from kvdiag.kv.layout.capacity import pool_capacity
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.layers import Architecture

Case = dict[str, Any]


def own_figures(case: Case, architecture: Architecture, deployment: Deployment) -> Case:
    """The same figures as kvdiag computes them."""
    layout = deployed_layout(architecture, deployment)
    capacity = pool_capacity(
        layout,
        pool_bytes=case["pool_bytes"],
        context_tokens=case["context"],
        terms=deployment.request_terms(architecture),
    )
    return {
        "num_blocks": capacity.num_blocks,
        "groups": sorted(len(group.layers) for group in layout.groups),
        "capacity_tokens": capacity.capacity_tokens,
        "max_concurrency": capacity.max_concurrency,
    }
