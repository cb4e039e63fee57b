"""DeepSeek-V4 and V4.1: a sliding window in every layer, and compressed caches in most.

vLLM models/deepseek_v4/attention.py::DeepseekV4Attention, models/deepseek_v41/attention.py; the layers' pages are in
layout/compressed_pages.py.
"""

from kvdiag.kv.families.base import MAX_HEADS, MAX_LAYERS, ModelLayers, read_depth, spread_names
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.layout.layers import CompressedLayer

# The compressor's and the indexer's kernels are for these ratios (mla/sparse_swa.py, compressor.py).
_RATIOS = (0, 1, 4, 128)
_INDEXED_RATIO = 4
_SHARED_RATIOS = (0, 1, 2)


def deepseek_v4(text: Fields) -> ModelLayers:
    """DeepSeek-V4: `compress_ratios` says how many tokens a row of each layer stands for; those of ratio 4 have an
    indexer. MTP layers have a window alone.
    """
    depth = read_depth(text)
    ratios = _ratios(text, depth, _RATIOS)
    return _model(
        text,
        [
            CompressedLayer(
                index=index,
                head_size=_head_size(text),
                window_tokens=_window(text),
                ratio=ratio if ratio > 1 else 0,
                indexer_size=_indexer_size(text) if ratio == _INDEXED_RATIO else None,
            )
            for index, ratio in enumerate(ratios)
        ],
    )


def deepseek_v41(text: Fields) -> ModelLayers:
    """DeepSeek-V4.1: only the layers of `kv_source_layer_ids` keep compressed rows, which those after them read, and
    an indexer's where `index_source_layer_ids` has them too.
    """
    depth = read_depth(text)
    ratios = _ratios(text, depth, _SHARED_RATIOS)
    sources = frozenset(text.integers("kv_source_layer_ids", high=MAX_LAYERS) or ())
    indexers = frozenset(text.integers("index_source_layer_ids", high=MAX_LAYERS) or ())
    if any(ratios) and not (sources and indexers):
        raise text.error("kv_source_layer_ids", "or index_source_layer_ids is missing: compress_ratios needs both")
    return _model(
        text,
        [
            CompressedLayer(
                index=index,
                head_size=_head_size(text),
                window_tokens=_window(text),
                ratio=ratio if index in sources else 0,
                indexer_size=_indexer_size(text) if index in sources & indexers and ratio else None,
                ring=True,
            )
            for index, ratio in enumerate(ratios)
        ],
    )


def _model(text: Fields, layers: list[CompressedLayer]) -> ModelLayers:
    """The layers, and a draft layer with a window alone for each MTP module."""
    drafts = text.integer("num_nextn_predict_layers", default=0, low=0, high=64)
    last = layers[-1]
    draft = CompressedLayer(
        index=last.index, head_size=last.head_size, window_tokens=last.window_tokens, ring=last.ring
    )
    heads = text.integer("num_attention_heads", high=MAX_HEADS)
    return ModelLayers(heads, tuple(layers), draft_layers=(draft,) * drafts)


def _ratios(text: Fields, depth: int, known: tuple[int, ...]) -> tuple[int, ...]:
    """`compress_ratios`, or a `compress_ratios_count` summary spread out."""
    ratios = text.integers("compress_ratios", high=1 << 20)
    counts = text.child("compress_ratios_count")
    if ratios is None and counts is not None:
        listed = sum(counts.integer(name, low=0, high=MAX_LAYERS) for name in counts.names())
        names = spread_names(counts, text.path("compress_ratios_count"), listed)
        ratios = tuple(int(name) if name.isdecimal() else -1 for name in names)
    if ratios is None:
        raise text.error("compress_ratios", "is missing: it says how many tokens a row of each layer stands for")
    if len(ratios) < depth:
        raise text.error("compress_ratios", f"has {len(ratios)} entries and num_hidden_layers is {depth}")
    unknown = next((ratio for ratio in ratios[:depth] if ratio not in known), None)
    if unknown is not None:
        raise text.error("compress_ratios", f"has {unknown}: it must be one of {', '.join(map(str, known))}")
    return ratios[:depth]


def _head_size(text: Fields) -> int:
    return text.integer("head_dim", high=1 << 14)


def _window(text: Fields) -> int:
    return text.integer("sliding_window", high=1 << 20)


def _indexer_size(text: Fields) -> int:
    return text.integer("index_head_dim", high=1 << 14)
