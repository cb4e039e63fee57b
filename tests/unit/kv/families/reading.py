"""What the family tests read from a config: a letter for every layer, and a layer in words."""

from dataclasses import fields
from typing import Any

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.layers import Layer, LayerKind, StateLayer

LETTERS = {
    LayerKind.FULL: "F",
    LayerKind.SLIDING: "W",
    LayerKind.CHUNKED: "C",
    LayerKind.MLA: "L",
    LayerKind.MLA_DSA: "I",
    LayerKind.MAMBA1: "1",
    LayerKind.MAMBA2: "2",
    LayerKind.GATED_DELTA_NET: "g",
    LayerKind.KIMI_DELTA: "k",
    LayerKind.LINEAR: "l",
    LayerKind.SHORT_CONV: "c",
    LayerKind.CROSS_ATTENTION: "x",
    LayerKind.SHARED: "s",
    LayerKind.ENCODER_ONLY: "e",
    LayerKind.NO_CACHE: "-",
    LayerKind.SLIDING_MLA: "w",
    LayerKind.COMPRESSED_MLA: "m",
}

# Fields that few layers have, and their values in the others.
RARE = {
    "index_row_bytes": None,
    "sink_tokens": 0,
    "pool_tokens": 1,
    "pool_row_bytes": 0,
    "positions_per_token": 1,
    "replicated": False,
}


def letters(config: dict[str, Any]) -> str:
    """A letter for every layer."""
    return "".join(LETTERS[layer.kind] for layer in parse_architecture(config).layers)


def layer_in_words(layer: Layer) -> str:
    """A letter for its kind, and its other fields, or its state's, in their order."""
    holder = layer.state if isinstance(layer, StateLayer) else layer
    names = [one.name for one in fields(holder) if one.name not in ("index", "kind", "unshared")]
    sizes = [getattr(holder, name) for name in names if name not in RARE or getattr(holder, name) != RARE[name]]
    return " ".join([LETTERS[layer.kind], *("-" if size is None else f"{size}" for size in sizes)])
