"""What a GPU needs besides weights and KV cache, where it was not measured: context, activation, graphs.

Estimates, and labelled so. Only a running engine knows the real figures; a calibrated profile replaces these.
"""

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
# Published vLLM logs have non-torch memory of 0.01 to 0.46 GiB on one GPU, 2.1 GiB at TP 8 (NCCL).
_CONTEXT_BYTES = GIB * 35 // 100
_NCCL_BYTES_PER_DOUBLING = GIB * 45 // 100
# Graphs of decode batches: 0.04 to 2.24 GiB in published logs, 0.5 in the middle.
_GRAPH_BYTES = GIB // 2
# Live activation tensors per batched token, in hidden sizes of 16 bits: residual, attention in and out, and the gated
# feed-forward's two halves (fitted to 20 published profile lines; within a factor of two of each text model).
_HIDDEN_COPIES = 6
_SAMPLER_COPIES = 3
_SEQUENCES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Bytes per GPU besides weights and cache. `overhead_bytes` is what was measured of them in one figure."""

    context_bytes: int
    activation_bytes: int
    graph_bytes: int
    overhead_bytes: int = 0
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
) -> Overheads:
    """An estimate of what vLLM's profile run finds: the largest of a full batch in one layer, and of sampling."""
    per_token = 2 * (_HIDDEN_COPIES * hidden_size + 3 * feed_forward_size // tensor_parallel)
    layer = batched_tokens * per_token
    sampler = _SAMPLER_COPIES * _SEQUENCES * vocabulary * 4
    doublings = (tensor_parallel - 1).bit_length()
    return Overheads(
        context_bytes=_CONTEXT_BYTES + doublings * _NCCL_BYTES_PER_DOUBLING,
        activation_bytes=max(layer, sampler) + GIB // 4,
        graph_bytes=_GRAPH_BYTES if graphs else 0,
        source=ESTIMATE,
    )


def architecture_note(architecture: Architecture) -> str:
    """A caution for models whose activation is not that of a text model."""
    return "recurrent states are in fp32: activation can be twice the estimate" if architecture.is_hybrid else ""
