"""How a checkpoint stores its linear layers: bits per weight with scales and zero points, and layers left in 16 bits.

A format's name gives its usual settings. A config's quantization_config gives its own, which each tool writes in its
own way: its method decides how bits and groups are read, then come the layers that it leaves out
(vllm/model_executor/layers/quantization/: awq.py, auto_gptq.py, fp8.py, modelopt.py, mxfp4.py, bitsandbytes.py,
compressed_tensors/). A method of unknown size is an error, since the weights are the largest part of a plan.
"""

import json
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvdiag.errors import KvModelError
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.weights.linear_layers import Linear
from kvdiag.kv.weights.module_names import ModuleNames, parse_module_names

_PLAIN_BITS = 16.0
_SCALE_BITS = 16
_BLOCK_SCALE_BITS = 32
_MX_GROUP = 32
_USUAL_GROUP = 128
_NF4_BLOCK = 64
_NF4_OUTER_BLOCK = 256
_INTEGER_BITS = (2, 3, 4, 8)
_FLOAT_BITS = (4, 8)
_FOUR_BITS = 4
_EXPERTS = "mlp.experts."
# Lists that name every linear layer of every expert.
_MAX_NAMES = 1 << 18
_OVERRIDE = "pass --weights FORMAT or --weights BYTES"


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


