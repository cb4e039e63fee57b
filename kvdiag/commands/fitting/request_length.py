"""Whether an engine accepts requests of a length, and how to make it accept longer ones.

However large the pool is, an engine does not start with a context beyond the one it derives from the model's config.
"""

import json
from collections.abc import Mapping
from typing import Any

import click

from kvdiag.errors import KvModelError
from kvdiag.formatting import plural
from kvdiag.kv.families.architecture import text_fields
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.families.context_length import context_limit
from kvdiag.kv.fit.overheads import GENERIC_ENGINE
from kvdiag.kv.layout.layers import Architecture
from kvdiag.kv.layout.pages import ceil_div
from kvdiag.sources.model_files import ModelFiles


def refused_length(files: ModelFiles, architecture: Architecture, context_tokens: int, engine: str) -> str:
    """Why vLLM does not start with such a context, and what would let it; empty where it does."""
    longest = architecture.accepted_context_tokens
    if longest is None or context_tokens <= longest:
        return ""
    if engine == GENERIC_ENGINE:
        return f"the model supports {plural(longest, 'token')}: pass --context {longest} or less"
    text = text_fields(files.config)
    limit = context_limit(text, beside=files.limits)
    stop = f"vLLM does not start with --max-model-len {context_tokens}: {limit.field} limits it to {longest}"
    allow = "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 turns the check off"
    if not limit.rotary:
        return f"{stop}, and the model's positions cannot be scaled; {allow}, and longer requests then fail"
    scaled = json.dumps(_scaled(files.config, text, longest, context_tokens))
    return f"{stop}; to extend it, scale RoPE: --hf-overrides '{scaled}'. {allow} without scaling"


def _scaled(config: Mapping[str, Any], text: Fields, longest: int, context_tokens: int) -> Mapping[str, Any]:
    """YaRN by the least whole factor; vLLM 0.32 takes max_position_embeddings as the scaled length."""
    factor = ceil_div(context_tokens, longest)
    parameters = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": longest}
    known = text.child("rope_parameters")
    theta = text.raw("rope_theta") if known is None else known.raw("rope_theta")
    if isinstance(theta, int | float):
        parameters["rope_theta"] = theta
    overrides = {"rope_parameters": parameters, "max_position_embeddings": factor * longest}
    nested = text.path("").partition(".")[0]
    return {nested: overrides} if nested and nested in config else overrides


def sglang_context_tokens(text: Fields) -> int:
    """The context that SGLang derives (srt/utils/hf_transformers/common.py::get_context_length): the first length
    field, times the RoPE factor where the parameters do not name the original length.
    """
    factor = 1.0
    scaling = text.child("rope_scaling") or text.child("rope_parameters") or Fields({})
    known = scaling.has("original_max_position_embeddings") or scaling.text("rope_type") in (
        "llama3",
        "yarn",
        "longrope",
    )
    if not known:
        factor = scaling.number("factor", default=1, low=0, high=1e6)
    names = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
    return int(factor * text.integer(*names, "n_positions", default=2_048, high=1 << 40))


def check_length(architecture: Architecture, context_tokens: int | None) -> None:
    """Refuse a context that an engine other than vLLM does not start with; click.UsageError."""
    longest = architecture.accepted_context_tokens
    if context_tokens is not None and longest is not None and context_tokens > longest:
        raise click.UsageError(
            f"--context exceeds the model's limit of {plural(longest, 'token')}, so the engine does not start; to "
            "extend it, change rope_scaling and the limit in the model's config.json and pass that file"
        )


def with_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with --hf-overrides (config/model.py::ModelConfig._apply_dict_overrides): an object for a nested
    config changes that config's fields, any other replaces the value.
    """
    changed = dict(config)
    for name, value in overrides.items():
        own = changed.get(name)
        if isinstance(value, Mapping) and isinstance(own, Mapping) and name.endswith("_config"):
            changed[name] = with_overrides(own, value)
        else:
            changed[name] = value
    if "rope_parameters" in overrides:
        # transformers keeps one of the two: a later rope_parameters replaces a rope_scaling of the file.
        changed.pop("rope_scaling", None)
    return changed


def parsed_object(text: str, option: str) -> Mapping[str, Any]:
    """The JSON object that an option holds.

    Raises:
        KvModelError: it is not a JSON object.
    """
    try:
        value = json.loads(text[: 1 << 16])
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise KvModelError(f"--{option} {text[:40]!a} is not a JSON object", option)
    return value
