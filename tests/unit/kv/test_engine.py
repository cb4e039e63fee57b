"""What vLLM 0.32 itself made of configs: its grouping and capacity, and its scheduler's blocks step by step."""

import json
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.capacity import pool_capacity
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.kernel_blocks import Platform
from kvdiag.kv.layout.residency import decode_blocks
from tests.unit.kv.vectors import DATA

RECORDS: dict[str, Any] = json.loads((DATA / "vllm032_engine.json").read_text())


def deployment_of(record: dict[str, Any]) -> Deployment:
    """The settings that the engine ran with."""
    settings = dict(record["deployment"])
    platform = Platform(settings.pop("platform", "cuda"))
    return Deployment(platform=platform, **settings)


def name_of(record: dict[str, Any]) -> str:
    """The config and what is not as usual."""
    settings = {name: value for name, value in record["deployment"].items() if not name.startswith("max_")}
    return f"{record['config']} {settings} {record.get('prompt_tokens', '')}"


@pytest.mark.parametrize("record", RECORDS["capacities"], ids=name_of)
def test_capacity_of_a_config_equals_the_engines_own(record: dict[str, Any]) -> None:
    """Blocks, groups, bytes per block, tokens and concurrency from a config are those that the engine computed."""
    architecture = parse_architecture(RECORDS["configs"][record["config"]])
    deployment = deployment_of(record)

    layout = deployed_layout(architecture, deployment)
    capacity = pool_capacity(
        layout,
        pool_bytes=record["pool_bytes"],
        context_tokens=record["context_tokens"],
        terms=deployment.request_terms(architecture),
    )

    actual = {
        "num_blocks": capacity.num_blocks,
        "groups": len(layout.groups),
        "tokens": capacity.capacity_tokens,
        "max_concurrency": capacity.max_concurrency,
        "bytes_per_block": list(capacity.bytes_per_block),
    }
    expected = record["expect"]
    assert expected == {name: actual[name] for name in expected}


@pytest.mark.parametrize("record", RECORDS["blocks"], ids=name_of)
def test_blocks_held_equal_the_schedulers_own(record: dict[str, Any]) -> None:
    """At every length a decoding request holds what the engine's block pool counted."""
    architecture = parse_architecture(RECORDS["configs"][record["config"]])
    deployment = deployment_of(record)
    layout = deployed_layout(architecture, deployment)
    serving = deployment.request_terms(architecture, encoder_tokens=0)

    actual = [
        (tokens, decode_blocks(layout, resident_tokens=tokens, terms=serving))
        for first, last, _ in record["decode"]
        for tokens in range(first, last + 1)
    ]

    expected = [(tokens, blocks) for first, last, blocks in record["decode"] for tokens in range(first, last + 1)]
    assert expected == actual


def test_the_records_are_many() -> None:
    """The comparison covers what it says: hundreds of capacities, tens of thousands of steps."""
    steps = sum(last - first + 1 for one in RECORDS["blocks"] for first, last, _ in one["decode"])

    assert len(RECORDS["capacities"]) >= 220
    assert len(RECORDS["blocks"]) >= 120
    assert steps > 10_000
