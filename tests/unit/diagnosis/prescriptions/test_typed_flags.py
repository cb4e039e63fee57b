"""Settings as they are typed, in every form that flags have."""

import pytest

from kvdiag.diagnosis.prescriptions.typed_flags import typed


@pytest.mark.parametrize(
    ("engine", "setting", "value", "expected"),
    [
        ("vllm", "max_num_seqs", 6, "--max-num-seqs 6"),
        (None, "max_num_seqs", 6, "--max-num-seqs 6"),
        ("vllm", "kv_fp8", None, "--kv-cache-dtype fp8"),
        ("trtllm", "pool_bytes", 100, "max_gpu_total_bytes: 100 in kv_cache_config"),
        ("ollama", "max_num_seqs", 6, "OLLAMA_NUM_PARALLEL=6"),
        ("ollama", "max_model_len", 4096, "OLLAMA_CONTEXT_LENGTH=4096"),
        ("vllm", "graph_sizes", 8, "--max-cudagraph-capture-size 8"),
        ("llamacpp", "memory_fraction", 0.9, None),
        ("an engine of tomorrow", "max_num_seqs", 6, None),
    ],
)
def test_a_setting_is_typed_as_its_engine_reads_it(
    engine: str | None, setting: str, value: object, expected: str | None
) -> None:
    """A flag with a blank, a variable with an equals sign, a key of a file with a colon; nothing that it lacks."""
    assert expected == typed(engine, setting, value)
