"""Layers and models made by hand, in sizes that are easy to reckon with."""

from dataclasses import replace

from kvdiag.kv.layout.layers import Architecture, AttentionLayer, LatentLayer, Layer, LayerKind, StateLayer, StateShape


def full(index: int, kv_heads: int = 8) -> AttentionLayer:
    """A layer of heads of 128, 512 bytes a token and head in bf16."""
    return AttentionLayer(index=index, kind=LayerKind.FULL, kv_heads=kv_heads, head_size=128, head_size_v=128)


def sliding(index: int) -> AttentionLayer:
    """The same with a window of 1,024."""
    return replace(full(index), kind=LayerKind.SLIDING, window_tokens=1024)


def chunked(index: int) -> AttentionLayer:
    """The same in chunks of 8,192."""
    return replace(full(index), kind=LayerKind.CHUNKED, chunk_tokens=8192)


def latent(index: int, indexer: int | None = None) -> LatentLayer:
    """A latent row of 576, of which DeepSeek-V3 has 61."""
    return LatentLayer(index=index, latent_size=576, indexer_row_bytes=indexer)


def state(index: int, elements: int) -> StateLayer:
    """A recurrent state of so many elements, 2 bytes each in bf16."""
    shape = StateShape(
        conv_channels=0, conv_steps=0, drafts_lengthen_conv=False, recurrent_heads=1, recurrent_head_elements=elements
    )
    return StateLayer(index=index, kind=LayerKind.MAMBA2, state=shape)


def model(*layers: Layer, heads: int = 32) -> Architecture:
    """A model of these layers."""
    return Architecture(
        model_type="by_hand", depth=max(len(layers), 1), attention_heads=heads, layers=layers, dtype="bfloat16"
    )


DENSE = model(full(0), full(1))
HYBRID = model(full(0, kv_heads=1), state(1, 30_000))
