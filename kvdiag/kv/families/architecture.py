"""A parsed Hugging Face config.json -> Architecture.

In this order: the language model's part of the config; its model type, by name or by its class; an encoder, where vLLM
serves it as one; the values that the config class fills in; then the family's reader. The dimensions come from where
vLLM takes them: transformers_utils/model_arch_config_convertor.py and the model file of each family. A model type that
is not in `registry` is an error: the textbook formula is never a silent fallback, since it is wrong 4 to 25 times on
latent, windowed and state layers.
"""

from collections.abc import Mapping, Sequence
from itertools import product

from kvdiag.errors import KvModelError
from kvdiag.kv.families.attention import encoder_only
from kvdiag.kv.families.base import CONFIG_NAMES, WIDTH_NAMES
from kvdiag.kv.families.class_defaults import class_defaults
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.families.context_length import context_limit
from kvdiag.kv.families.registry import (
    ENCODER_CLASSES,
    ENCODING_DECODERS,
    FAMILIES,
    LAST_SERVED,
    TYPE_OF_ARCHITECTURE,
    TYPE_OF_WRAPPER,
    UNMODELLED,
)
from kvdiag.kv.layout.layers import Architecture, LatentLayer

# Where multimodal configs keep the language model, in the order tried
# (transformers PreTrainedConfig.get_text_config; vLLM transformers_utils/config.py).
_TEXT_CONFIGS: Sequence[str] = CONFIG_NAMES["text_configs"]
# vLLM serves a float32 checkpoint in 16 bits (config/model.py::_resolve_auto_dtype).
_MODEL_DTYPES: Mapping[str, str] = CONFIG_NAMES["dtypes"]
_NEVER_ASSUMED = frozenset(
    {*CONFIG_NAMES["depth"], *WIDTH_NAMES, "intermediate_size", *CONFIG_NAMES["max_context"]} - {"max_context"}
)
_OVERRIDE = "pass --kv-bytes-per-token"


def parse_architecture(
    config: Mapping[str, object],
    *,
    beside: Mapping[str, int] | None = None,
    sliding_window: bool = True,
    by_vllm: bool = True,
) -> Architecture:
    """The layers of a model, from its config.json, and the limits of its requests, for which `beside` and
    `sliding_window` are as in `context_limit`. Classes whose cache in vLLM is not modelled are refused for vLLM alone.
    Raises KvModelError with the field that decided so.
    """
    if not isinstance(config, Mapping):
        raise KvModelError(f"the config is a {type(config).__name__}, not a JSON object", "config")
    top = Fields(config)
    text = _text_config(top)
    if by_vllm:
        _check_modelled(top, text)
    model_type = _model_type(top, text)
    family = FAMILIES.get(model_type)
    if family is None and top.has("text_model_id"):
        raise top.error(
            "text_model_id", f"refers to the language model in another repository: pass {top.text('text_model_id')!a}"
        )
    if family is None:
        holder = text if text.has("model_type") else top
        raise holder.error("model_type", f"{model_type!r} is an unknown architecture: {_OVERRIDE}")
    if _is_bidirectional(top, text, model_type):
        family = encoder_only
    filled = _filled(text, model_type, nested=text is not top)
    model = family(filled)
    limit = context_limit(filled, beside=beside, sliding_window=sliding_window)
    return Architecture(
        model_type=model_type,
        depth=model.depth,
        attention_heads=model.attention_heads,
        layers=model.layers,
        draft_layers=model.draft_layers,
        layers_per_draft=model.layers_per_draft,
        dtype=_dtype(top, text),
        declared_kv_dtype=_declared_kv_dtype(top, text),
        state_dtype=model.state_dtype,
        max_context_tokens=limit.default_tokens,
        accepted_context_tokens=limit.most_tokens,
    )


def text_fields(config: Mapping[str, object]) -> Fields:
    """The language model's fields of a config that parse_architecture accepts, class defaults filled in."""
    top = Fields(config)
    text = _text_config(top)
    return _filled(text, _model_type(top, text), nested=text is not top)


def dropped_note(model_type: str) -> str:
    """A caution for a model that newer versions of vLLM refuse; empty for others."""
    version = LAST_SERVED.get(model_type)
    return "" if version is None else f"vLLM {version} was the last version to serve {model_type}: newer ones refuse it"


def given_architecture(*, bytes_per_token: int) -> Architecture:
    """A model of which only the cache's bytes per token and GPU are known (--kv-bytes-per-token): one row per token,
    the same on every rank, to be deployed with an 8-bit cache.
    """
    layer = LatentLayer(index=0, latent_size=bytes_per_token)
    return Architecture(model_type="given", depth=1, attention_heads=0, layers=(layer,), dtype="bfloat16")


