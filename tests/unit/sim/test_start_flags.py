"""The flags that a simulated server takes, and what each changes."""

import pytest

from kvdiag.sim import SCENARIOS, started_with

THRASH = SCENARIOS["concurrency-thrash"]


def test_each_flag_changes_its_field() -> None:
    """As `vllm serve` takes them, with a blank or an equals sign; the last of equals counts."""
    words = (
        *("--max-num-seqs", "9", "--max-num-seqs=6", "--max-model-len", "4096", "--max-num-batched-tokens", "1024"),
        *("--kv-cache-memory-bytes", "1073741824", "--gpu-memory-utilization", "0.8", "--block-size", "32"),
        *("--kv-cache-dtype", "fp8", "--no-enable-prefix-caching"),
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )
    made = started_with(THRASH, words)
    assert (6, 4096, 1024) == (made.max_running, made.max_model_len_tokens, made.max_batched_tokens)
    assert (2**30, 0.8, 32) == (made.kv_cache_memory_bytes, made.memory_fraction_ratio, made.block_tokens)
    assert (1, False, True) == (made.kv_element_bytes, made.prefix_caching, made.expandable_segments)


@pytest.mark.parametrize(
    "words",
    [
        ("--max-num-seqs",),
        ("--max-num-seqs", "0"),
        ("--max-num-seqs", "6.5"),
        ("--max-num-seqs", "9" * 20),
        ("--gpu-memory-utilization", "1.5"),
        ("--gpu-memory-utilization", "nan"),
        ("--kv-cache-dtype", "int4"),
        ("--enforce-eager",),
        ("2", "replicas"),
    ],
    ids=" ".join,
)
def test_what_is_no_flag_is_refused(words: tuple[str, ...]) -> None:
    """An ignored flag must not look like a fix without effect."""
    with pytest.raises(ValueError, match=r"--|'2'"):
        started_with(THRASH, words)
