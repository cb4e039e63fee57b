"""Every constructor refuses its edges: the least and the most of each figure are allowed, one beyond is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.bounds import MOST_BYTES, MOST_RANKS, MOST_TOKENS
from kvdiag.kv.calibration.engine_report import PrintedSize
from kvdiag.kv.calibration.predicted_vs_reported import Interval
from kvdiag.kv.calibration.profiles import ModelKey, Profile
from kvdiag.kv.families.base import Heads, ModelLayers, full_layers
from kvdiag.kv.fit.overheads import Overheads, vllm_overheads
from kvdiag.kv.fit.plan import Budget, Demand, Outcome, Plan, Traffic
from kvdiag.kv.fit.scenario import CheckpointWeights, GivenWeights
from kvdiag.kv.layout.capacity import CacheLayout, Capacity, plan_layout
from kvdiag.kv.layout.deployment import Deployment
from kvdiag.kv.layout.dtypes import KvDtype, KvPacking
from kvdiag.kv.layout.groups import PageGroup
from kvdiag.kv.layout.layers import Architecture, AttentionLayer, CachelessLayer, LatentLayer, LayerKind, StateLayer
from kvdiag.kv.layout.pages import PageKind, PageSpec, RequestTerms
from kvdiag.kv.layout.residency import ServingTerms
from kvdiag.kv.layout.state_layers import StateShape
from kvdiag.kv.weights.checkpoint import CheckpointTensor, RankWeights
from kvdiag.kv.weights.linear_layers import LayerParameters, Linear, Parameters
from kvdiag.kv.weights.module_names import ModuleNames
from kvdiag.kv.weights.quantization import FormatOverride, Quantization

LARGEST_SIZE = 1 << 24
STATE = StateShape(
    conv_channels=1, conv_steps=1, drafts_lengthen_conv=False, recurrent_heads=1, recurrent_head_elements=1
)
PAGE = PageSpec(kind=PageKind.FULL, block_size_tokens=1, heads=1, row_bytes=1)
LAYER = LayerParameters(index=0)
HEADS = Heads(attention_heads=1, kv_heads=1, head_size=1)
FULL: dict[str, Any] = {"index": 0, "kind": LayerKind.FULL, "kv_heads": 1, "head_size": 1, "head_size_v": 1}
SIZES = ("context_bytes", "activation_bytes", "graph_bytes", "overhead_bytes")
PROFILE: dict[str, Any] = {
    "gpu_total_bytes": 1, "model": ModelKey(digest="d", name="m"), "tensor_parallel": 1, "pipeline_parallel": 1,
    "context_bytes": 0, "activation_bytes": 0, "date": "2026-01-01", "source": "log",
}  # fmt: skip
CAPACITY = Capacity(num_blocks=0, bytes_per_block=(0,), context_tokens=1, blocks_per_request=0)
NAMES = ModuleNames(parts=frozenset(), wild=(), numbered={}, expressions=(), layered=())


class Edge(NamedTuple):
    """One figure of a constructor: its other arguments, and the least and most it may be."""

    make: Callable[..., object]
    others: dict[str, Any]
    name: str
    least: int
    most: int | None
    field: str


def edges(
    make: Callable[..., object], others: dict[str, Any], limits: dict[str, tuple[int, int | None]], **fields: str
) -> list[Edge]:
    """The rows of one constructor; `fields` has the names that its errors use for arguments of another name."""
    return [Edge(make, others, name, *limit, fields.get(name, name)) for name, limit in limits.items()]


NOT_NEGATIVE = (0, None)
EDGES = [
    *edges(
        Deployment,
        {},
        {
            "tensor_parallel": (1, MOST_RANKS),
            "pipeline_parallel": (1, MOST_RANKS),
            "max_num_batched_tokens": (1, MOST_TOKENS),
            "block_size_tokens": (1, 1 << 20),
            "kernel_block_tokens": (1, 1 << 20),
            "max_in_flight_tokens": (1, MOST_TOKENS),
            "speculative_tokens": (0, 1024),
        },
        block_size_tokens="block_size",
        speculative_tokens="num_speculative_tokens",
    ),
    *edges(Deployment, {"tensor_parallel": MOST_RANKS}, {"decode_context_parallel": (1, MOST_RANKS)}),
    *edges(
        Demand,
        {"context_tokens": 1, "requests": 1},
        {"context_tokens": (1, MOST_TOKENS), "requests": (1, 1 << 24)},
        context_tokens="context",
        requests="concurrency",
    ),
    *edges(
        Budget,
        {"total_bytes": 1, "memory_fraction_ratio": 1.0, "weights_bytes": 0, **dict.fromkeys(SIZES, 0)},
        {"total_bytes": (1, MOST_BYTES), **dict.fromkeys((*SIZES, "weights_bytes"), (0, MOST_BYTES))},
        total_bytes="gpu",
    ),
    *edges(Overheads, {"source": "", **dict.fromkeys(SIZES, 0)}, dict.fromkeys(SIZES, (0, MOST_BYTES))),
    *edges(
        Traffic,
        {"requests_per_second": 1, "prompt_tokens": 1, "output_tokens": 1, "seconds_per_output_token": 1},
        # A mean, so not always whole; but every request that is present has at least one token.
        {"seconds_to_first_token": (0, 10**9), "present_tokens": (1, 2 * 10**9)},
    ),
    *edges(GivenWeights, {}, {"total_bytes": (0, MOST_BYTES)}, total_bytes="weights"),
    *edges(
        RankWeights,
        {"stage": 0, "weights_bytes": 0},
        {"stage": NOT_NEGATIVE, "weights_bytes": NOT_NEGATIVE},
        stage="weights",
        weights_bytes="weights",
    ),
    *edges(
        CheckpointTensor,
        {"name": "t", "stored_bytes": 0, "elements": 0},
        {"stored_bytes": NOT_NEGATIVE, "elements": NOT_NEGATIVE},
        stored_bytes="t",
        elements="t",
    ),
    *edges(
        Linear,
        {"name": "q", "parameters": 0},
        {"parameters": NOT_NEGATIVE, "padded_parameters": NOT_NEGATIVE, "kv_heads": (1, None)},
        padded_parameters="parameters",
        kv_heads="num_key_value_heads",
    ),
    *edges(
        LayerParameters, {"index": 0}, {"index": NOT_NEGATIVE, "plain": NOT_NEGATIVE}, index="parameters",
        plain="parameters",
    ),
    *edges(
        Parameters,
        {"embedding": 0, "head": 0, "layers": (LAYER,)},
        dict.fromkeys(("embedding", "head", "other"), NOT_NEGATIVE),
        **dict.fromkeys(("embedding", "head", "other"), "vocab_size"),
    ),
    *edges(
        Capacity,
        {"num_blocks": 0, "bytes_per_block": (0,), "context_tokens": 1, "blocks_per_request": 0},
        {"num_blocks": NOT_NEGATIVE, "blocks_per_request": NOT_NEGATIVE},
        blocks_per_request="num_blocks",
    ),
    *edges(
        RequestTerms,
        {"max_in_flight_tokens": 1, "max_encoder_tokens": 0},
        {
            "max_in_flight_tokens": (1, MOST_TOKENS),
            "max_encoder_tokens": (0, MOST_TOKENS),
            "decode_context_parallel": (1, MOST_RANKS),
        },
    ),
    *edges(
        PageSpec,
        {"kind": PageKind.FULL, "block_size_tokens": 1, "heads": 1, "row_bytes": 1},
        {
            "block_size_tokens": (1, MOST_TOKENS),
            "heads": (1, MOST_BYTES),
            "row_bytes": (1, MOST_BYTES),
            "retained_tokens": NOT_NEGATIVE,
            "speculative_blocks": NOT_NEGATIVE,
            "checkpoint_blocks": NOT_NEGATIVE,
            "padded_page_bytes": (1, None),
        },
        block_size_tokens="block_size",
        heads="row_bytes",
        retained_tokens="speculative_blocks",
        checkpoint_blocks="speculative_blocks",
    ),
    *edges(
        PageSpec,
        {"kind": PageKind.SLIDING, "block_size_tokens": 1, "heads": 1, "row_bytes": 1},
        {"window_tokens": (1, None)},
        window_tokens="sliding_window",
    ),
    *edges(
        PageSpec,
        {"kind": PageKind.CHUNKED, "block_size_tokens": 1, "heads": 1, "row_bytes": 1},
        {"chunk_tokens": (1, None)},
        chunk_tokens="attention_chunk_size",
    ),
    *edges(
        ServingTerms,
        {"prefill_chunk_tokens": 1},
        {
            "prefill_chunk_tokens": (1, MOST_TOKENS),
            "steps_in_flight": (0, 1024),
            "encoder_tokens": (0, MOST_TOKENS),
            "decode_context_parallel": (1, MOST_RANKS),
        },
        prefill_chunk_tokens="max_num_batched_tokens",
    ),
    *edges(
        StateShape,
        {name: getattr(STATE, name) for name in ("conv_channels", "conv_steps", "drafts_lengthen_conv",
                                                 "recurrent_heads", "recurrent_head_elements")},
        dict.fromkeys(
            ("conv_channels", "conv_steps", "recurrent_heads", "recurrent_head_elements", "conv_groups",
             "conv_group_channels", "prefill_checkpoints"),
            (0, 1 << 28),
        ),
    ),
    *edges(
        AttentionLayer,
        FULL,
        {
            "index": (0, LARGEST_SIZE),
            "kv_heads": (1, LARGEST_SIZE),
            "head_size": (1, LARGEST_SIZE),
            "head_size_v": (1, LARGEST_SIZE),
        },
        index="layer index",
    ),
    *edges(
        AttentionLayer,
        FULL | {"kind": LayerKind.SLIDING},
        {"window_tokens": (1, LARGEST_SIZE)},
        window_tokens="sliding_window",
    ),
    *edges(
        AttentionLayer,
        FULL | {"kind": LayerKind.CHUNKED},
        {"chunk_tokens": (1, LARGEST_SIZE)},
        chunk_tokens="attention_chunk_size",
    ),
    *edges(
        LatentLayer,
        {"index": 0, "kind": LayerKind.MLA_DSA, "latent_size": 1},
        {"index": (0, LARGEST_SIZE), "latent_size": (1, LARGEST_SIZE), "indexer_row_bytes": (1, LARGEST_SIZE)},
        index="layer index",
        latent_size="kv_lora_rank + qk_rope_head_dim",
        indexer_row_bytes="index_head_dim",
    ),
    *edges(
        StateLayer,
        {"index": 0, "kind": LayerKind.MAMBA2, "state": STATE},
        {"index": (0, LARGEST_SIZE)},
        index="layer index",
    ),
    *edges(
        CachelessLayer,
        {"index": 0, "kind": LayerKind.SHARED},
        {"index": (0, LARGEST_SIZE), "head_size": (1, LARGEST_SIZE)},
        index="layer index",
    ),
    *edges(
        Architecture,
        {"model_type": "m", "depth": 1, "attention_heads": 1, "layers": (), "dtype": "bfloat16"},
        {
            "depth": (1, LARGEST_SIZE),
            "attention_heads": (0, LARGEST_SIZE),
            "max_context_tokens": (1, LARGEST_SIZE),
        },
        depth="num_hidden_layers",
        attention_heads="num_attention_heads",
        max_context_tokens="max_position_embeddings",
    ),
    *edges(
        Heads,
        {"attention_heads": 1, "kv_heads": 1, "head_size": 1},
        {"attention_heads": (1, None), "kv_heads": (1, 1), "head_size": (1, None)},
        attention_heads="num_attention_heads",
        head_size="num_attention_heads",
        kv_heads="num_attention_heads or num_key_value_heads",
    ),
    *edges(
        PrintedSize,
        {"nominal_bytes": 0},
        {"nominal_bytes": (0, MOST_BYTES), "slack_bytes": (0, MOST_BYTES)},
        nominal_bytes="size",
        slack_bytes="size",
    ),
    *edges(
        Profile,
        PROFILE,
        {
            "gpu_total_bytes": (1, MOST_BYTES),
            "tensor_parallel": (1, None),
            "pipeline_parallel": (1, None),
            **dict.fromkeys(SIZES, (0, MOST_BYTES)),
        },
        **dict.fromkeys((*SIZES, "gpu_total_bytes", "tensor_parallel", "pipeline_parallel"), "profile"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: f"{edge.make.__name__}.{edge.name}")
def test_every_constructor_refuses_its_edges(edge: Edge) -> None:
    """The ends are values, what lies beyond an end is refused under the name that a user knows."""
    for value in filter(None, {edge.least, edge.most}):
        assert value == getattr(edge.make(**{**edge.others, edge.name: value}), edge.name)
    for value in (edge.least - 1, *(() if edge.most is None else (edge.most + 1,))):
        with pytest.raises(KvModelError) as caught:
            edge.make(**{**edge.others, edge.name: value})
        assert caught.value.field in edge.field.split(" or ")


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Deployment(tensor_parallel=4, decode_context_parallel=3), "decode_context_parallel"),
        (lambda: Deployment(pipeline_parallel=2, pipeline_partition=(1,)), "pipeline_partition"),
        (lambda: Budget(**(dict.fromkeys((*SIZES, "weights_bytes"), 0)), total_bytes=1, memory_fraction_ratio=0),
         "memory_fraction"),
        (lambda: Budget(**(dict.fromkeys((*SIZES, "weights_bytes"), 0)), total_bytes=1, memory_fraction_ratio=1.001),
         "memory_fraction"),
        (lambda: CheckpointWeights(tensors=(), kv_heads=1, tied=False), "weights"),
        (lambda: Capacity(num_blocks=1, bytes_per_block=(1, -1), context_tokens=1, blocks_per_request=1),
         "num_blocks"),
        (lambda: CacheLayout(groups=(PageGroup(layers=(0, 1), pages=(PAGE, PAGE)),), stages=(0,)), "stages"),
        (lambda: plan_layout([PAGE] * 2, stages=[0] * 3), "stages"),
        (lambda: PageGroup(layers=(), pages=()), "layers"),
        (lambda: PageGroup(layers=(0,), pages=(PAGE, PAGE)), "layers"),
        (lambda: PageSpec(kind=PageKind.FULL, block_size_tokens=16, heads=1, row_bytes=2, padded_page_bytes=31),
         "padded_page_bytes"),
        (lambda: PageSpec(kind=PageKind.FULL, block_size_tokens=2, heads=1, row_bytes=MOST_BYTES), "row_bytes"),
        (lambda: KvDtype(name="x", packing=KvPacking.PLAIN, element_bits=5), "kv_dtype"),
        (lambda: AttentionLayer(**{**FULL, "kind": LayerKind.SLIDING}), "sliding_window"),
        (lambda: AttentionLayer(**FULL, window_tokens=1), "sliding_window"),
        (lambda: AttentionLayer(**{**FULL, "kind": LayerKind.CHUNKED}), "attention_chunk_size"),
        (lambda: AttentionLayer(**FULL, chunk_tokens=1), "attention_chunk_size"),
        (lambda: AttentionLayer(**{**FULL, "kind": LayerKind.MLA}), "kind"),
        (lambda: LatentLayer(index=0, kind=LayerKind.FULL, latent_size=1), "kind"),
        (lambda: LatentLayer(index=0, kind=LayerKind.MLA, latent_size=1, indexer_row_bytes=1), "kind"),
        (lambda: StateLayer(index=0, kind=LayerKind.FULL, state=STATE), "kind"),
        (lambda: CachelessLayer(index=0, kind=LayerKind.FULL), "kind"),
        (lambda: Architecture(model_type="m", depth=1, attention_heads=1, dtype="bfloat16",
                              layers=(AttentionLayer(**{**FULL, "index": 1}),)), "num_hidden_layers"),
        (lambda: StateShape(conv_channels=1, conv_steps=0, drafts_lengthen_conv=False, recurrent_heads=1,
                            recurrent_head_elements=0), "recurrent_heads"),
        (lambda: ModelLayers(depth=0, attention_heads=1, layers=full_layers(1, HEADS)), "num_hidden_layers"),
        (lambda: ModelLayers(depth=1, attention_heads=1, layers=()), "num_hidden_layers"),
        (lambda: Heads(attention_heads=4, kv_heads=3, head_size=1), "num_key_value_heads"),
        (lambda: Parameters(embedding=0, head=0, layers=()), "vocab_size"),
        (lambda: Quantization(linear_bits=0.5), "weights"),
        (lambda: Quantization(linear_bits=4, plain_bits=64.5), "weights"),
        (lambda: Quantization(linear_bits=4, head_bits=0), "weights"),
        (lambda: FormatOverride(names=NAMES, bits=65), "weights"),
        (lambda: ModuleNames(parts=frozenset(), wild=(), numbered={-1: ()}, expressions=(), layered=()), "ignore"),
        (lambda: Interval(nominal=1, low=2, high=3), "interval"),
        (lambda: Interval(nominal=4, low=2, high=3), "interval"),
        (lambda: Profile(**{**PROFILE, "context_bytes": None}), "profile"),
        (lambda: Profile(**{**PROFILE, "activation_bytes": None}), "profile"),
        (lambda: Profile(**{**PROFILE, "max_num_batched_tokens": -1}), "profile"),
        (lambda: Traffic(requests_per_second=0, prompt_tokens=1, output_tokens=1, seconds_per_output_token=1),
         "requests_per_second"),
        (lambda: Traffic(requests_per_second=1, prompt_tokens=0, output_tokens=1, seconds_per_output_token=1),
         "prompt_tokens"),
        (lambda: Traffic(requests_per_second=1, prompt_tokens=1, output_tokens=1e9 + 1, seconds_per_output_token=1),
         "output_tokens"),
        (lambda: Traffic(requests_per_second=1, prompt_tokens=1, output_tokens=1, seconds_per_output_token=1,
                         present_tokens=0.9), "present_tokens"),
        (lambda: Plan(outcome=Outcome.FITS, demand=Demand(context_tokens=1, requests=1), capacity=CAPACITY, budgets=(),
                      blocks_needed=0, headroom_bytes=0, max_requests=0, max_context_tokens=0, limiting_stage=0),
         "limiting_stage"),
        (lambda: vllm_overheads(hidden_size=1, feed_forward_size=1, vocabulary=0, tensor_parallel=1,
                                batched_tokens=1), "hidden size, vocabulary, ranks or tokens"),
    ],
)  # fmt: skip
def test_figures_that_contradict_each_other_are_refused(make: Callable[[], object], field: str) -> None:
    """And figures whose range is no whole number."""
    with pytest.raises(KvModelError) as caught:
        make()

    assert field == caught.value.field
