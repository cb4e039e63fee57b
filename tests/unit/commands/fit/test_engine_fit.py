"""`kvdiag fit --engine` for engines other than vLLM: flags of their own, exit codes, documents, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import kvdiag.outputs.documents
from kvdiag.commands import main
from kvdiag.commands.fit import command
from kvdiag.kv.pools.flag_bounds import ENGINE_FLAGS, PLAIN_FLAGS, allowed
from tests.unit.commands.fit.fitting import refusal
from tests.unit.kv.pools.recorded_engines import vectors
from tests.unit.sources.gguf_files import SETTINGS, gguf

SCHEMA = json.loads((Path(kvdiag.outputs.documents.__path__[0]) / "engine_fit.schema.json").read_text(encoding="utf-8"))
LIMITED = [row for row in vectors("sglang", measured=True) if row["reported"] and "--max-total-tokens" in row["flags"]]
A10 = ("--gpu", "a10")


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the document, which its schema admits."""
    code = main(["fit", *arguments, "--output", "json"])
    printed = capsys.readouterr()
    document: dict[str, Any] = json.loads(printed.out)
    assert [] == list(Draft202012Validator(SCHEMA).iter_errors(document))
    return code, document


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A GGUF file of 12 layers, ten with a window of 512."""
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf({**SETTINGS, "gemma3.attention.head_count_kv": [2] * 12}))
    return str(path)


@pytest.mark.parametrize("row", LIMITED, ids=[row["id"] for row in LIMITED])
def test_sglang_s_own_command_line(row: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The flags of a recorded start, as they were: the capacity that it reported."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(row["model_config"]))
    context = str(row["figures"]["context_len"])

    code, document = planned(capsys, str(path), "--engine", "sglang", *row["flags"].split(), "--context", context)

    assert document["capacity_tokens"] == row["reported"][0]["max_total_num_tokens"]
    assert document["max_running_requests"] == row["figures"]["max_running_requests"]
    # SGLang warns of a pool that holds no request of full length.
    assert code == (2 if int(context) > document["capacity_tokens"] else 0)


def test_windows_by_requests_hold_the_drafts_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real start of 0.5.23: by NGRAM a step takes ten branches, more than its four drafts."""
    (row,) = [one for one in LIMITED if one["id"] == "sglang-0.5.23-m1"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(row["model_config"]))
    drafts = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4", "--disable-overlap-schedule")
    limits = ("--max-total-tokens", "30000", "--disable-radix-cache", "--max-running-requests", "4")

    _, document = planned(capsys, str(path), "--engine", "sglang", *limits, *drafts)

    assert [pool["units"] for pool in document["pools"]] == [30_000, 6_701]


def test_llama_server_s_own_command_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """-c, -np and -ctk decide without a GPU; four slots have a quarter each."""
    code, document = planned(
        capsys, model, "--engine", "llamacpp", "-c", "32768", "-np", "4", "-ctk", "q8_0", "-fa", "on"
    )

    assert (code, document["outcome"], document["capacity_tokens"]) == (0, None, 32_768)
    assert document["longest_request_tokens"] == 8_192
    assert [(pool["units"], pool["streams"], pool["layers"]) for pool in document["pools"]] == [
        (8_192, 4, 2),
        (1_024, 4, 10),
    ]
    assert document["pools"][0]["k_bytes"] == 32_768 * 128 * 34 // 32 * 2


