"""What the readers of all families share: depth, heads, layer names, and layers made of them.

A family's reader puts names to its layers, in their order, and these functions make layers of names and fields. A field
is read under every name that vLLM and transformers accept. A layer of unknown type is an error that names the field,
because its bytes are unknown and the textbook formula would be wrong by a factor. Nothing here knows of GPUs,
parallelism or block sizes: those are kv/layout's.
"""

import json
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvdiag.errors import KvModelError
from kvdiag.kv.bounds import check_range
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.layout.layers import AttentionLayer, Layer, LayerKind, StateLayer, StateShape

CONFIG_NAMES: Mapping[str, Any] = json.loads(pkgutil.get_data(__package__, "config_names.json") or b"")
# The deepest published decoder has 132 layers; the limit keeps a hostile config from costing time.
MAX_LAYERS = 1024
MAX_HEADS = 4096
# The residual's width; BLOOM calls it n_embed (transformers BloomConfig.__post_init__), Moondream dim.
WIDTH_NAMES: Sequence[str] = CONFIG_NAMES["width"]
_LARGEST_HEAD = 1 << 14
# Names in `layer_types` of models that also have layers with a state.
ATTENTION_NAMES = frozenset({"full_attention", "attention"})
_STATE_NAMES = frozenset({"linear_attention", "mamba", "conv"})


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """The layers of a model as its family reads them from a config, with the draft layers of its MTP modules, and how
    many of those each draft token has (None: all are loaded for any number).
    """

    attention_heads: int
    layers: tuple[Layer, ...]
    draft_layers: tuple[Layer, ...] = ()
    layers_per_draft: int | None = None
    state_dtype: str | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise KvModelError("num_hidden_layers is 0: a model needs layers", "num_hidden_layers")

    @property
    def depth(self) -> int:
        """The number of decoder layers; a family lists each at least once."""
        return self.layers[-1].index + 1


