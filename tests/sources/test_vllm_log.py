"""vLLM's startup log: every wording in a table, whole logs of several versions, and what is no log at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.errors import KvdiagError
from kvdiag.kv.reported import GIB, EngineReport, RankReport, Size
from kvdiag.sources import vllm_log
from kvdiag.sources.vllm_log import parse_log, read_log

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"


def gib(value: float, slack: float = 0.005) -> Size:
    """A figure as printed with two decimals."""
    return Size(nominal_bytes=round(value * GIB), slack_bytes=round(slack * GIB))


def rank(line: str) -> RankReport:
    """The one rank that a line tells of."""
    report = parse_log(line)
    assert 1 == len(report.ranks)
    return report.ranks[0]


AUDIT = (
    "model weights take 12.55GiB; non_torch_memory takes 0.16GiB; PyTorch activation peak memory takes 2.38GiB; "
    "the rest of the memory reserved for KV Cache is 56.18GiB."
)
PROFILING = (
    "Memory profiling results: total_gpu_memory=79.15GiB initial_memory_usage=68.01GiB peak_torch_memory=10.77GiB "
    "memory_usage_post_profile=68.04Gib non_torch_memory=0.12GiB kv_cache_size=1.22GiB gpu_memory_utilization=0.90"
)
USAGE = "Free memory on device (94.06/94.97 GiB) on startup. Desired GPU memory utilization is (0.92, 87.37 GiB). "
CONSUMED = (
    f"{USAGE}Actual usage is 52.92 GiB for consumed memory (weights + non-torch), 2.32 GiB for peak activation, and "
    "1.51 GiB for CUDAGraph memory. Current kv cache memory in use is 32.13 GiB."
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
def test_every_wording_of_a_size(line: str, field: str, expected: Size | None) -> None:
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


def test_ranks_are_kept_apart_and_the_smallest_pool_decides() -> None:
    """Every rank that spoke is there under its name; the engine gives all of them what the smallest affords."""
    # GIVEN
    lines = [
        "(Worker_PP0_TP0 pid=11) INFO [g.py:1] Available KV cache memory: 17.79 GiB",
        "(Worker_PP0_TP1 pid=12) INFO [g.py:1] Available KV cache memory: 17.73 GiB",
        "(Worker_PP1_TP0 pid=13) INFO [g.py:1] Available KV cache memory: 19.02 GiB",
    ]

    # WHEN
    report = parse_log("\n".join(lines))

    # THEN
    assert [("Worker_PP0_TP0", 0), ("Worker_PP0_TP1", 0), ("Worker_PP1_TP0", 1)] == [
        (one.name, one.stage) for one in report.ranks
    ]
    assert report.deciding_rank == report.ranks[1]


def test_workers_of_one_name_are_told_apart_by_their_process() -> None:
    """V0's workers are all called VllmWorkerProcess, and its main process has no name."""
    # GIVEN
    names = ["", "(VllmWorkerProcess pid=521) ", "(VllmWorkerProcess pid=507) "]

    # WHEN
    report = parse_log("\n".join(f"{name}INFO 04-12 08:21:19 [worker.py:267] {AUDIT}" for name in names))

    # THEN
    assert ["main process", "VllmWorkerProcess 1 of 2", "VllmWorkerProcess 2 of 2"] == [
        one.name for one in report.ranks
    ]


def test_of_data_parallel_engines_the_smallest_is_taken() -> None:
    """Each engine has a pool of its own; figures of two are never mixed."""
    # GIVEN
    lines = [
        "(EngineCore_DP0 pid=1) INFO [g.py:1] Available KV cache memory: 9.0 GiB",
        "(EngineCore_DP1 pid=2) INFO [g.py:1] Available KV cache memory: 8.0 GiB",
        "(EngineCore_DP0 pid=1) INFO [k.py:1] GPU KV cache size: 9,000 tokens",
        "(EngineCore_DP1 pid=2) INFO [k.py:1] GPU KV cache size: 8,000 tokens",
    ]

    # WHEN
    report = parse_log("\n".join(lines))

    # THEN
    assert (8000, ["EngineCore_DP1"]) == (report.tokens, [one.name for one in report.ranks])
    assert "2 data-parallel engines" in report.notes[0]


def test_the_last_start_counts() -> None:
    """A server that was restarted into the same file, with other settings the second time."""
    # GIVEN
    first = (LOGS / "vllm-0.9.1-V1-reconstructed.log").read_text()
    second = (LOGS / "vllm-0.18.0-V1-reconstructed.log").read_text()

    # WHEN
    report = parse_log(first + second)

    # THEN
    assert ("0.18.0", 245_360) == (report.settings.version, report.tokens)
    assert (None, None) == (report.settings.max_num_batched_tokens, report.num_blocks)
    assert "the log has 2 starts; the last one is used" in report.notes


def test_a_start_that_has_not_told_its_memory_yet_does_not_hide_the_one_before() -> None:
    """A log that is copied while the server starts again."""
    text = (LOGS / "vllm-0.9.1-V1-reconstructed.log").read_text()
    again = "\n".join(text.splitlines()[:4])

    report = parse_log(f"{text}{again}\n")

    assert (136_080, True) == (report.tokens, any("a later start" in note for note in report.notes))


