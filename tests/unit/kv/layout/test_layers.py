"""Layers as a cache sees them: what kinds there are, and layers that cannot be."""

from dataclasses import replace

from kvdiag.kv.layout.layers import (
    Architecture,
    AttentionLayer,
    CachelessLayer,
    LatentLayer,
    LayerKind,
    StateLayer,
    StateShape,
)

STATE = StateShape(
    conv_channels=12, conv_steps=3, drafts_lengthen_conv=True, recurrent_heads=2, recurrent_head_elements=4
)
FULL = AttentionLayer(index=0, kind=LayerKind.FULL, kv_heads=2, head_size=64, head_size_v=64)
SLIDING = replace(FULL, kind=LayerKind.SLIDING, window_tokens=128)
LATENT = LatentLayer(index=0, latent_size=576)
MODEL = Architecture(model_type="llama", depth=3, attention_heads=4, layers=(FULL,), dtype="bfloat16")


def test_kinds_have_the_names_that_the_reports_use() -> None:
    """The kinds of a layer are words of a report and of --json, which others read."""
    assert {
        "full", "mla", "mla_dsa", "sliding", "chunked", "mamba1", "mamba2", "gated_delta_net", "kimi_delta", "linear",
        "short_conv", "cross_attention", "shared", "encoder_only", "no_cache",
        "sliding_mla", "compressed_mla",
    } == {kind.value for kind in LayerKind}  # fmt: skip


def test_a_model_is_told_by_its_layers() -> None:
    """States make a hybrid, latent rows MLA; kinds are counted in their order."""
    state = StateLayer(index=1, kind=LayerKind.MAMBA2, state=STATE)
    hybrid = replace(MODEL, layers=(FULL, state, replace(SLIDING, index=2), replace(FULL, index=2)))
    latent = replace(MODEL, layers=(LATENT, CachelessLayer(index=1, kind=LayerKind.SHARED)))

    assert [("full", 2), ("mamba2", 1), ("sliding", 1)] == list(hybrid.kinds.items())
    assert [(False, False), (True, False), (False, True)] == [
        (one.is_hybrid, one.uses_mla) for one in (MODEL, hybrid, latent)
    ]
