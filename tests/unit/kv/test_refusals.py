"""Every constructor refuses its edges: the least and the most of each figure are allowed, one beyond is not."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.bounds import MAX_BYTES, MAX_RANKS, MAX_TOKENS
from kvdiag.kv.calibration.engine_report import PrintedSize
from kvdiag.kv.calibration.profiles import ModelKey, Profile
from kvdiag.kv.families.base import Heads, ModelLayers
from kvdiag.kv.fit.plan import Budget, Demand, Traffic
from kvdiag.kv.layout.deployment import Deployment
from kvdiag.kv.layout.layers import StateShape
from kvdiag.kv.layout.pages import PageKind, PageSpec
from tests.unit.kv.refused import refused

STATE = StateShape(
    conv_channels=1, conv_steps=1, drafts_lengthen_conv=False, recurrent_heads=1, recurrent_head_elements=1
)
SIZES = ("context_bytes", "activation_bytes", "graph_bytes", "overhead_bytes")
BUDGET: dict[str, Any] = {"total_bytes": 1, "weights_bytes": 0, **dict.fromkeys(SIZES, 0)}
PROFILE: dict[str, Any] = {
    "gpu_total_bytes": 1, "model": ModelKey(digest="d", name="m"), "tensor_parallel": 1, "pipeline_parallel": 1,
    "context_bytes": 0, "activation_bytes": 0, "date": "2026-01-01", "source": "log",
}  # fmt: skip


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


EDGES = [
    *edges(
        Deployment,
        {},
        {
            "tensor_parallel": (1, MAX_RANKS),
            "pipeline_parallel": (1, MAX_RANKS),
            "max_num_batched_tokens": (1, MAX_TOKENS),
            "block_size_tokens": (1, 1 << 20),
            "max_in_flight_tokens": (1, MAX_TOKENS),
            "speculative_tokens": (0, 1024),
        },
        block_size_tokens="block_size",
        speculative_tokens="num_speculative_tokens",
    ),
    *edges(Deployment, {"tensor_parallel": MAX_RANKS}, {"decode_context_parallel": (1, MAX_RANKS)}),
    *edges(
        Demand,
        {"context_tokens": 1, "requests": 1},
        {"context_tokens": (1, MAX_TOKENS), "requests": (1, 1 << 24)},
        context_tokens="context",
        requests="concurrency",
    ),
    *edges(
        Budget,
        {"memory_fraction_ratio": 1.0, **BUDGET},
        {"total_bytes": (1, MAX_BYTES)},
        total_bytes="gpu",
    ),
    *edges(
        Traffic,
        {"requests_per_second": 1, "prompt_tokens": 1, "output_tokens": 1, "seconds_per_output_token": 1},
        # A mean, so not always whole; but every request that is present has at least one token.
        {"seconds_to_first_token": (0, 10**9), "present_tokens": (1, 2 * 10**9)},
    ),
    *edges(
        PageSpec,
        {"kind": PageKind.FULL, "block_size_tokens": 1, "heads": 1, "row_bytes": 1},
        {
            "block_size_tokens": (1, MAX_BYTES),
            "heads": (1, MAX_BYTES),
            "row_bytes": (1, MAX_BYTES),
        },
        block_size_tokens="row_bytes",
        heads="row_bytes",
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
        {"nominal_bytes": (0, MAX_BYTES), "slack_bytes": (0, MAX_BYTES)},
        nominal_bytes="size",
        slack_bytes="size",
    ),
    *edges(
        Profile,
        PROFILE,
        {
            "gpu_total_bytes": (1, MAX_BYTES),
            "tensor_parallel": (1, None),
            "pipeline_parallel": (1, None),
            **dict.fromkeys(SIZES, (0, MAX_BYTES)),
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
        (lambda: Budget(**BUDGET, memory_fraction_ratio=0), "memory_fraction"),
        (lambda: Budget(**BUDGET, memory_fraction_ratio=1.001), "memory_fraction"),
        (lambda: PageSpec(kind=PageKind.FULL, block_size_tokens=2, heads=1, row_bytes=MAX_BYTES), "row_bytes"),
        (lambda: StateShape(conv_channels=1, conv_steps=0, drafts_lengthen_conv=False, recurrent_heads=1,
                            recurrent_head_elements=0), "recurrent_heads"),
        (lambda: ModelLayers(1, ()), "num_hidden_layers"),
        (lambda: Heads(attention_heads=4, kv_heads=3, head_size=1), "num_key_value_heads"),
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
    ],
)  # fmt: skip
def test_figures_that_contradict_each_other_are_refused(make: Callable[[], object], field: str) -> None:
    """And figures whose range is no whole number."""
    with refused(field):
        make()