def test_a_sentence_that_is_wrapped_is_read_as_one() -> None:
    """Terminals and tickets break long lines where they like."""
    wrapped = CONSUMED.replace("utilization is ", "utilization is\n").replace("non-torch), ", "non-torch),\n")
    report = parse_log(f"(Worker_PP1_EP0 pid=1749) INFO 09-04 10:06:12 [gpu_worker.py:804] {wrapped}")

    told = report.ranks[0]

    assert ("Worker_PP1_EP0", gib(52.92), gib(2.32), gib(94.97), 0.92) == (
        told.name,
        told.consumed,
        told.activation,
        told.total,
        report.settings.memory_fraction_ratio,
    )


def test_the_model_is_told_and_not_its_drafter() -> None:
    """A drafter's architecture and length are printed after the model's own."""
    # GIVEN
    lines = [
        "INFO [model.py:1] Resolved architecture: Qwen3_5ForConditionalGeneration",
        "INFO [model.py:1] Using max model len 262144",
        "INFO [model.py:1] Resolved architecture: Qwen3_5MTP",
        "INFO [core.py:1] Initializing a V1 LLM engine (v0.24.0) with config: model='m', max_seq_len=65536",
        "INFO [k.py:1] GPU KV cache size: 8,000 tokens",
    ]

    # WHEN
    told = parse_log("\n".join(lines)).settings

    # THEN
    assert ("Qwen3_5ForConditionalGeneration", 65_536) == (told.architecture, told.max_model_len_tokens)


def test_blocks_set_while_graphs_are_estimated_are_not_the_servers() -> None:
    """The estimate runs on a handful of blocks, and says so with the same words as --num-gpu-blocks-override."""
    # GIVEN
    override = "Overriding num_gpu_blocks={} with num_gpu_blocks_override={}"
    pool = "INFO [g.py:1] Available KV cache memory: 13.1 GiB\n"

    # WHEN
    estimated = parse_log(f"INFO [k.py:1] {override.format(0, 16)}\n{pool}")
    chosen = parse_log(f"{pool}INFO [k.py:1] {override.format(900, 512)}")

    # THEN
    assert (None, 512) == (estimated.settings.blocks_override, chosen.settings.blocks_override)


def test_a_pool_below_zero_is_a_start_that_failed() -> None:
    """The figure is not used, and the note says why."""
    report = parse_log("INFO [g.py:1] Model loading took 5.0 GiB\nINFO [g.py:1] Available KV cache memory: -2.81 GiB")

    assert (None, True) == (report.ranks[0].pool, "-2.81 GiB: that start failed" in report.notes[0])


FIXTURES: dict[str, dict[str, object]] = {
    "vllm-0.32.0-cpu-llama": {"version": "0.32.0", "tokens": 521_783, "concurrency": 26.09, "ranks": 1, "pool": 1.0},
    "vllm-0.6.4-V0-reconstructed": {
        "version": "0.6.4.post1", "num_blocks": 1952, "concurrency": 1.56, "ranks": 1, "pool": 3.81, "total": 23.58},
    "vllm-0.7.3-V0-reconstructed": {
        "version": "0.7.3", "num_blocks": 5519, "concurrency": 2.69, "ranks": 1, "pool": 2.36, "total": 14.56},
    "vllm-0.9.1-V1-reconstructed": {
        "version": "0.9.1", "tokens": 136_080, "concurrency": 3.32, "ranks": 1, "pool": 18.69},
    "vllm-0.11.2-V1-tp4-reconstructed": {
        "version": "0.11.2", "tokens": 1_391_552, "concurrency": 169.87, "ranks": 4, "pool": 106.17},
    "vllm-0.18.0-V1-reconstructed": {
        "version": "0.18.0", "tokens": 245_360, "concurrency": 7.49, "ranks": 1, "pool": 13.1},
    "vllm-0.32.0-V1-tp2-composed": {
        "version": "0.32.0", "tokens": 1_013_008, "concurrency": 7.73, "ranks": 2, "pool": 61.83, "total": 79.19},
}  # fmt: skip


@pytest.mark.parametrize("name", FIXTURES)
def test_whole_logs(name: str) -> None:
    """Logs of several versions, from the first line to the last."""
    report = read_log(LOGS / f"{name}.log")
    pool = report.deciding_rank.pool if report.deciding_rank else None
    told: dict[str, object] = {
        "version": report.settings.version,
        "tokens": report.tokens,
        "num_blocks": report.num_blocks,
        "concurrency": report.concurrency,
        "ranks": len(report.ranks),
        "pool": None if pool is None else round(pool.nominal_bytes / GIB, 2),
        "total": None if report.total_bytes is None else round(report.total_bytes / GIB, 2),
    }

    assert FIXTURES[name] == {field: value for field, value in told.items() if value is not None}


