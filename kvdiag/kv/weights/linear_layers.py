"""A model's parameters as linear layers: how many, by what name, and how tensor parallelism spreads them."""

import json
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

TYPES: Mapping[str, list[str]] = json.loads(pkgutil.get_data(__package__, "type_traits.json") or b"")
"""Model types by a trait that no config states: feed-forward blocks of two matrices, not three (`ungated`), a first
layer without experts, a gate on attention's output, a tied output layer (the class in transformers 5.19), and learned
positions.
"""


class Sharding(StrEnum):
    """What tensor-parallel ranks share of a linear layer: a part each, as many parts as KV heads, or nothing."""

    DIVIDED = "divided"
    KV_HEADS = "kv_heads"
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear layers of one decoder layer that go by one name. All experts are the first: `mlp.experts.0.gate_proj`.

    `padded_parameters` is what they grow to where a kernel pads their sizes.
    """

    name: str
    parameters: int
    spread: Sharding = Sharding.DIVIDED
    kv_heads: int = 1
    padded_parameters: int = 0

    def share(self, tensor_parallel: int) -> int:
        """Into how many parts the ranks divide it."""
        match self.spread:
            case Sharding.DIVIDED:
                return tensor_parallel
            case Sharding.KV_HEADS:
                return min(tensor_parallel, self.kv_heads)
            case Sharding.REPLICATED:
                return 1


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """One decoder layer. `plain` parameters (norms, routers, convolutions) are on every rank and never quantized."""

    linears: tuple[Linear, ...] = ()
    plain: int = 0

    def __add__(self, other: "LayerParameters") -> "LayerParameters":
        """The parameters of both."""
        return LayerParameters(self.linears + other.linears, self.plain + other.plain)

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.plain + sum(linear.parameters for linear in self.linears)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """A whole model. `head` is 0 where the output layer is the embedding."""

    embedding: int
    head: int
    layers: tuple[LayerParameters, ...]
    other: int = 0

    @property
    def total(self) -> int:
        """All parameters, tied ones once."""
        return self.embedding + self.head + self.other + sum(layer.total for layer in self.layers)


def block(name: str, *, inputs: int, width: int, matrices: int = 3) -> LayerParameters:
    """A feed-forward block: up (and gate, where `matrices` is 3) and down; without a width there is none."""
    if not width:
        return LayerParameters()
    up = "gate_proj" if matrices == 3 else "up_proj"  # noqa: PLR2004 - the third matrix is the gate
    return LayerParameters(
        (
            Linear(f"{name}.{up}", (matrices - 1) * inputs * width),
            Linear(f"{name}.down_proj", inputs * width),
        )
    )
