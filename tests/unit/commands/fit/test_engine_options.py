"""Options of `vllm serve` that change the pool's size: a number of blocks, and drafts."""

from typing import Any

import pytest

from tests.unit.commands.fit.fitting import GIB, answer, refusal

BY_MEMORY = "no-blocks-override"
POOL = ("--kv-pool-bytes", str(10 * GIB), "--context", "4096")


def config(method: str, tokens: object = 3) -> tuple[str, str]:
    """--speculative-config with a method."""
    return "--speculative-config", f'{{"method": "{method}", "num_speculative_tokens": {tokens}}}'


def capacity(capsys: pytest.CaptureFixture[str], model: str, *arguments: str) -> dict[str, Any]:
    """The figures of a pool of 10 GiB."""
    return answer(capsys, model, *arguments, *POOL)[1]


@pytest.mark.parametrize(("blocks", "expected"), [(2_000, 0), (600, 0), (128, 2)])
def test_the_pool_has_as_many_blocks_as_were_asked_for(
    capsys: pytest.CaptureFixture[str], blocks: int, expected: int
) -> None:
    """Not as many as the memory holds; one is the null block, so 128 hold no request of 2,048 tokens."""
    arguments = ("llama-3-8b", "--context", "2048", "--num-gpu-blocks-override", str(blocks))
    code, document = answer(capsys, *arguments)

    assert (expected, blocks) == (code, document["num_blocks"])


def test_more_blocks_than_the_memory_holds_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """The engine runs out of memory when it allocates them."""
    code, document = answer(capsys, "llama-3-8b", "--context", "2048", "--num-gpu-blocks-override", "1000000")

    assert (2, 0) == (code, document["max_requests"])
    assert "--num-gpu-blocks-override 1000000" in document["notes"][0]


def test_blocks_set_by_hand_decide_the_pool(capsys: pytest.CaptureFixture[str]) -> None:
    """256 blocks of 2 MiB: the budget has them, and names the rest as unused; without them 2,048 tokens fit 8 times."""
    arguments = ("llama-3-8b", "--context", "2048", "--concurrency", "8", "--num-gpu-blocks-override", "256")
    code, document = answer(capsys, *arguments)

    (budget,), (lever,) = document["budgets"], [one for one in document["levers"] if one["name"] == BY_MEMORY]
    no_part = ("total_bytes", "shortfall_bytes", "kv_pool_range_bytes")
    parts = sum(size for name, size in budget.items() if name not in no_part)
    assert (2, 512 << 20, budget["total_bytes"]) == (code, budget["kv_pool_bytes"], parts)
    assert [512 << 20, 512 << 20] == budget["kv_pool_range_bytes"]
    assert budget["unused_bytes"] > 50 * GIB
    assert "512 MiB per GPU" in document["notes"][0]
    assert ("without --num-gpu-blocks-override", "fits") == (lever["change"], lever["outcome"])


def test_blocks_beyond_the_memory_have_no_headroom(capsys: pytest.CaptureFixture[str]) -> None:
    """The headroom is what is missing for them, and without them it fits."""
    arguments = ("llama-3-8b", "--context", "2048", "--num-gpu-blocks-override", "90000000")
    _, document = answer(capsys, *arguments)

    (budget,) = document["budgets"]
    assert budget["kv_pool_bytes"] - 90_000_000 * (2 << 20) == document["headroom_bytes"]
    assert (BY_MEMORY, "fits") == (document["levers"][0]["name"], document["levers"][0]["outcome"])


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "qwen3_next_mtp"])
def test_mtp_is_as_its_number_of_tokens_alone(capsys: pytest.CaptureFixture[str], method: str) -> None:
    """Its layers are in the pool."""
    model = "deepseek-v3"

    expected = capacity(capsys, model, "--num-speculative-tokens", "3")
    assert expected == capacity(capsys, model, *config(method))
    assert expected["bytes_per_block"] > capacity(capsys, model)["bytes_per_block"]


@pytest.mark.parametrize(("method", "noted"), [("medusa", True), ("ngram", False)])
def test_weights_of_medusa_heads_are_left_out(capsys: pytest.CaptureFixture[str], method: str, *, noted: bool) -> None:
    """A note says so."""
    notes = answer(capsys, "llama-3-8b", "--context", "2048", *config(method))[1]["notes"]

    assert noted is any("Medusa" in note for note in notes)


@pytest.mark.parametrize(
    ("model", "arguments", "noted"),
    [
        ("deepseek-v3", ("--gpu", "mi300x", "--tp", "8"), True),
        ("deepseek-v3.2", ("--gpu", "188GiB", "--tp", "8", "--block-size", "64"), True),
        ("deepseek-v3", ("--kv-pool-bytes", "10GiB"), False),
        ("deepseek-v3", ("--gpu", "188GiB", "--tp", "8", "--block-size", "64"), False),
        ("deepseek-v3", ("--gpu", "188GiB", "--tp", "8", "--platform", "cpu"), False),
        ("llama-3-8b", ("--gpu", "mi300x"), False),
    ],
)
def test_formats_that_are_assumed_are_noted(
    capsys: pytest.CaptureFixture[str], model: str, arguments: tuple[str, ...], *, noted: bool
) -> None:
    """Of latent attention on a GPU whose generation is not known, where they depend on it; the pool is on an H100."""
    notes = answer(capsys, model, "--context", "2048", *arguments)[1]["notes"]

    assert noted is any(note.startswith("formats of Hopper assumed") for note in notes)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_of_the_prompt_have_no_layers(capsys: pytest.CaptureFixture[str], method: str) -> None:
    """But states of drafts take blocks."""
    hybrid = "qwen3-next-80b-a3b"

    assert capacity(capsys, "llama-3-8b") == capacity(capsys, "llama-3-8b", *config(method))
    assert (
        capacity(capsys, hybrid)["blocks_per_request"] < capacity(capsys, hybrid, *config(method))["blocks_per_request"]
    )


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (config("eagle3"), "eagle3"),
        (config("mtp", 0), "num_speculative_tokens"),
        (config("mtp"), "draft (MTP) layers"),
        (("--speculative-config", '{"model": "a/b", "num_speculative_tokens": 3}'), "names no method"),
        (("--speculative-config", "[]"), "not a JSON object"),
        ((*config("mtp"), "--num-speculative-tokens", "2"), "not both"),
        (("--num-gpu-blocks-override", "0"), "num_gpu_blocks_override"),
        (("--num-gpu-blocks-override", "9", *POOL), "--num-gpu-blocks-override or --kv-pool-bytes, not both"),
        (("--engine", "sglang", "--num-gpu-blocks-override", "9"), "--num-gpu-blocks-override"),
    ],
)
def test_what_is_not_modelled_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], word: str
) -> None:
    """By one line that names it."""
    assert word in refusal(capsys, "llama-3-8b", *arguments)
