"""The cost model against vLLM 0.32's own engine, for models whose layers keep their tokens in different ways.

Every `architectures/*.json` is the config of a model of some kind, as small as the CPU kernels take it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.kernel_blocks import Platform
from kvdiag.kv.layout.layers import Architecture
from kvdiag.kv.layout.residency import decode_blocks
from tests.integration.vllm.cli import kvdiag
from tests.integration.vllm.conftest import VllmHome

pytestmark = pytest.mark.real_vllm

CONTEXT_TOKENS = 20_000
PROGRAM = Path(__file__).with_name("capacities.py")
CONFIGS = tuple(sorted((Path(__file__).parent / "architectures").glob("*.json")))
LIMIT_SECONDS = 1800.0

EngineReports = Callable[[Path], dict[str, Any]]


@pytest.fixture(scope="module")
def engine_reports(vllm: VllmHome) -> EngineReports:
    """What the engine reports of an architecture, from one run of `capacities.py` for all of them."""
    by_config = dict(zip(CONFIGS, vllm.answers(PROGRAM, *CONFIGS, limit_seconds=LIMIT_SECONDS), strict=True))
    return lambda config: by_config[config]


of_each_architecture = pytest.mark.parametrize("config", CONFIGS, ids=[config.stem for config in CONFIGS])


def asked_blocks(architecture: Architecture, reported: dict[str, Any]) -> int | None:
    """The block size to plan with; without AMX a CPU takes another for latent attention, as the plan's note says."""
    return 16 if architecture.uses_mla and not reported["has_amx"] else None


def asked_states(architecture: Architecture, reported: dict[str, Any]) -> str:
    """The format of states to plan with: where a CPU decides nothing it is the model's own, as the plan's note says."""
    return (
        architecture.state_dtype or architecture.dtype if reported["state_dtype"] == "auto" else reported["state_dtype"]
    )


@of_each_architecture
def test_blocks_tokens_and_concurrency_are_the_engines_own(config: Path, engine_reports: EngineReports) -> None:
    """Of a pool of so many bytes the model makes the very numbers that the engine reports."""
    reported = engine_reports(config)
    architecture = parse_architecture(json.loads(config.read_text(encoding="utf-8")))
    block = asked_blocks(architecture, reported)
    result = kvdiag(
        "fit",
        str(config),
        *("--kv-pool-bytes", str(reported["pool_bytes"]), "--context", str(CONTEXT_TOKENS), "--platform", "cpu"),
        *("--max-num-batched-tokens", str(reported["max_num_batched_tokens"]), "--output", "json"),
        *(("--mamba-ssm-cache-dtype", asked_states(architecture, reported)) if architecture.is_hybrid else ()),
        *(() if block is None else ("--block-size", str(block))),
    )
    figures = ("num_blocks", "block_size", "capacity_tokens", "max_concurrency")
    assert {name: reported[name] for name in figures} == {name: result.document[name] for name in figures}


@of_each_architecture
def test_blocks_held_are_those_of_the_resident_tokens(config: Path, engine_reports: EngineReports) -> None:
    """After every step of a request its blocks are those predicted for its tokens, and at most those of its prefill."""
    reported = engine_reports(config)
    architecture = parse_architecture(json.loads(config.read_text(encoding="utf-8")))
    deployment = Deployment(
        platform=Platform.CPU,
        max_num_batched_tokens=reported["max_num_batched_tokens"],
        block_size_tokens=asked_blocks(architecture, reported),
        state_dtype=asked_states(architecture, reported),
    )
    layout = deployed_layout(architecture, deployment)
    serving = deployment.request_terms(architecture, encoder_tokens=0)

    for prompt_tokens, steps in reported["steps"].items():
        decoding = [(tokens, held) for tokens, held in steps if tokens > int(prompt_tokens)]
        predicted = [(tokens, decode_blocks(layout, resident_tokens=tokens, terms=serving)) for tokens, _ in decoding]
        assert len(decoding) > 10
        assert decoding == predicted


def test_the_architectures_are_of_many_kinds() -> None:
    """Heads of all groupings, windows of all mixtures, latent attention and two kinds of state."""
    parsed: list[Any] = [parse_architecture(json.loads(config.read_text(encoding="utf-8"))) for config in CONFIGS]
    assert len(CONFIGS) == len({one.model_type for one in parsed})
    assert {"full", "sliding", "mla", "gated_delta_net", "short_conv"} <= {kind for one in parsed for kind in one.kinds}
