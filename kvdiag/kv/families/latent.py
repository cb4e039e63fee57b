"""Families with multi-head latent attention (MLA): one compressed row per token, on every tensor-parallel rank.

vLLM mla_attention.py::MLAAttention.get_kv_cache_spec, deepseek_v2.py, longcat_flash.py.
"""

import math

from kvdiag.kv.families.base import (
    MAX_HEADS,
    MAX_LAYERS,
    ModelLayers,
    full_model,
    layer_names,
    read_depth,
    read_heads,
)
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.layout.layers import LatentLayer, LatentWindowLayer

_SPARSE = frozenset({"sparse_attention", "sparse", "indexed_attention", "deepseek_sparse_attention"})


def latent(text: Fields) -> ModelLayers:
    """DeepSeek V2 to V3.2, Kimi-K2, GLM-5 and their kin (deepseek_v2.py, glm4_moe_lite.py).

    With neither part of a latent query, as in DeepSeek-OCR, a layer keeps K and V per head
    (deepseek_v2.py::DeepseekV2DecoderLayer: use_mha).
    """
    if text.raw("qk_nope_head_dim") == 0 and text.raw("qk_rope_head_dim") == 0:
        return full_model(text, read_heads(text))
    depth = read_depth(text)
    size = latent_size(text)
    row = indexer_row_bytes(text)
    owners = indexer_owners(text, depth) if row is not None else frozenset[int]()
    drafts = text.integer("num_nextn_predict_layers", default=0, low=0, high=64)
    return ModelLayers(
        text.integer("num_attention_heads", high=MAX_HEADS),
        tuple(LatentLayer(index, size, row if index in owners else None) for index in range(depth)),
        draft_layers=(LatentLayer(depth - 1, size, row),) * drafts,
    )


def hy_v4(text: Fields) -> ModelLayers:
    """HY V4 (hy_v4/nvidia/attention.py): latent rows in every layer, and an indexer where `layer_types` says sparse and
    no earlier layer's selection is reused. `indexer_types` counts before the periods.
    """
    depth, size = read_depth(text), latent_size(text)
    row = indexer_row_bytes(text)
    kinds = text.strings("layer_types") or ()
    owners = frozenset[int]()
    if row is not None:
        listed = text.has("indexer_types")
        owners = indexer_owners(text.filled({"index_topk_freq": None}, override=True) if listed else text, depth)
        owners = frozenset(index for index in owners if index < len(kinds) and kinds[index] in _SPARSE)
    drafts = text.integer("num_nextn_predict_layers", default=0, low=0, high=64)
    return ModelLayers(
        text.integer("num_attention_heads", high=MAX_HEADS),
        tuple(LatentLayer(index, size, row if index in owners else None) for index in range(depth)),
        draft_layers=(LatentLayer(depth - 1, size, row),) * drafts,
    )


def dots3_note(text: Fields) -> ModelLayers:
    """Dots3-note (dots3_note/nvidia/model.py): windows of latent rows, and sparse attention whose rows are padded to
    the windows' size. MTP layers have windows unless `mtp_layer_types` says otherwise (config/speculative.py).
    """
    depth = read_depth(text)
    size = text.integer("swa_kv_lora_rank") + text.integer("swa_qk_rope_head_dim", low=0)
    if latent_size(text) > size:
        raise text.error("swa_kv_lora_rank", f"gives rows of {size}: those of the other layers are {latent_size(text)}")
    window = text.integer("sliding_window_size", high=1 << 30)
    if not text.has("index_topk"):
        raise text.error("index_topk", "is missing: its layers without a window have an indexer")
    row, owners = indexer_row_bytes(text), indexer_owners(text, depth)
    drafts = text.integer("num_nextn_predict_layers", default=1, low=0, high=64)
    drafted = text.strings("mtp_layer_types") or ("sliding_attention",) * drafts
    if len(drafted) != drafts:
        raise text.error("mtp_layer_types", f"names {len(drafted)} layers and num_nextn_predict_layers is {drafts}")

    def layer(index: int, name: str, owns: bool) -> LatentLayer | LatentWindowLayer:
        if name == "sliding_attention":
            return LatentWindowLayer(index=index, latent_size=size, window_tokens=window)
        return LatentLayer(index, size, row if owns else None)

    names = layer_names(text, depth)
    if names is None:
        raise text.error("layer_types", "is missing: it says which layers have a window")
    heads = text.integer("num_attention_heads", high=MAX_HEADS)
    return ModelLayers(
        # Ranks divide those of both kinds.
        math.gcd(heads, text.integer("swa_num_attention_heads", high=MAX_HEADS)),
        tuple(layer(index, name, index in owners) for index, name in enumerate(names)),
        draft_layers=tuple(layer(depth - 1, name, owns=True) for name in drafted),
    )


def longcat_flash(text: Fields) -> ModelLayers:
    """LongCat-Flash (longcat_flash.py): two attention sublayers in every decoder layer."""
    depth = text.integer("num_layers", high=MAX_LAYERS)
    size = latent_size(text)
    layers = tuple(LatentLayer(index, size) for index in range(depth) for _ in range(2))
    return ModelLayers(text.integer("num_attention_heads", high=MAX_HEADS), layers)


def latent_size(text: Fields) -> int:
    """kv_lora_rank + qk_rope_head_dim (ModelArchConfigConvertorBase.get_head_size)."""
    return text.integer("kv_lora_rank") + text.integer("qk_rope_head_dim", low=0)


def indexer_row_bytes(text: Fields) -> int | None:
    """Bytes per token of the sparse-attention indexer's cache: a byte per element and an fp32 scale per 128
    (deepseek_v2.py::Indexer). A config with index_topk has an indexer.
    """
    if not text.has("index_topk"):
        return None
    size = text.integer("index_head_dim", high=1 << 14)
    return size + size // 128 * 4


def indexer_owners(text: Fields, depth: int) -> frozenset[int]:
    """Layers with an indexer of their own; the others reuse the selection of one before
    (deepseek_v2.py::DeepseekV2MLAAttention: index_topk_pattern, index_topk_freq, index_skip_topk_offset; SGLang
    model_config.py::dsa_layer_skips_topk: indexer_types).
    """
    pattern = text.raw("index_topk_pattern")
    if isinstance(pattern, str | list):
        if len(pattern) > MAX_LAYERS:
            raise text.error("index_topk_pattern", f"has {len(pattern)} entries: at most {MAX_LAYERS} are supported")
        return frozenset(index for index in range(depth) if index >= len(pattern) or pattern[index] != "S")
    types = text.raw("indexer_types")
    if isinstance(types, list) and text.raw("index_topk_freq") is None:  # which vLLM reads instead
        return frozenset(index for index in range(depth) if index >= len(types) or types[index] != "shared")
    period = text.integer("index_topk_freq", default=1, high=MAX_LAYERS)
    offset = text.integer("index_skip_topk_offset", default=2, low=0, high=MAX_LAYERS)
    return frozenset(index for index in range(depth) if max(index - offset + 1, 0) % period == 0)
