"""What the weights take on each rank: from safetensors headers where the files are at hand, else from the config.

A checkpoint's own size is the safer figure: kernels pad (gpt-oss MXFP4 experts by 9 %), and formats keep some layers
in 16 bits. The caller reads the headers; this file only adds up.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvdiag.errors import KvModelError
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.weights.linear_layers import LayerParameters, Parameters
from kvdiag.kv.weights.quantization import SAFETENSORS_BITS, Quantization

_MAX_TENSORS = 1 << 20
_MAX_RANK = 8
_ATTENTION = re.compile(r"attn|attention|mamba|\bconv\b|embed")
_LAYER_NUMBER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d{1,4})\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTensor:
    """One tensor of a safetensors header."""

    name: str
    stored_bytes: int


def weights_from_config(
    parameters: Parameters,
    *,
    quantization: Quantization,
    tensor_parallel: int,
    stage_ends: Sequence[int],
    attention_parallel: int | None = None,
) -> tuple[int, ...]:
    """Weight bytes of each pipeline stage on one rank, from parameter counts.

    `attention_parallel` ranks divide attention, states and the embedding where an engine runs them data-parallel
    (SGLang 0.5.23: qwen3_moe.py, deepseek_v2.py, vocab_parallel_embedding.py). `stage_ends` holds the first layer
    beyond each stage. Embeddings and the output layer stay in 16 bits and are divided (vocab_parallel_embedding.py);
    the first stage has the embedding, the last the output layer.
    """
    ends = tuple(stage_ends)
    plain, head = quantization.plain_bits, quantization.head_bits
    totals = [0.0] * len(ends)
    attention = attention_parallel or tensor_parallel
    for index, layer in enumerate(parameters.layers[: ends[-1]]):
        stage = next(stage for stage, end in enumerate(ends) if index < end)
        totals[stage] += _layer_bits(index, layer, quantization, tensor_parallel, attention)
    totals[0] += parameters.embedding * plain / attention + parameters.other * plain
    totals[-1] += parameters.head * head / tensor_parallel
    if len(ends) > 1 and parameters.head == 0:
        # A tied output layer is the embedding again, on the last stage.
        totals[-1] += parameters.embedding * plain / tensor_parallel
    return tuple(math.ceil(bits / 8) for bits in totals)


def _layer_bits(
    index: int, layer: LayerParameters, quantization: Quantization, tensor_parallel: int, attention: int
) -> float:
    total = layer.plain * quantization.plain_bits
    for linear in layer.linears:
        count = linear.parameters
        if quantization.padded_experts:
            count = max(count, linear.padded_parameters)
        total += (
            count
            * quantization.bits(index, linear)
            / linear.share(attention if _ATTENTION.search(linear.name) else tensor_parallel)
        )
    return total


def read_headers(headers: Sequence[Mapping[str, object]]) -> tuple[CheckpointTensor, ...]:
    """The tensors of a checkpoint from its files' headers (the JSON object at the start of each safetensors file)."""
    tensors: list[CheckpointTensor] = []
    for header in headers:
        fields = Fields(header)
        names = [name for name in fields.names() if name != "__metadata__"]
        if len(tensors) + len(names) > _MAX_TENSORS:
            raise KvModelError(f"the safetensors headers have more than {_MAX_TENSORS:,} tensors", "safetensors")
        for name in names:
            entry = fields.child(name)
            if entry is not None:
                tensors.append(_tensor(name, entry))
    if not tensors:
        raise KvModelError("the safetensors headers have no tensor", "safetensors")
    return tuple(tensors)


def _tensor(name: str, entry: Fields) -> CheckpointTensor:
    shape = entry.integers("shape", high=1 << 40)
    offsets = entry.integers("data_offsets", high=1 << 50)
    dtype = entry.text("dtype")
    if shape is None or len(shape) > _MAX_RANK or dtype is None or dtype not in SAFETENSORS_BITS:
        field = "shape" if shape is None or len(shape) > _MAX_RANK else "dtype"
        raise entry.error(field, "is not that of a safetensors tensor")
    stored = math.prod(shape) * SAFETENSORS_BITS[dtype] // 8
    if offsets is not None and (not offsets or offsets[-1] - offsets[0] != stored):
        raise entry.error("data_offsets", f"must span {stored:,} bytes: shape {list(shape)} in {dtype}")
    return CheckpointTensor(name=name, stored_bytes=stored)


def weights_from_tensors(
    tensors: Sequence[CheckpointTensor],
    *,
    tensor_parallel: int,
    stage_ends: Sequence[int],
    kv_heads: int = 1,
    tied: bool = False,
    attention_parallel: int | None = None,
) -> tuple[int, ...]:
    """Weight bytes of each pipeline stage on one rank, from a checkpoint's tensors: norms, routers and latent
    down-projections are on every rank, KV projections on as many as there are KV heads, the rest is divided.
    """
    ends = tuple(stage_ends)
    totals = [0.0] * len(ends)
    for tensor in tensors:
        if tied and tensor.name.endswith("lm_head.weight"):
            continue
        ranks = (attention_parallel if _ATTENTION.search(tensor.name) else None) or tensor_parallel
        share = tensor.stored_bytes / _shares(tensor.name, ranks, kv_heads)
        totals[_stage(tensor.name, ends)] += share
        if tied and len(ends) > 1 and "embed_tokens" in tensor.name:
            totals[-1] += share
    return tuple(math.ceil(total) for total in totals)


_REPLICATED = re.compile(
    r"norm|(?:^|\.)fc\.weight|\.gate\.|router|q_a_proj|kv_a_proj|indexer|rotary|e_score_correction|input_scale|weight_scale_2|vision|visual"
)
_KV_PROJECTION = re.compile(r"\.(k_proj|v_proj)\.")


def _shares(name: str, tensor_parallel: int, kv_heads: int) -> int:
    if _REPLICATED.search(name):
        return 1
    if _KV_PROJECTION.search(name):
        return min(tensor_parallel, max(1, kv_heads))
    return tensor_parallel


def _stage(name: str, ends: tuple[int, ...]) -> int:
    found = _LAYER_NUMBER.search(name)
    if found is None or "vision" in name or "visual" in name:
        return len(ends) - 1 if "lm_head" in name or name.endswith("model.norm.weight") else 0
    number = int(found.group(1))
    return next((stage for stage, end in enumerate(ends) if number < end), len(ends) - 1)
