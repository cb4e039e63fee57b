"""What llama.cpp's startup lines report, in the forms of its versions, with and without a prefix."""

import pytest

from kvdiag.engines.llamacpp.load_log import failed_pool_bytes, parse_log, parse_settings
from kvdiag.errors import KvdiagError
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings

MIB = 2**20

NEW = """\
build_info: b11434-0123abc
llama_model_loader: - kv   0:   general.architecture str              = llama
llama_model_loader: - kv   1:           general.name str              = Llama 8B
load_tensors:   CPU_Mapped model buffer size =   281.81 MiB
load_tensors:        CUDA0 model buffer size =  4403.49 MiB
llama_context: constructing llama_context
llama_context: n_seq_max             = 4
llama_context: n_ctx                 = 32768
llama_context: n_ctx_seq             = 32768
llama_context: n_ubatch              = 512
llama_context: kv_unified            = true
llama_kv_cache:      CUDA0 KV buffer size =  4096.00 MiB
llama_kv_cache: size = 4096.00 MiB ( 32768 cells,  32 layers,  4/1 seqs), K (f16): 2048.00 MiB, V (f16): 2048.00 MiB
sched_reserve:      CUDA0 compute buffer size =   304.75 MiB
sched_reserve:  CUDA_Host compute buffer size =    72.01 MiB
load_model: initializing, n_slots = 4, n_ctx_slot = 32768, kv_unified = 'true'
"""

OLD = """\
build: 4589 (0123abc) with cc for x86_64-linux-gnu
llm_load_tensors:        CPU buffer size =   281.81 MiB
llm_load_tensors:      CUDA0 buffer size =  4403.49 MiB
llama_new_context_with_model: n_ctx      = 8192
llama_new_context_with_model: n_ubatch   = 512
llama_kv_cache_init:      CUDA0 KV buffer size =  1024.00 MiB
llama_new_context_with_model: KV self size  = 1024.00 MiB, K (f16):  512.00 MiB, V (f16):  512.00 MiB
llama_new_context_with_model:      CUDA0 compute buffer size =   560.00 MiB
"""

WINDOWS = """\
llama_context: constructing llama_context
llama_context: n_ctx         = 8192
llama_context: n_ctx_seq     = 2048
llama_kv_cache_iswa: creating non-SWA KV cache, size = 2048 cells
llama_kv_cache:      CUDA0 KV buffer size =     8.00 MiB
llama_kv_cache: size =    8.00 MiB (  2048 cells,   1 layers,  4/4 seqs), K (q8_0):    4.00 MiB, V (q4_0):    4.00 MiB
llama_kv_cache_iswa: creating     SWA KV cache, size = 1024 cells
llama_kv_cache:      CUDA0 KV buffer size =    20.00 MiB
llama_kv_cache: size =   20.00 MiB (  1024 cells,   5 layers,  4/4 seqs), K (q8_0):   10.00 MiB, V (q4_0):   10.00 MiB
load_model: initializing, n_slots = 4, n_ctx_slot = 2048, kv_unified = 'false'
"""

DRAFT = """\
llama_context: constructing llama_context
llama_context: n_ctx         = 4096
llama_kv_cache:      CUDA0 KV buffer size =    16.00 MiB
llama_kv_cache: size =   16.00 MiB (  4096 cells,   4 layers,  1/1 seqs), K (f16):    8.00 MiB, V (f16):    8.00 MiB
"""


def pools(report: EngineReport) -> dict[str, int]:
    """The pool's bytes on each device that has a part of it."""
    return {rank.name: rank.pool.nominal_bytes for rank in report.ranks if rank.pool is not None}


def test_cells_buffers_and_settings_of_a_current_build() -> None:
    """Weights, cells and compute buffers by device; the host's mapped weights are its own."""
    report = parse_log(NEW)
    assert (32768, 1.0, 32768) == (report.tokens, report.concurrency, report.context_tokens)
    assert {"CUDA0": 4096 * MIB} == pools(report)
    assert [("CPU", 281.81, 72.01), ("CUDA0", 4403.49, 304.75)] == [
        (rank.name, round(rank.weights.nominal_bytes / MIB, 2), round(rank.activation.nominal_bytes / MIB, 2))
        for rank in report.ranks
        if rank.weights is not None and rank.activation is not None
    ]
    settings = report.settings
    assert ("b11434-0123abc", "Llama 8B", "llama", "f16", 512) == (
        settings.version,
        settings.model,
        settings.architecture,
        settings.kv_dtype,
        settings.max_num_batched_tokens,
    )


@pytest.mark.parametrize(
    "prefix", ["0.00.520.077 I ", "\x1b[34m1.14.608.510\x1b[0m \x1b[32mI \x1b[0m", "2026-01-02T03:04:05Z stderr F "]
)
def test_a_prefix_does_not_matter(prefix: str) -> None:
    """Time and level since 2026, with colours, or what a container runtime puts in front."""
    assert parse_log(NEW) == parse_log("".join(f"{prefix}{line}\n" for line in NEW.splitlines()))


@pytest.mark.parametrize("name", ["llama_kv_cache_unified", "llama_kv_cache", "init"])
def test_the_names_of_functions_do_not_matter(name: str) -> None:
    """They changed three times in 2025."""
    assert parse_log(NEW) == parse_log(NEW.replace("llama_kv_cache:", f"{name}:"))


