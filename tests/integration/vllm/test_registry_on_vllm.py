"""Every class that vLLM registers is known, and those that can be built here have the layers that vLLM builds."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.families.registry import TYPE_OF_ARCHITECTURE, TYPE_OF_WRAPPER, UNMODELLED
from kvdiag.kv.layout.layers import AttentionLayer, LatentLayer, LayerKind, StateLayer
from tests.integration.vllm.conftest import VllmHome

pytestmark = pytest.mark.real_vllm

PROGRAM = Path(__file__).with_name("registry_layers.py")
LIMIT_SECONDS = 900.0
LEAST_BUILT = 115
SPECS = {
    LayerKind.FULL: "FullAttentionSpec",
    LayerKind.SLIDING: "SlidingWindowSpec",
    LayerKind.CHUNKED: "ChunkedLocalAttentionSpec",
    LayerKind.CROSS_ATTENTION: "CrossAttentionSpec",
}


@pytest.fixture(scope="module")
def registered(vllm: VllmHome) -> tuple[list[str], list[dict[str, Any]]]:
    """The names that vLLM registers, and what it builds of their default configs."""
    names, *built = vllm.answers(PROGRAM, limit_seconds=LIMIT_SECONDS)
    return names, built


def expected(config: dict[str, Any]) -> Counter[tuple[Any, ...]]:
    """The layers of a config as kvdiag reads it: kind, heads, sizes, window and chunk."""
    found: Counter[tuple[Any, ...]] = Counter()
    for layer in parse_architecture(config).layers:
        if isinstance(layer, StateLayer):
            found["state",] += 1
        elif isinstance(layer, LatentLayer):
            found["latent", layer.latent_size] += 1
        elif isinstance(layer, AttentionLayer) and layer.kind in SPECS:
            sizes = (layer.kv_heads, layer.head_size, layer.head_size_v, layer.window_tokens, layer.chunk_tokens)
            found[SPECS[layer.kind], *sizes] += 1
    return found


def built(layers: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    """The same of vLLM's specs."""
    found: Counter[tuple[Any, ...]] = Counter()
    for layer in layers:
        match layer["spec"]:
            case "MambaSpec":
                found["state",] += 1
            case "MLAAttentionSpec":
                found["latent", layer["head_size"]] += 1
            case spec:
                sizes = ("num_kv_heads", "head_size", "head_size_v", "sliding_window", "attention_chunk_size")
                found[spec, *(layer[name] for name in sizes)] += 1
    return found


def test_every_registered_class_is_known(registered: tuple[list[str], list[dict[str, Any]]]) -> None:
    """A class that a newer vLLM adds has to be mapped to a family, or refused by its name."""
    names, _ = registered

    assert [] == sorted(set(names) - {*TYPE_OF_ARCHITECTURE, *TYPE_OF_WRAPPER, *UNMODELLED})


def test_layers_are_those_that_vllm_builds(registered: tuple[list[str], list[dict[str, Any]]]) -> None:
    """Of its default config, each class has the engine's layers, or is refused by its name."""
    _, classes = registered
    unlike = {}
    refused = set()
    for one in classes:
        try:
            if expected(one["config"]) != built(one["layers"]):
                unlike[one["name"]] = (expected(one["config"]), built(one["layers"]))
        except KvModelError:
            refused.add(one["name"])

    assert {} == unlike
    assert refused <= set(UNMODELLED)
    assert len(classes) - len(refused) >= LEAST_BUILT
