"""What llama.cpp's host caches may take beyond the limits on its command line."""

from typing import Any

import pytest

from kvdiag.engines.llamacpp.slots import parse_caches, parse_pools, server_page
from kvdiag.kv.pools.gguf_header import GgufHeader
from kvdiag.kv.pools.gguf_layers import cells_of_gguf
from kvdiag.model import MAX_BYTES
from kvdiag.sources.host import NO_ENVIRONMENT
from kvdiag.sources.prometheus_text import Series
from tests.builders.values import GIB
from tests.unit.engines.llamacpp.llama_answers import DEFAULT, answer, options

SIZES = {
    "block_count": 6,
    "context_length": 32768,
    "embedding_length": 64,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.sliding_window": 64,
}
ROW_BYTES = (32 + 32) * 2
WINDOW_CELLS = 768
"""A window of 64 tokens and a batch of 512, in multiples of 256."""


def header(architecture: str) -> GgufHeader:
    """The header of a model's file."""
    own = {f"{architecture}.{name}": value for name, value in SIZES.items()}
    return GgufHeader(values={"general.architecture": architecture, **own}, lengths={}, tensor_bytes={}, formats={})


def limits(command: str = DEFAULT, *, model: str | None = "llama", **props: Any) -> dict[str, int]:
    """Their bytes by the flag that is named for each."""
    known = answer("b11549-unified4-props") | {"build_info": "b11549-0123abc"} | props
    cells = None if model is None else cells_of_gguf(header(model))
    page = server_page(known, answer("b11549-unified4-models"), options(command), cells)
    return {cache.flag: cache.limit_bytes for cache in parse_caches(page)}


@pytest.mark.parametrize(("flags", "mixed"), [("", True), ("--swa-full", None)])
def test_windows_as_long_as_the_context_leave_a_cell_its_size(flags: str, mixed: bool | None) -> None:
    """With --swa-full every layer keeps every token; else the windows' cells are fewer than the context's."""
    cells = cells_of_gguf(header("gemma3"))
    command = f"{DEFAULT} {flags}"
    page = server_page(answer("b11549-unified4-props"), answer("b11549-unified4-models"), options(command), cells)
    (pool,) = parse_pools(page, None, [command])[0]
    assert (mixed, 6 * ROW_BYTES if mixed is None else None) == (pool.mixed, pool.block_bytes)


def test_the_default_of_the_prompt_cache_is_known() -> None:
    """8 GiB where neither the command line nor the environment sets it; a plain model has no checkpoints."""
    assert {"--cache-ram, by default": 8 * GIB} == limits()


@pytest.mark.parametrize("command", [f"{DEFAULT} -cram 16", f"LLAMA_ARG_CACHE_RAM=16 {DEFAULT}"])
def test_a_limit_that_is_set_is_no_default(command: str) -> None:
    """The command line's own reader has it."""
    assert {} == limits(command)


def test_without_the_environment_no_default_is_known() -> None:
    """LLAMA_ARG_CACHE_RAM may set another."""
    assert {} == limits(f"{NO_ENVIRONMENT} {DEFAULT}")


@pytest.mark.parametrize(
    ("build", "sleeping", "known"),
    [("b6728-0", None, False), ("b6729-0", None, True), ("b0-unknown", None, False), ("b1-0c1e570", False, True)],
)
def test_a_build_without_a_prompt_cache_has_no_default(build: str, sleeping: bool | None, known: bool) -> None:
    """A build without a number is dated by what /props has."""
    assert known == ("--cache-ram, by default" in limits(build_info=build, is_sleeping=sleeping))


def test_checkpoints_are_windows_of_all_slots() -> None:
    """32 in each of four slots: five of six layers have a window; --ctx-checkpoints sets their number."""
    one = WINDOW_CELLS * ROW_BYTES * 5
    assert 32 * 4 * one == limits(model="gemma3")["--ctx-checkpoints"]
    assert 3 * 4 * one == limits(f"{DEFAULT} -ctxcp 3", model="gemma3")["--ctx-checkpoints"]
    for without in ("--ctx-checkpoints 0", "--swa-full"):
        assert "--ctx-checkpoints" not in limits(f"{DEFAULT} {without}", model="gemma3")


@pytest.mark.parametrize(
    ("command", "model"), [(DEFAULT, None), (f"{DEFAULT} -md draft.gguf", "llama")], ids=["no file", "a draft"]
)
def test_checkpoints_of_an_unknown_size_have_no_limit(command: str, model: str | None) -> None:
    """Nothing is called a leak that may be one."""
    assert MAX_BYTES - 1 == limits(command, model=model)["--ctx-checkpoints"]


def test_older_builds_keep_one_prompt_beyond_the_limit() -> None:
    """As long as a slot's context (PR 25070 made the limit strict)."""
    assert 32768 * ROW_BYTES * 6 == limits(f"{DEFAULT} -cram 16", build_info="b9000-0")["--ctx-size"]


@pytest.mark.parametrize("size", [-1.0, 0.0, float(MAX_BYTES), float("nan"), float("inf")])
def test_an_impossible_limit_is_none(size: float) -> None:
    """A page may come from a recording."""
    assert () == parse_caches({"llamacpp:checkpoints_limit_bytes": (Series({}, size),)})
