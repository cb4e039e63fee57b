"""What a GPU needs besides weights and KV cache, where it was not measured: context, activation, graphs.

Estimates, and labelled so. Only a running engine knows the real figures; a calibrated profile replaces these.
"""

import math
from dataclasses import dataclass

from kvdiag.kv.layout.layers import Architecture

GIB = 1 << 30

ESTIMATE = "estimate"
"""The source of overheads that were not measured."""

GENERIC_ENGINE = "generic"
"""`--engine` for any engine that is not modelled."""

RULE_OF_THUMB = "rule of thumb, 1.5 GB context, 2 GB allocator and activation"
"""The source of overheads for any engine, also for one that is not modelled."""

# The rule of thumb of "KV memory in production" and the audit article: CUDA context 1.5 GB, allocator 2 GB, activations
# counted inside the latter; 80 - 35 - 1.5 - 2 = 41.5 GB for a 70B model at TP 4 on 80 GB.
GENERIC_CONTEXT_BYTES = 1_500_000_000
GENERIC_OVERHEAD_BYTES = 2_000_000_000
# Memory outside torch's allocator that vLLM's profile run counts: a median of 0.09 GiB on one GPU, and 0.2 to 0.25 GiB
# on 2, 4 and 16 in published logs, with one of 2.1 GiB on 8 (NCCL). The CUDA context is there before vLLM counts.
_OUTSIDE_BYTES, _OUTSIDE_RANKS_BYTES = GIB // 10, GIB // 4
# Engines that count from an empty device have the context among it.
_CONTEXT_BYTES = GIB * 35 // 100
_NCCL_BYTES_PER_DOUBLING = GIB * 45 // 100
# Graphs of decode batches: a median of 0.46 GiB in published logs.
_GRAPH_BYTES = GIB // 2
# Nine in ten published figures are between these: factors of the activation, and GiB of graphs and of the rest.
_ACTIVATION_RATIOS = (0.3, 2.5)
_GRAPH_RANGE = (GIB // 16, GIB * 19 // 10)
_OUTSIDE_RANGE, _OUTSIDE_RANKS_RANGE = (GIB // 100, GIB * 46 // 100), (GIB // 20, GIB * 21 // 10)
# Live activation tensors per batched token, in hidden sizes of 16 bits: residual, attention in and out, and the gated
# feed-forward's two halves (fitted to 20 published profile lines; within a factor of two of each text model).
_HIDDEN_COPIES = 6
_SAMPLER_COPIES = 3
_SEQUENCES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Bytes per GPU besides weights and cache. `overhead_bytes` is what was measured of them in one figure.

    The sum is an estimate that most published logs fall short of by at most `less_bytes` or exceed by at most
    `more_bytes`; both are 0 where it was measured.
    """

    context_bytes: int
    activation_bytes: int
    graph_bytes: int
    overhead_bytes: int = 0
    less_bytes: int = 0
    more_bytes: int = 0
    source: str = ""


def generic_overheads() -> Overheads:
    """The articles' rule of thumb, for any engine."""
    return Overheads(
        context_bytes=GENERIC_CONTEXT_BYTES,
        activation_bytes=GENERIC_OVERHEAD_BYTES,
        graph_bytes=0,
        source=RULE_OF_THUMB,
    )


def vllm_overheads(
    *,
    hidden_size: int,
    feed_forward_size: int,
    vocabulary: int,
    tensor_parallel: int,
    batched_tokens: int,
    graphs: bool = True,
    whole_context: bool = False,
) -> Overheads:
    """An estimate of what vLLM's profile run finds: the largest of a full batch in one layer, and of sampling.

    With `whole_context` the CUDA context and NCCL's buffers are among it, for engines that count from an empty device.
    """
    per_token = 2 * (_HIDDEN_COPIES * hidden_size + 3 * feed_forward_size // tensor_parallel)
    layer = batched_tokens * per_token
    sampler = _SAMPLER_COPIES * _SEQUENCES * vocabulary * 4
    doublings = (tensor_parallel - 1).bit_length()
    outside = _OUTSIDE_RANKS_BYTES if doublings else _OUTSIDE_BYTES
    activation, graph = max(layer, sampler) + GIB // 4, _GRAPH_BYTES if graphs else 0
    ends = [
        (outside, *(_OUTSIDE_RANKS_RANGE if doublings else _OUTSIDE_RANGE)),
        (activation, *(int(activation * ratio) for ratio in _ACTIVATION_RATIOS)),
        (graph, *(_GRAPH_RANGE if graphs else (0, 0))),
    ]
    # The parts vary independently, so that their deviations add up as squares.
    less, more = (math.isqrt(sum((one[0] - one[end]) ** 2 for one in ends)) for end in (1, 2))
    return Overheads(
        context_bytes=_CONTEXT_BYTES + doublings * _NCCL_BYTES_PER_DOUBLING if whole_context else outside,
        activation_bytes=activation,
        graph_bytes=graph,
        less_bytes=less,
        more_bytes=more,
        source=ESTIMATE,
    )


def architecture_note(architecture: Architecture) -> str:
    """A caution for models whose activation is not that of a text model."""
    if architecture.denoises:
        return "sampling whole blocks of tokens takes memory that vLLM's profile run and this estimate leave out"
    return "recurrent states are in fp32: activation can be twice the estimate" if architecture.is_hybrid else ""