def test_nothing_secret_is_kept() -> None:
    """V0 prints its whole arguments, a key among them."""
    report = read_log(LOGS / "vllm-0.6.4-V0-reconstructed.log")

    assert "not-for-eyes" not in repr(report)


@pytest.mark.parametrize(
    "text",
    ["", "\n" * 1000, "hello", "INFO 01-01 00:00:00 [x.py:1] Available KV cache memory: GiB", "\0" * 4096, "(" * 9999],
)
def test_what_tells_no_memory_is_refused(text: str) -> None:
    """One line that names what was looked for."""
    with pytest.raises(KvdiagError, match="none of the lines") as caught:
        parse_log(text, origin="x.log")

    assert str(caught.value).startswith("x.log has none")


def test_binary_and_torn_lines_do_no_harm(tmp_path: Path) -> None:
    """Bytes that are no text, a figure cut in half, and a last line without its end."""
    # GIVEN
    path = tmp_path / "torn.log"
    path.write_bytes(
        b"\xff\xfe\x00\x80INFO [g.py:1] Available KV cache mem\nINFO [g.py:1] Available KV cache memory: 18.69 GiB\r\n"
        b"INFO [k.py:1] GPU KV cache size: 136,080 tokens\nINFO [k.py:1] Maximum concurrency for 40,960 tok"
    )

    # WHEN
    report = read_log(path)

    # THEN
    assert (gib(18.69), 136_080, None) == (report.ranks[0].pool, report.tokens, report.concurrency)


def test_of_a_long_log_both_ends_are_read(tmp_path: Path) -> None:
    """A start at the head, gigabytes of requests, and a note that the middle was not seen."""
    # GIVEN
    path = tmp_path / "long.log"
    with path.open("wb") as file:
        file.write((LOGS / "vllm-0.9.1-V1-reconstructed.log").read_bytes())
        file.truncate(3 * vllm_log.MAX_PART_BYTES)
        file.seek(0, os.SEEK_END)
        file.write(b"\nINFO [x.py:1] the end\n")

    # WHEN
    report = read_log(path)

    # THEN
    assert (136_080, True) == (report.tokens, "first and last 4 MiB" in report.notes[-1])


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """A log that another command writes: the tail is kept, the middle dropped."""
    # GIVEN
    path = tmp_path / "pipe"
    os.mkfifo(path)
    start = (LOGS / "vllm-0.9.1-V1-reconstructed.log").read_bytes()
    content = b"x" * 100 + b"\n" + b"noise\n" * (4 * vllm_log.MAX_PART_BYTES // 6) + start
    writer = threading.Thread(target=path.write_bytes, args=(content,))
    writer.start()

    # WHEN
    report = read_log(path)
    writer.join()

    # THEN
    assert 136_080 == report.tokens


def test_an_endless_line_is_cut(tmp_path: Path) -> None:
    """What lies beyond the longest line is not looked at."""
    path = tmp_path / "line.log"
    path.write_text("x" * (vllm_log.MAX_LINE_CHARACTERS + 1) + "Available KV cache memory: 1.00 GiB")

    with pytest.raises(KvdiagError):
        read_log(path)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A file that is not there, and a folder."""
    with pytest.raises(KvdiagError, match=r"nothing\.log: No such file"):
        read_log(tmp_path / "nothing.log")
    with pytest.raises(KvdiagError, match="is a folder"):
        read_log(tmp_path)


FRAGMENTS = st.sampled_from(
    [
        "INFO 01-01 00:00:00 [x.py:1] ",
        "(Worker_PP9999_TP0 pid=1) ",
        "(EngineCore_DP99999 pid=0) ",
        "Available KV cache memory: 999999999.999999999 GiB",
        "Available KV cache memory: -1.0 GiB",
        "GPU KV cache size: 999,999,999,999,999 tokens",
        "Maximum concurrency for 0 tokens per request: 0.0x",
        "Maximum concurrency for 999999999999999 tokens per request: 999999999999.9x",
        "# GPU blocks: 0, # CPU blocks: 0",
        "non-default args: {'tensor_parallel_size': 0, 'gpu_memory_utilization': 9.9, 'model': ''}",
        "Initializing a V1 LLM engine (v9) with config: model='', block_size=0, kv_cache_dtype=",
        "gpu_memory_utilization=1e-99",
        "\n",
        "\r",
        "\x1b[31m",
        "\u2028",
        "\0",
    ]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(FRAGMENTS, st.text(max_size=30)), max_size=30).map("".join))
def test_any_text_is_a_report_or_refused(text: str) -> None:
    """Whatever a file holds, there is a report or one KvdiagError."""
    try:
        report = parse_log(text)
    except KvdiagError:
        return
    assert isinstance(report, EngineReport)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=2000))
def test_any_bytes_are_a_report_or_refused(content: bytes) -> None:
    """The same for bytes put into the middle of a real log."""
    real = (LOGS / "vllm-0.7.3-V0-reconstructed.log").read_bytes()
    half = len(real) // 2
    try:
        report = parse_log((real[:half] + content + real[half:]).decode("utf-8", "replace"))
    except KvdiagError:
        return
    assert isinstance(report, EngineReport)
