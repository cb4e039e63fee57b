"""SGLang's startup logs: those of 27 starts of ten model shapes on 0.5.23, and what older and failed ones print."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvdiag.engines.sglang.settings import parallel_ranks
from kvdiag.engines.sglang.startup_log import failed_pool_bytes, parse_log
from kvdiag.errors import KvdiagError
from kvdiag.kv.calibration.engine_report import GIB, PrintedSize

STARTS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "starts.json").read_text())
ARGUMENTS = (
    "[2026-11-22 21:13:51] server_args={'model_path': '/models/tiny', 'kv_cache_dtype': 'auto', 'page_size': 16, "
    "'mem_fraction_static': 0.716, 'tp_size': 2, 'disable_radix_cache': True, 'chunked_prefill_size': 4096}"
)
OLDER_ARGUMENTS = "server_args=ServerArgs(model_path='/m', mem_fraction_static=0.88, tp_size=8, page_size=1)"
POOL = "[2026-11-22 21:14:12{}] KV Cache is allocated. #tokens: {}, K size: 2.50 GB, V size: 2.50 GB"
LAST = "[2026-11-22 21:14:12{}] max_total_num_tokens={}, chunked_prefill_size=4096, context_len=32768"


@pytest.mark.parametrize("start", STARTS, ids=[f"{start['model']} {start['flags']}" for start in STARTS])
def test_recorded_start_gives_its_tokens(start: dict[str, Any]) -> None:
    """The pool of every recorded start is the one that the server reported over HTTP."""
    assert parse_log("\n".join(start["lines"])).tokens == start["tokens"]


def test_ranks_are_kept_apart_and_the_smallest_pool_counts() -> None:
    """Two tensor-parallel ranks print a pool each; the arguments stand in one line."""
    lines = [ARGUMENTS, *(form.format(f" TP{rank}", 8192 + 16 * rank) for rank in (0, 1) for form in (POOL, LAST))]
    report = parse_log("\n".join(lines))
    assert (report.tokens, report.num_blocks, report.settings.block_size_tokens) == (8192, 512, 16)
    assert [rank.name for rank in report.ranks] == ["TP0", "TP1"]
    assert (report.settings.tensor_parallel, report.settings.prefix_caching) == (2, False)
    assert report.ranks[0].pool is not None
    assert report.ranks[0].pool.nominal_bytes == 5 * 2**30


def test_older_arguments_are_read_too() -> None:
    """Before 0.5.2x the arguments are printed as a dataclass."""
    report = parse_log("\n".join((OLDER_ARGUMENTS, LAST.format("", 454_421))))
    assert (report.settings.memory_fraction_ratio, report.settings.tensor_parallel) == (0.88, 8)


def test_pools_of_both_kinds_of_layers_are_one() -> None:
    """A window model prints two pools: bytes add up, and the tokens are those of the full layers."""
    lines = (
        "Use sliding window memory pool. full_layer_tokens=375360, swa_layer_tokens=300288",
        POOL.format("", 300_288),
    )
    report = parse_log("\n".join((*lines, POOL.format("", 375_360))))
    assert report.tokens == 375_360
    assert report.ranks[0].pool is not None
    assert report.ranks[0].pool.nominal_bytes == 10 * 2**30


def test_the_sum_of_both_kinds_of_layers_counts_where_their_lines_are_missing() -> None:
    """A cut log has the line of both pools alone."""
    report = parse_log("SWAKVPool mem usage: 79.94 GB, swa size: 798276, full size: 997846\n")

    assert (report.tokens, report.ranks[0].pool) == (
        997_846,
        PrintedSize(nominal_bytes=round(79.94 * GIB), slack_bytes=round(0.005 * GIB)),
    )


@pytest.mark.parametrize("prefix", ["[TP{}] ", "[22:18:22 TP{}] ", "[gpu_id={}] ", "[2026-02-01 00:05:03 DP0 TP{}] "])
def test_ranks_by_each_prefix(prefix: str) -> None:
    """Two ranks with a pool each, not one with the pools of two."""
    line = "KV Cache is allocated. #tokens: 46611, K size: 1.42 GB, V size: 1.42 GB\n"

    report = parse_log("".join(prefix.format(rank) + line for rank in range(2)))

    assert [rank.pool and rank.pool.nominal_bytes for rank in report.ranks] == [2 * round(1.42 * GIB)] * 2


def test_a_drafter_of_a_model_with_windows_comes_third() -> None:
    """Both kinds of layers may have as many tokens, and the drafter has as many as they."""
    report = parse_log(
        "Use sliding window memory pool. full_layer_tokens=8192, swa_layer_tokens=8192\n"
        "SWA KV Cache is allocated. dtype: torch.bfloat16, #tokens: 8192, K size: 3.00 GB, V size: 3.00 GB\n"
        "Full KV Cache is allocated. dtype: torch.bfloat16, #tokens: 8192, K size: 1.00 GB, V size: 1.00 GB\n"
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 8192, K size: 0.10 GB, V size: 0.10 GB\n"
    )

    assert [rank.pool and rank.pool.nominal_bytes for rank in report.ranks] == [8 * GIB]
    assert any("drafter" in note for note in report.notes)


def test_a_drafter_s_weights_alone_are_not_the_model_s() -> None:
    """Of a cut log the drafter's line may be all that is left of the weights."""
    weights = "Load weight end. elapsed=22.36 s, type=LlamaForCausalLMEagle3, avail mem=11.36 GB, mem usage=6.78 GB."
    report = parse_log("\n".join((weights, POOL.format("", 8192), LAST.format("", 8192))))
    assert [None] == [rank.weights for rank in report.ranks]
    assert any("drafter" in note for note in report.notes)


