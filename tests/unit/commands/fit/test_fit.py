"""`kvdiag fit` as it is typed: exit codes, the JSON answer, and the text."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvdiag.commands import main
from kvdiag.kv.fit.scenario import DEMAND_LEVERS
from tests.unit.commands.fit.fitting import GIB, answer
from tests.unit.kv.vectors import vectors

VECTORS = vectors()
ARCHITECTURES = Path(__file__).parents[3] / "integration" / "vllm" / "architectures"


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
    arguments = ("llama_70b", "--gpu", "80GB", "--tp", "4", "--context", "8192")
    _, document = answer(capsys, *arguments)
    most = document["max_requests"]

    at_most, _ = answer(capsys, *arguments, "--concurrency", str(most))
    beyond, _ = answer(capsys, *arguments, "--concurrency", str(most + 1))

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
    path = tmp_path / "specs.json"
    path.write_text(json.dumps(vector))
    arguments = [str(path), "--kv-pool-bytes", str(vector["available_bytes"])]
    arguments += ["--context", str(vector["max_model_len"])]
    arguments += ["--max-in-flight-tokens", str(vector["max_in_flight_tokens"])]
    arguments += ["--mamba-cache-mode", vector.get("mode", "none")]

    _, document = answer(capsys, *arguments)

    expected = vector["expect"]
    assert (expected["num_blocks"], expected["tokens"]) == (document["num_blocks"], document["capacity_tokens"])


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
    path = tmp_path / "lengths.json"
    path.write_text("[[1000, 200, 9], [6000, 400, 1]]")

    _, document = answer(
        capsys, "llama_70b", "--gpu", "h200", "--tp", "4", "--request-rate", "2", "--lengths", str(path)
    )

    assert 2116 == document["context_tokens"]


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


def test_a_gpu_much_too_small_is_shown_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    """A model thousands of times as large as the GPU is an answer, its bar cut at the end."""
    code = main(["fit", "llama_70b", "--gpu", "2MiB", "--no-profile"])

    assert (2, True) == (code, capsys.readouterr().out.startswith("DOES NOT FIT"))


def test_a_pool_on_a_cpu_says_what_its_blocks_depend_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Latent attention is kept in other blocks where the CPU has no AMX; a plan for one of the two says for which."""
    asked = (str(ARCHITECTURES / "deepseek_v2-mla.json"), "--kv-pool-bytes", str(GIB), "--platform", "cpu")

    _, unasked = answer(capsys, *asked)
    _, told = answer(capsys, *asked, "--block-size", "16")

    assert (128, True) == (unasked["block_size"], "--block-size 16" in unasked["notes"][0])
    assert (16, []) == (told["block_size"], told["notes"])


@pytest.mark.parametrize("asked", [("--kv-pool-bytes", str(64 * GIB)), ("--gpu", "h200", "--tp", "8")])
def test_a_model_that_vllm_dropped_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, asked: tuple[str, ...]
) -> None:
    """Its arithmetic is of the last version that served it: a newer one would not start with it."""
    config = {
        "model_type": "grok-1", "hidden_size": 6144, "num_hidden_layers": 64, "num_attention_heads": 48,
        "num_key_value_heads": 8, "intermediate_size": 32768, "vocab_size": 131072, "max_position_embeddings": 8192,
        "num_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    _, document = answer(capsys, str(path), *asked)
    assert any("vLLM 0.24.0" in note for note in document["notes"])


def test_a_given_rate_is_not_met_by_serving_less(capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer or shorter requests than arrive are no change that helps; of requests only wished for they are."""
    model, rate = ("qwen3-32b", "--gpu", "h100"), ("--request-rate", "4", "--prompt-tokens", "2000", "--output-tokens")
    _, given = answer(capsys, *model, *rate, "400")
    _, wished = answer(capsys, *model, "--context", "2400", "--concurrency", "67")
    names = [{one["name"] for one in document["levers"]} for document in (given, wished)]

    assert [set(), set(DEMAND_LEVERS)] == [found & set(DEMAND_LEVERS) for found in names]


def test_known_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """`--list` prints one name a line."""
    main(["fit", "--list"])
    names = capsys.readouterr().out.split()

    assert {"llama_7b", "llama_13b", "llama_70b", "mixtral_8x7b"} <= set(names)


def test_block_waste_is_the_share_that_holds_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    """1,000 tokens take 63 blocks of 16: eight slots of 1,008 are empty, in JSON and in the text."""
    arguments = ("llama_70b", "--gpu", "80GB", "--tp", "4", "--context", "1000")
    _, document = answer(capsys, *arguments)
    main(["fit", *arguments])

    assert 8 / 1008 == pytest.approx(document["block_waste_ratio"])
    assert "0.8 %" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_wider_plan_is_the_same_as_a_lever(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Context and activation are those of the wider deployment: a lever's headroom is what it gives if it is taken."""
    model = ("llama_70b", "--gpu", "h100")
    _, document = answer(capsys, *model, "--tp", str(ranks))
    _, wider = answer(capsys, *model, "--tp", str(2 * ranks))
    gained = {one["change"]: one["gained_bytes"] for one in document["levers"]}
    assert wider["headroom_bytes"] - document["headroom_bytes"] == gained[f"--tensor-parallel-size {2 * ranks}"]
