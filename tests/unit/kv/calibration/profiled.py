"""A measured profile in bytes that are easy to reckon with, the query that finds it, and the model it is of."""

from typing import Any

from kvdiag.kv.calibration.engine_report import PrintedSize
from kvdiag.kv.calibration.profiles import ModelKey, Profile, ProfileQuery

MODEL = ModelKey(digest="0123456789abcdef", name="a model")
PROFILE = Profile(
    gpu_total_bytes=1_000_000,
    gpu_name="h100",
    model=MODEL,
    tensor_parallel=2,
    pipeline_parallel=1,
    max_num_batched_tokens=8192,
    context_bytes=10,
    activation_bytes=20,
    graph_bytes=5,
    date="2026-01-02",
    source="log x.log",
)
QUERY = ProfileQuery(gpu_total_bytes=1_000_000, gpu_name="h100", model=MODEL, tensor_parallel=2, pipeline_parallel=1)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}


def size(nominal_bytes: int) -> PrintedSize:
    """A size without rounding."""
    return PrintedSize(nominal_bytes=nominal_bytes)
