"""How a vLLM server says it was started: its arguments, its engine config line and what it resolves from them.

Pure. The lines are Python's repr of dicts and objects; each value is found by its own bounded pattern, none is
evaluated, and what has another form than expected is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kvdiag.kv.calibration.engine_report import EngineSettings

MAX_TEXT_CHARACTERS = 512
_MOST = 1 << 40
_WHOLE = r"(\d{1,15})(?!\w|\.\d)"
_FRACTION = r"(\d(?:\.\d{1,20})?(?:e-\d{1,2})?)(?!\w|\.\d)"
_FLAG = r"(True|False)\b"
_WORD = r"'?(?:torch\.)?([A-Za-z][\w.-]{0,60})'?"
_TEXT = rf"'([^'\n]{{1,{MAX_TEXT_CHARACTERS}}})'"


def _argument(name: str, form: str) -> re.Pattern[str]:
    """`'name': value` of a dict, `name=value` of a Namespace or a config line."""
    return re.compile(rf"(?<![\w])'?{name}'?(?:=|: ){form}")


_ARGUMENTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("model", _argument("model", _TEXT)),
    ("dtype", _argument("dtype", _WORD)),
    ("kv_dtype", _argument("kv_cache_dtype", _WORD)),
    ("quantization", _argument("quantization", _WORD)),
    ("tensor_parallel", _argument("tensor_parallel_size", _WHOLE)),
    ("pipeline_parallel", _argument("pipeline_parallel_size", _WHOLE)),
    ("decode_context_parallel", _argument("decode_context_parallel_size", _WHOLE)),
    ("data_parallel", _argument("data_parallel_size", _WHOLE)),
    ("max_model_len_tokens", _argument("max_model_len", _WHOLE)),
    ("max_model_len_tokens", _argument("max_seq_len", _WHOLE)),
    ("max_num_batched_tokens", _argument("max_num_batched_tokens", _WHOLE)),
    ("block_size_tokens", _argument("block_size", _WHOLE)),
    ("memory_fraction_ratio", _argument("gpu_memory_utilization", _FRACTION)),
    ("pool_bytes", _argument("kv_cache_memory_bytes", _WHOLE)),
    ("blocks_override", _argument("num_gpu_blocks_override", _WHOLE)),
    ("speculative_tokens", _argument("num_(?:speculative|spec)_tokens", _WHOLE)),
    ("prefix_caching", _argument("enable_prefix_caching", _FLAG)),
    ("hybrid_manager", _argument("disable_hybrid_kv_cache_manager", _FLAG)),
    ("async_scheduling", _argument("async_scheduling", _FLAG)),
    ("state_cache_mode", _argument("mamba_cache_mode", _WORD)),
    ("state_dtype", _argument("mamba_ssm_cache_dtype", _WORD)),
    ("enforce_eager", _argument("enforce_eager", _FLAG)),
    ("device", _argument("device_config", _WORD)),
)
"""Field of `EngineSettings` to how it stands among the arguments or in the config line."""

_ARGUMENT_LINE = re.compile(r"\bnon-default args: |\bargs: Namespace\(")
_CONFIG_LINE = re.compile(r"Initializing an? (?:V[01] )?LLM engine \(v")

_RESOLVED: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("version", re.compile(r"Initializing an? (?:V[01] )?LLM engine \(v?(\d[\w.+-]{0,60})\)")),
    ("version", re.compile(r"vLLM API server version v?(\d[\w.+-]{0,60})")),
    ("architecture", re.compile(r"Resolved architecture: (\w{1,80})")),
    ("max_model_len_tokens", re.compile(rf"Using max model len {_WHOLE}")),
    ("max_num_batched_tokens", re.compile(rf"prefill is enabled with max_num_batched_tokens={_WHOLE}")),
    ("block_size_tokens", re.compile(r"Setting attention block size to (\d{1,9}) tokens")),
    ("decode_context_parallel", re.compile(r"KV cache size by the dcp_world_size (\d{1,5})")),
    ("memory_fraction_ratio", re.compile(rf"gpu_memory_utilization \({_FRACTION}\)")),
    ("memory_fraction_ratio", re.compile(rf"Desired GPU memory utilization is \({_FRACTION},")),
    ("memory_fraction_ratio", re.compile(rf"current --gpu-memory-utilization={_FRACTION} is equivalent")),
    ("memory_fraction_ratio", re.compile(rf"\bkv_cache_size=[\d.]{{1,20}}GiB gpu_memory_utilization={_FRACTION}")),
)
"""What the server prints once it has worked a setting out."""

_SWITCHES: tuple[tuple[str, re.Pattern[str], bool], ...] = (
    ("async_scheduling", re.compile(r"Asynchronous scheduling is enabled"), True),
    ("async_scheduling", re.compile(r"Asynchronous scheduling is disabled"), False),
    ("graphs_estimated", re.compile(r"CUDA graph memory profiling is enabled"), True),
    (
        "graphs_estimated",
        re.compile(r"CUDA graph memory profiling is disabled|graph memory profiling will be enabled"),
        False,
    ),
)

_TEXTS = frozenset(
    {
        "model",
        "dtype",
        "kv_dtype",
        "quantization",
        "state_cache_mode",
        "state_dtype",
        "device",
        "version",
        "architecture",
    }
)
_FLAGS = frozenset({"prefix_caching", "async_scheduling", "enforce_eager", "hybrid_manager"})
_UNSET = frozenset({"None", "none"})


def parse_settings(lines: Iterable[str]) -> EngineSettings:
    """The settings of one start; of two lines that tell the same one, the later. What the engine's config line says
    stands above what was asked for: it is what came of it, and of the model itself where a drafter is loaded too.
    """
    arguments: dict[str, Any] = {}
    config: dict[str, Any] = {}
    resolved: dict[str, Any] = {}
    for line in lines:
        if _ARGUMENT_LINE.search(line):
            arguments = _found(_ARGUMENTS, line)
        elif _CONFIG_LINE.search(line):
            config = _found(_ARGUMENTS, line)
            # Objects printed in the line have block sizes of other things.
            config.pop("block_size_tokens", None)
        # A drafter's architecture is resolved after the model's own.
        first = {"architecture": resolved["architecture"]} if "architecture" in resolved else {}
        resolved.update({**_found(_RESOLVED, line), **first})
        resolved.update({name: value for name, pattern, value in _SWITCHES if pattern.search(line)})
    return replace(EngineSettings(), **{**arguments, **resolved, **config})


def _found(table: Iterable[tuple[str, re.Pattern[str]]], line: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, pattern in table:
        match = pattern.search(line)
        if match is not None and name not in found and (value := _value(name, match[1])) is not None:
            found[name] = value
    return found


def _value(name: str, text: str) -> Any:
    if name in _TEXTS:
        return None if text in _UNSET else text
    if name in _FLAGS:
        # The argument switches the hybrid manager off.
        return (text == "True") is not (name == "hybrid_manager")
    if name == "memory_fraction_ratio":
        ratio = float(text)
        return ratio if 0 < ratio <= 1 else None
    number = int(text)
    return number if 0 < number <= _MOST else None