def _text_config(top: Fields) -> Fields:
    """The language model's own config: the first nested one that says anything, else the whole."""
    names = (top.text("model_type"), *(TYPE_OF_ARCHITECTURE.get(one) for one in top.strings("architectures") or ()))
    if "moondream3" in names:
        # transformers_utils/configs/moondream3.py: config.text, and class defaults for what it leaves out.
        holder = top.child("config")
        return top if holder is None else holder.child("text") or holder
    current = top
    while True:
        nested = next(
            (child for name in _TEXT_CONFIGS if (child := current.child(name)) is not None and child.names()),
            None,
        )
        if nested is None:
            return current
        current = nested


def _model_type(top: Fields, text: Fields) -> str:
    model_type = text.text("model_type") or (None if _is_wrapped(top, text) else top.text("model_type"))
    if model_type in FAMILIES:
        return str(model_type)
    for name in _classes(top, text):
        if name in TYPE_OF_ARCHITECTURE:
            return TYPE_OF_ARCHITECTURE[name]
        if name in TYPE_OF_WRAPPER and (model_type is None or model_type == top.text("model_type")):
            return TYPE_OF_WRAPPER[name]
    model_type = model_type or top.text("model_type")
    if model_type is None:
        raise KvModelError(
            f"model_type and architectures are missing or unknown: pass a model's config.json, or {_OVERRIDE}",
            "model_type",
        )
    return model_type


def _classes(top: Fields, text: Fields) -> tuple[str, ...]:
    return (*(text.strings("architectures") or ()), *(top.strings("architectures") or ()))


def _check_modelled(top: Fields, text: Fields) -> None:
    name = next((name for name in _classes(top, text) if name in UNMODELLED), None)
    if name is not None:
        raise top.error("architectures", f"{name} is not modelled yet: {UNMODELLED[name]}; {_OVERRIDE}")


def _is_wrapped(top: Fields, text: Fields) -> bool:
    """Whether the language model's config is part of a multimodal one, whose own type is another's."""
    return text is not top and any(name in TYPE_OF_WRAPPER for name in top.strings("architectures") or ())


def _is_bidirectional(top: Fields, text: Fields, model_type: str) -> bool:
    classes = frozenset(top.strings("architectures") or ()) | frozenset(text.strings("architectures") or ())
    if classes & ENCODER_CLASSES:
        return True
    return model_type in ENCODING_DECODERS and not text.flag("is_causal", default=True)


def _filled(text: Fields, model_type: str, *, nested: bool) -> Fields:
    """The config with what its transformers class fills in.

    A top-level config must state depth and width: only nested text configs, which are written as
    differences from their class, may leave them out.
    """
    defaults = class_defaults(model_type)
    if not nested:
        defaults = {name: value for name, value in defaults.items() if name not in _NEVER_ASSUMED}
    return text.filled(defaults)


def _dtype(top: Fields, text: Fields) -> str:
    """The dtype the model runs in (config/model.py::_get_and_verify_dtype): the whole config's, else the text's."""
    for source, name in product((top, text), ("dtype", "torch_dtype")):
        value = source.text(name)
        if value is None or value == "auto":
            continue
        short = value.removeprefix("torch.")
        if short not in _MODEL_DTYPES:
            raise source.error(name, f"{short!r} is not a dtype that vLLM serves a model in")
        return _MODEL_DTYPES[short]
    return "bfloat16"


def _declared_kv_dtype(top: Fields, text: Fields) -> str | None:
    """The KV format a quantized checkpoint asks for, used where --kv-cache-dtype is auto.

    utils/torch_utils.py::get_kv_cache_quant_algo_string (ModelOpt), model_executor/layers/attention/attention.py
    (compressed-tensors kv_cache_scheme).
    """
    for source, name in product((top, text), ("quantization_config", "compression_config")):
        quantization = source.child(name) or Fields({})
        inner = quantization.child("quantization") or quantization
        for holder, key in product((inner, quantization), ("kv_cache_scheme", "kv_cache_quant_algo")):
            scheme = holder.raw(key)
            if isinstance(scheme, str):
                return {"fp8": "fp8", "nvfp4": "nvfp4"}.get(scheme.lower())
            if isinstance(scheme, Mapping):
                bits = scheme.get("num_bits")
                return {8: "fp8", 4: "nvfp4"}.get(bits) if isinstance(bits, int) else None
    return None
