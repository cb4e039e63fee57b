"""What the weights take on each rank: from safetensors headers where the files are at hand, else from the config.

A checkpoint's own size is the safer figure: kernels pad (gpt-oss MXFP4 experts by 9 %), and formats keep some layers
in 16 bits. The caller reads the headers; this file only adds up.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvdiag.kv.errors import KvModelError
from kvdiag.kv.fields import Fields
from kvdiag.kv.parameters import LayerParameters, Parameters

# safetensors: the width of each dtype name in bits.
_SAFETENSORS_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16,
    "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8,
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_MOST_TENSORS = 1 << 20
_MOST_RANK = 8
_EIGHT_BITS = 8
_FOUR_BITS = 4
_LAYER_NUMBER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d{1,4})\.")


class WeightFormat(StrEnum):
    """How linear layers are stored."""

    BF16 = "bf16"
    FP32 = "fp32"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    AWQ = "awq"
    GPTQ = "gptq"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    NF4 = "nf4"


# Bits per weight of a linear layer with its scales. fp8 with an fp32 scale per 128 x 128 block; int4 symmetric and
# awq/gptq with zero points in groups of 128; nvfp4 with an fp8 scale per 16, mxfp4 with an e8m0 scale per 32
# (vllm/model_executor/layers/quantization/: fp8.py, awq.py, modelopt.py, mxfp4.py, bitsandbytes.py).
LINEAR_BITS: dict[WeightFormat, float] = {
    WeightFormat.FP32: 32.0,
    WeightFormat.BF16: 16.0,
    WeightFormat.FP8: 8.0 + 32 / (128 * 128),
    WeightFormat.INT8: 8.0,
    WeightFormat.INT4: 4.0 + 16 / 128,
    WeightFormat.AWQ: 4.0 + 16 / 128 + 4 / 128,
    WeightFormat.GPTQ: 4.0 + 16 / 128 + 4 / 128,
    WeightFormat.NVFP4: 4.0 + 8 / 16,
    WeightFormat.MXFP4: 4.0 + 8 / 32,
    WeightFormat.NF4: 4.0 + 32 / 64,
}
_ALIASES = {
    "auto": None,
    "fp16": WeightFormat.BF16,
    "float16": WeightFormat.BF16,
    "bfloat16": WeightFormat.BF16,
    "half": WeightFormat.BF16,
    "float32": WeightFormat.FP32,
    "w8a8": WeightFormat.INT8,
    "w4a16": WeightFormat.INT4,
    "bnb": WeightFormat.NF4,
    "bitsandbytes": WeightFormat.NF4,
}
# gpt-oss experts are the only layers that MXFP4 checkpoints quantize (models/gpt_oss.py), and kernels pad their sizes:
# 2,880 to 3,072 and 2,944 (seen in published logs: 65.97 GiB for 120b, 13.72 for 20b).
_EXPERTS_ONLY = frozenset({WeightFormat.MXFP4})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """Weight bytes of one pipeline stage on one tensor-parallel rank."""

    stage: int
    weights_bytes: int

    def __post_init__(self) -> None:
        if self.stage < 0 or self.weights_bytes < 0:
            raise KvModelError(
                f"stage {self.stage} with {self.weights_bytes} bytes of weights is impossible", "weights"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTensor:
    """One tensor of a safetensors header."""

    name: str
    stored_bytes: int
    elements: int

    def __post_init__(self) -> None:
        if self.stored_bytes < 0 or self.elements < 0:
            raise KvModelError(
                f"tensor {self.name} of {self.elements} elements in {self.stored_bytes} bytes is impossible", self.name
            )


def parse_weight_format(name: str) -> WeightFormat | None:
    """A format by name; None for `auto`, which means what the config declares."""
    lowered = name.lower()
    if lowered in _ALIASES:
        return _ALIASES[lowered]
    if lowered not in {member.value for member in WeightFormat}:
        known = ", ".join([*_ALIASES, *WeightFormat])
        raise KvModelError(
            f"weight format {name[:40]!r} is not known; known are {known}, or pass the weights in bytes", "weights"
        )
    return WeightFormat(lowered)


def declared_weight_format(config: Mapping[str, object], *, dtype: str) -> WeightFormat:
    """The format a config's quantization_config declares, else the model dtype."""
    top = Fields(config)
    for holder in (top, top.child("text_config")):
        for key in ("quantization_config", "compression_config"):
            quantization = None if holder is None else holder.child(key)
            if quantization is not None:
                return _format_of(quantization)
    return WeightFormat.FP32 if dtype == "float32" else WeightFormat.BF16


