"""What LoRA slots take on a GPU, which vLLM allocates for every linear layer before it sizes the pool.

As the `create_lora_weights` of lora/layers/ do (base_linear.py, column_parallel_linear.py, vocab_parallel_embedding.py,
logits_processor.py): of a layer whose outputs are divided, the first matrix is whole on every rank; of one whose inputs
are, the second. Only for classes that were compared with vLLM's manager.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import text_fields
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.layout.dtypes import model_dtype_bytes
from kvdiag.kv.layout.layers import Architecture, AttentionLayer
from kvdiag.kv.layout.pages import ceil_div
from kvdiag.kv.weights.linear_layers import TYPES

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""config/lora.py::MaxLoRARanks"""

MOST_SLOTS = 1 << 16
_MOST_VOCABULARY = 258_048
"""lora/layers/logits_processor.py: that of a larger one is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSlots:
    """Slots for `count` adapters of `rank`, in elements of so many bytes. `vocabulary` is 0 where the embedding and the
    output layer have none.
    """

    count: int
    rank: int
    element_bytes: int
    hidden: int
    width: int
    vocabulary: int
    attention_heads: int
    layers: tuple[AttentionLayer, ...]

    def stage_bytes(self, tensor_parallel: int, stage_ends: Sequence[int]) -> tuple[int, ...]:
        """Bytes on one rank of each pipeline stage."""
        rows = [0] * len(stage_ends)
        for layer in self.layers:
            stage = next(stage for stage, end in enumerate(stage_ends) if layer.index < end)
            rows[stage] += self._layer_rows(layer, tensor_parallel)
        if self.vocabulary:
            rows[0] += self.vocabulary + self.hidden
            rows[-1] += self.vocabulary + self.hidden
        return tuple(count * self.count * self.rank * self.element_bytes for count in rows)

    def _layer_rows(self, layer: AttentionLayer, ranks: int) -> int:
        """Elements of one adapter of rank 1: query, key and value, their output, gate, up and down."""
        query = self.attention_heads // ranks * layer.head_size
        key = max(1, layer.kv_heads // ranks) * layer.head_size
        inner = ceil_div(self.width, ranks)
        return 3 * self.hidden + query + 2 * key + query + self.hidden + 3 * (self.hidden + inner)


def adapter_slots(
    config: Mapping[str, object], architecture: Architecture, *, count: int, rank: int, dtype: str
) -> AdapterSlots:
    """The slots of a model. Raises KvModelError where they are not known for it."""
    top, text = Fields(config), text_fields(config)
    classes = frozenset(top.strings("architectures") or ())
    layers = tuple(layer for layer in architecture.layers if isinstance(layer, AttentionLayer))
    whole = architecture.model_type in TYPES["adapted_with_embeddings"]
    known = whole or architecture.model_type in TYPES["adapted"]
    wrapped = text.path("hidden_size") != "hidden_size" or not classes <= frozenset(TYPES["adapted_classes"])
    if not known or wrapped or len(layers) != architecture.depth:
        raise KvModelError(
            f"--enable-lora is not modelled for this {architecture.model_type}: leave it out, and pass --weights BYTES "
            "with the adapters' slots included",
            "enable_lora",
        )
    vocabulary = text.integer("vocab_size", high=1 << 26) if whole else 0
    if vocabulary > _MOST_VOCABULARY:
        raise KvModelError(f"vLLM has no LoRA for a vocabulary of more than {_MOST_VOCABULARY:,}", "vocab_size")
    return AdapterSlots(
        count=count,
        rank=rank,
        element_bytes=model_dtype_bytes(architecture.dtype if dtype == "auto" else dtype),
        hidden=text.integer("hidden_size"),
        width=text.integer("intermediate_size"),
        vocabulary=vocabulary,
        attention_heads=architecture.attention_heads,
        layers=layers,
    )