_TABLE: Mapping[str, Mapping[str, Any]] = json.loads(pkgutil.get_data(__package__, "weight_formats.json") or b"")
# Bits per weight of a linear layer with its scales, where only the format's name is known. fp8 with an fp32 scale per
# 128 x 128 block; int4 symmetric and awq/gptq with zero points in groups of 128; nvfp4 with an fp8 scale per 16, mxfp4
# with an e8m0 scale per 32, nf4 with an fp32 scale per 64.
LINEAR_BITS: Mapping[str, float] = _TABLE["linear_bits"]
_ALIASES: Mapping[str, str | None] = _TABLE["aliases"]
# The width of each dtype name of safetensors in bits.
SAFETENSORS_BITS: Mapping[str, int] = _TABLE["safetensors_bits"]
# ModelOpt's quant_algo: weight bits, bits of a scale, and weights that share one (0: one per channel or tensor); names
# of modelopt.py::LINEAR_ALGOS and of ModelOpt itself (modelopt/torch/export/quant_utils.py).
_ALGORITHMS: Mapping[str, tuple[int, int, int]] = _TABLE["modelopt_algorithms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatOverride:
    """Linear layers stored in another way than the rest."""

    names: ModuleNames
    bits: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Bits per weight: of linear layers, of `exceptions` (the first that names a layer counts) and of all else.

    `padded_experts` where the kernel pads the experts' sizes.
    """

    linear_bits: float
    plain_bits: float = _PLAIN_BITS
    head_bits: float = _PLAIN_BITS
    exceptions: tuple[FormatOverride, ...] = ()
    experts_only: bool = False
    padded_experts: bool = False

    @property
    def quantizes(self) -> bool:
        """Whether linear layers take fewer bits than the rest."""
        return self.linear_bits < self.plain_bits

    def bits(self, index: int, linear: Linear) -> float:
        """Bits per weight of a linear layer in layer `index`."""
        if self.experts_only and not linear.name.startswith(_EXPERTS):
            return self.plain_bits
        for exception in self.exceptions:
            if exception.names.match(index, linear.name):
                return exception.bits
        return self.linear_bits


def parse_weight_format(name: str) -> WeightFormat | None:
    """A format by name; None for `auto`, which means what the config declares."""
    chosen = _ALIASES.get(name.lower(), name.lower())
    if chosen is not None and chosen not in LINEAR_BITS:
        known = ", ".join([*_ALIASES, *WeightFormat])
        raise KvModelError(f"unknown weight format {name[:40]!r}: give a size in bytes or one of {known}", "weights")
    return None if chosen is None else WeightFormat(chosen)


def usual_quantization(weight_format: WeightFormat) -> Quantization:
    """The usual settings of a format given by name alone.

    MXFP4 checkpoints quantize experts only, and kernels pad those: 2,880 to 3,072 and 2,944 in gpt-oss (published
    logs: 65.97 GiB for 120b, 13.72 GiB for 20b).
    """
    bits = LINEAR_BITS[weight_format]
    mxfp4 = weight_format is WeightFormat.MXFP4
    plain = max(_PLAIN_BITS, bits)
    return Quantization(linear_bits=bits, plain_bits=plain, head_bits=plain, experts_only=mxfp4, padded_experts=mxfp4)


def declared_quantization(config: Mapping[str, object]) -> Quantization:
    """What a config's quantization_config declares; 16 bits where it declares none (a float32 checkpoint is served in
    16 bits, too).
    """
    top = Fields(config)
    for holder in (top, top.child("text_config")):
        for key in ("quantization_config", "compression_config"):
            declared = None if holder is None else holder.child(key)
            if declared is not None:
                return _declared(declared)
    return usual_quantization(WeightFormat.BF16)


def _declared(declared: Fields) -> Quantization:
    method = (declared.text("quant_method") or "").lower().replace("_", "-")
    if not method and (declared.has("quant_algo") or declared.child("producer") is not None):
        # ModelOpt checkpoints may leave the method out (ModelArchConfigConvertorBase._normalize_quantization_config).
        method = "modelopt"
    unquantized = tuple(_unquantized(declared))
    match method:
        case "awq" | "awq-marlin" | "auto-awq":
            bits = _grouped(declared, zeros=declared.flag("zero_point", default=True))
        case "gptq" | "gptq-marlin" | "auto-gptq" | "auto-round" | "intel/auto-round" | "inc":
            # qzeros are stored whether the format is symmetric or not; with desc_act so is g_idx, 32 bits an input row.
            head = declared.flag("lm_head", default=False)
            bits = _grouped(declared, zeros=True)
            return Quantization(
                linear_bits=bits,
                head_bits=bits if head else _PLAIN_BITS,
                exceptions=(*unquantized, *_per_layer(declared)),
            )
        case "fp8" | "fbgemm-fp8" | "deepspeedfp":
            bits = 8 + _block_scale(declared, "weight_block_size")
        case "mxfp8":
            bits = 8 + 8 / _MX_GROUP
        case "mxfp4" | "gpt-oss-mxfp4":
            return usual_quantization(WeightFormat.MXFP4)
        case "bitsandbytes":
            bits = _bitsandbytes_bits(declared)
        case "modelopt" | "modelopt-fp4" | "modelopt-mxfp8" | "modelopt-mixed":
            bits = _modelopt_bits(declared, method)
        case "compressed-tensors":
            return _compressed(declared, unquantized)
        case _:
            raise declared.error("quant_method", f"{method[:40]!a} is a format of unknown size: {_OVERRIDE}")
    return Quantization(linear_bits=bits, exceptions=unquantized)


def _unquantized(declared: Fields) -> Iterator[FormatOverride]:
    """The layers that stay in 16 bits, under the name that each tool has for the list."""
    for holder in filter(None, (declared, declared.child("quantization"))):
        for key in ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules"):
            if entries := holder.strings(key, most=_MAX_NAMES):
                yield FormatOverride(names=parse_module_names(entries, field=holder.path(key)), bits=_PLAIN_BITS)


def _grouped(
    fields: Fields, *, zeros: bool, default_bits: int | None = None, default_group: int = _USUAL_GROUP
) -> float:
    """Integers in groups that share a 16-bit scale and, with `zeros`, a zero point as wide as a weight."""
    bits = _integer_bits(fields, "bits", "w_bit", default=default_bits)
    group = fields.maybe_integer("group_size", "q_group_size", low=-1, high=1 << 20)
    if group == 0:
        raise fields.error("group_size", "is 0: it must be -1 (a whole channel) or a number of weights")
    return bits + _per_group(_SCALE_BITS + (bits if zeros else 0), default_group if group is None else group)


def _integer_bits(fields: Fields, *names: str, default: int | None = None) -> int:
    bits = fields.maybe_integer(*names, low=1, high=64)
    if bits is None and default is None:
        raise fields.error(names[0], f"is missing: {_OVERRIDE}")
    chosen = default if bits is None else bits
    if chosen not in _INTEGER_BITS:
        raise fields.error(
            next(name for name in names if fields.has(name)),
            f"is {chosen}, not 2, 3, 4 or 8: {_OVERRIDE}",
        )
    return chosen


def _per_group(scale_bits: float, group: int) -> float:
    """The bits that scales add to each weight; 0 where a whole channel shares one scale."""
    return scale_bits / group if group > 0 else 0.0


def _block_scale(fields: Fields, name: str) -> float:
    sides = fields.integers(name, low=1, high=1 << 20)
    if not sides:
        return 0.0
    if len(sides) != 2:  # noqa: PLR2004 - a block has two sides
        raise fields.error(name, f"has {len(sides)} sides, not two")
    return _BLOCK_SCALE_BITS / (sides[0] * sides[1])


def _per_layer(declared: Fields) -> Iterator[FormatOverride]:
    """GPTQModel's `dynamic` ("-:EXPRESSION" leaves layers alone, "+:EXPRESSION" has settings of its own) and
    AutoRound's `extra_config`, which has settings for names.
    """
    own = _integer_bits(declared, "bits", "w_bit")
    group = declared.maybe_integer("group_size", low=-1, high=1 << 20) or _USUAL_GROUP
    for key in ("dynamic", "extra_config"):
        holder = declared.child(key) or Fields({})
        alike: dict[float, list[str]] = {}
        for name in holder.names():
            if name.startswith("-:"):
                alike.setdefault(_PLAIN_BITS, []).append(f"re:{name[2:]}")
                continue
            settings = holder.child(name)
            if settings is None or not (settings.has("bits") or settings.has("group_size")):
                continue
            entry = f"re:{name[2:]}" if name.startswith("+:") else name
            if settings.raw("bits") in (16, 32):
                bits = _PLAIN_BITS
            else:
                bits = _grouped(settings, zeros=True, default_bits=own, default_group=group)
            alike.setdefault(bits, []).append(entry)
        for bits, entries in alike.items():
            yield FormatOverride(names=parse_module_names(entries, field=declared.path(key)), bits=bits)


def _bitsandbytes_bits(declared: Fields) -> float:
    """NF4 and FP4 with an fp32 scale per 64 weights, quantized again to 8 bits with an fp32 scale per 256 of them
    (bitsandbytes/functional.py::quantize_4bit); int8 with a scale per row.
    """
    if declared.flag("load_in_8bit", default=False):
        return 8.0
    if declared.flag("bnb_4bit_use_double_quant", default=False):
        return 4 + 8 / _NF4_BLOCK + 32 / (_NF4_BLOCK * _NF4_OUTER_BLOCK)
    return 4 + 32 / _NF4_BLOCK


def _modelopt_bits(declared: Fields, method: str) -> float:
    inner = declared.child("quantization") or declared
    holder = inner if inner.has("quant_algo") else declared
    algorithm = holder.text("quant_algo") or {"modelopt-fp4": "NVFP4", "modelopt-mxfp8": "MXFP8"}.get(method, "FP8")
    if algorithm.upper() == "MIXED_PRECISION" or method == "modelopt-mixed":
        raise holder.error("quant_algo", "MIXED_PRECISION has a format for each layer: pass --weights BYTES")
    known = _ALGORITHMS.get(algorithm.upper())
    if known is None:
        raise holder.error("quant_algo", f"{algorithm[:40]!a} is a format of unknown size: {_OVERRIDE}")
    bits, scale_bits, group = known
    if bits == _FOUR_BITS:
        group = holder.integer("group_size", default=group, high=1 << 20)
    return bits + _per_group(scale_bits, group)


def _compressed(declared: Fields, unquantized: tuple[FormatOverride, ...]) -> Quantization:
    """compressed-tensors: groups of layers with settings of their own; a target is a class of layers, a name or an
    expression.
    """
    groups = declared.child("config_groups") or Fields({})
    whole: float | None = None
    named: list[FormatOverride] = []
    for name in groups.names():
        group = groups.child(name) or Fields({})
        weights = group.child("weights")
        if weights is None:
            continue
        bits = _compressed_bits(weights)
        targets = group.strings("targets") or ("Linear",)
        if "Linear" in targets:
            whole = bits if whole is None else whole
        else:
            named.append(FormatOverride(names=parse_module_names(targets, field=group.path("targets")), bits=bits))
    if whole is None and not named:
        raise declared.error("config_groups", f"has no weights: {_OVERRIDE}")
    return Quantization(linear_bits=_PLAIN_BITS if whole is None else whole, exceptions=(*unquantized, *named))


def _compressed_bits(weights: Fields) -> float:
    """compressed_tensors/quantization/quant_args.py::QuantizationArgs."""
    kind = weights.text("type") or "int"
    strategy = weights.text("strategy")
    group = weights.maybe_integer("group_size", low=-1, high=1 << 20)
    if kind == "float":
        bits = weights.integer("num_bits", low=1, high=64)
        if bits not in _FLOAT_BITS:
            raise weights.error("num_bits", f"is {bits}, not 4 or 8: {_OVERRIDE}")
        if strategy == "block":
            return bits + _block_scale(weights, "block_structure")
        # NVFP4 and the MX formats have 8-bit scales.
        return bits + (_per_group(8, group) if group and group > 0 else 0.0)
    if kind != "int":
        raise weights.error("type", f"{kind[:40]!a} is neither int nor float: {_OVERRIDE}")
    bits = _integer_bits(weights, "num_bits")
    if strategy in ("channel", "tensor") or not group or group < 0:
        return float(bits)
    zeros = 0 if weights.flag("symmetric", default=True) else bits
    return bits + _per_group(_SCALE_BITS + zeros, group)
