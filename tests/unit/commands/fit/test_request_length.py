"""A request longer than the engine accepts does not fit, however large the pool is."""

import json
from pathlib import Path

import pytest

from tests.unit.commands.fit.fitting import answer, refusal

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("llama-3-8b", ("--context", "8193")),
        ("llama-3-8b", ("--context", "100000")),
        ("llama-3-8b", ("--context", "8193", "--kv-pool-bytes", "10GiB")),
        ("llama-3-8b", ("--context", "8193", "--engine", "generic")),
        ("llama-3-8b", ("--request-rate", "0.1", "--prompt-tokens", "9000", "--output-tokens", "100")),
        ("opt-6.7b", ("--context", "4096")),
        ("mistral-7b-v0.1", ("--context", "4097", "--disable-sliding-window")),
        ("llama-3-8b", ("--context", "4097", "--hf-overrides", '{"max_position_embeddings": 4096}')),
    ],
)
def test_a_request_beyond_the_limit_does_not_fit(
    capsys: pytest.CaptureFixture[str], model: str, arguments: tuple[str, ...]
) -> None:
    """The code is that of a demand that does not fit, and the first note names the limit."""
    code, document = answer(capsys, model, *arguments)

    limits = {"opt-6.7b": "2048", "mistral-7b-v0.1": "4096"}
    limit = "4096" if "--hf-overrides" in arguments else limits.get(model, "8192")
    assert 2 == code
    assert limit in document["notes"][0]


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("llama-3-8b", ("--context", "8192")),
        ("mistral-7b-v0.1", ("--context", "8192")),
        ("mistral-7b-v0.1", ("--context", "4096", "--disable-sliding-window")),
        ("llama-3-8b", ("--context", "32768", "--hf-overrides", '{"rope_scaling": {"type": "linear", "factor": 4}}')),
        ("llama-3-8b", ("--context", "16384", "--hf-overrides", '{"max_position_embeddings": 16384}')),
    ],
)
def test_a_request_within_it_does(capsys: pytest.CaptureFixture[str], model: str, arguments: tuple[str, ...]) -> None:
    """Up to the limit, which scaling and overrides move."""
    assert 0 == answer(capsys, model, *arguments)[0]


def test_only_a_shorter_request_is_a_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    """No GPU, weight or cache format makes the engine accept it."""
    _, document = answer(capsys, "llama-3-8b", "--context", "100000")

    assert [("shorter-context", "fits")] == [(one["name"], one["outcome"]) for one in document["levers"]]
    assert ([], 0, 8192) == (document["combinations"], document["max_requests"], document["max_context_tokens"])


def test_the_way_to_longer_requests_is_named_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """RoPE can be scaled, learned positions cannot."""
    rotary, learned = (
        answer(capsys, model, "--context", "100000")[1]["notes"][0] for model in ("llama-3-8b", "opt-6.7b")
    )

    overrides = json.loads(rotary.split("'")[1])
    assert ("yarn", 106_496) == (overrides["rope_parameters"]["rope_type"], overrides["max_position_embeddings"])
    assert "--hf-overrides" not in learned
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN" in learned


def test_the_grid_ends_at_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """Every row is of a length that the engine accepts."""
    _, document = answer(capsys, "llama-3-8b", "--grid")

    assert {2_048, 8_192} == {one["context_tokens"] for one in document["grid"]}


def test_a_nested_config_is_overridden_in_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An object for a nested config changes its fields alone; its class fills in a length that it leaves out."""
    nested = {name: value for name, value in LLAMA.items() if name != "max_position_embeddings"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": nested}))
    longer = ("--hf-overrides", '{"text_config": {"max_position_embeddings": 4096}}')

    assert 2 == answer(capsys, str(tmp_path), "--context", "4096")[0]
    assert 0 == answer(capsys, str(tmp_path), "--context", "4096", *longer)[0]


def test_a_file_beside_the_config_limits_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A sentence-transformers file states the longest input."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 512}')

    assert 2 == answer(capsys, str(tmp_path), "--context", "513")[0]
    assert 0 == answer(capsys, str(tmp_path), "--context", "512")[0]


@pytest.mark.parametrize("engine", ["sglang", "trtllm", "tgi", "lmdeploy"])
def test_other_engines_refuse_it_too(capsys: pytest.CaptureFixture[str], engine: str) -> None:
    """They do not start with it either."""
    assert "8,192" in refusal(capsys, "llama-3-8b", "--engine", engine, "--context", "8193")


def test_sglang_takes_yarn_as_the_scaled_length(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Where the parameters name the original length its factor is one, as for vLLM; a plain factor counts."""
    scaled = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(scaled))

    assert 0 == answer(capsys, str(tmp_path), "--engine", "sglang", "--context", "16384")[0]
    assert "16,384" in refusal(capsys, str(tmp_path), "--engine", "sglang", "--context", "16385")
