"""What the family tests read from a config: a letter for every layer, or the field it is refused by."""

from typing import Any

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.layers import LayerKind

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
}


def letters(config: dict[str, Any]) -> str:
    """A letter for every layer."""
    return "".join(LETTERS[layer.kind] for layer in parse_architecture(config).layers)


def refused(config: dict[str, Any]) -> str | None:
    """The field that a config is refused by, or None."""
    try:
        parse_architecture(config)
    except KvModelError as error:
        return error.field
    return None
