"""TensorRT-LLM's startup logs, published ones within their rounding."""

import pytest

from kvdiag.engines.trtllm.startup_log import WORDINGS, parallel_ranks
from kvdiag.errors import KvdiagError
from kvdiag.kv.calibration.engine_report import GIB

INFO = "[TensorRT-LLM][INFO]"

PYTORCH = f"""[TensorRT-LLM] TensorRT LLM version: 1.2.0
{INFO} Number of tokens per block: 32.
{INFO} [MemUsageChange] Allocated 1.13 GiB for max tokens in paged KV cache (8224).
[TRT-LLM] [I] Peak memory during memory usage profiling (torch + non-torch): 21.55 GiB, available KV cache memory when \
calculating max tokens: 52.05 GiB, fraction is set 0.9, kv size is 147456. device total memory 79.11 GiB, , tmp kv_mem \
1.13 GiB
{INFO} Max KV cache pages per sequence: 1025 [window size=32768], tokens per block=32, primary blocks=11844, secondary \
blocks=0, max sequence length=32768
{INFO} Number of tokens per block: 32.
{INFO} [MemUsageChange] Allocated 52.05 GiB for max tokens in paged KV cache (379008).
{INFO} [MemUsageChange] Allocated 0.00 GiB for max tokens in paged KV cache (0).
[TRT-LLM] [I] max_seq_len=32768, max_num_requests=2048, max_num_tokens=8192, max_batch_size=2048
"""
"""Written from the wordings of tensorrt_llm/_torch/pyexecutor of 2026; the figures fit one another."""

# NVIDIA/TensorRT-LLM#1400, 0.8 on an A100 80 GB: Llama-2-7B, 32 layers and heads of 128 in half precision
RUNTIME_0_8 = f"""{INFO} Loaded engine size: 12856 MiB
{INFO} Allocate 69524783104 bytes for k/v cache.
{INFO} Using 132608 tokens in paged KV cache.
"""

# triton-inference-server/tutorials, pull request 150
SPECULATIVE = f"""{INFO} Max KV cache blocks per sequence: 65 [window size=2051], tokens per block=32, \
primary blocks=116617, secondary blocks=0
{INFO} [MemUsageChange] Allocated 78.30 GiB for max tokens in paged KV cache (3731744).
"""

# NVIDIA/TensorRT-LLM#2268, 0.13 on an A100 40 GB: Qwen1.5-7B; the memory available, the share of it and the blocks
RUNTIME_0_13 = f"""{INFO} Memory usage when calculating max tokens in paged kv cache: total: 39.39 GiB, \
available: 21.89 GiB
{INFO} Number of blocks in KV cache primary pool: 631
{INFO} [MemUsageChange] Allocated 19.72 GiB for max tokens in paged KV cache (40384).
"""

# triton-inference-server/tensorrtllm_backend#285, 0.7.1: Llama-2-7B
RUNTIME_0_7 = f"""{INFO} Allocate 1342177280 bytes for k/v cache.
{INFO} Using 2560 total tokens in paged KV cache, and 20 blocks per sequence
"""


def test_the_tokens_of_the_oldest_runtime() -> None:
    """Before 0.8 they are printed with the blocks of a sequence."""
    report = WORDINGS.report(RUNTIME_0_7)
    assert (2560, [1342177280]) == (report.tokens, [rank.pool.nominal_bytes for rank in report.ranks if rank.pool])


def test_of_the_two_pools_the_last_counts() -> None:
    """The trial run's pool is printed first, a dry run's last: neither is the pool."""
    report = WORDINGS.report(PYTORCH)
    (rank,) = report.ranks
    assert (11_844, 379_008, "1.2.0") == (report.num_blocks, report.tokens, report.settings.version)
    assert (32, 0.9, 32_768, 8192) == (
        report.settings.block_size_tokens,
        report.settings.memory_fraction_ratio,
        report.settings.max_model_len_tokens,
        report.settings.max_num_batched_tokens,
    )
    assert rank.pool is not None
    assert rank.pool.low_bytes <= 379_008 * 147_456 <= rank.pool.high_bytes
    assert rank.total is not None
    assert 79.11 == round(rank.total.nominal_bytes / GIB, 2)


@pytest.mark.parametrize(
    ("log", "tokens", "bytes_per_token"),
    [(RUNTIME_0_8, 132_608, 524_288), (RUNTIME_0_13, 40_384, 524_288)],
    ids=["0.8", "0.13"],
)
def test_published_logs_fit_their_models(log: str, tokens: int, bytes_per_token: int) -> None:
    """The pool that a log prints is its tokens times what the model's token costs, within the rounding."""
    report = WORDINGS.report(log)
    (rank,) = report.ranks
    assert rank.pool is not None
    assert (tokens, True) == (
        report.tokens,
        rank.pool.low_bytes <= tokens * bytes_per_token <= rank.pool.high_bytes,
    )


def test_published_blocks_make_up_the_tokens() -> None:
    """Blocks of the primary pool times the tokens of each are the tokens that the pool line prints."""
    report = WORDINGS.report(SPECULATIVE)
    assert (116_617, 32, 116_617 * 32) == (report.num_blocks, report.settings.block_size_tokens, report.tokens)


def test_the_runtime_s_other_parts_are_read() -> None:
    """Weights of an engine file, and the device as the runtime sees it."""
    (old,), (new,) = WORDINGS.report(RUNTIME_0_8).ranks, WORDINGS.report(RUNTIME_0_13).ranks
    assert old.weights is not None
    assert new.total is not None
    assert (12_856 << 20, 39.39) == (old.weights.nominal_bytes, round(new.total.nominal_bytes / GIB, 2))


def test_of_two_starts_the_last_counts() -> None:
    """A restart in one log replaces what the first printed; one without figures does not."""
    second = PYTORCH.replace("379008", "189504").replace("52.05", "26.03").replace("11844", "5922")
    report = WORDINGS.report(PYTORCH + second)
    assert (189_504, 5922, 1) == (report.tokens, report.num_blocks, len(report.notes))
    again = WORDINGS.report(PYTORCH + "[TensorRT-LLM] TensorRT LLM version: 1.2.0\n")
    assert (379_008, 1) == (again.tokens, len(again.notes))


@pytest.mark.parametrize("text", ["", "[MemUsageChange] Allocated", "Allocated x GiB for max tokens in paged KV cache"])
def test_another_log_is_none(text: str) -> None:
    """A text without its lines is no report."""
    with pytest.raises(KvdiagError):
        WORDINGS.report(text)


def test_settings_are_read_from_lines() -> None:
    """Lines with settings alone give them."""
    found = WORDINGS.settings(PYTORCH.splitlines())
    assert (32, 0.9) == (found.block_size_tokens, found.memory_fraction_ratio)


@pytest.mark.parametrize(
    ("commands", "ranks"),
    [
        (["trtllm-serve model --tp_size 4 --pp_size=2"], (4, 2)),
        (["trtllm-serve model"], (1, 1)),
        (["trtllm-serve model --extra_llm_api_options x.yaml"], None),
        (["trtllm-serve model --tp_size 4 --extra_llm_api_options x.yaml"], (4, 1)),
        (["python -c pass"], None),
        ([], None),
    ],
)
def test_ranks_are_those_of_the_command_line(commands: list[str], ranks: tuple[int, int] | None) -> None:
    """A file of further options may set them, so that their absence says nothing."""
    assert ranks == parallel_ranks(commands)
