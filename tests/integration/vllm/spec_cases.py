"""Cases of layers whose pool vLLM's own classes and kvdiag compute from the same config."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvdiag.kv.layout.capacity import pool_capacity
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.layers import Architecture
from tests.integration.vllm.conftest import VllmHome

Case = dict[str, Any]

LIMIT_SECONDS = 300.0


def engine_answers(vllm: VllmHome, program: Path, cases: Mapping[str, Case], folder: Path) -> dict[str, Case]:
    """The engine's figures for every case, by a program that imports `bare_layers`."""
    given = folder / "cases.json"
    given.write_text(json.dumps(list(cases.values())), encoding="utf-8")
    return dict(zip(cases, vllm.answers(program, given, limit_seconds=LIMIT_SECONDS), strict=True))


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
