"""A model's parameters as linear layers: how many, by what name, and how tensor parallelism spreads them."""

import json
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass

TYPES: Mapping[str, list[str]] = json.loads(pkgutil.get_data(__package__, "type_traits.json") or b"")
"""Model types by a trait that no config states: feed-forward blocks of two matrices, not three (`ungated`), a first
layer without experts, a gate on attention's output, a tied output layer (the class in transformers 5.19), and learned
positions.
"""


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear layers of one decoder layer that go by one name. All experts are the first: `mlp.experts.0.gate_proj`.

    Tensor-parallel ranks divide it into no more than `most_parts`: as many as KV heads, or 1 where each has it whole.
    `padded_parameters` is what they grow to where a kernel pads their sizes.
    """

    name: str
    parameters: int
    most_parts: int | None = None
    padded_parameters: int = 0

    def share(self, tensor_parallel: int) -> int:
        """Into how many parts the ranks divide it."""
        return tensor_parallel if self.most_parts is None else min(tensor_parallel, self.most_parts)


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