Family = Callable[[Fields], ModelLayers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Head counts and the head size of a config's attention layers."""

    attention_heads: int
    kv_heads: int
    head_size: int

    def __post_init__(self) -> None:
        check_range("num_attention_heads", min(self.attention_heads, self.kv_heads, self.head_size), 1)
        if self.kv_heads > self.attention_heads or self.attention_heads % self.kv_heads:
            raise KvModelError(
                f"num_key_value_heads {self.kv_heads} must divide num_attention_heads {self.attention_heads}",
                "num_key_value_heads",
            )


def read_depth(text: Fields) -> int:
    """The number of decoder layers (ModelArchConfigConvertorBase.get_num_hidden_layers, HF attribute maps)."""
    return text.integer(*CONFIG_NAMES["depth"], high=MAX_LAYERS)


def read_heads(text: Fields, *, kv_heads: int | None = None) -> Heads:
    """Heads as ModelArchConfigConvertorBase reads them: get_total_num_kv_heads, get_head_size."""
    attention_heads = text.maybe_integer(*CONFIG_NAMES["attention_heads"], high=MAX_HEADS)
    if kv_heads is None:
        kv_heads = text.maybe_integer(*CONFIG_NAMES["kv_heads"], high=MAX_HEADS)
    size = text.maybe_integer(*CONFIG_NAMES["head_size"], low=0, high=_LARGEST_HEAD) or None
    if attention_heads is None:
        # Only head_dim and the KV heads cost anything: a config that states both needs no query heads.
        attention_heads = text.integer("num_attention_heads", default=kv_heads if size else None)
    if size is None:
        hidden = text.integer(*WIDTH_NAMES)
        if hidden < attention_heads:
            raise text.error("hidden_size", f"{hidden} is less than num_attention_heads {attention_heads}")
        if hidden % attention_heads:
            # transformers LlamaConfig.validate_architecture refuses it.
            raise text.error(
                "hidden_size",
                f"{hidden} is not a multiple of num_attention_heads {attention_heads}, and there is no head_dim",
            )
        size = hidden // attention_heads
    return Heads(attention_heads=attention_heads, kv_heads=kv_heads or attention_heads, head_size=size)


def window_of(text: Fields) -> int | None:
    """`sliding_window`; 0 means none (config/model.py::ModelConfig.__post_init__)."""
    return text.maybe_integer("sliding_window", low=0, high=1 << 30) or None


def layer_names(text: Fields, depth: int) -> tuple[str, ...] | None:
    """`layer_types`, one name per layer, or a `layer_types_count` summary spread out; None without either."""
    names = text.strings("layer_types")
    if names is not None:
        if len(names) < depth:
            raise text.error("layer_types", f"names {len(names)} layers and num_hidden_layers is {depth}")
        return names[:depth]
    counts = text.child("layer_types_count")
    return None if counts is None else spread_names(counts, text.path("layer_types_count"), depth)


def spread_names(counts: Fields, field: str, depth: int) -> tuple[str, ...]:
    """Layer names from how many there are of each, rarer ones spaced evenly among the others."""
    totals = {name: counts.integer(name, low=0, high=MAX_LAYERS) for name in counts.names()}
    if sum(totals.values()) != depth:
        raise KvModelError(f"{field} counts {sum(totals.values())} layers and num_hidden_layers is {depth}", field)
    placed = [((rank + 1) / total, -total, name) for name, total in totals.items() for rank in range(total)]
    return tuple(name for _, _, name in sorted(placed))


def names_where(full: Iterable[object], other: str = "sliding_attention") -> tuple[str, ...]:
    """`full_attention` for each true entry, and `other` for the rest."""
    return tuple("full_attention" if flag else other for flag in full)


def every_nth(depth: int, period: int, *, other: str = "sliding_attention", first: bool = False) -> tuple[str, ...]:
    """Layer names where the last (or with `first` the first) of each `period` layers has full attention."""
    full = 0 if first else period - 1
    return names_where((index % period == full for index in range(depth)), other)


def full_layer(index: int, heads: Heads, *, head_size_v: int | None = None) -> AttentionLayer:
    """A full-attention layer."""
    return AttentionLayer(
        index=index,
        kind=LayerKind.FULL,
        kv_heads=heads.kv_heads,
        head_size=heads.head_size,
        head_size_v=heads.head_size if head_size_v is None else head_size_v,
    )


def full_layers(depth: int, heads: Heads) -> tuple[AttentionLayer, ...]:
    """`depth` full-attention layers."""
    return tuple(full_layer(index, heads) for index in range(depth))


def full_model(text: Fields, heads: Heads) -> ModelLayers:
    """A model with the same full attention in every layer."""
    return ModelLayers(heads.attention_heads, full_layers(read_depth(text), heads))


def sliding_layer(index: int, heads: Heads, window_tokens: int, *, head_size_v: int | None = None) -> AttentionLayer:
    """A sliding-window layer."""
    full = full_layer(index, heads, head_size_v=head_size_v)
    return replace(full, kind=LayerKind.SLIDING, window_tokens=window_tokens)


def typed_layers(
    text: Fields, names: tuple[str, ...], heads: Heads, window_tokens: int | None
) -> tuple[AttentionLayer, ...]:
    """Layers from the `layer_types` names of attention models."""
    layers: list[AttentionLayer] = []
    for index, name in enumerate(names):
        match name:
            case "full_attention" | "attention" | "global_attention":
                layers.append(full_layer(index, heads))
            case "sliding_attention" | "window_attention" | "local_attention":
                if window_tokens is None:
                    raise text.error("sliding_window", "is missing: layer_types has sliding-window layers")
                layers.append(sliding_layer(index, heads, window_tokens))
            case "chunked_attention":
                chunk = text.integer("attention_chunk_size", high=1 << 30)
                layers.append(replace(full_layer(index, heads), kind=LayerKind.CHUNKED, chunk_tokens=chunk))
            case _:
                raise unknown_layer(text, name)
    return tuple(layers)


def typed_model(text: Fields, names: tuple[str, ...], window_tokens: int | None) -> ModelLayers:
    """An attention model whose layers differ by name alone."""
    heads = read_heads(text)
    return ModelLayers(heads.attention_heads, typed_layers(text, names, heads, window_tokens))


def mixed_model(text: Fields, names: tuple[str, ...], kind: LayerKind, state: StateShape) -> ModelLayers:
    """A model of attention layers and layers with a state: attention where the name says so, a state elsewhere."""
    heads = read_heads(text)
    layers: list[Layer] = []
    for index, name in enumerate(names):
        if name in ATTENTION_NAMES:
            layers.append(full_layer(index, heads))
        elif name in _STATE_NAMES:
            layers.append(StateLayer(index=index, kind=kind, state=state))
        else:
            raise unknown_layer(text, name)
    return ModelLayers(heads.attention_heads, tuple(layers))


def unknown_layer(text: Fields, name: str) -> KvModelError:
    """The error for a layer type that a family does not know."""
    problem = f"has a layer of type {name[:40]!a}, whose KV cost is not known; pass --kv-bytes-per-token instead"
    return text.error("layer_types", problem)
