"""vLLM's startup log: every wording of a size, a capacity and a setting in a table, behind any prefix."""

import time

import pytest

from kvdiag.engines.vllm.startup_log import MAX_LINE_CHARACTERS, parse_log
from kvdiag.errors import KvdiagError
from kvdiag.kv.calibration.engine_report import GIB, PrintedSize
from tests.unit.engines.vllm.vllm_logs import AUDIT, CONSUMED, USAGE, gib, rank

PROFILING = (
    "Memory profiling results: total_gpu_memory=79.15GiB initial_memory_usage=68.01GiB peak_torch_memory=10.77GiB "
    "memory_usage_post_profile=68.04Gib non_torch_memory=0.12GiB kv_cache_size=1.22GiB gpu_memory_utilization=0.90"
)
WEIGHED = (
    f"{USAGE}Actual usage is 14.99 GiB for weight, 1.2 GiB for peak activation, 0.31 GiB for non-torch memory, and "
    "0.4 GiB for CUDAGraph memory. Current kv cache memory in use is 70.1 GiB."
)


@pytest.mark.parametrize(
    ("line", "field", "expected"),
    [
        ("Loading model weights took 14.9888 GB", "weights", gib(14.9888, 0.00005)),
        ("Model loading took 14.2487 GB and 12.483029 seconds", "weights", gib(14.2487, 0.00005)),
        ("Model loading took 15.2683 GiB and 12.483029 seconds", "weights", gib(15.2683, 0.00005)),
        ("Model loading took 16.9619 GiB memory and 31.201119 seconds", "weights", gib(16.9619, 0.00005)),
        ("Model loading took 14.25 GiB memory and 21.303919 seconds", "weights", gib(14.25)),
        ("Model loading took 8.0 GiB and 21.303919 seconds", "weights", gib(8.0)),
        (AUDIT, "weights", gib(12.55)),
        (AUDIT, "non_torch", gib(0.16)),
        (AUDIT, "activation", gib(2.38)),
        (AUDIT, "pool", gib(56.18)),
        ("can use total_gpu_memory (79.19GiB) x gpu_memory_utilization (0.90) = 71.27GiB", "total", gib(79.19)),
        (PROFILING, "total", gib(79.15)),
        (PROFILING, "peak_torch", gib(10.77)),
        (PROFILING, "non_torch", gib(0.12)),
        (PROFILING, "pool", gib(1.22)),
        ("Available KV cache memory: 106.17 GiB", "pool", gib(106.17)),
        ("Available KV cache memory: 8.0 GiB", "pool", gib(8.0)),
        ("Initial free memory 78.1 GiB, reserved 20.0 GiB memory for KV Cache as specified by", "pool", gib(20.0)),
        ("Explicitly set (1.0/15.96) GiB for KV cache on node 0.", "pool", gib(1.0)),
        ("Auto set (4.0/15.96) GiB for KV cache on node 0, with 6.0 GiB requested", "pool", gib(4.0)),
        ("Graph capturing finished in 25 secs, took 2.24 GiB", "graphs_actual", gib(2.24)),
        ("Estimated CUDA graph memory: 0.36 GiB total", "graphs_estimate", gib(0.36)),
        ("CUDA graph pool memory: 0.11 GiB (actual), 0.14 GiB (estimated), difference", "graphs_actual", gib(0.11)),
        ("CUDA graph pool memory: 0.11 GiB (actual), 0.14 GiB (estimated), difference", "graphs_estimate", gib(0.14)),
        (CONSUMED, "total", gib(94.97)),
        (CONSUMED, "consumed", gib(52.92)),
        (CONSUMED, "activation", gib(2.32)),
        (CONSUMED, "pool", gib(32.13)),
        (CONSUMED, "weights", None),
        (WEIGHED, "weights", gib(14.99)),
        (WEIGHED, "non_torch", gib(0.31)),
        (WEIGHED, "activation", gib(1.2)),
        ("Free memory on device cuda:0 (27.28/31.86 GiB) on startup is less than desired", "total", gib(31.86)),
    ],
)
def test_every_wording_of_a_size(line: str, field: str, expected: PrintedSize | None) -> None:
    """Each version's sentence gives the size it prints, with the rounding of its last digit."""
    assert expected == getattr(rank(f"INFO 01-01 00:00:00 [worker.py:1] {line}"), field)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("# GPU blocks: 1952, # CPU blocks: 2048", {"num_blocks": 1952, "is_v0": True}),
        ("# cuda blocks: 7191, # CPU blocks: 512", {"num_blocks": 7191, "is_v0": True}),
        ("# GPU blocks: 1381", {"num_blocks": 1381, "is_v0": False}),
        ("GPU KV cache size: 136,080 tokens", {"tokens": 136_080}),
        (
            "Maximum concurrency for 40,960 tokens per request: 3.32x",
            {"concurrency": 3.32, "concurrency_slack": 0.005, "context_tokens": 40_960},
        ),
        ("Maximum concurrency for 2048 tokens per request: 10.79x", {"concurrency": 10.79, "context_tokens": 2048}),
        (
            "CPU KV cache size: 521,783 tokens, Maximum concurrency for 20,000 tokens per request: 26.09x",
            {"tokens": 521_783, "concurrency": 26.09, "context_tokens": 20_000},
        ),
        (
            "GPU + host KV cache size: 99 tokens, Maximum concurrency for 20 tokens per request: 4.95x",
            {"tokens": 99, "concurrency": 4.95},
        ),
    ],
)
def test_every_wording_of_a_capacity(line: str, expected: dict[str, object]) -> None:
    """Blocks, tokens and concurrency, with and without thousands separators, on one line or two."""
    report = parse_log(f"INFO 01-01 00:00:00 [x.py:1] {line}")
    assert expected == {name: getattr(report, name) for name in expected}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("non-default args: {'model': 'org/m', 'tensor_parallel_size': 4}", {"tensor_parallel": 4}),
        ("args: Namespace(gpu_memory_utilization=0.85, block_size=32, max_num_batched_tokens=None)", {
            "memory_fraction_ratio": 0.85, "block_size_tokens": 32, "max_num_batched_tokens": None}),
        ("non-default args: {'kv_cache_dtype': 'fp8_e5m2', 'max_num_batched_tokens': 8192}", {
            "kv_dtype": "fp8_e5m2", "max_num_batched_tokens": 8192}),
        ("non-default args: {'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 3}}", {
            "speculative_tokens": 3}),
        ("non-default args: {'kv_cache_memory_bytes': 21474836480}", {"pool_bytes": 20 * GIB}),
        ("non-default args: {'disable_hybrid_kv_cache_manager': True}", {"hybrid_manager": False}),
        (("Initializing a V1 LLM engine (v0.14.1) with config: model='m', dtype=torch.float16, max_seq_len=131072,"
         " pipeline_parallel_size=2, decode_context_parallel_size=8, quantization=awq, kv_cache_dtype=fp8,"
         " device_config=cuda, enable_prefix_caching=False"), {
            "version": "0.14.1", "model": "m", "dtype": "float16", "max_model_len_tokens": 131_072,
            "pipeline_parallel": 2, "decode_context_parallel": 8, "quantization": "awq", "kv_dtype": "fp8",
            "device": "cuda", "prefix_caching": False}),
        ("Initializing an LLM engine (v0.6.1.dev238+ge2c6e0a82) with config: model='m'", {
            "version": "0.6.1.dev238+ge2c6e0a82"}),
        ("Chunked prefill is enabled with max_num_batched_tokens=2048.", {"max_num_batched_tokens": 2048}),
        ("Setting attention block size to 1056 tokens to ensure that attention page size is >= mamba page size.", {
            "block_size_tokens": 1056}),
        ("Multiplying the GPU KV cache size by the dcp_world_size 8.", {"decode_context_parallel": 8}),
        (("The current --gpu-memory-utilization=0.8200 is equivalent to --gpu-memory-utilization=0.8048 without CUDA"
         " graph memory profiling."), {"memory_fraction_ratio": 0.82}),
        ("CUDA graph memory profiling is disabled (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0).", {
            "graphs_estimated": False}),
        ("Asynchronous scheduling is enabled.", {"async_scheduling": True}),
        ("Resolved architecture: Qwen2ForCausalLM", {"architecture": "Qwen2ForCausalLM"}),
        ("Using max model len 32768", {"max_model_len_tokens": 32_768}),
    ],
)  # fmt: skip
def test_every_wording_of_a_setting(line: str, expected: dict[str, object]) -> None:
    """Arguments, the config line and what the server resolves from them; unset ones are None."""
    told = parse_log(f"INFO 01-01 00:00:00 [x.py:1] {line}\nINFO 01-01 00:00:00 [y.py:2] # GPU blocks: 9").settings
    assert expected == {name: getattr(told, name) for name in expected}


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "INFO 01-16 09:40:00 worker.py:238] ",
        "INFO 06-10 08:00:00 [gpu_worker.py:227] ",
        "(EngineCore pid=7) INFO 01-01 00:00:00 [x.py:1] ",
        "(EngineCore_DP0 pid=7) [Stage-0] INFO 01-01 00:00:00 [x.py:1] ",
        "(VllmWorker rank=0 pid=7) INFO 01-01 00:00:00 [x.py:1] ",
        "(RayWorkerWrapper pid=7, ip=10.0.0.9) INFO 01-01 00:00:00 [x.py:1] ",
        "\x1b[1;36m(Worker_TP0 pid=7)\x1b[0;0m \x1b[32mINFO\x1b[0m 01-01 00:00:00 [x.py:1] ",
        "2026-01-01T00:00:00.123456789Z stderr F (EngineCore pid=7) INFO 01-01 00:00:00 [x.py:1] ",
        '{"log":"(EngineCore pid=7) INFO 01-01 00:00:00 [x.py:1] ',
        "│ INFO 03-21 20:15:45 [worker.py:267] ",
    ],
)
def test_what_stands_before_a_message_does_not_matter(prefix: str) -> None:
    """Prefixes of every version, colours, container runtimes and boxes."""
    assert gib(18.69) == rank(f"{prefix}Available KV cache memory: 18.69 GiB").pool


def test_hostile_lines_take_time_in_proportion() -> None:
    """20 MB of digits took more than three minutes: each place of the word was a beginning."""

    def taken(share: int) -> float:
        begun_seconds = time.thread_time()
        with pytest.raises(KvdiagError):
            parse_log("GiB " + "9" * (MAX_LINE_CHARACTERS // share))
        parse_log("# a blocks: 9," * (4_000 // share))
        return time.thread_time() - begun_seconds

    assert min(taken(1) for _ in range(3)) < 12 * min(taken(4) for _ in range(3))