def test_a_line_wrapped_without_an_indent_is_one() -> None:
    """A report's width cuts the pool's line after a comma."""
    report = parse_log(POOL.format("", 8192).replace(", K", ",\nK"))
    assert (8192, [5 * GIB]) == (report.tokens, [rank.pool.nominal_bytes for rank in report.ranks if rank.pool])


def test_last_start_counts() -> None:
    """Of two starts in one file the later one that got as far as its pool is used, which a note says."""
    report = parse_log("\n".join((ARGUMENTS, LAST.format("", 1024), ARGUMENTS, LAST.format("", 2048), ARGUMENTS)))
    assert report.tokens == 2048
    assert len(report.notes) == 2


def test_text_without_figures_is_refused() -> None:
    """A log of another program is none of SGLang's."""
    with pytest.raises(KvdiagError):
        parse_log("INFO hello\n" * 10)


def test_refused_start_gives_what_is_missing() -> None:
    """The share that the weights alone need, beyond the fraction, is the memory that is missing for any pool."""
    log = (
        "[2026-07-01 10:00:00 TP0] Load weight begin. avail mem=138.00 GB\n"
        "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.88. Raise "
        "--mem-fraction-static above 0.912 (minimum viable = 1 - available/pre = 0.9113)."
    )
    assert failed_pool_bytes(log) == round((0.9113 - 0.88) * 138 * 2**30)


@pytest.mark.parametrize(
    ("titles", "ranks"),
    [
        (("python -m sglang.launch_server", "sglang::scheduler", "sglang::detokenizer"), (1, 1)),
        (("sglang::scheduler_TP0", "sglang::scheduler_TP1"), (2, 1)),
        (("sglang::scheduler_PP0_TP0", "sglang::scheduler_PP1_TP0"), (1, 2)),
        (("sglang::scheduler_DP0", "sglang::scheduler_DP1", "sglang::data_parallel_controller"), (1, 1)),
        (("sglang::scheduler_DP0_TP0", "sglang::scheduler_DP1_TP1"), (1, 1)),
        (("sglang::scheduler_DP0_TP0_EP0", "sglang::scheduler_DP0_TP1_EP1"), (2, 1)),
        (("python -m sglang.launch_server --nnodes 2", "sglang::scheduler_TP0"), None),
        (("nginx", "sglang::detokenizer"), None),
    ],
)
def test_titles_show_the_ranks(titles: tuple[str, ...], ranks: tuple[int, int] | None) -> None:
    """Ranks of one engine, also where one numbering counts those of all data-parallel ranks."""
    assert parallel_ranks(titles) == ranks


@pytest.mark.parametrize(
    "command",
    [
        "command=python3 -m sglang.launch_server --model-path /m/grok-2 --tp-size 16 --enable-dp-attention --dp=8\n",
        'exec: ["sglang", "serve", "--tp", "16", "--dp", "8", "--enable-dp-attention", "--model", "/m/grok-2"]\n',
        "python -m sglang.launch_server \\\n  --model /m/grok-2 --tp 16\\\n  --dp-size 8 --enable-dp-attention\n",
    ],
)
def test_a_command_line_gives_settings(command: str) -> None:
    """Where the log has no server_args: in one line, in a list, over several lines; advice in messages is none."""
    advice = "[2026-07-01 10:00:00] KV pool is small: lower --context-length 4096 or --disable-hybrid-swa-memory\n"
    settings = parse_log(command + advice + LAST.format("", 1024)).settings

    assert (settings.model, settings.tensor_parallel) == ("/m/grok-2", 16)
    assert settings.flags == {"data_parallel": 8, "dp_attention": True}
    assert settings.max_model_len_tokens == 32_768


@pytest.mark.parametrize("code", ["launch_server(server_args)", "Runner(server_args, dtype=server_args.dtype)"])
def test_code_in_a_traceback_leaves_the_arguments(code: str) -> None:
    """A server that fails after its start prints the names of its arguments again, without their values."""
    log = f"server_args=ServerArgs(tp_size=8, dtype='bfloat16')\n{LAST.format('', 1024)}    {code}\n"
    settings = parse_log(log).settings
    assert (settings.tensor_parallel, settings.dtype) == (8, "bfloat16")


@pytest.mark.parametrize(
    ("flag", "on_host"),
    [
        ("--cpu-offload-gb 400", True),
        ("--cpu-offload-gb 0.5", True),
        ("--kt-weight-path /m/int4", True),
        ("--cpu-offload-gb 0", None),
    ],
)
def test_weights_in_host_memory_are_known(flag: str, on_host: bool | None) -> None:
    """Weights on the GPU are then fewer than the model's."""
    log = f"python -m sglang.launch_server {flag} --tp 2\n{LAST.format('', 1024)}"
    assert parse_log(log).settings.host_weights is on_host