def test_llama_server_s_flags_follow_from_a_demand(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without -c and -np, as many slots as requests, each with its context."""
    _, document = planned(capsys, model, "--engine", "llamacpp", "--context", "4000", "--concurrency", "3", *A10)

    assert (document["settings"]["n_parallel"], document["settings"]["n_ctx"]) == (3, 3 * 4_096)
    assert document["outcome"] == "fits"
    assert sum(part["bytes"] for part in document["parts"]) == document["gpu_bytes"] - document["headroom_bytes"]


@pytest.mark.parametrize("engine", ["sglang", "trtllm", "tgi", "lmdeploy", "llamacpp"])
def test_a_model_of_the_catalogue(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every engine plans for a GPU, and its levers never make the answer worse."""
    code, document = planned(
        capsys, "llama_7b", "--engine", engine, *A10, "--context", "4096", "--concurrency", "8", "--offline"
    )

    assert (code, document["outcome"]) == (2, "does_not_fit")
    assert document["levers"]
    assert document["engine"] == engine


def test_a_pool_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """--kv-pool-bytes asks the arithmetic alone."""
    code, document = planned(
        capsys,
        "llama-3.1-8b",
        "--engine",
        "sglang",
        "--kv-pool-bytes",
        "10GiB",
        "--page-size",
        "64",
        "--context",
        "8192",
    )

    assert (code, document["capacity_tokens"], document["gpu_bytes"]) == (0, 81_920, None)


@pytest.mark.parametrize("engine", ["sglang", "llamacpp", "trtllm", "tgi"])
def test_a_grid(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One plan for each number of requests and each context that the model allows: 40,960 tokens."""
    _, document = planned(capsys, "qwen3-8b", "--engine", engine, "--gpu", "h100", "--grid", "--offline")

    rows = {(one["context_tokens"], one["requests"]): one["outcome"] for one in document["grid"]}
    assert rows[2_048, 1] == "fits"
    assert "fits" not in {rows[max(rows)], rows.get((131_072, 1), "tight")}


@pytest.mark.parametrize("engine", ["sglang", "trtllm", "tgi", "lmdeploy", "llamacpp"])
@pytest.mark.parametrize(("model", "gpu"), [("gpt-oss-120b", "h100"), ("llama_70b", "h100"), ("llama_7b", "a10")])
def test_a_change_serves_requests(model: str, gpu: str, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No change is listed with which the server does not start or serves no request."""
    _, document = planned(capsys, model, "--engine", engine, "--gpu", gpu, "--concurrency", "2", "--offline")

    assert [one for one in document["levers"] if not one["max_requests"]] == []


def test_the_fraction_that_holds_the_demand(capsys: pytest.CaptureFixture[str]) -> None:
    """gpt-oss-120b on an H100 does not start with the default; the fraction to set is one with which a request fits."""
    _, document = planned(capsys, "gpt-oss-120b", "--engine", "sglang", "--gpu", "h100", "--offline")

    first = document["levers"][0]
    assert first["change"].startswith("--mem-fraction-static")
    assert first["outcome"] == "tight"


@pytest.mark.parametrize("group", [("--dp-size", "8", "--enable-dp-attention"), ("--attn-dp-size", "8")])
def test_attention_of_data_parallel_groups_is_whole(group: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek-V3 on 8 ranks: each has all of attention and the embedding with one group for each rank, and the
    requests of all groups are held.
    """
    fixed = ("deepseek-v3", "--engine", "sglang", "--gpu", "h200", "--tp", "8", "--concurrency", "16", "--offline")
    _, split = planned(capsys, *fixed)
    _, whole = planned(capsys, *fixed, *group)

    # By hand: q_b, kv_b and o in 61 layers at 8 bits, the embedding at 16; seven eighths of each more.
    more = (61 * (1_536 * 24_576 + 512 * 32_768 + 16_384 * 7_168) + 2 * 129_280 * 7_168) * 7 // 8
    assert whole["parts"][0]["bytes"] - split["parts"][0]["bytes"] == pytest.approx(more, rel=0.01)
    assert (whole["gpus"], whole["max_requests"]) == (8, 8 * (whole["capacity_tokens"] // 8 // 163_840))


@pytest.mark.parametrize(
    "arguments",
    [
        ("llama_7b", "--engine", "sglang", "--page-size", "many"),
        ("llama_7b", "--engine", "sglang", "--page-size"),
        ("qwen3-8b", "--engine", "sglang", "--context", "131072", "--gpu", "h100", "--offline"),
        ("llama_7b", "--engine", "sglang", "--mem-fraction-static", "2"),
        ("llama_7b", "--engine", "vllm", "--page-size", "64"),
        ("llama_7b", "--engine", "llamacpp", "-ctk", "fp8"),
        ("llama_7b", "--engine", "llamacpp", "--swa-full=1"),
        ("llama_7b", "--engine", "tgi", "--attention", "none"),
        ("qwen3-next-80b-a3b", "--engine", "lmdeploy"),
        ("llama-3.1-8b", "--engine", "sglang", "--tp", "3", "--offline"),
        ("llama-3.1-8b", "--engine", "trtllm", "--tp_size", "3", "--offline"),
        ("llama-3.1-8b", "--engine", "tgi", "--num-shard", "3", "--offline"),
        ("llama-3.1-8b", "--engine", "lmdeploy", "--tp", "3", "--offline"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and exit code 3: wrong values, missing values, options of another engine."""
    assert refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("engine", "flag", "value"),
    [
        ("lmdeploy", "--cache-max-entry-count", "1.0"),
        ("lmdeploy", "--cache-block-seq-len", "0"),
        ("lmdeploy", "--quant-policy", "5"),
        ("lmdeploy", "--quant-policy", "42"),
        ("trtllm", "--tokens_per_block", "33"),
        ("trtllm", "--max_attention_window", "128,0"),
        ("trtllm", "--max_attention_window", "128,"),
        ("tgi", "--attention", "none"),
        ("sglang", "--page-size", "0"),
        ("sglang", "--mamba-full-memory-ratio", "nan"),
        ("sglang", "--mamba-full-memory-ratio", "inf"),
        ("sglang", "--cuda-graph-max-bs", "-100000"),
        ("sglang", "--max-running-requests", "0"),
        ("sglang", "--speculative-num-draft-tokens", "-5"),
        ("sglang", "--mamba-radix-cache-strategy", "other"),
        ("llamacpp", "--parallel", "0"),
    ],
)
def test_a_flag_s_bounds(engine: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that the engine does not take is refused, and the flag is named."""
    assert flag.lstrip("-") in refusal(capsys, "llama-3.1-8b", "--engine", engine, flag, value, "--offline")


def test_the_help_lists_the_engine_s_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """Help asked with --engine shows all flags of that engine, and none of another."""
    main(["fit", "--engine", "llamacpp", "--help"])
    shown = capsys.readouterr().out

    assert [flag for flag in ENGINE_FLAGS["llamacpp"] if flag not in shown] == []
    assert "--page-size" not in shown


def test_a_start_command_can_be_pasted(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags that decide no pool change nothing, with their values in either form."""
    flags = ("-c", "1000", "-np", "8", "-ctk", "q8_0")
    expected = planned(capsys, model, "--engine", "llamacpp", *flags)
    more = ("--host", "127.0.0.1", "-t", "8", "--metrics", "--port=8080", "-ngl", "99", "--temp", "-1")
    assert expected == planned(capsys, model, "--engine", "llamacpp", *more, *flags)


def test_an_sglang_command_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    """With flags of expert parallelism and backends; a method's name means the weights' format."""
    own = ("llama-3.1-8b", "--engine", "sglang", "--gpu", "80GiB", "--offline")
    pasted = ("--model-path", "some/model", "--ep-size", "2", "--moe-a2a-backend", "deepep", "--enable-dp-lm-head")
    expected = planned(capsys, *own, "--weights", "nvfp4")

    assert expected == planned(capsys, *own, *pasted, "--quantization", "modelopt_fp4")


@pytest.mark.parametrize(
    ("layers", "refused"), [("1", True), ("0", True), ("all", False), ("-1", False), ("99", False)]
)
def test_layers_in_host_memory_are_no_plan_for_a_device(
    layers: str, refused: bool, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The caches are as large as ever, but what is on the device is then less than is planned."""
    flags = (model, "--engine", "llamacpp", "-c", "1000", "-ngl", layers)
    planned(capsys, *flags)
    if refused:
        assert "gpu-layers" in refusal(capsys, *flags, "--gpu", "8GiB")
    else:
        planned(capsys, *flags, "--gpu", "8GiB")


def test_flags_that_decide_no_pool_are_no_others() -> None:
    """None of them is a setting, or an option of `fit` itself."""
    own = {name for option in command.params for name in option.opts}
    for engine, flags in PLAIN_FLAGS.items():
        assert set() == {*flags} & {*own, *ENGINE_FLAGS[engine]}


def test_the_table_s_bounds() -> None:
    """Every flag's bounds can be read."""
    assert all(allowed(engine, flag) for engine, flags in ENGINE_FLAGS.items() for flag in flags if flags[flag][2:])


def test_a_gguf_file_is_llama_cpp_s(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A GGUF file with another engine is an error that names the option."""
    assert "--engine llamacpp" in refusal(capsys, model, "--engine", "sglang")


def test_engine_from_the_environment(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's flags are also taken where KVDIAG_FIT_ENGINE names it."""
    monkeypatch.setenv("KVDIAG_FIT_ENGINE", "llamacpp")

    _, document = planned(capsys, model, "-c", "1000", "-np=8")

    assert document["capacity_tokens"] == 8 * 256
