"""A GGUF header -> the rows and states of llama.cpp's caches.

As src/llama-model.cpp (b11434) reads it: `load_hparams` for what all architectures share, the architecture's own
load_arch_hparams for windows and states, `create_memory` for which layers keep what. gguf_architectures.json lists the
architectures by how their layers differ; one that is not listed is an error, because a cache that is not known must
not be taken for a plain one.
"""

import json
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvdiag.errors import KvModelError
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.pools.cell_model import CellLayer, CellModel
from kvdiag.kv.pools.gguf_header import GgufHeader

_KINDS: Mapping[str, Any] = json.loads(pkgutil.get_data(__package__, "gguf_architectures.json") or b"")
_KNOWN = frozenset(name for kind in _KINDS.values() for name in kind)
_MAX_LAYERS, _MAX_SIZE, _MAX_CONTEXT = 512, 1 << 22, 1 << 30
# Before GLM 5.2 every layer has an indexer; from there on the first two, then every fourth (glm-dsa.cpp).
_GLM_SHARED_INDEXERS_FROM_TOKENS = 1_048_576
_GLM_OWNED_LAYERS, _GLM_INDEXER_EVERY = 2, 4
_MAX_ROPE_SCALE = 1 << 20
_DEFAULT_TOKEN_SHIFTS = 2
_DEFAULT_KDA_STEPS = 3


_STATEFUL = (
    "recurrent",
    "side_by_side",
    "states_without_kv_heads",
    "states_without_feed_forward",
    "states_by_interval",
)


def keeps_states(architecture: str) -> bool:
    """Whether layers of this architecture keep a state for each request."""
    return any(architecture in _KINDS[kind] for kind in _STATEFUL)


def cells_of_gguf(header: GgufHeader) -> CellModel:
    """The caches of the model in a GGUF file.

    Raises:
        KvModelError: the architecture is not known, or a setting is missing or impossible.
    """
    architecture = Fields(header.values).text("general.architecture") or ""
    if architecture not in _KNOWN:
        raise KvModelError(f"unknown GGUF architecture {architecture[:40]!a}: its caches are not modelled", "gguf")
    if architecture in _KINDS["unsupported"]:
        raise KvModelError(f"the caches of GGUF architecture {architecture} are not modelled", "gguf")
    return _Reader(header, architecture).model()


@dataclass(frozen=True, slots=True)
class _Heads:
    """Query and KV heads of each layer, and the sizes of one head without and with a window."""

    queries: Sequence[int]
    kv: Sequence[int]
    k_size: int
    v_size: int
    k_size_windowed: int
    v_size_windowed: int


def _layer(heads: _Heads, index: int, *, windowed: bool = False, latent: bool = False) -> CellLayer:
    k_head, v_head = heads.k_size, heads.v_size
    if windowed:
        k_head, v_head = heads.k_size_windowed, heads.v_size_windowed
    return CellLayer(
        k_elements=k_head * heads.kv[index],
        v_elements=0 if latent else v_head * heads.kv[index],
        k_head_elements=k_head,
        v_head_elements=0 if latent else v_head,
        windowed=windowed,
    )


