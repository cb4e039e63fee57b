"""Options of `vllm serve` that change the pool's size: a number of blocks, and drafts."""

from typing import Any

import pytest

from tests.unit.commands.fit.fitting import GIB, answer, refusal

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


def test_the_capacity_alone_has_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    """16 tokens each."""
    document = capacity(capsys, "llama-3-8b", "--num-gpu-blocks-override", "1000")

    assert (1_000, 16_000) == (document["num_blocks"], document["capacity_tokens"])


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "qwen3_next_mtp"])
def test_mtp_is_as_its_number_of_tokens_alone(capsys: pytest.CaptureFixture[str], method: str) -> None:
    """Its layers are in the pool."""
    model = "deepseek-v3"

    expected = capacity(capsys, model, "--num-speculative-tokens", "3")
    assert expected == capacity(capsys, model, *config(method))
    assert expected["bytes_per_block"] > capacity(capsys, model)["bytes_per_block"]


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
        (("--speculative-config", "[]"), "not a JSON object"),
        ((*config("mtp"), "--num-speculative-tokens", "2"), "not both"),
        (("--num-gpu-blocks-override", "0"), "num_gpu_blocks_override"),
        (("--engine", "sglang", "--num-gpu-blocks-override", "9"), "--num-gpu-blocks-override"),
    ],
)
def test_what_is_not_modelled_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], word: str
) -> None:
    """By one line that names it."""
    assert word in refusal(capsys, "llama-3-8b", *arguments)