def _format_of(quantization: Fields) -> WeightFormat:
    method = (quantization.text("quant_method") or "").lower().replace("_", "-")
    bits = quantization.maybe_integer("bits", "w_bit", low=1, high=32)
    if not method and (quantization.has("quant_algo") or quantization.child("producer") is not None):
        # ModelOpt checkpoints may leave the method out (ModelArchConfigConvertorBase._normalize_quantization_config).
        method = "modelopt"
    match method:
        case "awq" | "gptq" | "auto-round" | "gptq-marlin" | "awq-marlin":
            if bits == _EIGHT_BITS:
                return WeightFormat.INT8
            return WeightFormat.GPTQ if "gptq" in method else WeightFormat.AWQ
        case "fp8" | "fbgemm-fp8" | "deepspeedfp":
            return WeightFormat.FP8
        case "mxfp4" | "gpt-oss-mxfp4":
            return WeightFormat.MXFP4
        case "bitsandbytes":
            eight = quantization.flag("load_in_8bit", default=False)
            return WeightFormat.INT8 if eight else WeightFormat.NF4
        case "modelopt" | "modelopt-fp4" | "modelopt-mixed":
            inner = quantization.child("quantization") or quantization
            algorithm = (inner.text("quant_algo") or quantization.text("quant_algo") or method).upper()
            return WeightFormat.NVFP4 if "FP4" in algorithm else WeightFormat.FP8
        case "compressed-tensors":
            return _compressed_format(quantization)
    field = quantization.path("quant_method")
    raise KvModelError(
        f"{field} {method[:40]!a} is not a format whose size is known; pass --weights FORMAT or --weights BYTES",
        field,
    )


def _compressed_format(quantization: Fields) -> WeightFormat:
    if "mxfp4" in (quantization.text("format") or ""):
        return WeightFormat.MXFP4
    groups = quantization.child("config_groups")
    for name in () if groups is None else groups.names():
        group = groups.child(name) if groups is not None else None
        weights = None if group is None else group.child("weights")
        if weights is not None:
            bits = weights.integer("num_bits", low=1, high=32)
            is_float = weights.text("type") == "float"
            if bits == _FOUR_BITS:
                return WeightFormat.NVFP4 if is_float else WeightFormat.INT4
            return WeightFormat.FP8 if is_float else WeightFormat.INT8
    field = quantization.path("config_groups")
    raise KvModelError(f"{field} declares no weights; pass --weights FORMAT or --weights BYTES", field)


def weights_from_config(
    parameters: Parameters, *, weight_format: WeightFormat, tensor_parallel: int, stage_ends: Sequence[int]
) -> tuple[RankWeights, ...]:
    """Weight bytes of each pipeline stage on one rank, from parameter counts.

    `stage_ends` holds the first layer beyond each stage. Embeddings and the output layer stay in 16 bits and are
    divided (vocab_parallel_embedding.py); the first stage has the embedding, the last the output layer.
    """
    _check_ranks(tensor_parallel)
    ends = tuple(stage_ends)
    linear = LINEAR_BITS[weight_format]
    dense = LINEAR_BITS[WeightFormat.BF16] if weight_format in _EXPERTS_ONLY else linear
    plain = max(LINEAR_BITS[WeightFormat.BF16], linear)
    totals = [0.0] * len(ends)
    start = 0
    for stage, end in enumerate(ends):
        for layer in parameters.layers[start:end]:
            padded = weight_format in _EXPERTS_ONLY
            totals[stage] += _layer_bits(layer, tensor_parallel, dense, linear, plain, padded=padded)
        start = end
    totals[0] += parameters.embedding * plain / tensor_parallel + parameters.other * plain
    totals[-1] += parameters.head * plain / tensor_parallel
    if len(ends) > 1 and parameters.head == 0:
        # A tied output layer is the embedding again, on the last stage.
        totals[-1] += parameters.embedding * plain / tensor_parallel
    return tuple(RankWeights(stage=stage, weights_bytes=math.ceil(bits / 8)) for stage, bits in enumerate(totals))


