"""`kvdiag fit` and what it is given: settings that an engine takes, and the one line that refuses bad input."""

from pathlib import Path

import pytest

from kvdiag.commands import main
from tests.unit.commands.fit.fitting import GIB, answer, refusal

ANOTHERS = ("another/Llama-3.1-8B-Instruct", "--context", "8192")
ON_AN_H100 = ("llama_70b", "--gpu", "h100")


@pytest.mark.parametrize(
    "content",
    ['{"a": 1}', "[[1, 2]]", f"[[1{'0' * 400}, 1, 1]]", "[" * 100_000],
    ids=["object", "two", "huge", "nested"],
)
def test_a_file_that_holds_no_lengths_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    """An invalid lengths file is refused with one line that names the required format."""
    path = tmp_path / "lengths.json"
    path.write_text(content)

    assert "[prompt tokens, output tokens, weight]" in refusal(
        capsys, "llama_70b", "--request-rate", "2", "--lengths", str(path)
    )


def test_an_unknown_architecture_is_planned_with_given_bytes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With `--kv-bytes-per-token` and `--weights` nothing of the config is needed."""
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "never_seen"}')
    line = refusal(capsys, str(path))

    code, document = answer(
        capsys,
        str(path),
        *("--kv-bytes-per-token", "100000", "--weights", "16GB", "--gpu", "80GB", "--context", "4096"),
    )

    assert "model_type" in line
    assert "--kv-bytes-per-token" in line
    assert (0, [1_600_000]) == (code, document["bytes_per_block"])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("llama_70",), "llama_70b"),
        (("llama_70b", "--gpu", "h1000"), "gpu"),
        (("llama_70b", "--gpu", "-5GB"), "gpu"),
        (("llama_70b", "--gpu", "80"), "80 bytes"),
        (("folder/nothing.json",), "no such file"),
        (("llama_70b", "--tp", "3"), "tensor_parallel 3"),
        (("llama_70b", "--tp", "0"), "tensor_parallel"),
        (("llama_70b", "--pp", "81"), "pipeline_parallel 81"),
        (("llama_70b", "--tp", "4", "--dcp", "3"), "decode_context_parallel 3"),
        (("llama_70b", "--context", "0"), "context"),
        (("llama_70b", "--context", str(10**30)), "context"),
        (("llama_70b", "--concurrency", "0"), "concurrency"),
        (("llama_70b", "--block-size", "0"), "block_size"),
        (("llama_70b", "--block-size", "24"), "block_size"),
        (("deepseek-v3.2", "--block-size", "32"), "block_size"),
        (("llama_70b", "--tp", "8", "--dcp", "2"), "decode_context_parallel 2"),
        (("llama_70b", "--tp", "16", "--dcp", "4"), "decode_context_parallel 4"),
        (("llama_70b", "--mamba-ssm-cache-dtype", "float8"), "float8"),
        (("llama_70b", "--mamba-ssm-cache-dtype", "float32"), "--mamba-ssm-cache-dtype"),
        (("llama_70b", "--grid", "--kv-pool-bytes", "2000000"), "--grid"),
        (("llama_70b", "--kv-dtype", "fp8", "--kv-bytes-per-token", "9", "--weights", "1GB"), "--kv-dtype"),
        (("",), "MODEL is empty"),
        ((" ",), "MODEL is empty"),
        (("llama_70b", "--max-num-batched-tokens", "0"), "max_num_batched_tokens"),
        (("llama_70b", "--kv-dtype", "fp3"), "fp3"),
        (("llama_70b", "--weights", "fp3"), "fp3"),
        (("llama_70b", "--memory-fraction", "1.5"), "memory_fraction"),
        (("llama_70b", "--memory-fraction", "nan"), "--memory-fraction"),
        (("llama_70b", "--kv-bytes-per-token", "0", "--weights", "1GB"), "kv-bytes-per-token"),
        (("llama_70b", "--kv-bytes-per-token", "9"), "--weights"),
        (("llama_70b", "--kv-bytes-per-token", str(10**8), "--weights", "1GB"), "kv-bytes-per-token"),
        (("llama_70b", "--kv-pool-bytes", "-1"), "--kv-pool-bytes"),
        (("llama_70b", "--max-model-len", "32kk"), "--max-model-len"),
        (("llama_70b", "--num-speculative-tokens", "-1"), "num_speculative_tokens"),
        (("llama_70b", "--request-rate", "nan", "--prompt-tokens", "1", "--output-tokens", "1"), "--request-rate"),
        (("llama_70b", "--lengths", "/nonexistent", "--request-rate", "1"), "/nonexistent"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], word: str
) -> None:
    """Exit code 3 and one line on stderr that names what is wrong."""
    assert word in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("llama_70b", ("--tp", "16", "--dcp", "2")),
        ("deepseek-v3", ("--tp", "8", "--dcp", "8", "--block-size", "64")),
        ("nemotron-nano-9b-v2", ("--mamba-ssm-cache-dtype", "bfloat16")),
        ("llama_70b", ("--block-size", "48", "--mamba-ssm-cache-dtype", "auto")),
    ],
)
def test_settings_that_an_engine_takes_are_taken(
    capsys: pytest.CaptureFixture[str], model: str, arguments: tuple[str, ...]
) -> None:
    """What vLLM accepts is not refused: DCP over copies of KV heads and over MLA, states in 16 bits, whole blocks."""
    code, document = answer(capsys, model, *arguments, "--kv-pool-bytes", str(10 * GIB), "--context", "4096")

    assert (0, True) == (code, document["num_blocks"] > 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("llama-3-8b", "--gpu", "h100", "--hf-overrides", "[1]"),
        (),
        (*ON_AN_H100, "--concurrency", "4", "--request-rate", "1", "--prompt-tokens", "9", "--output-tokens", "9"),
        (*ON_AN_H100, "--request-rate", "1"),
        (*ON_AN_H100, "--lengths", "lengths.json"),
        (*ON_AN_H100, "--prompt-tokens", "2000"),
        (*ON_AN_H100, "--max-num-batched-tokens", "9", "--max-in-flight-tokens", "9"),
        (*ON_AN_H100, "--gpus", "9"),
        ("llama_70b", "--tp", "4"),
        (*ON_AN_H100, "--weights", "70"),
        (*ON_AN_H100, "--kv-pool-bytes", "10"),
    ],
)
def test_wrong_usage_is_code_3(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    """Options that exclude or require each other are usage errors: exit code 3, one message on stderr."""
    code = main(["fit", *arguments])
    printed = capsys.readouterr()

    assert (3, "", True) == (code, printed.out, printed.err.startswith("kvdiag: "))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (("--tensor-parallel-size", "4"), ("--tp", "4")),
        (("-tp", "2", "-pp", "2"), ("--tp", "2", "--pp", "2")),
        (("--gpu-memory-utilization", "0.8"), ("--memory-fraction", "0.8")),
        (("--kv-cache-dtype", "fp8"), ("--kv-dtype", "fp8")),
        (("--max-model-len", "32K"), ("--context", "32768")),
        (("--max-model-len", "32k"), ("--context", "32000")),
        (("--max-num-seqs", "8"), ("--concurrency", "8")),
        (("--quantization", "fp8"), ("--weights", "fp8")),
        (("-q", "awq"), ("--weights", "awq")),
        (("--max-num-batched-tokens", "2K"), ("--max-num-batched-tokens", "2048")),
    ],
)
def test_options_have_the_engines_names_too(
    capsys: pytest.CaptureFixture[str], theirs: tuple[str, ...], ours: tuple[str, ...]
) -> None:
    """A command line of the engine is answered as its translation."""
    answers = [answer(capsys, "llama_70b", "--no-profile", *arguments) for arguments in (theirs, ours, ())]

    assert answers[0] == answers[1] != answers[2]


def test_a_hub_that_cannot_be_reached_falls_back_to_the_catalogue(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the model's name, and the answer names both; another name is refused as before."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    code, document = answer(capsys, *ANOTHERS)

    assert 0 == code
    assert {"llama-3.1-8b", "another/Llama-3.1-8B-Instruct"} <= set(document["model"].replace(",", "").split())
    note = document["notes"][0]
    assert {"llama-3.1-8b,", "another/Llama-3.1-8B-Instruct:"} <= set(note.split())
    assert note in answer(capsys, *ANOTHERS, "--kv-pool-bytes", "1GiB")[1]["notes"]
    assert note in answer(capsys, *ANOTHERS, "--engine", "sglang")[1]["notes"]
    assert "cannot reach" in refusal(capsys, "another/a-model-of-tomorrow")