def test_a_build_of_2024_says_its_context_alone() -> None:
    """It has no line with cells; the context is as large as the pool."""
    report = parse_log(OLD)
    assert (8192, "4589 (0123abc)", "f16") == (report.tokens, report.settings.version, report.settings.kv_dtype)
    assert {"CUDA0": 1024 * MIB} == pools(report)


def test_a_build_of_2025_says_its_cells_before_its_pool() -> None:
    """Its functions had other names for some weeks (public log of February 2025)."""
    report = parse_log(
        "0.01.437.821 I llama_context_base: n_ctx         = 2048\n"
        "0.01.439.202 I init: kv_size = 2048, offload = 1, type_k = 'f16', type_v = 'f16', n_layer = 32\n"
        "0.01.440.332 I init:      CUDA0 KV buffer size =   640.00 MiB\n"
        "0.01.440.346 I llama_context_kv_self: KV self size  =  640.00 MiB, K (f16):  320.00 MiB, V (f16): 320.00 MiB\n"
    )

    assert (report.tokens, report.settings.kv_dtype, [rank.name for rank in report.ranks]) == (2048, "f16", ["CUDA0"])


def test_a_pool_for_each_slot_adds_up_and_windows_add_bytes() -> None:
    """Cells are printed for each of four streams; the first cache's are the capacity."""
    report = parse_log(WINDOWS)
    assert (8192, 2048, 4.0, "q8_0/q4_0") == (
        report.tokens,
        report.context_tokens,
        report.concurrency,
        report.settings.kv_dtype,
    )
    assert {"CUDA0": 28 * MIB} == pools(report)


@pytest.mark.parametrize("text", [NEW + DRAFT, NEW.replace("build_info: b11434-0123abc\n", "") + DRAFT])
def test_a_draft_model_is_not_the_served_one(text: str) -> None:
    """The context with the larger cache counts."""
    report = parse_log(text)
    assert 32768 == report.tokens
    assert {"CUDA0": 4096 * MIB} == pools(report)


def test_the_last_start_that_reports_memory_counts() -> None:
    """A file often has several."""
    report = parse_log(f"{OLD}{NEW}build_info: b11435-0123abc\n")
    assert ("b11434-0123abc", 32768) == (report.settings.version, report.tokens)
    assert any("2 starts" in note for note in report.notes)


@pytest.mark.parametrize(("unified", "tokens"), [("true", 8192), ("false", 32768)])
def test_the_default_verbosity_shows_slots_alone(unified: str, tokens: int) -> None:
    """-lv 3 prints no sizes; slots and whether they share the pool give its tokens."""
    report = parse_log(f"srv load_model: initializing, n_slots = 4, n_ctx_slot = 8192, kv_unified = '{unified}'\n")
    assert (tokens, 8192, ()) == (report.tokens, report.context_tokens, report.ranks)


def test_a_log_of_something_else_is_refused() -> None:
    """As of another engine."""
    with pytest.raises(KvdiagError):
        parse_log("INFO: Model loading took 12.55 GiB\n")
    assert EngineSettings() == parse_settings(["INFO: Model loading took 12.55 GiB"])


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("alloc_buffer: allocating 204800.00 MiB on device 0: cudaMalloc failed: out of memory", 204800 * MIB),
        ("cpu_buffer_type_alloc_buffer: failed to allocate CPU buffer of size 137438953504", 137438953504),
    ],
)
def test_a_cache_that_did_not_fit_says_its_bytes(asked: str, expected: int) -> None:
    """The allocation that failed stands before it."""
    text = f"{asked}\nllama_kv_cache_init: failed to allocate buffer for kv cache\n"
    assert (expected, None) == (failed_pool_bytes(text), failed_pool_bytes(asked))


REMOTE = """\
llama_context: n_ctx         = 4096
llama_kv_cache_unified: RPC[172.31.110.11:50052] KV buffer size =   800.00 MiB
llama_kv_cache_unified: RPC[172.31.110.12:50052] KV buffer size =   784.00 MiB
llama_kv_cache_unified:        CPU KV buffer size =   432.00 MiB
llama_kv_cache: size = 2016.00 MiB ( 4096 cells, 126 layers, 1/ 1 seqs), K (f16): 1008.00 MiB, V (f16): 1008.00 MiB
"""


def test_servers_of_an_rpc_cluster_are_devices() -> None:
    """Llama 405B over two of them and the host: all of its 2,016 MiB."""
    found = parse_log(REMOTE)
    sizes = {rank.name: rank.pool.nominal_bytes // MIB for rank in found.ranks if rank.pool is not None}
    assert {"RPC[172.31.110.11:50052]": 800, "RPC[172.31.110.12:50052]": 784, "CPU": 432} == sizes
    assert (4096, "f16") == (found.tokens, found.settings.kv_dtype)


def test_a_cache_of_2025_has_no_sequences() -> None:
    """Its line ends with the layers."""
    line = "llama_kv_cache: size = 1024.00 MiB ( 8192 cells, 32 layers), K (q8_0): 512.00 MiB, V (q8_0): 512.00 MiB"
    found = parse_log(f"llama_kv_cache_unified:        CPU KV buffer size =  1024.00 MiB\n{line}")
    assert (8192, "q8_0") == (found.tokens, found.settings.kv_dtype)
