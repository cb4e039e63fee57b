"""The flags that a simulated server is started with, as those of `vllm serve`: each changes one field of its scenario.

`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` is a variable there, and written before the flags here.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvdiag.sim.scenarios import Scenario

_SIZES = re.compile(r"[1-9]\d{0,14}")
_SHARES = re.compile(r"0?\.\d{1,4}|1(\.0*)?")

FLAGS: Mapping[str, tuple[str, re.Pattern[str], Callable[[str], Any]]] = {
    "--max-num-seqs": ("max_running", _SIZES, int),
    "--max-model-len": ("max_model_len_tokens", _SIZES, int),
    "--max-num-batched-tokens": ("max_batched_tokens", _SIZES, int),
    "--kv-cache-memory-bytes": ("kv_cache_memory_bytes", _SIZES, int),
    "--gpu-memory-utilization": ("memory_fraction_ratio", _SHARES, float),
    "--block-size": ("block_tokens", _SIZES, int),
    "--kv-cache-dtype": ("kv_element_bytes", re.compile("fp8|auto"), {"fp8": 1, "auto": 2}.__getitem__),
}
"""Each flag, its field, the values that it takes, and how they are read."""

WORDS: Mapping[str, Mapping[str, Any]] = {
    "--no-enable-prefix-caching": {"prefix_caching": False},
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True": {"expandable_segments": True},
}
"""What is written without a value of its own."""


def started_with(scenario: Scenario, words: Sequence[str]) -> Scenario:
    """The scenario of a server that is started with these flags.

    Raises:
        ValueError: one is none of a simulated server's, or its value is not one that it takes.
    """
    rest = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while rest:
        word = rest.pop(0)
        if word in WORDS:
            scenario = replace(scenario, **WORDS[word])
            continue
        if word not in FLAGS:
            raise ValueError(f"{word!r} is no flag of a simulated server: it takes {', '.join((*FLAGS, *WORDS))}")
        field, pattern, read = FLAGS[word]
        value = rest.pop(0) if rest else ""
        if not pattern.fullmatch(value):
            raise ValueError(f"{word} {value!r} is not a value of this flag")
        scenario = replace(scenario, **{field: read(value)})
    return scenario
