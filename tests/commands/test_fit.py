"""`kvdiag fit` as it is typed: exit codes, the JSON answer, and the one line that refuses bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvdiag.commands import main
from tests.kv.vectors import vectors

GIB = 1 << 30
VECTORS = vectors()
ARCHITECTURES = Path(__file__).parents[1] / "e2e" / "architectures"


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON that `kvdiag fit` prints."""
    code = main(["fit", *arguments, "--output", "json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, document


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr with which `kvdiag fit` refuses."""
    code = main(["fit", *arguments])
    printed = capsys.readouterr()
    lines = printed.err.splitlines()

    assert (3, "", 1) == (code, printed.out, len(lines)), printed
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("llama_70b", "--gpu", "80GB", "--tp", "4", "--context", "8192", "--concurrency", "4"), (0, "fits")),
        (("llama_70b", "--gpu", "80GB", "--tp", "1", "--context", "8192"), (2, "does_not_fit")),
    ],
)
def test_the_exit_code_says_whether_it_fits(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: tuple[int, str]
) -> None:
    """70B fits four GPUs of 80 GB and not one."""
    code, document = answer(capsys, *arguments)

    assert expected == (code, document["outcome"])


def test_the_largest_concurrency_fits_and_one_more_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    """`max_requests` is the largest that the command itself accepts."""
    # GIVEN
    arguments = ("llama_70b", "--gpu", "80GB", "--tp", "4", "--context", "8192")
    _, document = answer(capsys, *arguments)
    most = document["max_requests"]

    # WHEN
    at_most, _ = answer(capsys, *arguments, "--concurrency", str(most))
    beyond, _ = answer(capsys, *arguments, "--concurrency", str(most + 1))

    # THEN
    assert (1, 2) == (at_most, beyond)


def test_the_parts_of_a_gpu_add_up_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights, pool, activation, context, graphs and reserve are the GPU's bytes."""
    _, document = answer(capsys, "llama_70b", "--gpu", "h200", "--tp", "4", "--context", "8192")
    budget = document["budgets"][0]
    parts = ("weights", "kv_pool", "activation", "context", "graph", "reserve")

    assert budget["total_bytes"] == sum(budget[f"{part}_bytes"] for part in parts)


@pytest.mark.parametrize("vector", [one for one in VECTORS if "layers" in one], ids=lambda one: one["name"])
def test_a_pool_of_given_bytes_holds_what_the_engine_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, vector: dict[str, Any]
) -> None:
    """`--kv-pool-bytes` with a dump of the engine's own specs gives its blocks, tokens and concurrency."""
    # GIVEN
    path = tmp_path / "specs.json"
    path.write_text(json.dumps(vector))
    arguments = [str(path), "--kv-pool-bytes", str(vector["available_bytes"])]
    arguments += ["--context", str(vector["max_model_len"])]
    arguments += ["--max-in-flight-tokens", str(vector["max_in_flight_tokens"])]
    arguments += ["--mamba-cache-mode", vector.get("mode", "none")]

    # WHEN
    _, document = answer(capsys, *arguments)

    # THEN
    actual = {
        "num_blocks": document["num_blocks"],
        "groups": document["groups"],
        "tokens": document["capacity_tokens"],
        "max_concurrency": document["max_concurrency"],
        "bytes_per_block": document["bytes_per_block"],
    }
    assert vector["expect"] == actual


def test_bytes_of_a_known_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten GiB for Llama 70B on 8 GPUs: 40,960 bytes a token on each, 262,144 tokens."""
    code, document = answer(capsys, "llama_70b", "--tp", "8", "--kv-pool-bytes", str(10 * GIB), "--context", "8192")

    assert (0, 40_960, 655_360, 262_144) == (
        code,
        document["kv_bytes_per_token"],
        document["bytes_per_block"],
        document["capacity_tokens"],
    )


def test_every_rank_of_a_pipeline_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages of four ranks are eight entries."""
    _, document = answer(capsys, "llama_70b", "--tp", "4", "--pp", "2", "--kv-pool-bytes", str(10 * GIB))

    assert [(stage, rank) for stage in range(2) for rank in range(4)] == [
        (one["stage"], one["rank"]) for one in document["ranks"]
    ]


def test_what_does_not_fit_comes_with_levers(capsys: pytest.CaptureFixture[str]) -> None:
    """Each lever names its change, its price and what it gains."""
    _, document = answer(capsys, "llama_70b", "--gpu", "80GB", "--tp", "4", "--context", "131072", "--concurrency", "9")

    assert document["levers"]
    assert all(lever["change"] and lever["price"] and lever["gained_bytes"] > 0 for lever in document["levers"])


def test_traffic_becomes_a_demand(capsys: pytest.CaptureFixture[str]) -> None:
    """Little's law: 2 requests a second of 12.5 seconds each are 25 at once on average, more in 1 % of the time."""
    arguments = ["llama_70b", "--gpu", "h200", "--tp", "4", "--request-rate", "2", "--prompt-tokens", "2000"]
    arguments += ["--output-tokens", "400", "--seconds-per-token", "0.03", "--seconds-to-first", "0.5"]
    _, document = answer(capsys, *arguments)

    assert 25 < document["requests"] < 50
    assert 2400 == document["context_tokens"]


def test_lengths_come_from_a_file_as_well(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A histogram of lengths is planned at the length of those present: 9 x 6.5 s x 1,200 and 12.5 s x 6,400."""
    # GIVEN
    path = tmp_path / "lengths.json"
    path.write_text("[[1000, 200, 9], [6000, 400, 1]]")

    # WHEN
    _, document = answer(
        capsys, "llama_70b", "--gpu", "h200", "--tp", "4", "--request-rate", "2", "--lengths", str(path)
    )

    # THEN
    assert 2116 == document["context_tokens"]


@pytest.mark.parametrize(
    "content",
    ['{"a": 1}', "[[1, 2]]", f"[[1{'0' * 400}, 1, 1]]", "[" * 100_000],
    ids=["object", "two", "huge", "nested"],
)
def test_a_file_that_holds_no_lengths_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    """Whatever it holds, one line says what has to be in it."""
    # GIVEN
    path = tmp_path / "lengths.json"
    path.write_text(content)

    # THEN
    assert "[prompt tokens, output tokens, weight]" in refusal(
        capsys, "llama_70b", "--request-rate", "2", "--lengths", str(path)
    )


def test_the_grid_has_a_plan_for_every_point(capsys: pytest.CaptureFixture[str]) -> None:
    """Four contexts by five concurrencies, and more of either never turns a no into a yes."""
    _, document = answer(capsys, "llama_70b", "--gpu", "h200", "--tp", "4", "--grid")
    grid = {(one["context_tokens"], one["requests"]): one["outcome"] != "does_not_fit" for one in document["grid"]}

    assert 20 == len(grid)
    assert all(
        grid[small] or not grid[large]
        for small in grid
        for large in grid
        if small[0] <= large[0] and small[1] <= large[1]
    )


@pytest.mark.parametrize(
    ("context", "words"),
    [("8192", "FITS"), ("131072", "DOES NOT FIT")],
)
def test_text_begins_with_the_answer(capsys: pytest.CaptureFixture[str], context: str, words: str) -> None:
    """The first words of the text are the verdict, and every line keeps within 80 columns."""
    main(["fit", "llama_70b", "--gpu", "80GB", "--tp", "4", "--context", context, "--concurrency", "4"])
    lines = capsys.readouterr().out.splitlines()

    assert lines[0].startswith(words)
    assert not [line for line in lines if len(line) > 80]


def test_a_gpu_much_too_small_is_shown_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    """A model thousands of times as large as the GPU is an answer, its bar cut at the end."""
    code = main(["fit", "llama_70b", "--gpu", "2MiB", "--no-profile"])

    assert (2, True) == (code, capsys.readouterr().out.startswith("DOES NOT FIT"))


def test_a_pool_on_a_cpu_says_what_its_blocks_depend_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Latent attention is kept in other blocks where the CPU has no AMX; a plan for one of the two says for which."""
    # GIVEN
    asked = (str(ARCHITECTURES / "deepseek_v2-mla.json"), "--kv-pool-bytes", str(GIB), "--platform", "cpu")

    # WHEN
    _, unasked = answer(capsys, *asked)
    _, told = answer(capsys, *asked, "--block-size", "16")

    # THEN
    assert (128, True) == (unasked["block_size"], "--block-size 16" in unasked["notes"][0])
    assert (16, []) == (told["block_size"], told["notes"])


def test_the_text_of_a_pool(capsys: pytest.CaptureFixture[str]) -> None:
    """The capacity mode prints blocks, tokens and bytes per token."""
    main(["fit", "llama_70b", "--tp", "8", "--kv-pool-bytes", str(10 * GIB), "--context", "8192"])

    assert [
        "16,384 blocks of 655,360 bytes, 1 group",
        "512 blocks a request, 32.00 at once",
        "262,144 tokens, as the engine counts them",
        "40,960 bytes per token on each GPU",
    ] == capsys.readouterr().out.splitlines()


def test_an_unknown_architecture_is_planned_with_given_bytes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With `--kv-bytes-per-token` and `--weights` nothing of the config is needed."""
    # GIVEN
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "never_seen"}')
    line = refusal(capsys, str(path))

    # WHEN
    code, document = answer(
        capsys,
        str(path),
        *("--kv-bytes-per-token", "100000", "--weights", "16GB", "--gpu", "80GB", "--context", "4096"),
    )

    # THEN
    assert "model_type" in line
    assert "--kv-bytes-per-token" in line
    assert (0, [1_600_000]) == (code, document["bytes_per_block"])


def test_known_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """`--list` prints one name a line."""
    main(["fit", "--list"])
    names = capsys.readouterr().out.split()

    assert {"llama_7b", "llama_13b", "llama_70b", "mixtral_8x7b"} <= set(names)


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
        (("llama_70b", "--grid", "--kv-pool-bytes", "1000000"), "--grid"),
        (("llama_70b", "--kv-dtype", "fp8", "--kv-bytes-per-token", "9", "--weights", "1GB"), "--kv-dtype"),
        (("",), "MODEL is empty"),
        ((" ",), "MODEL is empty"),
        (("llama_70b", "--max-num-batched-tokens", "0"), "max_num_batched_tokens"),
        (("llama_70b", "--kv-dtype", "fp3"), "fp3"),
        (("llama_70b", "--weights", "fp3"), "fp3"),
        (("llama_70b", "--memory-fraction", "1.5"), "memory fraction"),
        (("llama_70b", "--memory-fraction", "nan"), "memory fraction"),
        (("llama_70b", "--kv-bytes-per-token", "0", "--weights", "1GB"), "kv-bytes-per-token"),
        (("llama_70b", "--kv-bytes-per-token", "9"), "--weights"),
        (("llama_70b", "--kv-bytes-per-token", str(10**8), "--weights", "1GB"), "kv-bytes-per-token"),
        (("llama_70b", "--kv-pool-bytes", "-1"), "kv_pool_bytes"),
        (("llama_70b", "--num-speculative-tokens", "-1"), "num_speculative_tokens"),
        (("llama_70b", "--request-rate", "nan", "--prompt-tokens", "1", "--output-tokens", "1"), "requests_per_second"),
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


@pytest.fixture
def bert(tmp_path: Path) -> str:
    """The config of bert-base."""
    path = tmp_path / "config.json"
    config = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
    }
    path.write_text(json.dumps(config))
    return str(path)


def test_an_encoder_is_judged_by_its_weights(capsys: pytest.CaptureFixture[str], bert: str) -> None:
    """BERT keeps no KV cache: its 109 million weights and the overheads decide, and the cache's figures are null."""
    # WHEN
    code, document = answer(capsys, bert, "--gpu", "80GB", "--no-profile")
    small, refused = answer(capsys, bert, "--gpu", "1GiB", "--no-profile")

    # THEN
    budget = document["budgets"][0]
    cache = ("max_requests", "max_context_tokens", "num_blocks", "blocks_per_request", "capacity_tokens")
    assert (0, False, [None] * 5, None) == (
        code,
        document["keeps_kv_cache"],
        [document[name] for name in cache],
        document["block_waste_ratio"],
    )
    assert (2, True) == (small, refused["headroom_bytes"] < 0)
    assert budget["weights_bytes"] == pytest.approx(2 * 109.5e6, rel=0.01)


def test_an_encoder_says_in_one_line_that_it_keeps_nothing(capsys: pytest.CaptureFixture[str], bert: str) -> None:
    """The text has one line about the cache, and neither blocks nor a longest context; stages are no obstacle."""
    code = main(["fit", bert, "--gpu", "80GB", "--no-profile", "--pp", "2"])
    text = capsys.readouterr().out

    assert (0, 1) == (code, text.count("KV cache  none: weights and overheads decide alone"))
    assert not [word for word in ("blocks", "concurrency", "longest context", "KV pool") if word in text]


def test_an_encoder_has_neither_pool_nor_grid(capsys: pytest.CaptureFixture[str], bert: str) -> None:
    """Asking what a pool holds of it is refused, and so is a grid."""
    assert "keeps no KV cache" in refusal(capsys, bert, "--kv-pool-bytes", "1000000")
    assert "--grid" in refusal(capsys, bert, "--grid")


def test_block_waste_is_the_share_that_holds_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    """1,000 tokens take 63 blocks of 16: eight slots of 1,008 are empty, in JSON and in the text."""
    arguments = ("llama_70b", "--gpu", "80GB", "--tp", "4", "--context", "1000")
    _, document = answer(capsys, *arguments)
    main(["fit", *arguments])

    assert 8 / 1008 == pytest.approx(document["block_waste_ratio"])
    assert "block waste      0.8%" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("llama_70b", "--concurrency", "4", "--request-rate", "1", "--prompt-tokens", "9", "--output-tokens", "9"),
        ("llama_70b", "--request-rate", "1"),
        ("llama_70b", "--lengths", "lengths.json"),
        ("llama_70b", "--prompt-tokens", "2000"),
        ("llama_70b", "--max-num-batched-tokens", "9", "--max-in-flight-tokens", "9"),
        ("llama_70b", "--gpus", "9"),
    ],
)
def test_wrong_usage_is_code_3(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    """Options that exclude or miss one another are wrong usage, said on stderr."""
    code = main(["fit", *arguments])
    printed = capsys.readouterr()

    assert (3, "", True) == (code, printed.out, printed.err.startswith("kvdiag: "))


def test_one_request_is_told_in_the_singular(capsys: pytest.CaptureFixture[str]) -> None:
    """A lever after which one fits, and none more."""
    # WHEN
    main(["fit", "llama_70b", "--gpu", "a100", "--context", "8192"])

    # THEN
    assert "fp8 weights: +63.73 GiB per GPU, 1 request at once\n" in capsys.readouterr().out