class _Reader:
    """One header, with the keys of its architecture."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        prefix = f"{architecture}."
        own = {key.removeprefix(prefix): value for key, value in header.values.items() if key.startswith(prefix)}
        self._fields = Fields(own, architecture)
        self._header = header
        self._architecture = architecture
        self._depth_all = self._fields.integer("block_count", high=_MAX_LAYERS)
        drafts = self._fields.integer("nextn_predict_layers", default=0, low=0, high=self._depth_all)
        self._depth = self._depth_all - drafts

    def model(self) -> CellModel:
        """Rows, states and windows together."""
        heads = self._heads()
        states = self._state_layers(heads)
        window = self._window()
        windowed = self._windowed_layers(states) if window else [False] * self._depth_all
        latent = self._is_latent()
        layers: list[CellLayer] = []
        for index in range(self._depth_all):
            if not self._keeps_rows(index, states):
                continue
            for name, count in (("head_count", heads.queries[index]), ("head_count_kv", heads.kv[index])):
                if not count and self._architecture not in _KINDS["layers_without_attention"]:
                    raise self._fields.error(f"attention.{name}", f"is 0 in layer {index}, which keeps K and V")
            layers.append(_layer(heads, index, windowed=windowed[index], latent=latent))
        drafts = [] if latent else [_layer(heads, index) for index in range(self._depth, self._depth_all)]
        rows = [
            (heads.v_size_windowed if windowed[index] else heads.v_size) * heads.kv[index]
            for index in range(self._depth_all)
        ]
        conv, recurrent = self._state(heads) if any(states) else (0, 0)
        index_layers, index_elements = self._indexers()
        return CellModel(
            architecture=self._architecture,
            trained_tokens=self._fields.integer("context_length", low=0, high=_MAX_CONTEXT),
            layers=() if self._architecture in _KINDS["no_cache"] else tuple(layers),
            window_tokens=window or None,
            latent=latent,
            widest_v_elements=0 if latent else max(rows),
            index_layers=index_layers,
            index_elements=index_elements,
            state_layers=sum(states[: self._depth]),
            conv_elements=conv,
            recurrent_elements=recurrent,
            flash_attention=self._architecture not in _KINDS["no_flash_attention"],
            draft_layers=tuple(drafts),
            depth=self._depth_all,
            attention_heads=heads.queries[0],
            hidden_size=self._fields.integer("embedding_length", high=_MAX_SIZE),
            vocabulary=self._header.lengths.get("tokenizer.ggml.tokens", 0)
            or self._fields.integer("vocab_size", default=0, low=0),
            rope_scaling=self._fields.text("rope.scaling.type"),
            rope_scale=self._fields.number("rope.scaling.factor", default=1.0, low=0.0, high=_MAX_ROPE_SCALE) or 1.0,
            yarn_tokens=self._fields.integer("rope.scaling.original_context_length", default=0, low=0) or None,
        )

    def _per_layer(self, name: str, default: int) -> Sequence[int]:
        """A value of all layers, or a list with one of each (get_key_or_arr)."""
        if isinstance(self._fields.raw(name), list):
            found = self._fields.integers(name, high=_MAX_SIZE) or ()
            if len(found) < self._depth_all:
                raise self._fields.error(name, f"has {len(found)} entries for {self._depth_all} layers")
            return found[: self._depth_all]
        return [self._fields.integer(name, default=default, low=0, high=_MAX_SIZE)] * self._depth_all

    def _heads(self) -> _Heads:
        queries = self._per_layer("attention.head_count", 0)
        kv = (
            queries
            if not self._fields.has("attention.head_count_kv")
            else self._per_layer("attention.head_count_kv", 0)
        )
        size = self._fields.integer("embedding_length", high=_MAX_SIZE) // queries[0] if queries[0] else 0
        k_size = self._size("attention.key_length", size) if queries[0] else 0
        v_size = self._size("attention.value_length", size) if queries[0] else 0
        return _Heads(
            queries,
            kv,
            k_size,
            v_size,
            self._size("attention.key_length_swa", k_size),
            self._size("attention.value_length_swa", v_size),
        )

    def _size(self, name: str, default: int = 0) -> int:
        return self._fields.integer(name, default=default, low=0, high=_MAX_SIZE)

    def _keeps_rows(self, index: int, states: Sequence[bool]) -> bool:
        """Whether a layer has K and V of its own (create_memory's filters, llama_hparams::has_kv)."""
        name = self._architecture
        if name in _KINDS["recurrent"]:
            return False
        if name in _KINDS["side_by_side"]:
            return True
        if name in _KINDS["states_without_feed_forward"]:
            return not states[index] and self._feed_forward()[index] == 0
        if name in _KINDS["states_without_kv_heads"]:
            return not states[index]
        first_shared = self._first_shared()
        return index < self._depth and not states[index] and (first_shared is None or index < first_shared)

    def _first_shared(self) -> int | None:
        """The first of the layers that read another layer's cache (Gemma 3n and 4)."""
        kind = _KINDS["windows"].get(self._architecture, {})
        if kind.get("shared_layers"):
            return self._depth_all - self._size("attention.shared_kv_layers")
        cached: int | None = kind.get("cached_layers")
        return cached

    def _feed_forward(self) -> Sequence[int]:
        return self._per_layer("feed_forward_length", 0)

    def _state_layers(self, heads: _Heads) -> list[bool]:
        """Which layers keep a state (llama_hparams::is_recr)."""
        name, depth = self._architecture, self._depth
        if name in _KINDS["recurrent"] or name in _KINDS["side_by_side"]:
            return [True] * self._depth_all
        if name in _KINDS["states_by_interval"]:
            listed = self._fields.raw("attention.recurrent_layers")
            if isinstance(listed, list):
                return [bool(flag) for flag in listed[: self._depth_all]] + [False] * (self._depth_all - len(listed))
            every = self._fields.integer("full_attention_interval", default=_KINDS["states_by_interval"][name])
            return [index < depth and (index + 1) % every != 0 for index in range(self._depth_all)]
        if name in _KINDS["states_without_feed_forward"]:
            feed_forward = self._feed_forward()
            return [
                index < depth and heads.kv[index] == 0 and feed_forward[index] == 0 for index in range(self._depth_all)
            ]
        by_heads = name in _KINDS["states_without_kv_heads"]
        return [by_heads and index < depth and heads.kv[index] == 0 for index in range(self._depth_all)]

    def _state(self, heads: _Heads) -> tuple[int, int]:
        """Elements of a layer's convolution and recurrent state (llama_hparams::n_embd_r, n_embd_s)."""
        name, width = self._architecture, self._size("embedding_length")
        steps = max(0, self._size("ssm.conv_kernel") - 1)
        recurrent = self._size("ssm.state_size") * self._size("ssm.inner_size")
        match _KINDS["states"].get(name):
            case "wkv":
                shifts = self._size("token_shift_count", _DEFAULT_TOKEN_SHIFTS)
                return shifts * width, width * self._size("wkv.head_size")
            case "short_conv":
                return width * max(0, self._size("shortconv.l_cache") - 1), 0
            case "kda":
                size = self._size("kda.head_dim")
                return 3 * (steps or _DEFAULT_KDA_STEPS) * heads.queries[0] * size, size * size * heads.queries[0]
            case "lightning":
                return 0, heads.k_size**2 * heads.queries[0]
            case "ungrouped":
                return steps * self._size("ssm.inner_size"), recurrent
            case _:
                channels = self._size("ssm.inner_size") + 2 * self._size("ssm.group_count") * self._size(
                    "ssm.state_size"
                )
                return steps * channels, recurrent

    def _window(self) -> int:
        """The window's tokens; 0 where all layers keep all tokens."""
        kind = _KINDS["windows"].get(self._architecture)
        only = None if kind is None else kind.get("only_layers")
        if kind is None or only not in (None, self._depth):
            return 0
        name = "attention.sliding_window"
        if always := kind.get("always"):
            return 0 if self._fields.raw(name) == 0 else int(always)
        tokens = self._fields.integer(name, default=kind.get("window", 0), low=0, high=_MAX_CONTEXT)
        return int(kind.get("fixed", tokens)) if tokens else 0

    def _windowed_layers(self, states: Sequence[bool]) -> list[bool]:
        """Which layers have the window (load_swa_pattern, set_swa_pattern)."""
        kind = _KINDS["windows"][self._architecture]
        if kind.get("attention"):
            return [index < self._depth and not states[index] for index in range(self._depth_all)]
        name = "attention.sliding_window_pattern"
        listed = self._fields.raw(name)
        if isinstance(listed, list):
            return [bool(flag) for flag in listed[: self._depth_all]] + [False] * (self._depth_all - len(listed))
        every = self._fields.integer(name, default=kind.get("every"), low=0, high=_MAX_LAYERS)
        full = 0 if kind.get("full_first") else every - 1
        return [index < self._depth and (every == 0 or index % every != full) for index in range(self._depth_all)]

    def _is_latent(self) -> bool:
        """Whether layers keep one compressed row (llama_hparams::is_mla)."""
        sizes = (self._size("attention.key_length_mla"), self._size("attention.value_length_mla"))
        return self._architecture in _KINDS["latent"] and all(sizes)

    def _indexers(self) -> tuple[int, int]:
        """How many layers have an indexer's row, and its elements."""
        if self._architecture not in _KINDS["indexed"]:
            return 0, 0
        size = self._fields.integer("attention.indexer.key_length", high=_MAX_SIZE)
        listed = self._fields.raw("attention.indexer.types")
        if self._architecture != "glm-dsa":
            return self._depth, size
        if isinstance(listed, list):
            return sum(bool(flag) for flag in listed[: self._depth]), size
        if self._fields.integer("context_length", low=0, high=_MAX_CONTEXT) < _GLM_SHARED_INDEXERS_FROM_TOKENS:
            return self._depth, size
        owned = (
            index < _GLM_OWNED_LAYERS or (index - _GLM_OWNED_LAYERS) % _GLM_INDEXER_EVERY == 0
            for index in range(self._depth)
        )
        return sum(owned), size