def _layer_bits(
    layer: LayerParameters, tensor_parallel: int, dense: float, experts: float, plain: float, *, padded: bool
) -> float:
    kv_shares = min(tensor_parallel, layer.kv_heads)
    expert_count = max(layer.padded_experts, layer.experts) if padded else layer.experts
    return (
        layer.divided * dense / tensor_parallel
        + layer.kv_projection * dense / kv_shares
        + expert_count * experts / tensor_parallel
        + layer.replicated * dense
        + layer.plain * plain
    )


def read_headers(headers: Sequence[Mapping[str, object]]) -> tuple[CheckpointTensor, ...]:
    """The tensors of a checkpoint from its files' headers (the JSON object at the start of each safetensors file)."""
    tensors: list[CheckpointTensor] = []
    for header in headers:
        fields = Fields(header)
        names = [name for name in fields.names() if name != "__metadata__"]
        if len(tensors) + len(names) > _MOST_TENSORS:
            raise KvModelError(f"the headers name more than {_MOST_TENSORS} tensors", "safetensors")
        for name in names:
            entry = fields.child(name)
            if entry is not None:
                tensors.append(_tensor(name, entry))
    if not tensors:
        raise KvModelError("the safetensors headers name no tensor", "safetensors")
    return tuple(tensors)


def _tensor(name: str, entry: Fields) -> CheckpointTensor:
    shape = entry.integers("shape", high=1 << 40)
    offsets = entry.integers("data_offsets", high=1 << 50)
    dtype = entry.text("dtype")
    if shape is None or len(shape) > _MOST_RANK or dtype not in _SAFETENSORS_BITS:
        field = entry.path("shape" if shape is None or len(shape) > _MOST_RANK else "dtype")
        raise KvModelError(f"{field[:120]} is not what a safetensors header holds", field)
    elements = math.prod(shape)
    stored = elements * _SAFETENSORS_BITS[dtype] // 8
    if offsets is not None and (not offsets or offsets[-1] - offsets[0] != stored):
        field = entry.path("data_offsets")
        raise KvModelError(f"{field[:120]} does not span the {stored} bytes of shape {list(shape)} in {dtype}", field)
    return CheckpointTensor(name=name, stored_bytes=stored, elements=elements)


def weights_from_tensors(
    tensors: Sequence[CheckpointTensor],
    *,
    tensor_parallel: int,
    stage_ends: Sequence[int],
    kv_heads: int = 1,
    tied: bool = False,
) -> tuple[RankWeights, ...]:
    """Weight bytes of each pipeline stage on one rank, from a checkpoint's tensors: norms, routers and latent
    down-projections are on every rank, KV projections on as many as there are KV heads, the rest is divided.
    """
    _check_ranks(tensor_parallel)
    ends = tuple(stage_ends)
    totals = [0.0] * len(ends)
    for tensor in tensors:
        if tied and tensor.name.endswith("lm_head.weight"):
            continue
        share = tensor.stored_bytes / _shares(tensor.name, tensor_parallel, kv_heads)
        totals[_stage(tensor.name, ends)] += share
        if tied and len(ends) > 1 and "embed_tokens" in tensor.name:
            totals[-1] += share
    return tuple(RankWeights(stage=stage, weights_bytes=math.ceil(total)) for stage, total in enumerate(totals))


_REPLICATED = re.compile(
    r"norm|\.gate\.|router|q_a_proj|kv_a_proj|indexer|rotary|e_score_correction|input_scale|weight_scale_2|vision|visual"
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


def _check_ranks(tensor_parallel: int) -> None:
    if not 1 <= tensor_parallel <= 1 << 12:
        raise KvModelError(
            f"tensor_parallel is {tensor_parallel}; it must lie between 1 and {1 << 12}", "tensor_parallel"
        )
